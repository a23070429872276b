// What one word attends to in every layer: a row per layer.
import { cellGrid } from "./cell_grid";
import { changeDetector } from "./changes";
import { interval, type Context } from "./context";
import { layerName, queriesOf } from "./data";
import { cut, fill, h, hint, s, visible } from "./dom";
import { shown } from "./format";
import { meanLine } from "./head_sets";
import { inParts } from "./pause";
import { cutName, wordNames } from "./word_names";

const [SHOWN, TALL] = [72, 18]; // words of a row, pixels of a row

// What the chosen word attends to in all layers does not depend on the head: it is drawn again for another word.
export function layerRows(context: Context): { element: HTMLElement; draw(): void } {
  const body = h("div", { class: "scroll" });
  const element = h(
    "section",
    { class: "strip" },
    h("h2", {}, "All layers"),
    hint("What the chosen word attends to: the mean of the heads of each layer."),
    body,
  );
  const isNew = changeDetector();
  let [turn, room] = [0, 0];

  async function draw() {
    const { text, state, colors } = context;
    if (!isNew(state.text, text.title, state.query, state.scale, colors.theme)) return;
    const mine = ++turn;
    room ||= element.clientWidth; // read once: later it would cost a layout for every key
    const figure = await figureOf(context, state.query, room).catch((error) => {
      isNew();
      throw error;
    });
    if (mine === turn) fill(body, figure);
  }
  return { element, draw: () => void draw() };
}

async function figureOf(context: Context, query: number, room: number): Promise<SVGSVGElement> {
  const { text } = context;
  const crossed = text.queries !== null;
  const [first, last] = interval(crossed ? 0 : query, SHOWN, text.tokens.length);
  const lines = await meansOfLayers(context, query);
  const names = wordNames(text.tokens).slice(first, last);
  const layers = text.layers.map((layer) => cut(layerName(layer), 20));
  const longest = Math.max(...names.map((name) => Math.min([...name].length, 12)));
  const [left, bottom] = [
    Math.max(58, 12 + 6.2 * Math.max(...layers.map((name) => name.length))),
    longest * 6.5 + 8,
  ];
  const cell = Math.max(13, Math.min(30, (Math.min(room || 700, 700) - left - 4) / names.length));
  const [width, height] = [left + names.length * cell + 4, layers.length * TALL + bottom];
  const cells = cellGrid({
    rows: layers.length,
    cols: names.length,
    wide: cell,
    tall: TALL,
    gap: [1, 2],
    color: (layer, at) => context.colors.weight(lines[layer][first + at]),
    title: (layer, at) =>
      `${layerName(text.layers[layer])}, ${names[at]}: ${shown(lines[layer][first + at])}`,
    chosen: (layer) => context.set({ layer }),
  });
  cells.setAttribute("transform", `translate(${left},0)`);
  const label = (said: string, place: Record<string, string | number>) =>
    s(
      "text",
      { x: 0, y: 0, ...place, "text-anchor": "end", "font-size": 11, fill: "currentColor" },
      said,
    );
  return s(
    "svg",
    {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": `What ${visible(queriesOf(text)[query])} attends to in every layer`,
    },
    ...layers.map((name, layer) => label(name, { x: left - 6, y: layer * TALL + 12 })),
    cells,
    ...names.map((name, at) =>
      label(cutName(name, 12), {
        "dominant-baseline": "central",
        transform: `translate(${left + (at + 0.5) * cell},${layers.length * TALL + 4}) rotate(-90)`,
        "font-weight": first + at === query && !crossed ? 700 : 400,
      }),
    ),
  );
}

// The mean over the heads of each layer of the weights of a query.
const meansOfLayers = (context: Context, query: number) =>
  inParts(context.text.layers, (layer, at) =>
    meanLine(context, new Map([[at, [...layer.heads.keys()]]]), query),
  );
