// The lecture on RoPE: positions rotate pairs of channels, so a score depends on the distance only.
import * as Plot from "@observablehq/plot";
import { SERIES } from "./color";
import type { Context } from "./context";
import { counted, plural, shown } from "./format";
import { decay, dot, normals, rotated } from "./formulas";
import { baseList, dial, figure, withControls, type Lecture, plotOf } from "./lecture_controls";

const chosen = { query: 9, key: 4, shift: 0, pair: 0, width: 16, base: 10000 };
const FAR = 256;
const vector = (seed: number) => normals(chosen.width, seed);
const places = () => [chosen.query + chosen.shift, chosen.key + chosen.shift];
const turned = (seed: number, position: number) => rotated(vector(seed), position, chosen.base);
const score = () => dot(turned(1, places()[0]), turned(2, places()[1])) / Math.sqrt(chosen.width);
const pair = () => Math.min(chosen.pair, chosen.width / 2 - 1);
// Positions after which the chosen pair has turned once.
const period = () => 2 * Math.PI * chosen.base ** ((2 * pair()) / chosen.width);

function plane(context: Context) {
  const [i, j] = places();
  const ends = (x: number[]) => [x[pair()], x[pair() + chosen.width / 2]];
  const unit = ([x, y]: number[]) => [x / Math.hypot(x, y), y / Math.hypot(x, y)];
  const arrows = [
    { name: `query, position ${i}`, at: unit(ends(turned(1, i))), from: unit(ends(vector(1))) },
    { name: `key, position ${j}`, at: unit(ends(turned(2, j))), from: unit(ends(vector(2))) },
  ];
  const arrow = (end: "at" | "from", opacity: number) =>
    Plot.arrow(arrows, {
      x1: 0,
      y1: 0,
      x2: (one) => one[end][0],
      y2: (one) => one[end][1],
      stroke: "name",
      strokeWidth: 2.5,
      strokeOpacity: opacity,
    });
  return plotOf(
    context,
    {
      height: 340,
      x: { domain: [-1.15, 1.15], label: null, ticks: [] },
      y: { domain: [-1.15, 1.15], label: null, ticks: [] },
      color: { domain: arrows.map((one) => one.name), range: SERIES, legend: true },
      marks: [
        Plot.ruleX([0], { strokeOpacity: 0.2 }),
        Plot.ruleY([0], { strokeOpacity: 0.2 }),
        arrow("from", 0.25),
        arrow("at", 1),
      ],
    },
    340,
  );
}

const curve = () =>
  Array.from({ length: FAR + 1 }, (_, distance) => ({
    distance,
    score: decay(distance, chosen.width, chosen.base),
  }));
function byDistance(context: Context) {
  const apart = Math.abs(chosen.query - chosen.key);
  return plotOf(context, {
    height: 260,
    x: { label: "distance" },
    y: { label: "share of the score at distance 0" },
    marks: [
      Plot.ruleY([0]),
      Plot.ruleX([apart], { strokeDasharray: "3 3" }),
      Plot.line(curve(), { x: "distance", y: "score", stroke: SERIES[0], strokeWidth: 1.5 }),
    ],
  });
}
const rising = () => {
  const all = curve();
  return all.slice(1).filter((one, at) => one.score > all[at].score).length / FAR;
};

const distance = () => {
  const before = chosen.query - chosen.key;
  return before === 0
    ? "the same as the query's"
    : `${Math.abs(before)} ${before > 0 ? "before" : "after"} the query`;
};
const effects = {
  query: () =>
    `Query at position ${places()[0]}: pair ${pair()} turns ${(places()[0] / period()).toFixed(2)} times.`,
  key: () => `Key at position ${places()[1]}, ${distance()}: the score is ${shown(score())}.`,
  shift: () =>
    `${plural(chosen.shift, "position")} later: the distance is the same, and so is the score, ${shown(score())}.`,
  pair: () =>
    `Pair ${pair()} turns once in ${period() < 1000 ? period().toFixed(1) : counted(Math.round(period()))} positions.`,
  width: () =>
    `Width ${chosen.width}: ${chosen.width / 2} pairs, each slower than the pair before.`,
  base: () => `Base ${counted(chosen.base)}: a larger base turns the last pairs more slowly.`,
};

export const ropeLecture: Lecture = (context) =>
  withControls(
    (changed) => [
      dial("Position of the query", chosen, "query", [0, 64, 1], effects, changed),
      dial("Position of the key", chosen, "key", [0, 64, 1], effects, changed),
      dial("Shift both", chosen, "shift", [0, 1000, 10], effects, changed),
      dial("Pair of channels", chosen, "pair", [0, 31, 1], effects, changed),
      dial("Width of a vector", chosen, "width", [4, 64, 4], effects, changed),
      baseList("Base", chosen, effects.base, changed),
    ],
    () => [
      figure(
        `Pair ${pair()} of the query and of the key`,
        "Pale: before the rotation. Each is drawn with the length 1.",
        plane(context),
      ),
      figure(
        "The score of a vector with itself",
        `In the mean over all vectors. It falls with distance, but it rises in ${Math.round(100 * rising())} % of the steps.`,
        byDistance(context),
      ),
    ],
    "charts",
  );
