// The picture view: weights over an image, the frames of a video or a spectrogram; a map of every head beside it.
import { headName, inText, meansOnly, strongest, type Context, type Panel } from "./context";
import { layerLabel, layerName, queriesOf, type PicturePanel, type Text } from "./data";
import { choice, fill, h, s, saving, segments, shown, strong, visible } from "./dom";
import { byLayer, headsInWords, isChosen, listedHeads, meanLine } from "./head_sets";
import { cells, keyOf, photoOf, placeOf, strip, thumbnail } from "./patches";

const [LISTED, WORDS, TIMED, DECADES] = [5, 600, 80, 3]; // strongest links in the readout, words beside an image, words with a time
const WAIT = 120; // milliseconds that the mouse rests before the maps of all layers follow

export function pictureView(context: Context): Panel {
  const tools = h("div", { class: "tools" });
  const stage = h("div", { class: "pictures", tabindex: 0, role: "group", "aria-label": "Patches. Arrows move." });
  const words = h("div", { class: "beside-picture" });
  const readout = h("p", { class: "readout looks", "aria-live": "polite" });
  const pointedAt = h("p", { class: "hint pointed" });
  const legendBox = h("div", { class: "key" });
  const tiles = h("section", { class: "tiles" });
  const notes = h("div", {});
  const element = h("div", { class: "picture-view" }, tools, notes, h("div", { class: "picture-sides" },
    h("div", {}, stage, legendBox, words, readout, pointedAt), tiles));
  let [turn, tileTurn] = [0, 0];
  let held = false; // a click holds a token, so that pointing reads single weights
  let preview: number | null = null;
  let line: Float32Array | null = null;
  let overlays: SVGImageElement[] = [];
  let marks: SVGRectElement[] = [];
  let timer = 0;
  let drawn = "";

  const panels = (): PicturePanel[] => context.text.picture?.panels ?? [];
  const crossed = () => context.text.queries !== null;
  // A token whose row (what it attends to) or column (what attends to it) is shown.
  const turned = () => context.state.side === "in";
  const focus = () => preview ?? (crossed() && turned() ? Math.max(0, context.state.key) : context.state.query);
  const focusTokens = () => (turned() ? context.text.tokens : queriesOf(context.text));
  const patchOf = new Map<number, [number, number]>(); // token -> panel, patch

  function readPanels() {
    patchOf.clear();
    panels().forEach((panel, at) => {
      for (let patch = 0; patch < panel.rows * panel.columns; patch++) patchOf.set(placeOf(panel, patch), [at, patch]);
    });
  }
  const isSound = () => context.text.picture?.kind === "sound";
  // Whether the patches can be chosen in this direction: in cross-attention they are keys only.
  const patchesFocus = () => !crossed() || turned();

  function drawTools() {
    const { state, text } = context;
    const custom = isChosen(state);
    fill(tools,
      segments("Direction", turned() ? "in" : "out", crossed()
        ? [["out", "What a word attends to"], ["in", `Which words attend to ${isSound() ? "a moment" : "a patch"}`]]
        : [["out", "What it attends to"], ["in", "What attends to it"]],
        (side) => context.set({ side, key: Math.max(0, state.key) })),
      choice("Heads", state.heads, [["one", "this head"], ["layer", "mean of the layer"],
        ["all", "mean of all"], ...(custom ? [[state.heads, headsInWords(context)] as [string, string]] : [])], (heads) => context.set({ heads })),
      segments("Cover", state.cover, [["light", "Light"], ["colours", "Colours"]], (cover) => context.set({ cover })),
      saving(() => `${text.title} picture ${headName(context)}`, () => figure(), () => context.root,
        () => legendBox.querySelector("svg")));
  }

  // The images

  function drawStage() {
    overlays = [];
    marks = [];
    const many = panels().length > 1;
    stage.className = `pictures${many ? " many" : ""}${isSound() ? " sound" : ""}`;
    stage.replaceChildren(...panels().map((panel, at) => {
      const sound = isSound();
      const height = sound ? panel.width / 5 : panel.height;
      const svg = s("svg", { viewBox: `0 0 ${panel.width} ${height}`, width: panel.width, height, role: "img",
        "aria-label": sound ? "Spectrogram under the weights" : `Image ${many ? at + 1 : ""} under the weights`,
        preserveAspectRatio: "none", class: "photo" });
      svg.append(s("image", { href: photoOf(panel), width: panel.width, height, preserveAspectRatio: "none" }));
      overlays[at] = svg.appendChild(s("image", { class: "cover", width: panel.width, height,
        preserveAspectRatio: "none", style: "image-rendering:pixelated" }));
      marks[at] = svg.appendChild(s("rect", { class: "mark", fill: "none", stroke: "var(--accent)", "stroke-width": 2,
        "vector-effect": "non-scaling-stroke" }));
      svg.addEventListener("pointermove", (event) => point(at, event));
      svg.addEventListener("pointerleave", () => leave());
      svg.addEventListener("click", (event) => choose(at, event));
      const said = context.text.picture?.kind === "video" ? `frame ${at}` : many ? `image ${at + 1}` : "";
      return h("figure", { class: "patches" }, svg, sound && curve, sound && seconds(panel), said && h("figcaption", {}, said));
    }));
  }

  // The weights along the time, under a spectrogram.
  const curve = s("svg", { class: "curve", viewBox: "0 0 1000 60", preserveAspectRatio: "none", role: "img",
    "aria-label": "Weight by time" });
  function drawCurve(values: Float32Array | null, top: number) {
    if (!isSound()) return;
    const steps = values ? [...values].map((weight, at) =>
      `L${(1000 * at) / values.length},${60 - 58 * scaled(weight / top)}H${(1000 * (at + 1)) / values.length}`) : [];
    curve.replaceChildren(s("path", { d: `M0,60${steps.join("")}V60Z`, fill: "currentColor" }));
  }

  // The time axis of a spectrogram.
  function seconds(panel: PicturePanel): HTMLElement {
    const all = panel.columns * (context.text.picture?.seconds ?? 0);
    const step = [0.1, 0.2, 0.5, 1, 2, 5, 10].find((one) => all / one <= 8) ?? 10;
    return h("div", { class: "seconds", "aria-hidden": "true" }, ...Array.from({ length: Math.floor(all / step + 1e-6) + 1 },
      (_, at) => h("span", { style: `left:${(100 * at * step) / all}%` }, `${+(at * step).toFixed(2)} s`)));
  }

  const tokenAt = (at: number, event: MouseEvent): number => {
    const panel = panels()[at];
    const box = (event.currentTarget as Element).getBoundingClientRect();
    const within = (share: number, size: number) => Math.max(0, Math.min(size - 1, Math.floor(share * size)));
    return placeOf(panel, within((event.clientY - box.top) / box.height, panel.rows) * panel.columns
      + within((event.clientX - box.left) / box.width, panel.columns));
  };
  function point(at: number, event: PointerEvent) {
    const token = tokenAt(at, event);
    if (!held && patchesFocus()) return void follow(token);
    sayPointed(token);
  }
  function sayPointed(token: number) {
    const { text } = context;
    const values = line;
    if (!values || (crossed() && turned())) return;
    fill(pointedAt, strong(shown(values[token])), turned() ? ` from ` : ` on `, visible(text.tokens[token]),
      ` (token ${token})`);
    pointedAt.dataset.weight = String(values[token]);
  }
  function follow(token: number) {
    if (preview === token) return;
    preview = token;
    void colour();
    clearTimeout(timer);
    timer = window.setTimeout(() => void drawTiles(), context.state.tiles === "all" ? WAIT : 30);
  }
  function leave() {
    fill(pointedAt);
    if (preview === null) return;
    preview = null;
    void colour();
    clearTimeout(timer);
    timer = window.setTimeout(() => void drawTiles(), 30);
  }
  function choose(at: number, event: MouseEvent) {
    const token = tokenAt(at, event);
    stage.focus({ preventScroll: true });
    if (crossed() && !turned()) return context.set({ side: "in", key: token });
    hold(token);
  }
  function hold(token: number) {
    held = !(held && token === (crossed() && turned() ? context.state.key : context.state.query));
    preview = null;
    move(token);
    void colour();
  }
  const move = (token: number, quiet = false) =>
    context.set(crossed() && turned() ? { key: token } : { query: token }, quiet);

  // The tokens that are not patches: the class token, registers, words.

  function drawWords() {
    const { text } = context;
    const list = (tokens: string[], isFocus: boolean, label: string) => {
      const box = h("div", { class: "chips", role: "group", "aria-label": label });
      let patches = 0;
      tokens.slice(0, tokens.length).forEach((token, at) => {
        if (patchOf.has(at) && (!crossed() || tokens === text.tokens)) { patches++; return; }
        if (patches && !crossed()) { box.append(imageChip()); patches = 0; }
        if (box.childElementCount < WORDS) box.append(wordChip(token, at, isFocus));
      });
      if (patches && !crossed() && box.childElementCount) box.append(imageChip());
      return box.childElementCount ? box : null;
    };
    if (crossed()) {
      const queries = list(text.queries!, true, "Words");
      const keys = list(text.tokens, false, "Other tokens");
      if (keys) keys.classList.add("keys");
      return fill(words, h("p", { class: "hint" }, hint()), queries, keys);
    }
    fill(words, h("p", { class: "hint" }, hint()), list(text.tokens, true, "Tokens that are not patches"));
  }
  const imageChip = () => h("span", { class: "chip-word image" }, "▦ image ", h("b", { class: "sum" }));
  function wordChip(token: string, at: number, isFocus: boolean): HTMLElement {
    const chip = isFocus
      ? h("button", { type: "button", class: "chip-word", dir: "auto", title: `${token} · ${at}`,
        onclick: () => { if (crossed()) context.set({ side: "out", query: at }); else hold(at); },
        onpointerenter: () => { if (!held && !(crossed() && turned())) follow(at); }, onpointerleave: () => leave() },
        visible(token))
      : h("span", { class: "chip-word", dir: "auto", title: `${token} · ${at}` }, visible(token));
    chip.dataset.at = String(at);
    if (crossed() && isFocus && context.text.picture?.seconds) void sayTime(chip, at);
    return chip;
  }
  // Under a word of a transcript: the centre of its weight, in seconds.
  async function sayTime(chip: HTMLElement, at: number) {
    if (at >= TIMED) return;
    const values = await meanLine(context, byLayer(listedHeads(context)), at);
    chip.append(h("span", { class: "when" }, `${centre(values).toFixed(2)} s`));
  }
  const hint = () => (crossed()
    ? `Choose a word to see what it attends to. Click the ${isSound() ? "spectrogram" : "picture"} to see which words attend to it.`
    : isSound() ? "Point at a moment to see its map. A click holds it; then pointing reads single weights. Esc lets go."
    : "Point at a patch or a token to see its map. A click holds it; then pointing reads single weights. Esc lets go.");

  // The weights

  async function colour() {
    const mine = ++turn;
    const at = focus();
    const values = await meanLine(context, byLayer(listedHeads(context)), at, turned());
    if (mine !== turn) return;
    line = values;
    const keysShown = !(crossed() && turned());
    const top = greatest(values, keysShown);
    panels().forEach((panel, number) => {
      const own = Float32Array.from({ length: panel.rows * panel.columns },
        (_, patch) => (keysShown ? scaled(values[placeOf(panel, patch)] / top) : 1));
      overlays[number].setAttribute("href", cells(own, panel.rows, panel.columns, context.state.cover, context.colours)
        .toDataURL());
      mark(number, panel, at);
    });
    colourWords(values, at);
    drawCurve(keysShown ? values : null, top);
    fill(legendBox, keysShown && keyOf(context, top, scaled),
      h("span", { class: "hint" }, keysShown ? `${coverName()} ${isSound() ? "a moment" : "a patch"}: its weight, up to the largest, ${shown(top)}`
        : "the colours of the words are their weights"));
    say(values, at);
  }
  const coverName = () => (context.state.cover === "light" ? "Light on" : "Colour of");
  const scaled = (share: number) => (context.state.scale === "linear" ? share : context.state.scale === "sqrt"
    ? Math.sqrt(share) : share <= 0 ? 0 : Math.max(0, 1 + Math.log10(share) / DECADES));
  // The largest weight on a patch, which has the full colour; of words if only words are shown.
  function greatest(values: Float32Array, patches: boolean): number {
    let most = 0;
    for (let at = 0; at < values.length; at++) if (!patches || patchOf.has(at)) most = Math.max(most, values[at]);
    return most || 1;
  }
  function mark(number: number, panel: PicturePanel, at: number) {
    const found = patchesFocus() ? patchOf.get(at) : undefined;
    const isHere = found?.[0] === number;
    marks[number].style.display = isHere ? "" : "none";
    if (!isHere) return;
    const height = isSound() ? panel.width / 5 : panel.height;
    const [wide, tall] = [panel.width / panel.columns, height / panel.rows];
    const [row, col] = [Math.floor(found![1] / panel.columns), found![1] % panel.columns];
    for (const [name, value] of Object.entries({ x: col * wide, y: row * tall, width: wide, height: tall }))
      marks[number].setAttribute(name, String(value));
  }
  function colourWords(values: Float32Array, at: number) {
    const all = [...patchOf.keys()].reduce((sum, token) => sum + (values[token] ?? 0), 0);
    words.querySelectorAll(".sum").forEach((sum) => { sum.textContent = shown(all); });
    const chips = words.querySelectorAll<HTMLElement>(".chip-word[data-at]");
    chips.forEach((chip) => {
      const token = Number(chip.dataset.at);
      const isKeyChip = chip.parentElement!.classList.contains("keys");
      const hasWeight = !crossed() || (turned() ? !isKeyChip : isKeyChip);
      const weight = hasWeight ? values[token] : 0;
      chip.style.background = weight ? context.colours.weight(weight) : "";
      chip.style.color = weight ? context.colours.textOn(weight) : "";
      const chosen = !isKeyChip && !(crossed() && turned()) && token === at;
      chip.toggleAttribute("data-chosen", chosen);
      if (chip.tagName === "BUTTON") chip.setAttribute("aria-pressed", String(chosen));
    });
  }

  // What the token attends to, in words: the strongest links, and the share of patches and of every other kind of token.
  function say(values: Float32Array, at: number) {
    const { text } = context;
    const others = turned() ? queriesOf(text) : text.tokens;
    const list = strongest(values, LISTED).flatMap((each, n) =>
      [n ? ", " : "", strong(visible(others[each])), ` ${shown(values[each])}`]);
    const which = inText(headsInWords(context));
    fill(readout, strong(visible(focusTokens()[at])), ` (token ${at})`, turned() ? " receives attention from " : " attends to ",
      ...(list.length ? list : ["nothing"]), `, in ${which}. `, turned() ? "" : parts(values), time(values));
    if (preview === null) context.tell(readout.textContent ?? "");
  }
  function parts(values: Float32Array): HTMLElement {
    const total = new Map<string, number>();
    values.forEach((weight, at) => {
      const kind = patchOf.has(at) ? isSound() ? "the sound" : "patches"
        : /^\[REG/.test(context.text.tokens[at]) ? "registers" : isWord(at) ? "words" : visible(context.text.tokens[at]);
      total.set(kind, (total.get(kind) ?? 0) + weight);
    });
    const said = [...total].filter(([, weight]) => weight > 0).map(([kind, weight]) =>
      `${(100 * weight).toFixed(1)} % on ${kind}`);
    return h("span", { class: "parts" }, `Of its weight, ${said.join(", ")}. `);
  }
  const isWord = (at: number) => !context.text.special.includes(at);
  function time(values: Float32Array): string {
    if (!context.text.picture?.seconds || turned()) return "";
    return `The centre of its weight is at ${centre(values).toFixed(2)} s.`;
  }
  function centre(values: Float32Array): number {
    const total = values.reduce((sum, weight) => sum + weight, 0);
    const at = values.reduce((sum, weight, frame) => sum + weight * (frame + 0.5), 0) / (total || 1);
    return at * context.text.picture!.seconds!;
  }

  // A map of every head

  async function drawTiles() {
    const mine = ++tileTurn;
    const { state, text, source } = context;
    const everywhere = state.tiles === "all";
    const layers = everywhere ? [...text.layers.keys()] : [state.layer];
    const at = focus();
    const keysShown = !(crossed() && turned());
    const active = patchOf.get(at)?.[0] ?? 0;
    const panel = panels()[active];
    if (!panel || !keysShown) return fill(tiles);
    const lines = await Promise.all(layers.map((layer) => turned() ? source.columns(state.text, layer, at)
      : source.rows(state.text, layer, at)));
    if (mine !== tileTurn) return;
    const wanted = [state.text, layers.join(), active].join("|");
    if (tiles.dataset.drawn !== wanted) buildTiles(layers, wanted, panel);
    layers.forEach((layer, row) => lines[row].forEach((values, head) => drawTile(layer, head, values, panel)));
  }
  function buildTiles(layers: number[], wanted: string, panel: PicturePanel) {
    const { text, state } = context;
    tiles.dataset.drawn = wanted;
    void thumbnail(panel).then((photo) => {
      if (tiles.dataset.drawn === wanted) tiles.style.setProperty("--photo", `url("${photo}")`);
    });
    tiles.style.setProperty("--shape", isSound() ? "5 / 2"
      : `${panel.width} / ${panel.height}`);
    const rows = layers.map((layer) => h("div", { class: "tile-row", role: "row" },
      layers.length > 1 && h("span", { class: "axis", role: "rowheader" }, layerLabel(text.layers[layer])),
      ...text.layers[layer].heads.map((_, head) => {
        const name = headName(context, layer, head);
        const tile = h("button", { type: "button", class: "tile", role: "gridcell", title: name, "aria-label": name,
          onclick: () => context.set({ layer, head, heads: "one" }) }, h("canvas", { "aria-hidden": "true" }),
          h("span", { class: "share", "aria-hidden": "true" }));
        tile.dataset.place = `${layer}.${head}`;
        return tile;
      })));
    fill(tiles, h("h2", {}, "Every head"), choice("Show", state.tiles, [["layer", `heads of ${layerName(text.layers[state.layer])}`],
      ["all", "heads of all layers"]], (chosen) => context.set({ tiles: chosen })),
      h("p", { class: "hint" }, `The same token in every head, each on its own scale. The number is the share of the weight that is on ${isSound() ? "the sound" : "patches"}.`),
      h("div", { class: `tile-grid${layers.length > 1 ? " all" : ""}`, role: "grid", "aria-label": "Heads" }, ...rows));
    tiles.style.setProperty("--columns", String(layers.length > 1
      ? Math.max(...text.layers.map((layer) => layer.heads.length)) : 4));
  }
  function drawTile(layer: number, head: number, values: Float32Array, panel: PicturePanel) {
    const tile = tiles.querySelector<HTMLElement>(`[data-place="${layer}.${head}"]`);
    if (!tile) return;
    const chosen = layer === context.state.layer && head === context.state.head;
    tile.setAttribute("aria-selected", String(chosen));
    tile.tabIndex = chosen ? 0 : -1;
    const top = greatest(values, true);
    const own = Float32Array.from({ length: panel.rows * panel.columns }, (_, patch) =>
      scaled(values[placeOf(panel, patch)] / top));
    cells(own, panel.rows, panel.columns, context.state.cover, context.colours, tile.querySelector("canvas")!);
    let share = 0;
    for (const at of patchOf.keys()) share += values[at] ?? 0;
    tile.querySelector(".share")!.textContent = turned() ? shown(share) : `${Math.round(100 * share)} %`;
  }

  // The figure to be saved: the images with their weights, side by side.
  function figure(): SVGSVGElement | null {
    const drawnNow = [...stage.querySelectorAll<SVGSVGElement>("svg.photo")];
    return drawnNow.length === 1 ? drawnNow[0] : strip(drawnNow);
  }

  function draw() {
    if (!context.text.picture) {
      fill(tools); fill(stage); fill(words); fill(legendBox); fill(tiles); fill(readout);
      return fill(notes, h("p", { class: "hint" }, "This text has no picture. Pictures belong to models that read images, videos or sounds."));
    }
    fill(notes, meansOnly(context));
    readPanels();
    drawTools();
    drawStage();
    drawWords();
    tiles.dataset.drawn = "";
    void colour();
    void drawTiles();
  }

  return {
    element,
    update(before) {
      const { state } = context;
      const wanted = [state.text, state.side, state.heads, state.cover, state.scale, state.tiles, context.colours.css[9],
        isSound() ? `${state.layer}.${state.head}` : ""].join(); // the times of words are those of the head
      if (!before || wanted !== drawn) { drawn = wanted; preview = null; return draw(); }
      drawTools();
      void colour();
      void drawTiles();
    },
    key(event) {
      if (event.key === "Escape" && held) { held = false; fill(pointedAt); return true; }
      const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      const target = event.composedPath()[0] as HTMLElement;
      if (target.classList?.contains("tile")) return stepTile(target, event.key);
      if (!step || !patchesFocus() || !panels().length) return false;
      preview = null;
      move(neighbour(focus(), step), true);
      return true;
    },
    close() { clearTimeout(timer); },
  };

  // The patch beside a patch; from another token, the first patch.
  function neighbour(at: number, [down, right]: number[]): number {
    const found = patchOf.get(at);
    if (!found) return placeOf(panels()[0], 0);
    const panel = panels()[found[0]];
    const within = (value: number, size: number) => Math.max(0, Math.min(size - 1, value));
    return placeOf(panel, within(Math.floor(found[1] / panel.columns) + down, panel.rows) * panel.columns
      + within((found[1] % panel.columns) + right, panel.columns));
  }
  function stepTile(tile: HTMLElement, key: string): boolean {
    const all = [...tiles.querySelectorAll<HTMLElement>(".tile")];
    const width = context.state.tiles === "all" ? context.text.layers[context.state.layer].heads.length : 4;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -width, ArrowDown: width }[key];
    const next = step === undefined ? undefined : all[all.indexOf(tile) + step];
    if (!next) return false;
    const [layer, head] = next.dataset.place!.split(".").map(Number);
    context.set({ layer, head, heads: "one" }, true);
    tiles.querySelector<HTMLElement>(`[data-place="${layer}.${head}"]`)?.focus();
    return true;
  }
}

export const hasPicture = (text: Text) => Boolean(text.picture);
