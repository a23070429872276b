// What the panels of a figure share: its sizes in points, its words, its cells and its colors. Dark is more, on white.
import { pictureOf, type Colors } from "./color";
import { interval, type Context } from "./context";
import { queriesOf } from "./data";
import { cut, s, visible } from "./dom";
import { legendInPoints } from "./legend";
import { cutName } from "./word_names";
import type { Row } from "./output";

export const [SMALL, NORMAL] = [7, 8]; // the sizes of letters in points
export const FONT = "Helvetica, Arial, 'Liberation Sans', 'Noto Sans', sans-serif";
export const [INK, SOFT, LINE, GOLD] = ["#111418", "#4a5158", "#c9c9c4", "#c27800"];
export const TALLEST = 640; // points: no panel is taller than a page
const [RECTS, LETTERS] = [4096, 14]; // more cells are one picture; the longest label

export interface Frame {
  context: Context;
  width: number; // in points
  colors: Colors; // with the scale of weights
  span: [number, number] | null; // the tokens that were asked for
  tallest: number; // points of a panel
}
// `heads` names the heads that a panel is about; "": all.
export interface Drawn {
  node: SVGGElement;
  width: number;
  height: number;
  title: string;
  heads: string;
  said: string;
  rows: Row[];
  keys: number; // that a cell sums over, for the legend of weights; 0: there are no weights
}

let pen: CanvasRenderingContext2D | null = null;
export function widthOf(text: string, size = NORMAL, bold = false): number {
  pen ??= document.createElement("canvas").getContext("2d")!;
  pen.font = `${bold ? "bold " : ""}${size * 10}px ${FONT}`;
  return pen.measureText(text).width / 10;
}

export const shortToken = (token: string) => cutName(visible(token), LETTERS);
const unnumbered = (name: string) => cut(shortToken(name.replace(/ \(\d+\)$/, "")), 9); // beside a position
export const widest = (tokens: string[], size = SMALL) =>
  tokens.reduce((most, token) => Math.max(most, widthOf(shortToken(token), size)), 0);

interface Look {
  size?: number;
  anchor?: string;
  bold?: boolean;
  fill?: string;
  turned?: boolean;
  token?: boolean;
}
export function write(
  text: string,
  x: number,
  y: number,
  {
    size = SMALL,
    anchor = "start",
    bold = false,
    fill = INK,
    turned = false,
    token = false,
  }: Look = {},
) {
  return s(
    "text",
    {
      ...(turned
        ? { transform: `translate(${round(x)},${round(y)}) rotate(-90)` }
        : { x: round(x), y: round(y) }),
      "font-size": size,
      "text-anchor": anchor,
      dy: "0.35em",
      fill,
      "font-weight": bold ? 700 : null,
      direction: "ltr",
      class: token ? "token" : null,
    },
    text,
  );
}
export const round = (value: number) => Math.round(value * 100) / 100;
// The place and the size of a rectangle.
export const box = ([x, y, width, height]: number[]) => ({
  x: round(x),
  y: round(y),
  width: round(width),
  height: round(height),
});

// A matrix of cells, rectangles if they are few, and a picture with sharp cells if they are many.
export function weightCells(
  frame: Frame,
  values: ArrayLike<number>,
  rows: number,
  cols: number,
  [x, y, cell, tall]: number[],
  color = (value: number) => frame.colors.weight(value),
): SVGGElement {
  const group = s("g", { class: "cells" });
  if (rows * cols <= RECTS) {
    for (let i = 0; i < rows; i++)
      for (let j = 0; j < cols; j++)
        group.append(
          s("rect", {
            ...box([x + j * cell, y + i * tall, cell, tall]),
            fill: color(values[i * cols + j]),
          }),
        );
  } else group.append(cellImage(values, rows, cols, [x, y, cols * cell, rows * tall], color));
  group.append(
    s("rect", {
      ...box([x, y, cols * cell, rows * tall]),
      fill: "none",
      stroke: LINE,
      "stroke-width": 0.5,
    }),
  );
  return group;
}

// Cells as vectors: a path for each color, to which every matrix of a panel adds its cells.
export function cellsByColor(
  frame: Frame,
  values: ArrayLike<number>,
  rows: number,
  cols: number,
  [x, y, width, height]: number[],
  paths: Map<string, string[]>,
) {
  const [wide, tall] = [width / cols, height / rows];
  for (let at = 0; at < rows * cols; at++) {
    const color = frame.colors.weight(values[at]);
    const path = paths.get(color) ?? [];
    if (!path.length) paths.set(color, path);
    path.push(
      `M${round(x + (at % cols) * wide)},${round(y + Math.floor(at / cols) * tall)}h${round(wide)}v${round(tall)}h${-round(wide)}z`,
    );
  }
}

// Cells as an image. Each cell is several pixels, so that no program blurs them.
export function cellImage(
  values: ArrayLike<number>,
  rows: number,
  cols: number,
  [x, y, width, height]: number[],
  color: (value: number) => string,
): SVGImageElement {
  const small = pictureOf(values, rows, cols, color);
  const times = Math.max(1, Math.ceil(((width / 72) * 300) / cols));
  const large = document.createElement("canvas");
  [large.width, large.height] = [cols * times, rows * times];
  const brush = large.getContext("2d")!;
  brush.imageSmoothingEnabled = false;
  brush.drawImage(small, 0, 0, large.width, large.height);
  return s("image", {
    ...box([x, y, width, height]),
    preserveAspectRatio: "none",
    href: large.toDataURL(),
  });
}

// Every n-th cell of a size has room for a label.
const labelStep = (size: number) => Math.max(1, 2 ** Math.ceil(Math.log2((SMALL + 0.8) / size)));
// Tokens beside the rows of cells (`down`) or below their columns. Every n-th, with its number, if there is no room.
export function tokensAlong(
  tokens: string[],
  first: number,
  step: number,
  size: number,
  down: boolean,
  [x, y]: number[],
): SVGGElement {
  const group = s("g", {});
  const every = labelStep(size);
  for (let at = 0; at * step < tokens.length; at += every) {
    const name = tokens[at * step];
    const said = every * step > 1 ? `${unnumbered(name)} ${first + at * step}` : shortToken(name);
    const middle = (at + 0.5) * size;
    group.append(
      down
        ? write(said, x - 3, y + middle, { anchor: "end", token: true })
        : write(said, x + middle, y + 3, { anchor: "end", turned: true, token: true }),
    );
  }
  return group;
}
export const gutter = (tokens: string[], first: number, step: number, size: number) => {
  const every = labelStep(size);
  const shown = tokens.filter((_, at) => at % (step * every) === 0);
  return every * step > 1
    ? shown.reduce(
        (most, token, at) =>
          Math.max(most, widthOf(`${unnumbered(token)} ${first + at * step * every}`, SMALL)),
        0,
      ) + 4
    : widest(shown) + 4;
};

// The text in lines that are at most `room` points wide.
export function linesOfText(text: string, room: number, size = NORMAL): string[] {
  const out: string[] = [];
  let line = "";
  for (const word of text.split(/\s+/u).flatMap((each) => broken(each, room, size))) {
    const longer = line ? `${line} ${word}` : word;
    if (line && widthOf(longer, size) > room) {
      out.push(line);
      line = word;
    } else line = longer;
  }
  return line ? [...out, line] : out;
}
// A word that is wider than a line, as in Chinese, in parts.
function broken(word: string, room: number, size: number): string[] {
  if (widthOf(word, size) <= room) return [word];
  const parts = [""];
  for (const letter of word) {
    if (widthOf(parts.at(-1)! + letter, size) > room) parts.push("");
    parts[parts.length - 1] += letter;
  }
  return parts;
}

export const pairOf = (text: Context["text"], i: number, j: number) => [
  i,
  queriesOf(text)[i],
  j,
  text.tokens[j],
];

// The tokens of a side: those that were asked for, or those around the chosen one.
export const tokensOf = (
  frame: Frame,
  side: "queries" | "keys",
  most: number,
): [number, number] => {
  const { text, state } = frame.context;
  const all = side === "keys" ? text.tokens.length : queriesOf(text).length;
  if (frame.span && (side === "queries" || !text.queries))
    return [frame.span[0], Math.min(frame.span[1], all)];
  return interval(side === "keys" && text.queries ? 0 : state.query, most, all);
};

// The place and the name of a token, or of the first and the last one of a cell.
export const tokensInRow = (tokens: string[], first: number, last: number) =>
  first === last
    ? [first, tokens[first]]
    : [`${first}-${last}`, `${tokens[first]} … ${tokens[last]}`];

export const capital = (text: string) => text[0].toUpperCase() + text.slice(1);

// The legend of one panel, and the size of the panel with it.
export function legendBelow(node: SVGGElement, legend: SVGSVGElement, [x, y]: number[]) {
  const key = legendInPoints(legend, SMALL);
  key.node.setAttribute("transform", `translate(${round(x)},${round(y)})`);
  node.append(key.node);
  return { width: x + key.width, height: y + key.height };
}
