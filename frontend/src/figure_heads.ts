// Panels of a figure: all heads, and a statistic of all heads.
import type { Context } from "./context";
import {
  bytes,
  layerLabel,
  mostHeads,
  queriesOf,
  shortName,
  sizeOf,
  statisticsOf,
  weightOf,
} from "./data";
import { s } from "./dom";
import {
  box,
  cellImage,
  cellsByColor,
  SMALL,
  widthOf,
  write,
  LINE,
  SOFT,
  type Drawn,
  type Frame,
  tokensInRow,
  capital,
  legendBelow,
} from "./figure_frame";
import { rangeOf, statisticInCell } from "./format";
import { headOrder } from "./head_order";
import { rangeLegend } from "./legend";
import type { Row } from "./output";

const [EXACT, MOST, VECTORS] = [48, 256, 24_000]; // tokens with a cell each, and heads; cells, of more they are pictures

// All heads, in the order of the overview

export async function headsPanel(frame: Frame): Promise<Drawn> {
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

// A statistic of every head

export async function statisticsPanel(frame: Frame): Promise<Drawn> {
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
