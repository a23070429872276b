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
const [HIGHEST, LEAST, WIDEST] = [46, 0.03, 4]; // pixels above a line, the least share drawn, pixels of a line

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
  const peak =
    Math.min(from.top, to.top) -
    Math.min(room < HIGHEST ? room / 0.8 : HIGHEST, 14 + Math.abs(to.x - from.x) * 0.12) -
    lift;
  return `M${point(from.x, from.top + 4)} C${point(from.x, peak)} ${point(to.x, peak)} ${point(to.x, to.top + 4)}`;
}

export const isDrawn = ({ from, to, share }: Arc) => from !== to && share >= LEAST;

// Draws arcs from word to word. Words of different boxes are joined by a line between the boxes.
export function drawArcs(figure: SVGSVGElement, arcs: Arc[]) {
  const size = figure.getBoundingClientRect();
  figure.replaceChildren(
    ...arcs.flatMap((arc) => {
      const { from, to } = arc;
      if (!isDrawn(arc)) return [];
      const [start, end] = [spotOf(from, size), spotOf(to, size)];
      if (start.hidden && end.hidden) return [];
      return [arcOf(arc, start, end, size, WIDEST)];
    }),
  );
}

// One arc in a drawing of a size; `widest` are the pixels of a weight of 1.
export function arcOf(
  { from, to, share, color, title, dashes, lift = 0 }: Arc,
  start: Spot,
  end: Spot,
  size: { width: number; height: number },
  widest: number,
): SVGPathElement {
  const line = 1 + (widest - 1) * Math.min(share, 1);
  return s(
    "path",
    {
      d: pathOf(start, end, from.parentElement !== to.parentElement, size, line, lift),
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
