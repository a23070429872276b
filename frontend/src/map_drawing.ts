import type { Context } from "./context";
import { queriesOf } from "./data";
import { cut, s, visible } from "./dom";
import { inCell } from "./format";
import { LABEL, type MapFrame } from "./map_frame";
import type { MapTiles } from "./map_tiles";
import { TILE } from "./source";
import { cutName, wordNames } from "./word_names";

const NUMBERED = 24; // pixels per weight for a number in the cell
type Pair = [number, number];

// Draws all that is seen of a level, and asks for tiles that are missing.
export function paintMap(
  context: Context,
  frame: MapFrame,
  tiles: MapTiles,
  canvas: HTMLCanvasElement,
  pointed: Pair | null,
) {
  const { colors } = context;
  const [[I, J], { width, height }, level] = [frame.counts(), frame.plot(), frame.levelOf()];
  const ratio = window.devicePixelRatio || 1;
  const pen = canvas.getContext("2d")!;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, frame.width, frame.height);
  pen.save();
  pen.beginPath();
  pen.rect(frame.left, 0, width, height);
  pen.clip();
  pen.fillStyle = colors.get("--none");
  pen.fillRect(frame.toX(0), frame.toY(0), J * frame.transform.k, I * frame.transform.k);
  paintTiles(frame, tiles, pen, level);
  paintCross(context, frame, pen, pointed);
  if (level === 0 && frame.transform.k >= NUMBERED) paintNumbers(context, frame, tiles, pen);
  pen.restore();
  pen.strokeStyle = colors.get("--line");
  // Around what is seen of the map: a short text is narrower than the window.
  const [x, y] = [Math.max(frame.left, frame.toX(0)), Math.max(0, frame.toY(0))];
  const [right, bottom] = [Math.min(frame.width, frame.toX(J)), Math.min(height, frame.toY(I))];
  pen.strokeRect(x - 0.5, y + 0.5, right - x, bottom - y);
}

function paintTiles(
  frame: MapFrame,
  tiles: MapTiles,
  pen: CanvasRenderingContext2D,
  level: number,
) {
  const [top, bottom, left, right] = frame.seenTiles(level);
  const wanted = new Set<string>();
  for (let row = top; row <= bottom; row++)
    for (let col = left; col <= right; col++) {
      wanted.add(tiles.nameOf(level, row, col));
      paintTile(frame, tiles, pen, level, row, col);
    }
  tiles.only(wanted);
}

// A tile, or a part of a coarser tile that is there until it arrives.
function paintTile(
  frame: MapFrame,
  tiles: MapTiles,
  pen: CanvasRenderingContext2D,
  level: number,
  row: number,
  col: number,
) {
  const tile = tiles.at(level, row, col, true);
  const step = TILE * 2 ** level;
  for (let up = level, r = row, c = col; up < level + 8; up++, r >>= 1, c >>= 1) {
    const found = up === level ? tile : tiles.at(up, r, c, false);
    if (!found) continue;
    const cell = 2 ** up;
    const [x, y] = [(col * step - c * TILE * cell) / cell, (row * step - r * TILE * cell) / cell];
    const [w, t] = [Math.min(step / cell, found.cols - x), Math.min(step / cell, found.rows - y)];
    pen.imageSmoothingEnabled = false;
    if (w > 0 && t > 0)
      pen.drawImage(
        tiles.pictureOf(found),
        x,
        y,
        w,
        t,
        frame.toX(col * step),
        frame.toY(row * step),
        w * cell * frame.transform.k,
        t * cell * frame.transform.k,
      );
    return;
  }
}

function paintNumbers(
  { colors }: Context,
  frame: MapFrame,
  tiles: MapTiles,
  pen: CanvasRenderingContext2D,
) {
  const [top, bottom, left, right] = frame.seen();
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.font = `${Math.min(13, frame.transform.k / 2.4)}px system-ui, sans-serif`;
  for (let i = top; i < bottom; i++)
    for (let j = left; j < right; j++) {
      const value = tiles.valueAt(0, i, j);
      if (value === null) continue;
      pen.fillStyle = colors.textOn(value);
      pen.fillText(inCell(value), frame.toX(j + 0.5), frame.toY(i + 0.5));
    }
}

function paintCross(
  { state, colors }: Context,
  frame: MapFrame,
  pen: CanvasRenderingContext2D,
  pointed: Pair | null,
) {
  const [I, J] = frame.counts();
  const k = Math.max(frame.transform.k, 1.5);
  const marks: [Pair, string][] = [[[state.query, state.key], colors.get("--accent")]];
  if (pointed) marks.push([pointed, colors.get("--soft")]);
  for (const [[i, j], color] of marks) {
    // A line of the paper's color around it: visible on every color of the ramp.
    for (const [stroke, wide] of [
      [colors.get("--paper"), 3.5],
      [color, 1.5],
    ] as const) {
      pen.strokeStyle = stroke;
      pen.lineWidth = wide;
      if (i >= 0) pen.strokeRect(frame.toX(0), frame.toY(i), J * frame.transform.k, k);
      if (j >= 0) pen.strokeRect(frame.toX(j), frame.toY(0), k, I * frame.transform.k);
    }
    pen.lineWidth = 1;
  }
}

// Labels of tokens along the sides; only every n-th label if there is no space for all.
export function labelsOf({ state, text }: Context, frame: MapFrame): SVGElement[] {
  const [top, bottom, left, right] = frame.seen();
  const { width, height } = frame.plot();
  const step = 2 ** Math.max(0, Math.ceil(Math.log2(LABEL / frame.transform.k)));
  const nameOf = (tokens: string[], at: number) =>
    step > 1 ? `${cut(visible(tokens[at]), 9)} ${at}` : cutName(wordNames(tokens)[at], 14);
  const label = (said: string, isChosen: boolean, spot: Record<string, string | number>) =>
    s(
      "text",
      {
        ...spot,
        "text-anchor": "end",
        "dominant-baseline": "central",
        class: isChosen ? "chosen" : "",
      },
      said,
    );
  const nodes: SVGElement[] = [];
  for (let i = Math.ceil(top / step) * step; i < bottom; i += step) {
    const y = frame.toY(i + 0.5);
    if (y >= 4 && y <= height - 2)
      nodes.push(label(nameOf(queriesOf(text), i), i === state.query, { x: frame.left - 6, y }));
  }
  for (let j = Math.ceil(left / step) * step; j < right; j += step) {
    const x = frame.toX(j + 0.5);
    if (x >= frame.left + 3 && x <= frame.left + width - 2)
      nodes.push(
        label(nameOf(text.tokens, j), j === state.key, {
          x: 0,
          y: 0,
          transform: `translate(${x},${height + 7}) rotate(-90)`,
        }),
      );
  }
  return [...nodes, ...axisNames(frame)];
}

function axisNames(frame: MapFrame): SVGElement[] {
  const [[I, J], { height }] = [frame.counts(), frame.plot()];
  const middle = (from: number, to: number, least: number, most: number) =>
    (Math.max(from, least) + Math.min(to, most)) / 2;
  const across = middle(frame.toX(0), frame.toX(J), frame.left, frame.width);
  const down = middle(frame.toY(0), frame.toY(I), 0, height);
  const axis = (place: Record<string, number | string>, said: string, term: string) =>
    s(
      "text",
      { ...place, class: "axis-name", "text-anchor": "middle" },
      s("title", {}, term),
      said,
    );
  return [
    axis({ x: across, y: frame.height - 6 }, "is attended to →", "A column is a key."),
    axis(
      { x: 0, y: 0, transform: `translate(14,${down}) rotate(-90)` },
      "← attends",
      "A row is a query.",
    ),
  ];
}
