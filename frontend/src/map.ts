// The map view: one head, zoomable from pooled cells to single weights, with token labels.
import { select } from "d3-selection";
import { zoom as zooming, zoomIdentity, type ZoomTransform } from "d3-zoom";
import { headName, isPhone, place, type Context, type Panel } from "./context";
import { legend } from "./colour";
import { queriesOf, type Pool } from "./data";
import { headStrip } from "./head_strip";
import { aboutHead } from "./about_head";
import { choice, cut, fill, h, s, saving, strong, visible } from "./dom";
import { pinButton } from "./pins";
import { TILE } from "./source";
import { cutName, placesOf, wordNames } from "./word_names";

const [DEEPEST, NUMBERED, LABEL] = [72, 40, 13]; // pixels per weight: the most, for a number in the cell, for a label
interface Tile { values: Float32Array; rows: number; cols: number; picture: HTMLCanvasElement | null; painted: string }

export function mapView(context: Context): Panel {
  const canvas = h("canvas", { role: "img", tabindex: 0 });
  const labels = s("svg", { class: "labels", "aria-hidden": "true" });
  const box = h("div", { class: "map-box" }, canvas, labels);
  const readout = h("p", { class: "readout", role: "status", "aria-live": "polite" });
  const progress = h("div", { class: "progress", role: "progressbar", "aria-label": "Computing tiles", hidden: true });
  const find = h("input", { type: "search", class: "go-to", placeholder: "token, 12 or 12,34",
    "aria-label": "Jump to a token, a query, or a query and a key",
    onkeydown: (event: KeyboardEvent) => event.key === "Enter" && jump(find.value) });
  const [tools, key] = [h("div", { class: "tools" }), h("div", { class: "key" })];
  const beside = h("div", { class: "about-map" });
  const strip = headStrip(context);
  const element = h("div", { class: "map-view" }, tools,
    h("div", { class: "sides" }, h("div", { class: "main map-row" }, strip.element,
    h("div", { class: "map-main" }, box, progress)),
    h("aside", { class: "beside" }, h("h2", {}, "Here"), readout, key, beside)));

  // While a story plays, its bar lies over the end of the window.
  const storyBar = () => context.root.querySelector<HTMLElement>(":scope > .story:not([hidden])")?.offsetHeight ?? 0;
  let bar = 0;
  let size = { width: 0, height: 0, left: 0, bottom: 0 };
  let transform: ZoomTransform = zoomIdentity;
  let hover: [number, number] | null = null;
  let frame = 0;
  let whole = 1; // pixels per weight when the whole map is visible
  let matches: number[] = [];
  let asked = "";
  let stopped = false; // by Esc or a failure, until the next move
  let failure = ""; // why the last tile could not be loaded
  const waiting = new Map<string, AbortController>();

  const again = () => { stopped = false; failure = ""; };
  const counts = () => [queriesOf(context.text).length, context.text.tokens.length] as const;
  const finest = () => context.source.finest(context.state.text);
  const levelOf = (k: number) => Math.max(finest(), Math.ceil(Math.log2(1 / k) - 0.01), 0);
  const behavior = zooming<HTMLCanvasElement, unknown>().on("zoom",
    (event) => { transform = event.transform; again(); draw(); if (event.sourceEvent) remember(); });
  select(canvas).call(behavior);

  // Canvas coordinates of a cell of the map.
  const toX = (j: number) => transform.x + j * transform.k;
  const toY = (i: number) => transform.y + i * transform.k;
  const plot = () => ({ width: size.width - size.left, height: size.height - size.bottom });

  function measure() {
    const [I, J] = counts();
    const some = [context.text.tokens, queriesOf(context.text)].flatMap((tokens) => wordNames(tokens).slice(0, 3000));
    const longest = Math.max(...some.map((name) => [...name].length));
    const numbered = Math.max(I, J) * LABEL > box.clientWidth ? Math.min(longest, 9) + 1 + String(J).length : 0;
    const gutter = Math.max(78, Math.min(124, 24 + Math.max(Math.min(longest, 14), numbered) * 6.3));
    const width = Math.max(box.clientWidth, 200);
    const square = (width - gutter) * Math.min(1, I / J);
    bar = storyBar();
    const top = isPhone(context.root) ? context.root.querySelector(".scale")!.getBoundingClientRect().top : -window.scrollY;
    const above = box.getBoundingClientRect().top - top; // a story scrolls a phone to the scale
    const room = Math.max(320, Math.min(window.innerHeight * 0.78, 900, bar ? window.innerHeight - above - bar - 8 : Infinity));
    const height = Math.round(Math.max(200, Math.min(room, I * DEEPEST + gutter,
      (I < J ? Math.max(square, 160) : width - gutter) + gutter)));
    size = { width, height, left: gutter, bottom: gutter };
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = box.style.height = `${height}px`;
    labels.setAttribute("viewBox", `0 0 ${width} ${height}`);
    whole = Math.min(plot().width / J, plot().height / I, DEEPEST);
    behavior.extent([[size.left, 0], [width, plot().height]]).scaleExtent(
      [whole / 1.5, Math.max(DEEPEST, whole)]).translateExtent([[-J * 0.5, -I * 0.5], [J * 1.5, I * 1.5]]);
  }

  // Move to the position in the address.
  function go() {
    const { state } = context;
    const [I, J] = counts();
    const { width, height } = plot();
    const k = state.x < 0 ? whole : Math.max(whole / 1.5, Math.min(DEEPEST, 2 ** state.zoom));
    const [x, y] = state.x < 0 ? [J / 2, I / 2] : [state.x, state.y];
    const to = zoomIdentity.translate(size.left + (state.x < 0 ? 0 : width / 2 - x * k),
      state.x < 0 ? 0 : height / 2 - y * k).scale(k);
    select(canvas).call(behavior.transform, to);
  }

  let timer = 0;
  function remember() {
    clearTimeout(timer);
    timer = window.setTimeout(() => {
      const { width, height } = plot();
      context.set({ x: Math.max(0, (size.left + width / 2 - transform.x) / transform.k),
        y: Math.max(0, (height / 2 - transform.y) / transform.k), zoom: Math.log2(transform.k) }, true);
    }, 250);
  }

  const nameOf = (level: number, row: number, col: number) => {
    const { text, layer, head, pool } = context.state;
    return [text, layer, head, level, row, col, level ? pool : ""].join();
  };
  const held = new Map<string, Tile>();
  function tileAt(level: number, row: number, col: number, ask: boolean): Tile | null {
    const name = nameOf(level, row, col);
    const found = held.get(name);
    if (found) { held.delete(name); held.set(name, found); return found; }
    if (ask && !stopped && !waiting.has(name)) fetchTile(name, level, row, col);
    return null;
  }
  async function fetchTile(name: string, level: number, row: number, col: number) {
    const [I, J] = counts();
    const stop = new AbortController();
    waiting.set(name, stop);
    try {
      const values = await context.source.tile(place(context), level, row, col, context.state.pool as Pool,
        stop.signal);
      const [rows, cols] = [[I, row], [J, col]].map(([n, at]) => Math.min(TILE, Math.ceil(n / 2 ** level) - at * TILE));
      held.set(name, { values, rows, cols, picture: null, painted: "" });
      if (held.size > 500) held.delete(held.keys().next().value!);
    } catch (error) {
      if (!stop.signal.aborted) {
        stopped = true;
        failure = `Weights could not be loaded: ${(error as Error).message}`;
        context.tell(failure);
      }
    }
    if (waiting.get(name) === stop) waiting.delete(name);
    draw();
  }

  function pictureOf(tile: Tile): HTMLCanvasElement {
    const { scale } = context.colours;
    const look = `${scale.kind}${scale.floor}${context.colours.css[9]}`;
    if (!tile.picture || tile.painted !== look) {
      tile.picture ??= h("canvas", { width: tile.cols, height: tile.rows });
      tile.painted = look;
      const colours = new Uint32Array(tile.rows * tile.cols);
      for (let at = 0; at < colours.length; at++) colours[at] = context.colours.cell(tile.values[at]);
      tile.picture.getContext("2d")!.putImageData(new ImageData(new Uint8ClampedArray(colours.buffer), tile.cols,
        tile.rows), 0, 0);
    }
    return tile.picture;
  }

  function draw() {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(paintAll);
  }

  // The visible tiles of a level: first and last row, first and last column.
  function span(level: number) {
    const [I, J] = counts();
    const { width, height } = plot();
    const step = TILE * 2 ** level;
    const ends = (from: number, to: number, n: number) =>
      [Math.max(0, Math.floor(from / step)), Math.min(Math.ceil(n / step) - 1, Math.floor(to / step))];
    return [...ends(-transform.y / transform.k, (height - transform.y) / transform.k, I),
      ...ends((size.left - transform.x) / transform.k, (size.left + width - transform.x) / transform.k, J)];
  }

  function paintAll() {
    if (!size.width) return;
    const [I, J] = counts();
    const ratio = window.devicePixelRatio || 1;
    const pen = canvas.getContext("2d")!;
    const { width, height } = plot();
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, size.width, size.height);
    pen.save();
    pen.beginPath();
    pen.rect(size.left, 0, width, height);
    pen.clip();
    pen.fillStyle = context.colours.get("--none");
    pen.fillRect(toX(0), toY(0), J * transform.k, I * transform.k);
    const level = levelOf(transform.k);
    const [top, bottom, left, right] = span(level);
    context.cells(context.state.pool === "max" ? 1 : 2 ** level);
    const wanted = new Set<string>();
    for (let row = top; row <= bottom; row++)
      for (let col = left; col <= right; col++) {
        wanted.add(nameOf(level, row, col));
        drawTile(pen, level, row, col);
      }
    for (const [name, stop] of waiting) if (!wanted.has(name)) { stop.abort(); waiting.delete(name); }
    drawCross(pen);
    if (level === 0 && transform.k >= NUMBERED) drawNumbers(pen);
    pen.restore();
    pen.strokeStyle = context.colours.get("--line");
    pen.strokeRect(size.left - 0.5, 0.5, width, height);
    drawLabels();
    box.dataset.level = String(level);
    box.dataset.waiting = String(waiting.size);
    progress.hidden = !waiting.size && !stopped;
    const tiles = `${waiting.size} tile${waiting.size > 1 ? "s" : ""}`;
    progress.textContent = failure ? `${failure} Move the map to try again.`
      : stopped ? "Stopped; move the map to continue" : `Computing ${tiles}; press Esc to stop`;
    canvas.setAttribute("aria-label",
      `Weights of ${headName(context)}: ${I} rows of queries, ${J} columns of keys; cells of ${2 ** level}.`);
    const { query, key: at } = context.state;
    if (hover) tellCell(...hover);
    else if (at >= 0) tellCell(query, at);
  }

  // Draw a tile, or a part of a cached coarser tile until it arrives.
  function drawTile(pen: CanvasRenderingContext2D, level: number, row: number, col: number) {
    const tile = tileAt(level, row, col, true);
    const step = TILE * 2 ** level;
    for (let up = level, r = row, c = col; up < level + 8; up++, r >>= 1, c >>= 1) {
      const found = up === level ? tile : tileAt(up, r, c, false);
      if (!found) continue;
      const cell = 2 ** up;
      const [x, y] = [(col * step - c * TILE * cell) / cell, (row * step - r * TILE * cell) / cell];
      const [w, t] = [Math.min(step / cell, found.cols - x), Math.min(step / cell, found.rows - y)];
      pen.imageSmoothingEnabled = false;
      if (w > 0 && t > 0) pen.drawImage(pictureOf(found), x, y, w, t, toX(col * step), toY(row * step),
        w * cell * transform.k, t * cell * transform.k);
      return;
    }
  }

  function drawNumbers(pen: CanvasRenderingContext2D) {
    const [top, bottom, left, right] = seen();
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.font = `${Math.min(13, transform.k / 3.6)}px system-ui, sans-serif`;
    for (let i = top; i < bottom; i++)
      for (let j = left; j < right; j++) {
        const value = weightAt(i, j);
        if (value === null) continue;
        pen.fillStyle = context.colours.textOn(value);
        pen.fillText(value === 0 ? "0" : value < 0.0005 ? value.toExponential(0) : value.toFixed(3).replace(/^0/, ""),
          toX(j + 0.5), toY(i + 0.5));
      }
  }

  const seen = () => {
    const [I, J] = counts();
    const { width, height } = plot();
    const { x, y, k } = transform;
    return [Math.max(0, Math.floor(-y / k)), Math.min(I, Math.ceil((height - y) / k)),
      Math.max(0, Math.floor((size.left - x) / k)), Math.min(J, Math.ceil((size.left + width - x) / k))];
  };

  // The value of the cell of a level that contains a pair; null: not loaded yet.
  function cellAt(level: number, i: number, j: number): number | null {
    const [row, col] = [i, j].map((n) => Math.floor(n / 2 ** level));
    const tile = tileAt(level, Math.floor(row / TILE), Math.floor(col / TILE), false);
    return tile ? tile.values[(row % TILE) * tile.cols + (col % TILE)] : null;
  }
  const weightAt = (i: number, j: number) => cellAt(0, i, j);

  function drawCross(pen: CanvasRenderingContext2D) {
    const { query, key: at } = context.state;
    const [I, J] = counts();
    const marks: [number, number, string][] = [[query, at, context.colours.get("--accent")]];
    if (hover) marks.push([...hover, context.colours.get("--soft")]);
    for (const [i, j, colour] of marks) {
      const k = Math.max(transform.k, 1.5);
      // A line of the paper's colour around it: visible on every colour of the ramp.
      for (const [stroke, wide] of [[context.colours.get("--paper"), 3.5], [colour, 1.5]] as const) {
        pen.strokeStyle = stroke;
        pen.lineWidth = wide;
        if (i >= 0) pen.strokeRect(toX(0), toY(i), J * transform.k, k);
        if (j >= 0) pen.strokeRect(toX(j), toY(0), k, I * transform.k);
      }
      pen.lineWidth = 1;
    }
  }

  // Token labels along the sides; only every n-th label if there is no space for all.
  function drawLabels() {
    const [top, bottom, left, right] = seen();
    const { width, height } = plot();
    const step = 2 ** Math.max(0, Math.ceil(Math.log2(LABEL / transform.k)));
    const nodes: SVGElement[] = [];
    const label = (tokens: string[], at: number, down: boolean, chosen: boolean) => {
      const middle = (down ? toY(at + 0.5) : toX(at + 0.5));
      if (down ? middle < 4 || middle > height - 2 : middle < size.left + 3 || middle > size.left + width - 2) return;
      const said = step > 1 ? `${cut(visible(tokens[at]), 9)} ${at}` : cutName(wordNames(tokens)[at], 14);
      const spot = down ? { x: size.left - 6, y: middle, "text-anchor": "end" }
        : { x: 0, y: 0, "text-anchor": "end", transform: `translate(${middle},${height + 7}) rotate(-90)` };
      nodes.push(s("text", { ...spot, "dominant-baseline": "central", class: chosen ? "chosen" : "" }, said));
    };
    const { query, key: at } = context.state;
    for (let i = Math.ceil(top / step) * step; i < bottom; i += step) label(queriesOf(context.text), i, true,
      i === query);
    for (let j = Math.ceil(left / step) * step; j < right; j += step) label(context.text.tokens, j, false, j === at);
    const axis = (place: Record<string, number | string>, said: string, term: string) =>
      s("text", { ...place, class: "axis-name", "text-anchor": "middle" }, s("title", {}, term), said);
    const [I, J] = counts();
    const middle = (from: number, to: number, least: number, most: number) => (Math.max(from, least) + Math.min(to, most)) / 2;
    const [across, down] = [middle(toX(0), toX(J), size.left, size.width), middle(toY(0), toY(I), 0, height)];
    nodes.push(axis({ x: across, y: size.height - 6 }, "is attended to →", "A column is a key."),
      axis({ x: 0, y: 0, transform: `translate(14,${down}) rotate(-90)` }, "← attends", "A row is a query."));
    labels.replaceChildren(...nodes);
  }

  // Describe the cell under the crosshair; single weights with six digits.
  function tellCell(i: number, j: number) {
    const { text, state } = context;
    const level = levelOf(transform.k);
    const value = cellAt(level, i, j);
    const queries = queriesOf(text);
    const said = value === null ? "…" : String(+value.toPrecision(6));
    const parts: (Node | string)[] = [];
    if (level === 0) parts.push(strong(visible(queries[i])), ` ${i} → `, strong(visible(text.tokens[j])), ` ${j}: `,
      h("output", { class: "weight" }, said));
    else {
      const ends = (at: number, all: number) => { const first = Math.floor(at / 2 ** level) * 2 ** level;
        return `${first}–${Math.min(first + 2 ** level, all) - 1}`; };
      const how = state.pool === "max" ? "the strongest weight" : "summed over keys, averaged over queries";
      parts.push(`queries ${ends(i, queries.length)} → keys ${ends(j, text.tokens.length)}: `,
        h("output", { class: "weight" }, said), `, ${how} (`, strong(visible(queries[i])), " → ",
        strong(visible(text.tokens[j])), "; zoom in for single weights)");
    }
    const line = h("span", {}, ...parts);
    if (line.textContent !== readout.textContent) readout.replaceChildren(line);
  }

  function rest() {
    hover = null;
    const { query, key: at } = context.state;
    if (at >= 0) { tellCell(query, at); return; }
    const [i, j, weight] = context.text.layers[context.state.layer].heads[context.state.head].strongest;
    readout.replaceChildren("Strongest link: ", strong(visible(queriesOf(context.text)[i])), " → ",
      strong(visible(context.text.tokens[j] ?? "")), ` ${weight}. Point at a cell, or click to choose it.`);
  }

  function under(event: PointerEvent | MouseEvent): [number, number] | null {
    const bounds = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - bounds.left - transform.x, event.clientY - bounds.top - transform.y];
    const [j, i] = [Math.floor(x / transform.k), Math.floor(y / transform.k)];
    const [I, J] = counts();
    const inside = event.clientX - bounds.left > size.left && event.clientY - bounds.top < size.height - size.bottom;
    return inside && i >= 0 && j >= 0 && i < I && j < J ? [i, j] : null;
  }

  canvas.addEventListener("pointermove", (event) => { hover = under(event); if (!hover) rest(); draw(); });
  canvas.addEventListener("pointerleave", () => { rest(); draw(); });
  canvas.addEventListener("click", (event) => { const found = under(event); if (found) context.set(
    { query: found[0], key: found[1] }); });

  // Centre a pair, large enough to read.
  function show(i: number, j: number, k = Math.max(transform.k, Math.min(DEEPEST, 48))) {
    context.set({ query: i, key: j, x: j + 0.5, y: i + 0.5, zoom: Math.log2(k) });
    context.tell(`${visible(queriesOf(context.text)[i])} attends to ${visible(context.text.tokens[j])}`);
  }

  function jump(wish: string) {
    const { text, state } = context;
    const [I, J] = counts();
    const numbers = /^\s*(\d+)(?:\s*,\s*(\d+))?\s*$/.exec(wish);
    if (!wish.trim()) return;
    if (numbers) {
      const i = Math.min(Number(numbers[1]), I - 1);
      return show(i, Math.min(numbers[2] === undefined ? Math.min(i, J - 1) : Number(numbers[2]), J - 1));
    }
    if (asked !== wish) matches = placesOf(wish, queriesOf(text));
    asked = wish;
    if (!matches.length) { readout.replaceChildren("There is no token ", strong(wish), "."); return; }
    const next = matches[(matches.indexOf(state.query) + 1) % matches.length];
    void context.source.rows(state.text, state.layer, next).then((rows) => {
      const row = rows[state.head];
      show(next, row.reduce((best, value, at) => (value > row[best] ? at : best), 0));
    });
  }

  const isPooled = () => levelOf(whole / 1.5) > 0; // at some zoom
  let tooled = "";
  function drawTools() {
    const { state } = context;
    const wanted = [state.text, state.layer, state.head, state.scale, state.pool, state.pins, isPooled(), context.colours.css[9]].join();
    if (wanted === tooled) return;
    tooled = wanted;
    const center = (factor: number) => () => zoomBy(factor);
    fill(tools,
      h("label", { class: "choice" }, h("span", {}, "Go to"), find),
      h("span", { class: "segments", role: "group", "aria-label": "Zoom" },
        h("button", { type: "button", title: "Zoom out (−)", "aria-label": "Zoom out", onclick: center(0.5) }, "−"),
        h("button", { type: "button", title: "Zoom in (+)", "aria-label": "Zoom in", onclick: center(2) }, "+"),
        h("button", { type: "button", title: "Show the whole map (0)", onclick: () => context.set({ x: -1, y: -1 }) },
          "Whole")),
      isPooled() && choice("Cells show", state.pool, [["mean", "sum over keys"], ["max", "strongest weight"]],
        (pool) => context.set({ pool })),
      pinButton(context),
      saving(() => `${context.text.title} ${headName(context)}`, picture, () => context.root),
    );
    beside.replaceChildren(h("h2", {}, "This head"), aboutHead(context));
    key.replaceChildren(h("span", { class: "hint" }, context.source.precision(state.text)));
  }

  function zoomBy(factor: number) {
    const { query, key: at } = context.state;
    const { width, height } = plot();
    const inside = at >= 0 && toX(at) > size.left && toX(at) < size.width && toY(query) > 0 && toY(query) < height;
    select(canvas).call(behavior.scaleBy, factor, inside ? [toX(at + 0.5), toY(query + 0.5)]
      : [size.left + width / 2, height / 2]);
    remember();
  }

  function picture(): SVGSVGElement {
    const ratio = canvas.width / size.width;
    const { width, height } = plot();
    const image = h("canvas", { width: Math.round(width * ratio), height: Math.round(height * ratio) });
    image.getContext("2d")!.drawImage(canvas, -Math.round(size.left * ratio), 0);
    const figure = s("svg", { width: size.width, height: size.height + 52,
      viewBox: `0 0 ${size.width} ${size.height + 52}` });
    figure.append(s("title", {}, `${headName(context)}: ${context.text.title}`),
      s("image", { x: size.left, y: 0, width, height, href: image.toDataURL() }));
    const words = s("g", { "font-size": 11, fill: "currentColor" });
    for (const node of labels.children) words.append(node.cloneNode(true));
    const scaleBar = legend(context.colours, context.colours.scale, "weight");
    figure.append(words, s("g", { transform: `translate(${size.left + 40},${size.height + 22})` },
      ...scaleBar.children));
    return figure;
  }

  const watch = new ResizeObserver(() => { if (Math.abs(box.clientWidth - size.width) > 1) { measure(); drawTools(); go(); } });
  watch.observe(box);

  return {
    element,
    update(before) {
      const { state } = context;
      const another = !before || before.text !== state.text || before.view !== state.view;
      again();
      if (before && (before.query !== state.query || before.key !== state.key)) hover = null;
      const isResized = another || bar !== storyBar();
      drawTools(); // before the measure: they stand above the map
      if (isResized) { measure(); drawTools(); } // the measure says whether cells are pooled
      strip.update();
      if (isResized) go();
      else if (before.x !== state.x || before.y !== state.y || before.zoom !== state.zoom) {
        const { width, height } = plot();
        const here = [(size.left + width / 2 - transform.x) / transform.k, (height / 2 - transform.y) / transform.k,
          Math.log2(transform.k)];
        if (state.x < 0 || Math.abs(here[0] - state.x) + Math.abs(here[1] - state.y) > 0.01
          || Math.abs(here[2] - state.zoom) > 0.001) go();
      }
      if (!hover) rest();
      draw();
    },
    key(event) {
      const { query, key: at } = context.state;
      const [I, J] = counts();
      const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (step) {
        const far = event.shiftKey ? 10 : 1;
        const [i, j] = [Math.max(0, Math.min(I - 1, query + step[0] * far)),
          Math.max(0, Math.min(J - 1, Math.max(at, 0) + step[1] * far))];
        const [x, y] = [toX(j), toY(i)];
        const { width, height } = plot();
        const outside = x < size.left || y < 0 || x + transform.k > size.left + width || y + transform.k > height;
        context.set(outside ? { query: i, key: j, x: j + 0.5, y: i + 0.5, zoom: Math.log2(transform.k) }
          : { query: i, key: j }, true);
        return true;
      }
      if (event.key === "+" || event.key === "=") return zoomBy(2), true;
      if (event.key === "-") return zoomBy(0.5), true;
      if (event.key === "0") return context.set({ x: -1, y: -1 }), true;
      if (event.key === "/") return find.focus(), find.select(), true;
      if (event.key === "Escape") {
        stopped = waiting.size > 0;
        for (const stop of waiting.values()) stop.abort();
        waiting.clear();
        draw();
        return true;
      }
      return false;
    },
    close() { watch.disconnect(); for (const stop of waiting.values()) stop.abort(); },
  };
}
