// The panels of a figure: the map of a head, an alignment, two heads or texts; and those of other files.
import { textOver } from "./color";
import { chosenSides, differenceOf, haveSameSizes } from "./compare_heads";
import { canCompareTexts, textsOfFigure } from "./compare_texts";
import { headName, inText, place, type Context } from "./context";
import { layerLabel, type Pool, queriesOf, shortName } from "./data";
import { cut, s } from "./dom";
import {
  box,
  gutter,
  shortToken,
  SMALL,
  tokensAlong,
  weightCells,
  widest,
  widthOf,
  write,
  GOLD,
  SOFT,
  type Drawn,
  type Frame,
  tokensOf,
  tokensInRow,
  pairOf,
  legendBelow,
} from "./figure_frame";
import { headsPanel, statisticsPanel } from "./figure_heads";
import { wordsWithArcs } from "./figure_words";
import { inCell } from "./format";
import { differenceLegend } from "./legend";
import type { Row } from "./output";
import { TILE } from "./source";
import { alignmentPanels } from "./views/alignment";
import { isOfHeads } from "./views/compare";
import { namesOfMap, wordNames } from "./word_names";

export const PANELS: [string, string][] = [
  ["words", "Words with arcs"],
  ["map", "Map of the head"],
  ["heads", "All heads"],
  ["compare", "Two texts or heads"],
  ["alignment", "Alignment"],
  ["statistics", "Statistic of all heads"],
];
export const CSV_HEAD: Row = [
  "panel",
  "layer",
  "head",
  "quantity",
  "query",
  "query token",
  "key",
  "key token",
  "value",
];
// Cells of a side; points of a cell with a number, of the largest cell, and of a figure with room for two maps.
const [MOST, NUMBERED, WIDEST, BESIDE] = [256, 14, 20, 300];

interface Region {
  values: Float32Array;
  rows: number;
  cols: number;
  level: number;
  first: [number, number];
}
// Weights, or cells of several weights if a side has more than MOST tokens.
async function region(
  frame: Frame,
  at = place(frame.context),
  [top, bottom]: [number, number],
  [left, right]: [number, number],
): Promise<Region> {
  const { source, state } = frame.context;
  const finest = source.finest(state.text);
  const level = Math.max(
    finest,
    Math.ceil(Math.log2(Math.max(bottom - top, right - left) / MOST)),
    0,
  );
  const ends = [top, bottom - 1, left, right - 1].map((token) => token >> level);
  const [rows, cols] = [ends[1] - ends[0] + 1, ends[3] - ends[2] + 1];
  const values = new Float32Array(rows * cols);
  const of = frame.context.text;
  const across = Math.ceil(of.tokens.length / 2 ** level);
  for (let r = Math.floor(ends[0] / TILE); r <= Math.floor(ends[1] / TILE); r++)
    for (let c = Math.floor(ends[2] / TILE); c <= Math.floor(ends[3] / TILE); c++) {
      const tile = await source.tile(at, level, r, c, state.pool as Pool);
      const wide = Math.min(TILE, across - c * TILE);
      for (let n = 0; n < tile.length; n++) {
        const [i, j] = [r * TILE + Math.floor(n / wide) - ends[0], c * TILE + (n % wide) - ends[2]];
        if (i >= 0 && j >= 0 && i < rows && j < cols) values[i * cols + j] = tile[n];
      }
    }
  return {
    values,
    rows,
    cols,
    level,
    first: [ends[0] << level, ends[2] << level],
  };
}

function rowsOf(
  context: Context,
  panel: string,
  layer: number,
  head: string | number,
  found: Region,
): Row[] {
  const { text } = context;
  const { values, cols, level, first } = found;
  const size = 2 ** level;
  const part = (at: number, tokens: string[]) =>
    tokensInRow(tokens, at, Math.min(at + size, tokens.length) - 1);
  const quantity =
    size > 1
      ? context.state.pool === "max"
        ? "largest weight of a cell"
        : "weight of a cell"
      : "weight";
  return Array.from(values, (value, at) => [
    panel,
    layerLabel(text.layers[layer]),
    head,
    quantity,
    ...part(first[0] + Math.floor(at / cols) * size, queriesOf(text)),
    ...part(first[1] + (at % cols) * size, text.tokens),
    value,
  ]);
}

// The map of one head

const wholeRegion = (frame: Frame) =>
  region(
    frame,
    place(frame.context),
    tokensOf(frame, "queries", Infinity),
    tokensOf(frame, "keys", Infinity),
  );

async function map(frame: Frame): Promise<Drawn> {
  const { context } = frame;
  const { text, state } = context;
  const found = await wholeRegion(frame);
  const { node, width, height } = matrix(frame, found, headName(context));
  const pooled = found.level
    ? ` A cell is ${2 ** found.level} × ${2 ** found.level} weights: ${
        state.pool === "max" ? "the largest of them" : "their sum over keys, averaged over queries"
      }.`
    : "";
  const [rows, columns] = text.queries ? ["target word", "source word"] : ["query", "key"];
  return {
    node,
    width,
    height,
    title: `Map of ${inText(headName(context))}`,
    keys: state.pool === "max" ? 1 : 2 ** found.level,
    heads: headName(context),
    said: `Each row is a ${rows} and shows what it attends to; each column is a ${columns}.${pooled}`,
    rows: rowsOf(context, "map", state.layer, state.head, found),
  };
}

function matrix(
  frame: Frame,
  { values, rows, cols, level, first }: Region,
  about: string,
  color = (value: number) => frame.colors.weight(value),
) {
  const { text } = frame.context;
  const step = 2 ** level;
  const tokens = namesOfMap(text).map((all, way) =>
    all.slice(first[way], first[way] + [rows, cols][way] * step),
  );
  const guess = Math.min(WIDEST, (frame.width - 40) / cols);
  const left = 11 + gutter(tokens[0], first[0], step, guess);
  const cell = Math.min(WIDEST, (frame.width - left - 1) / cols, (frame.tallest - 60) / rows);
  const [low, name] = [rows * cell, gutter(tokens[1], first[1], step, cell)];
  const node = s("g", { "aria-label": about });
  node.append(weightCells(frame, values, rows, cols, [left, 0, cell, cell], color));
  node.append(
    tokensAlong(tokens[0], first[0], step, cell, true, [left, 0]),
    tokensAlong(tokens[1], first[1], step, cell, false, [left, low]),
  );
  if (cell >= NUMBERED && level === 0)
    for (let at = 0; at < values.length; at++)
      node.append(
        write(
          inCell(values[at]),
          left + ((at % cols) + 0.5) * cell,
          (Math.floor(at / cols) + 0.5) * cell,
          { anchor: "middle", fill: textOver(color(values[at])) },
        ),
      );
  const axes = text.queries ? ["query (target)", "key (source)"] : ["query", "key"];
  node.append(
    write(axes[0], 4, low / 2, { turned: true, anchor: "middle", fill: SOFT }),
    write(axes[1], left + (cols * cell) / 2, low + name + 6, { anchor: "middle", fill: SOFT }),
  );
  return { node, width: left + cols * cell, height: low + name + 11 };
}

// Alignment: mechanisms, layers or heads side by side, with gold links outlined

async function alignment(frame: Frame): Promise<Drawn> {
  const { context, width } = frame;
  const { text } = context;
  const found = await alignmentPanels(context);
  const room = Math.floor((width - 40) / 7.8);
  const [rows, cols] = [
    tokensOf(frame, "queries", 60),
    tokensOf(frame, "keys", Math.min(60, room)),
  ];
  const tokens = namesOfMap(text).map((all, way) => all.slice(...[rows, cols][way]));
  const left = widest(tokens[0]) + 4;
  const above = widest(tokens[1]) + 4;
  const fit = (columns: number) =>
    Math.min(14, ((width - left + 10) / columns - 10) / tokens[1].length);
  let columns = Math.min(
    found.length,
    Math.max(1, Math.floor((width - left + 10) / (tokens[1].length * 7.8 + 10))),
  );
  columns = Math.ceil(found.length / Math.ceil(found.length / columns));
  const cell = Math.max(fit(columns), 0.5);
  const tall = rows[1] - rows[0];
  const down = Math.max(1, Math.floor((frame.tallest - above) / (tall * cell + 16)));
  const shown = found.slice(0, columns * down);
  const node = s("g", {});
  const table: Row[] = [];
  for (const [n, panel] of shown.entries()) {
    const [x, y] = [
      left + (n % columns) * (tokens[1].length * cell + 10),
      12 + above + Math.floor(n / columns) * (tall * cell + 16),
    ];
    const weights = await panel.weights(rows, cols);
    node.append(
      alignmentCells(frame, weights, [rows, cols], [x, y, cell], n < columns, n % columns === 0),
    );
    node.append(
      write(titled(panel.title, tokens[1].length * cell), x, y - (n < columns ? above + 5 : 6), {
        bold: true,
      }),
    );
    weights.forEach((weight, at) => {
      table.push([
        "alignment",
        ...panel.place,
        "weight",
        ...pairOf(
          text,
          rows[0] + Math.floor(at / tokens[1].length),
          cols[0] + (at % tokens[1].length),
        ),
        weight,
      ]);
    });
  }
  const height = 12 + above + Math.ceil(shown.length / columns) * (tall * cell + 16) - 16;
  const gold = text.gold.length
    ? " Outlined: gold links; a dashed outline is a possible link."
    : "";
  const missing =
    shown.length < found.length ? ` The first ${shown.length} of ${found.length} are shown.` : "";
  return {
    node,
    width: left + columns * (tokens[1].length * cell + 10) - 10,
    height,
    title: "Alignment",
    heads: "",
    rows: table,
    keys: 1,
    said: `${text.queries ? "Each row is a target word, each column a source word" : "Each row is a query, each column a key"}.${gold}${missing}`,
  };
}

function titled(title: string, room: number): string {
  let text = title;
  while (text.length > 1 && widthOf(text, SMALL, true) > room) text = `${text.slice(0, -2)}…`;
  return text;
}

function alignmentCells(
  frame: Frame,
  weights: Float32Array,
  [rows, cols]: [number, number][],
  [x, y, cell]: number[],
  isTop: boolean,
  isLeft: boolean,
): SVGGElement {
  const { text } = frame.context;
  const node = s("g", {});
  node.append(
    weightCells(frame, weights, rows[1] - rows[0], cols[1] - cols[0], [x, y, cell, cell]),
  );
  if (isLeft)
    node.append(
      tokensAlong(wordNames(queriesOf(text)).slice(...rows), rows[0], 1, cell, true, [x, y]),
    );
  if (isTop)
    wordNames(text.tokens)
      .slice(...cols)
      .forEach((token, j) => {
        node.append(
          write(shortToken(token), x + (j + 0.5) * cell, y - 3, { turned: true, token: true }),
        );
      });
  for (const [i, j, sure] of text.gold)
    if (i >= rows[0] && i < rows[1] && j >= cols[0] && j < cols[1])
      for (const [name, inset, stroke] of [
        ["halo", 1.2, "#ffffff"],
        ["gold", 0.5, GOLD],
      ] as const) // a light line inside
        node.append(
          s("rect", {
            class: name,
            ...box([
              x + (j - cols[0]) * cell + inset,
              y + (i - rows[0]) * cell + inset,
              cell - 2 * inset,
              cell - 2 * inset,
            ]),
            fill: "none",
            stroke,
            "stroke-width": name === "gold" ? 1 : 0.5,
            "stroke-dasharray": sure || name === "halo" ? null : "2 1.4",
          }),
        );
  return node;
}

// What the view Compare shows: the words of two texts, or the maps of two heads

async function compare(frame: Frame): Promise<Drawn[]> {
  const { context } = frame;
  const { state } = context;
  const isMaps = !canCompareTexts(context) || isOfHeads(state);
  const sides = isMaps
    ? (await chosenSides(context)).map(({ place, text }) => ({ text, at: place }))
    : (await textsOfFigure(context)).map(({ text, number, query }) => ({
        text,
        at: { text: number, query },
      }));
  const width = isMaps && frame.width > BESIDE ? (frame.width - 20) / 2 : frame.width;
  const frames = sides.map(({ text, at }) => ({
    ...frame,
    width,
    context: { ...context, text, state: { ...state, ...at } },
  }));
  const drawn = await Promise.all(
    frames.map(async (one) => {
      const { context: own } = one;
      const { text } = own;
      const drawn = await (isMaps ? map : wordsWithArcs)(one);
      const name = isMaps ? headName(own) : drawn.title;
      const title = titled(`${name}: ${text.title}`, 0.84 * Math.max(width, drawn.width));
      const rows = drawn.rows.map(([panel, ...rest]): Row => [`${panel}, ${text.title}`, ...rest]);
      const heads = isMaps ? "" : drawn.heads; // the titles name them
      return { ...drawn, title, heads, rows, said: `“${cut(text.title, 80)}”: ${drawn.said}` };
    }),
  );
  return isMaps && haveSameSizes(sides) ? [...drawn, await difference(frames)] : drawn;
}

// The map of the first of two heads minus that of the second.
async function difference(frames: Frame[]): Promise<Drawn> {
  const [{ colors, context }] = frames;
  const found = await Promise.all(frames.map(wholeRegion));
  const [values, most] = differenceOf(found);
  const made = { ...found[0], values };
  const panel = matrix(frames[0], made, "Difference", colors.difference(most || 1));
  const names = frames.map(({ context: { text, state } }) =>
    shortName(text.layers[state.layer], state.head),
  );
  const legend = differenceLegend(colors, most || 1);
  const key = legendBelow(panel.node, legend, [0, panel.height + 6]);
  return {
    node: panel.node,
    width: Math.max(panel.width, key.width),
    height: key.height,
    title: "Difference",
    heads: "",
    said: "The first map minus the second: purple is more weight in the first, green more in the second.",
    keys: 0,
    rows: rowsOf(context, "difference", context.state.layer, "", made).map(
      ([panel, , , quantity, ...rest]) => [
        panel,
        "",
        names.join(" − "),
        `difference of ${quantity}`,
        ...rest,
      ],
    ),
  };
}

export const DRAW: Record<string, (frame: Frame) => Promise<Drawn | Drawn[]>> = {
  words: wordsWithArcs,
  map,
  heads: headsPanel,
  compare,
  alignment,
  statistics: statisticsPanel,
};
