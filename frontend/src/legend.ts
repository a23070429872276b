// The legend of every view: colors from the least to the greatest value, with numbers below them.
import type { Colors, Scale } from "./color";
import { s } from "./dom";
import { counted, shown, tick } from "./format";

const [WIDE, PARTS, TALL, ZERO] = [240, 60, 10, 34]; // pixels of the colors, their rectangles, pixels for the cell of exactly 0

interface Legend {
  said: string; // for screen readers
  color(share: number): string; // from 0 to 1
  ticks: [number, string][]; // places from 0 to 1, with their numbers
  side?: number; // pixels beside the colors, and above them
  above?: number;
}
const LETTERS = 11; // pixels

const word = (x: number, y: number, anchor: string, said: string) =>
  s("text", { x, y, "font-size": LETTERS, "text-anchor": anchor, fill: "currentColor" }, said);

export function legendOf({ said, color, ticks, side = 20, above = 0 }: Legend): SVGSVGElement {
  const left = Math.max(side, ...ticks.map(([, label]) => 3.6 * label.length)); // half of the longest number
  const [width, height] = [WIDE + 2 * left, above + 29];
  return s(
    "svg",
    {
      class: "legend",
      width,
      height,
      viewBox: `${-left} ${-above} ${width} ${height}`,
      role: "img",
      "aria-label": said,
    },
    ...Array.from({ length: PARTS }, (_, at) =>
      s("rect", {
        class: "ramp",
        x: (at * WIDE) / PARTS,
        width: WIDE / PARTS + (at < PARTS - 1 ? 0.5 : 0),
        height: TALL,
        fill: color((at + 0.5) / PARTS),
      }),
    ),
    ...ticks.flatMap(([place, label]) => {
      const x = place * WIDE;
      return [
        s("line", { class: "tick", x1: x, x2: x, y1: TALL, y2: 14, stroke: "currentColor" }),
        word(x, 25, "middle", label),
      ];
    }),
  );
}

// 1/14, or 0.107 if a cell sums over several keys.
const partOf = (uniform: number): string => {
  const parts = 1 / uniform;
  return Math.abs(parts - Math.round(parts)) < 1e-6
    ? `1/${counted(Math.round(parts))}`
    : shown(uniform);
};
const brief = (value: number) => String(Number(shown(value))); // 1 and not 1.000

const INK = "#111418";
// The legend on paper, with letters of a size in points.
export function legendInPoints(legend: SVGSVGElement, letters: number) {
  const times = letters / LETTERS;
  const [x, y, width, height] = legend.getAttribute("viewBox")!.split(" ").map(Number);
  for (const text of legend.querySelectorAll("text")) {
    text.setAttribute("font-size", String(letters));
    for (const way of ["x", "y"])
      text.setAttribute(way, String(times * Number(text.getAttribute(way))));
  }
  const shapes = [...legend.children].filter((one) => one.tagName !== "text");
  const node = s(
    "g",
    { class: "legend", color: INK, transform: `translate(${-x * times},${-y * times})` },
    s("g", { transform: `scale(${times})` }, ...shapes),
    ...legend.querySelectorAll("text"),
  );
  return { node: s("g", {}, node), width: width * times, height: height * times };
}

// The colors of weights: a cell for exactly 0, the ramp, and where the weight of a uniform row is, if it has one (not 0).
export function weightLegend(colors: Colors, { ticks, place, uniform }: Scale): SVGSVGElement {
  const equal = uniform ? `equal weights: ${partOf(uniform)} each` : "";
  const every = Math.ceil(ticks.length / 5);
  const figure = legendOf({
    said: `Colors of a weight from 0 to 1${equal && `; ${equal}`}`,
    color: (share) => colors.of(share),
    ticks: ticks
      .filter((_, at) => (ticks.length - 1 - at) % every === 0)
      .map((value) => [place(value), tick(value)]),
    side: ZERO,
    above: 20,
  });
  const x = place(uniform) * WIDE;
  const mark = s("path", {
    class: "uniform",
    d: `M${x - 4},-6L${x + 4},-6L${x},0Z`,
    fill: "currentColor",
  });
  const [at, anchor] = x < 60 ? [x - 5, "start"] : x > WIDE - 60 ? [x + 5, "end"] : [x, "middle"];
  figure.prepend(
    s("rect", {
      class: "zero",
      x: 4 - ZERO,
      width: 13,
      height: TALL,
      fill: colors.css[0],
      stroke: "currentColor",
      "stroke-opacity": 0.25,
    }),
    word(10.5 - ZERO, 25, "middle", "0"),
  );
  if (equal) figure.append(mark, word(at, -9, anchor, equal));
  return figure;
}

// The colors of a difference, from -most to most.
export function differenceLegend(colors: Colors, most: number): SVGSVGElement {
  const color = colors.difference(most);
  return legendOf({
    said: "Colors of the difference",
    color: (share) => color(most * (2 * share - 1)),
    ticks: [-1, -0.5, 0, 0.5, 1].map((part) => [
      (part + 1) / 2,
      `${part > 0 ? "+" : ""}${tick(part * most)}`,
    ]),
  });
}

// The colors of a statistic that is not a weight: from its lowest value to its highest.
export function rangeLegend(
  colors: Colors,
  low: number,
  high: number,
  name: string,
): SVGSVGElement {
  const figure = legendOf({
    said: `Colors of ${name} from ${shown(low)} to ${shown(high)}`,
    color: (share) => colors.of(share),
    ticks: [
      [0, brief(low)],
      [1, brief(high)],
    ],
    above: 18,
  });
  figure.append(word(0, -6, "start", name));
  return figure;
}
