// The panels of a figure: words with arcs, the map of a head, all heads, alignment, and a statistic of all heads.
import { interval, headName, inText, place, strongest, type Context } from "./context";
import {
  bytes,
  layerLabel,
  mostHeads,
  type Pool,
  queriesOf,
  shortName,
  sizeOf,
  statisticsOf,
  weightOf,
} from "./data";
import { textOver } from "./color";
import { chosenSides, differenceOf, haveSameSizes } from "./compare_heads";
import { canCompareTexts, textsOfFigure } from "./compare_texts";
import { cut, s } from "./dom";
import { inCell, rangeOf, shown, statisticInCell } from "./format";
import { differenceLegend, legendInPoints, rangeLegend } from "./legend";
import { ARCS, arcOf, heightOf, LEAST, spot, widestOf } from "./arcs";
import {
  box,
  cellImage,
  cellsByColor,
  gutter,
  NORMAL,
  round,
  shortToken,
  SMALL,
  tokensAlong,
  weightCells,
  widest,
  widthOf,
  write,
  GOLD,
  INK,
  LINE,
  SOFT,
  type Drawn,
  type Frame,
} from "./figure_frame";
import { alignmentPanels } from "./views/alignment";
import { isOfHeads } from "./views/compare";
import { headOrder } from "./head_order";
import type { Row } from "./output";
import { TILE } from "./source";
import { namesOfMap, wordNames } from "./word_names";
import { byLayer, headsInWords, listedHeads, meanLine } from "./head_sets";

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
const [PITCH, MOST, NUMBERED, WIDEST, EXACT, VECTORS] = [9.2, 256, 14, 20, 48, 24_000];
const [THICKEST, BESIDE] = [2.8, 300]; // points of the widest arc; of a figure with room for two maps
// VECTORS: cells of all heads, of more they are pictures

const pair = (text: Context["text"], i: number, j: number) => [
  i,
  queriesOf(text)[i],
  j,
  text.tokens[j],
];
const capital = (text: string) => text[0].toUpperCase() + text.slice(1);
// The weight of an arc: as in a cell, and also if it is small.
const arcWeight = (value: number) => inCell(value) || shown(value);

// The tokens of a side: those that were asked for, or those around the chosen one.
const tokensOf = (frame: Frame, side: "queries" | "keys", most: number): [number, number] => {
  const { text, state } = frame.context;
  const all = side === "keys" ? text.tokens.length : queriesOf(text).length;
  if (frame.span && (side === "queries" || !text.queries))
    return [frame.span[0], Math.min(frame.span[1], all)];
  return interval(side === "keys" && text.queries ? 0 : state.query, most, all);
};

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

// The place and the name of a token, or of the first and the last one of a cell.
const tokensInRow = (tokens: string[], first: number, last: number) =>
  first === last
    ? [first, tokens[first]]
    : [`${first}-${last}`, `${tokens[first]} … ${tokens[last]}`];

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

// Words with arcs

async function wordsWithArcs(frame: Frame): Promise<Drawn> {
  const { context, width } = frame;
  const { text, state } = context;
  const heads = byLayer(listedHeads(context));
  const room = Math.floor(width / PITCH);
  const keys = tokensOf(frame, "keys", room);
  if (keys[1] - keys[0] > room) keys[1] = keys[0] + room;
  const query = wordNames(queriesOf(text))[state.query];
  const weights = await meanLine(context, heads, state.query);
  const one = [...heads.values()].flat().length === 1;
  const label = one
    ? String([...heads.values()].flat()[0])
    : `mean of ${[...heads].map(([layer, list]) => `${layerLabel(text.layers[layer])}: ${list.join(" ")}`).join("; ")}`;
  const rows: Row[] = [];
  for (let j = keys[0]; j < keys[1]; j++)
    rows.push([
      "words",
      one || heads.size === 1 ? layerLabel(text.layers[[...heads.keys()][0]]) : "all",
      label,
      "weight",
      ...pair(text, state.query, j),
      weights[j],
    ]);
  const node = s("g", {});
  const [across, height] = text.queries
    ? crossWords(frame, node, keys, weights)
    : selfWords(frame, node, keys, weights);
  const left = 1 - weights.slice(...keys).reduce((total, value) => total + value, 0);
  const outside =
    left > 0.005 && (keys[0] > 0 || keys[1] < text.tokens.length)
      ? ` Tokens ${keys[0]} to ${keys[1] - 1} of ${text.tokens.length}; ${Math.round(left * 100)} % of the weight is outside.`
      : "";
  return {
    node,
    width: across,
    height,
    title: `What “${query}” attends to`,
    rows,
    keys: 1,
    heads: one ? headName(context, ...listedHeads(context)[0]) : capital(headsInWords(context)),
    said: `What “${query}” attends to; a thicker arc is a larger weight.${outside}`,
  };
}

// The x of the middle of every word, its width, and whether words are turned because a line has no room for them.
function spread(
  tokens: string[],
  width: number,
): { at: number[]; wide: number[]; turned: boolean } {
  const size = tokens.map((token) => widthOf(shortToken(token), NORMAL, true) + 5);
  const total = size.reduce((a, b) => a + b, 0);
  const turned = total > width;
  const pitch = Math.min(width / tokens.length, 16);
  let x = 0;
  const at = size.map((each) => {
    const step = turned ? pitch : each;
    x += step;
    return x - step / 2;
  });
  return { at, wide: turned ? size.map(() => pitch) : size, turned };
}

// The arcs of the chosen word, the strongest last: the places of their words, and the share of the widest arc.
function arcShares(frame: Frame, weights: Float32Array, [first, last]: [number, number]) {
  const shown = weights.subarray(first, last);
  const widest = widestOf(weights.length, ...shown);
  return strongest(shown, ARCS)
    .map((at) => ({ at, share: shown[at] / widest, weight: shown[at] }))
    .filter(({ share }) => share >= LEAST)
    .map((arc) => ({
      ...arc,
      color: frame.colors.line(arc.weight),
    }))
    .reverse();
}

function selfWords(
  frame: Frame,
  node: SVGGElement,
  [first, last]: [number, number],
  weights: Float32Array,
) {
  const { text, state } = frame.context;
  const tokens = text.tokens.slice(first, last);
  const { at, wide, turned } = spread(tokens, frame.width);
  const tall = turned ? widest(tokens, NORMAL) + 6 : 13;
  const here = state.query - first;
  const arcs =
    at[here] === undefined
      ? []
      : arcShares(frame, weights, [first, last]).filter((arc) => arc.at !== here);
  const rise = (j: number) => 0.75 * heightOf(Math.abs(at[j] - at[here]));
  const top = Math.max(0, ...arcs.map((arc) => rise(arc.at))) + 10;
  const sheet = { width: frame.width, height: top + tall };
  for (const arc of arcs)
    node.append(
      arcOf(arc, spot(at[here], top, tall), spot(at[arc.at], top, tall), sheet, {
        widest: THICKEST,
      }),
    );
  const most = arcs.at(-1);
  if (most) {
    const [x, y] = [(at[here] + at[most.at]) / 2, top - rise(most.at) - 4];
    const said = arcWeight(most.weight);
    const wide = widthOf(said, SMALL) + 3;
    node.append(
      s("rect", { ...box([x - wide / 2, y - 4, wide, 8]), fill: "#ffffff" }),
      write(said, x, y, { anchor: "middle" }),
    );
  }
  tokens.forEach((token, j) => {
    wordBox(
      frame,
      node,
      token,
      [at[j], top, wide[j], tall],
      weights[first + j],
      turned,
      j === here,
    );
  });
  return [at.at(-1)! + wide.at(-1)! / 2, top + tall];
}

function wordBox(
  frame: Frame,
  node: SVGGElement,
  token: string,
  [x, y, wide, tall]: number[],
  weight: number | null,
  turned: boolean,
  chosen: boolean,
) {
  node.append(
    s("rect", {
      class: "cell",
      ...box([x - wide / 2 + 0.3, y, wide - 0.6, tall]),
      fill: weight === null ? "none" : frame.colors.weight(weight),
      stroke: chosen ? INK : "none",
      "stroke-width": 1,
    }),
  );
  const look = { size: NORMAL, bold: chosen, fill: frame.colors.textOn(weight ?? 0), token: true };
  node.append(
    turned
      ? write(shortToken(token), x, y + 3, { ...look, turned, anchor: "end" })
      : write(shortToken(token), x, y + tall / 2, { ...look, anchor: "middle" }),
  );
}

// Two texts: the queries above, the keys below, and a line for every weight.
function crossWords(
  frame: Frame,
  node: SVGGElement,
  [first, last]: [number, number],
  weights: Float32Array,
) {
  const { text, state } = frame.context;
  const room = Math.floor(frame.width / PITCH);
  const above = interval(state.query, room, queriesOf(text).length);
  const [own, keys] = [queriesOf(text).slice(...above), text.tokens.slice(first, last)];
  const [top, low] = [spread(own, frame.width), spread(keys, frame.width)];
  const tall = (tokens: string[], turned: boolean) => (turned ? widest(tokens, NORMAL) + 6 : 13);
  const [upper, lower] = [tall(own, top.turned), tall(keys, low.turned)];
  const [start, end] = [upper, upper + 40];
  const sheet = { width: frame.width, height: end + lower };
  for (const arc of arcShares(frame, weights, [first, last]))
    node.append(
      arcOf(
        arc,
        spot(top.at[state.query - above[0]], 0, start),
        spot(low.at[arc.at], end, lower),
        sheet,
        { widest: THICKEST, apart: true },
      ),
    );
  own.forEach((token, i) => {
    wordBox(
      frame,
      node,
      token,
      [top.at[i], 0, top.wide[i], upper],
      null,
      top.turned,
      i === state.query - above[0],
    );
  });
  keys.forEach((token, j) => {
    wordBox(
      frame,
      node,
      token,
      [low.at[j], end, low.wide[j], lower],
      weights[first + j],
      low.turned,
      false,
    );
  });
  const ends = [top, low].map(({ at, wide }) => at.at(-1)! + wide.at(-1)! / 2);
  return [Math.max(...ends), end + lower];
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

// All heads, in the order of the overview

async function heads(frame: Frame): Promise<Drawn> {
  const { context, width } = frame;
  const { text, state, source } = context;
  const order = headOrder(context);
  const grouped = state.sort === "layer";
  const name =
    Math.max(
      ...order.map(({ layer, head }) => widthOf(shortName(text.layers[layer], head), SMALL)),
    ) + 3;
  const columns = grouped
    ? mostHeads(text)
    : Math.min(12, order.length, Math.max(1, Math.floor(width / name)));
  const count = grouped ? text.layers.length : Math.ceil(order.length / columns);
  const left = grouped
    ? 12 + Math.max(...text.layers.map((_, at) => widthOf(layerLabel(text.layers[at]), SMALL)))
    : 0;
  const nameHeight = grouped ? 0 : 9;
  const pitch = Math.min(44, (width - left) / columns, (frame.tallest - 12) / count - nameHeight);
  const node = s("g", {});
  const rows: Row[] = [];
  const [I, J] = sizeOf(text);
  const exact = Math.max(I, J) <= EXACT && order.length <= MOST && !source.finest(state.text);
  const top = grouped ? 10 : 0;
  const tiles = await Promise.all(
    order.map(({ layer, head }) =>
      exact
        ? source.tile({ text: state.text, layer, head }, 0, 0, 0, "mean")
        : Float32Array.from(bytes(text.layers[layer].heads[head].thumbnail), weightOf),
    ),
  );
  const [cells, frames] = [new Map<string, string[]>(), [] as SVGElement[]];
  const isVector = tiles.reduce((total, tile) => total + tile.length, 0) <= VECTORS;
  for (const [n, { layer, head }] of order.entries()) {
    const [row, col] = grouped ? [layer, head] : [Math.floor(n / columns), n % columns];
    const [x, y, size] = [left + col * pitch, top + row * (pitch + nameHeight), pitch * 0.92];
    const [tall, wide] = exact ? [I, J] : text.layers[layer].small;
    const at = [x, y, size, size];
    if (isVector) cellsByColor(frame, tiles[n], tall, wide, at, cells);
    else node.append(cellImage(tiles[n], tall, wide, at, (value) => frame.colors.weight(value)));
    frames.push(
      s("rect", { class: "head", ...box(at), fill: "none", stroke: LINE, "stroke-width": 0.4 }),
    );
    if (!grouped)
      node.append(
        write(shortName(text.layers[layer], head), x + size / 2, y + size + 5, {
          anchor: "middle",
        }),
      );
    rows.push(...smallRows(context, { layer, head }, tiles[n], [tall, wide]));
  }
  node.append(
    ...[...cells].map(([fill, path]) =>
      s("path", { class: "cells", d: path.join(""), fill, "shape-rendering": "crispEdges" }),
    ),
    ...frames,
  );
  if (grouped) headNumbers(context, node, [left, top, pitch, pitch], 0.46);
  const by = state.color in text.layers[0].heads[0].values ? `, by ${state.color}` : "";
  const sorted = `${by}, ${state.sort === "down" ? "highest" : "lowest"} first`;
  return {
    node,
    width: left + columns * pitch,
    height: top + count * (pitch + nameHeight),
    title: "All heads",
    heads: "",
    rows,
    keys: exact ? 1 : Math.ceil(J / text.layers[0].small[1]),
    said: `Each picture is one head${grouped ? ", a row per layer" : sorted}.`,
  };
}

// Numbers above the columns of heads, and names beside the rows of layers: every n-th if there is no room.
function headNumbers(
  { text }: Context,
  node: SVGGElement,
  [x, y, wide, tall]: number[],
  middle: number,
) {
  const every = (size: number) => Math.max(1, Math.ceil(10 / size));
  for (let head = 0; head < mostHeads(text); head += every(wide))
    node.append(write(String(head), x + (head + middle) * wide, 4, { anchor: "middle" }));
  for (let layer = 0; layer < text.layers.length; layer += every(tall))
    node.append(
      write(layerLabel(text.layers[layer]), x - 3, y + (layer + middle) * tall, { anchor: "end" }),
    );
}

function smallRows(
  context: Context,
  { layer, head }: { layer: number; head: number },
  values: Float32Array,
  [rows, cols]: number[],
): Row[] {
  const { text } = context;
  const sides = [
    [queriesOf(text), rows],
    [text.tokens, cols],
  ] as const;
  const whole = sides.every(([tokens, count]) => tokens.length === count);
  const part = (tokens: string[], count: number, at: number) => {
    const [first, next] = [at, at + 1].map((each) => Math.ceil((each * tokens.length) / count));
    return tokensInRow(tokens, first, next - 1);
  };
  return Array.from(values, (value, at) => [
    "heads",
    layerLabel(text.layers[layer]),
    head,
    whole ? "weight" : "weight of a cell",
    ...part(queriesOf(text), rows, Math.floor(at / cols)),
    ...part(text.tokens, cols, at % cols),
    value,
  ]);
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
        ...pair(
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

// The legend of one panel, and the size of the panel with it.
function legendBelow(node: SVGGElement, legend: SVGSVGElement, [x, y]: number[]) {
  const key = legendInPoints(legend, SMALL);
  key.node.setAttribute("transform", `translate(${round(x)},${round(y)})`);
  node.append(key.node);
  return { width: x + key.width, height: y + key.height };
}

// A statistic of every head

async function statistics(frame: Frame): Promise<Drawn> {
  const { context, width } = frame;
  const { text, state, source } = context;
  const names = statisticsOf(text);
  const name = names.includes(state.color) ? state.color : names[0];
  const columns = mostHeads(text);
  const left =
    22 + Math.max(...text.layers.map((_, at) => widthOf(layerLabel(text.layers[at]), SMALL)));
  const cell = Math.min(32, (width - left) / columns);
  const tall = Math.min(14, (frame.tallest - 60) / text.layers.length);
  const values = text.layers.map((layer) => layer.heads.map((head) => head.values[name]));
  const [least, most] = rangeOf(values.flat());
  const share = (value: number) => Math.max((value - least) / (most - least || 1), 0.004);
  const node = s("g", {});
  const rows: Row[] = [];
  values.forEach((list, layer) => {
    list.forEach((value, head) => {
      const [x, y] = [left + head * cell, 10 + layer * tall];
      node.append(
        s("rect", {
          class: "cell",
          ...box([x, y, cell - 0.6, tall - 0.6]),
          fill: frame.colors.of(share(value)),
        }),
      );
      if (cell >= 17 && tall >= 8.5)
        node.append(
          write(statisticInCell(value), x + cell / 2, y + tall / 2, {
            anchor: "middle",
            fill: frame.colors.on(share(value)),
          }),
        );
      rows.push(["statistics", layerLabel(text.layers[layer]), head, name, "", "", "", "", value]);
    });
  });
  headNumbers(context, node, [left, 10, cell, tall], 0.5);
  const bottom = 10 + values.length * tall;
  node.append(
    write("layer", 4, (10 + bottom) / 2, { turned: true, anchor: "middle", fill: SOFT }),
    write("head", left + (columns * cell) / 2, bottom + 6, { anchor: "middle", fill: SOFT }),
  );
  const key = legendBelow(node, rangeLegend(frame.colors, least, most, name), [
    left - 8,
    bottom + 14,
  ]);
  const title = `${capital(name)} of every head`;
  const meaning = source.common.statistics[name];
  return {
    node,
    width: Math.max(left + columns * cell, key.width),
    height: key.height,
    title,
    heads: "",
    said: `${title}${meaning ? `: ${meaning}` : ""}.`,
    rows,
    keys: 0,
  };
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
  heads,
  compare,
  alignment,
  statistics,
};
