// The map of a head, zoomable from pooled cells to single weights, with token labels.
import { aboutHead } from "./about_head";
import { plural } from "./format";
import { changeDetector } from "./changes";
import { headName, type Context, type Panel } from "./context";
import { queriesOf, shortName } from "./data";
import { actionButton, choice, fill, h, s, signButton, strong, visible, labelled } from "./dom";
import { labelsOf, paintMap } from "./map_drawing";
import { DEEPEST, MapFrame } from "./map_frame";
import { tellCell } from "./map_readout";
import { mapSearch } from "./map_search";
import { MapTiles } from "./map_tiles";
import { pinButton } from "./pin_set";
import { arrowOf, within } from "./steps";

const READABLE = 48; // pixels per weight

export interface HeadMap extends Panel {
  point(query: number | null): void; // a word elsewhere is pointed at: its row is marked
}

// `linked` hears at which weight the reader points; `why` folds out above the map.
export function headMap(
  context: Context,
  linked: (query: number | null, key?: number) => void,
  why: HTMLElement,
): HeadMap {
  const canvas = h("canvas", { role: "img", tabindex: 0 });
  const labels = s("svg", { class: "labels", "aria-hidden": "true" });
  const box = h("div", { class: "map-box" }, canvas, labels);
  const readout = h("p", { class: "readout", role: "status", "aria-live": "polite" });
  const progress = h("div", {
    class: "progress",
    role: "progressbar",
    "aria-label": "Computing tiles",
    hidden: true,
  });
  const [tools, precision] = [h("div", { class: "tools" }), h("div", { class: "key" })];
  const [here, beside] = [h("h2", {}), h("div", { class: "about-map" })];
  let row: number | null = null; // of the word that is pointed at
  const element = h(
    "section",
    { class: "head-map", "aria-label": "Map of the head" },
    h("div", { class: "map-tools" }, tools, why),
    h(
      "div",
      { class: "sides" },
      h("div", { class: "map-main" }, box, progress),
      h("aside", { class: "beside" }, here, readout, precision, beside),
    ),
  );
  const frame = new MapFrame(context, canvas, box, () => {
    tiles.again();
    draw();
  });
  const tiles = new MapTiles(context, frame, () => draw());
  const search = mapSearch(context, show, (wish) =>
    readout.replaceChildren("There is no token ", strong(wish), "."),
  );
  let pointed: [number, number] | null = null;
  let waitingFrame = 0;
  const areToolsNew = changeDetector();

  // Drawing

  function draw() {
    cancelAnimationFrame(waitingFrame);
    waitingFrame = requestAnimationFrame(paint);
  }

  function paint() {
    if (!frame.width) return;
    const level = frame.levelOf();
    context.keysPerCell(context.state.pool === "max" ? 1 : 2 ** level);
    paintMap(context, frame, tiles, canvas, pointed ?? (row === null ? null : [row, -1]));
    labels.replaceChildren(...labelsOf(context, frame));
    const [I, J] = frame.counts();
    canvas.setAttribute(
      "aria-label",
      `Weights of ${headName(context)}: ${I} rows of queries, ${J} columns of keys; cells of ${2 ** level}.`,
    );
    box.dataset.level = String(level);
    box.dataset.waiting = String(tiles.waits);
    tellProgress();
    const { query, key } = context.state;
    if (pointed) tellCell(context, frame, tiles, readout, ...pointed);
    else if (key >= 0) tellCell(context, frame, tiles, readout, query, key);
  }

  function tellProgress() {
    const { waits, stopped, failure } = tiles;
    progress.hidden = !waits && !stopped;
    progress.textContent = failure
      ? `${failure} Move the map to try again.`
      : stopped
        ? "Stopped; move the map to continue"
        : `Computing ${plural(waits, "tile")}; press Esc to stop`;
  }

  // Nothing is pointed at: the readout is that of the chosen pair, or of the strongest link.
  function rest() {
    pointed = null;
    const { query, key } = context.state;
    if (key >= 0) tellCell(context, frame, tiles, readout, query, key);
    else fill(readout, "Point at a cell, or click to choose it.");
  }

  function measure() {
    frame.measure();
    labels.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
  }

  function drawTools() {
    const { state, source, colors } = context;
    if (
      !areToolsNew(
        state.text,
        state.layer,
        state.head,
        state.scale,
        state.pool,
        state.pins,
        frame.isPooled(),
        colors.theme,
      )
    )
      return;
    fill(
      tools,
      labelled("Go to", search.element),
      zoomButtons(),
      frame.isPooled() &&
        choice(
          "Cells show",
          state.pool,
          [
            ["mean", "sum over keys"],
            ["max", "strongest weight"],
          ],
          (pool) => context.set({ pool }),
        ),
      pinButton(context),
    );
    here.textContent = `Here, in ${shortName(context.text.layers[state.layer], state.head)}`;
    fill(beside, h("h2", {}, "This head"), aboutHead(context));
    fill(precision, h("span", { class: "hint" }, source.precision(state.text)));
  }

  const zoomButtons = () =>
    h(
      "span",
      { class: "segments", role: "group", "aria-label": "Zoom" },
      signButton("−", "Zoom out", () => frame.zoomBy(0.5), "Zoom out (−)"),
      signButton("+", "Zoom in", () => frame.zoomBy(2), "Zoom in (+)"),
      actionButton(
        { title: "Show the whole map (0)", onclick: () => context.set({ x: -1, y: -1 }) },
        "Whole",
      ),
    );

  // Pointing

  canvas.addEventListener("pointermove", (event) => {
    const before = pointed;
    pointed = frame.pairUnder(event);
    if (!pointed) rest();
    if (pointed?.join() !== before?.join()) linked(pointed?.[0] ?? null, pointed?.[1]);
    draw();
  });
  canvas.addEventListener("pointerleave", () => {
    rest();
    linked(null);
    draw();
  });
  canvas.addEventListener("click", (event) => {
    const found = frame.pairUnder(event);
    if (found) context.set({ query: found[0], key: found[1] });
  });

  // Center a pair, large enough to read.
  function show(i: number, j: number) {
    const k = Math.max(frame.transform.k, Math.min(DEEPEST, READABLE));
    context.set({ query: i, key: j, x: j + 0.5, y: i + 0.5, zoom: Math.log2(k) });
    context.tell(
      `${visible(queriesOf(context.text)[i])} attends to ${visible(context.text.tokens[j])}`,
    );
  }

  // Keys

  function move([down, right]: [number, number]): true {
    const { query, key } = context.state;
    const [I, J] = frame.counts();
    const [i, j] = [within(query + down, I), within(Math.max(key, 0) + right, J)];
    context.set(
      frame.isOutside(i, j)
        ? { query: i, key: j, x: j + 0.5, y: i + 0.5, zoom: Math.log2(frame.transform.k) }
        : { query: i, key: j },
      true,
    );
    return true;
  }

  const resized = new ResizeObserver(() => {
    if (frame.isWider()) {
      measure();
      drawTools();
      frame.go();
    }
  });
  resized.observe(box);

  const acts: Record<string, () => void> = {
    "+": () => frame.zoomBy(2),
    "=": () => frame.zoomBy(2),
    "-": () => frame.zoomBy(0.5),
    "0": () => context.set({ x: -1, y: -1 }),
    "/": () => search.focus(),
    Escape: () => {
      tiles.stop();
      draw();
    },
  };

  return {
    element,
    point(query) {
      row = query;
      draw();
    },
    update(before) {
      const { state } = context;
      tiles.again();
      if (before && (before.query !== state.query || before.key !== state.key)) pointed = null;
      const isResized =
        !before || before.text !== state.text || before.view !== state.view || frame.hasOtherBar();
      drawTools();
      if (isResized) {
        measure();
        drawTools();
      } // the measure says whether cells are pooled
      const isMoved =
        before && (before.x !== state.x || before.y !== state.y || before.zoom !== state.zoom);
      if (isResized || (isMoved && !frame.isThere())) frame.go();
      if (!pointed) rest();
      draw();
    },
    key(event) {
      const arrow = arrowOf(event.key);
      if (arrow) {
        const far = event.shiftKey ? 10 : 1;
        return move([arrow[0] * far, arrow[1] * far]);
      }
      acts[event.key]?.();
      return event.key in acts;
    },
    close() {
      resized.disconnect();
      cancelAnimationFrame(waitingFrame);
      tiles.close();
    },
  };
}
