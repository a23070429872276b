// Arcs between words. An arc stays inside of its drawing: a Bezier curve lies within the hull of its four points.
import { s } from "./dom";

export interface Arc {
  from: HTMLElement;
  to: HTMLElement;
  share: number;
  color: string;
  title?: string;
  dashes?: string;
  lift?: number;
} // pixels above the arcs of others
interface Spot {
  x: number;
  top: number;
  tall: number;
  hidden: boolean;
  above: number;
} // pixels free above its line
export const [LEAST, ARCS] = [0.03, 5]; // the least share drawn; the links of a word that are drawn
const [HIGHEST, WIDEST] = [46, 4]; // pixels above a line, pixels of a line

// A word on paper.
export const spot = (x: number, top: number, tall: number): Spot => ({
  x,
  top,
  tall,
  hidden: false,
  above: Infinity,
});

// Where a word is in the drawing; a word that is scrolled away is at the edge of its box.
function spotOf(word: HTMLElement, origin: DOMRect): Spot {
  const bounds = word.getClientRects()[0] ?? word.getBoundingClientRect();
  const box = word.parentElement!.getBoundingClientRect();
  const hidden = bounds.bottom < box.top + 2 || bounds.top > box.bottom - 2;
  const top = hidden ? (bounds.top > box.bottom - 2 ? box.bottom - 6 : box.top) : bounds.top;
  const line = parseFloat(getComputedStyle(word.parentElement!).lineHeight);
  const isFirst = bounds.top - box.top + word.parentElement!.scrollTop < line * 0.75;
  return {
    x: bounds.left + bounds.width / 2 - origin.left,
    top: top - origin.top,
    tall: hidden ? 6 : bounds.height,
    hidden,
    above: isFirst ? HIGHEST : line - bounds.height,
  };
}

// Above a line if both words stand in it; else from the lower side of the upper word to the upper side of the lower one.
function pathOf(
  from: Spot,
  to: Spot,
  apart: boolean,
  size: { width: number; height: number },
  line: number,
  lift: number,
): string {
  const between = (value: number, last: number) => Math.max(line, Math.min(last - line, value));
  const point = (x: number, y: number) =>
    `${between(x, size.width).toFixed(1)},${between(y, size.height).toFixed(1)}`;
  if (apart || Math.abs(from.top - to.top) > Math.min(from.tall, to.tall) / 2) {
    const [upper, lower] = from.top < to.top ? [from, to] : [to, from];
    const middle = (upper.top + upper.tall + lower.top) / 2;
    return `M${point(upper.x, upper.top + upper.tall)} C${point(upper.x, middle)} ${point(lower.x, middle)} ${point(lower.x, lower.top)}`;
  }
  const room = Math.min(from.above, to.above);
  const wanted = heightOf(Math.abs(to.x - from.x)) + lift;
  // Between two lines the curve takes two thirds of the room, and does not touch the word above, which is not its end.
  const peak =
    Math.min(from.top, to.top) - (room < HIGHEST ? Math.min(0.87 * room, wanted) : wanted);
  return `M${point(from.x, from.top + 4)} C${point(from.x, peak)} ${point(to.x, peak)} ${point(to.x, to.top + 4)}`;
}

export const isDrawn = ({ from, to, share }: Arc) => from !== to && share >= LEAST;
// The weight of the widest arc: the largest one, but in a long text at most ten times that of equal weights.
export const widestOf = (size: number, ...most: number[]) =>
  Math.max(Math.min(1, 10 / size), ...most);
// How high an arc over a distance is above its words.
export const heightOf = (distance: number) => Math.min(HIGHEST, 14 + distance * 0.12);

// Draws arcs from word to word. Words of different boxes are joined by a line between the boxes.
export function drawArcs(figure: SVGSVGElement, arcs: Arc[]) {
  const size = figure.getBoundingClientRect();
  figure.replaceChildren(
    ...arcs.flatMap((arc) => {
      const { from, to } = arc;
      if (!isDrawn(arc)) return [];
      const [start, end] = [spotOf(from, size), spotOf(to, size)];
      if (start.hidden && end.hidden) return [];
      return [arcOf(arc, start, end, size, { apart: from.parentElement !== to.parentElement })];
    }),
  );
}

// One arc in a drawing of a size; `widest` are the pixels of a weight of 1, and `apart` that its ends are in other boxes.
export function arcOf(
  { share, color, title, dashes, lift = 0 }: Omit<Arc, "from" | "to">,
  start: Spot,
  end: Spot,
  size: { width: number; height: number },
  { widest = WIDEST, apart = false } = {},
): SVGPathElement {
  const line = (widest / WIDEST) * (1 + (WIDEST - 1) * Math.min(share, 1));
  return s(
    "path",
    {
      class: "arc",
      d: pathOf(start, end, apart, size, line, lift),
      fill: "none",
      stroke: color,
      "stroke-width": line.toFixed(2),
      opacity: start.hidden || end.hidden ? 0.4 : null,
      "stroke-linecap": "round",
      "stroke-dasharray": dashes,
    },
    title ? s("title", {}, title) : null,
  );
}
