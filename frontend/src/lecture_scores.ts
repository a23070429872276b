// The lecture on scores: how one query and its keys become scores, and scores become weights.
import * as Plot from "@observablehq/plot";
import { SERIES } from "./color";
import type { Context } from "./context";
import { h } from "./dom";
import { shown } from "./format";
import { entropy, NORMALIZERS, SCORES } from "./formulas";
import { dial, figure, names, withControls, type Lecture, plotOf } from "./lecture_controls";

const KEYS: [string, number, number][] = [
  ["cat", 1.6, 0.5],
  ["dog", 1.3, 1.0],
  ["sat", -0.4, 1.5],
  ["the", 0.3, -0.2],
  ["mat", 0.9, -1.4],
  ["on", -1.3, -0.6],
  ["ran", -1.0, 1.1],
];
export const NUM_KEYS = KEYS.length;
const query = { angle: 25, size: 1.6, temperature: 1, normalizer: "softmax", score: "scaled dot" };

interface Row {
  token: string;
  x: number;
  y: number;
  score: number;
  weight: number;
}
const radians = () => (query.angle * Math.PI) / 180;
const vector = () => [query.size * Math.cos(radians()), query.size * Math.sin(radians())];
function rowsOf(): Row[] {
  const raw = KEYS.map(([, x, y]) => SCORES[query.score][1](vector(), [x, y]));
  const weights = NORMALIZERS[query.normalizer](raw.map((value) => value / query.temperature));
  return KEYS.map(([token, x, y], at) => ({ token, x, y, score: raw[at], weight: weights[at] }));
}
const best = (rows: Row[], of: (row: Row) => number) =>
  rows.reduce((top, row) => (of(row) > of(top) ? row : top));

function plane(context: Context, rows: Row[]) {
  const { colors } = context;
  return plotOf(
    context,
    {
      height: 360,
      x: { domain: [-2.5, 2.5], label: null },
      y: { domain: [-2.2, 2.2], label: null },
      marks: [
        Plot.ruleX([0], { strokeOpacity: 0.2 }),
        Plot.ruleY([0], { strokeOpacity: 0.2 }),
        Plot.link(rows, {
          x1: 0,
          y1: 0,
          x2: "x",
          y2: "y",
          stroke: (row: Row) => colors.line(row.weight),
          strokeWidth: (row: Row) => (row.weight > 0 ? 1 + 7 * row.weight : 0),
        }),
        Plot.arrow([vector()], {
          x1: 0,
          y1: 0,
          x2: (at: number[]) => at[0],
          y2: (at: number[]) => at[1],
          stroke: "currentColor",
          strokeWidth: 2.5,
        }),
        Plot.dot(rows, { x: "x", y: "y", fill: "currentColor", r: 3.5 }),
        Plot.text(rows, { x: "x", y: "y", text: "token", dy: -10 }),
      ],
    },
    400,
  );
}

function bars(
  context: Context,
  rows: Row[],
  key: "score" | "weight",
  fill: string | ((row: Row) => string),
  domain?: number[],
) {
  return plotOf(
    context,
    {
      height: 180,
      marginLeft: 44,
      x: { label: null, domain: KEYS.map(([token]) => token) },
      y: { label: key, grid: true, domain },
      marks: [
        Plot.barY(rows, {
          x: "token",
          y: key,
          fill,
          tip: true,
          stroke: key === "weight" ? "currentColor" : undefined,
          strokeOpacity: 0.35,
        }),
        Plot.ruleY([0]),
      ],
    },
    400,
  );
}

const effects = {
  score: () => `${query.score}: ${SCORES[query.score][0]}.`,
  normalizer: () => {
    const zeros = rowsOf().filter((row) => row.weight === 0).length;
    return `${query.normalizer}: ${zeros ? `${zeros} of ${NUM_KEYS} keys have a weight of exactly 0` : "every key has some weight"}.`;
  },
  temperature: () => {
    const top = best(rowsOf(), (row) => row.weight);
    return `Temperature ${query.temperature}: scores are divided by ${query.temperature}; “${top.token}” has the largest weight, ${shown(top.weight)}.`;
  },
  angle: () =>
    `Direction ${query.angle}°: it is nearest to that of “${
      best(
        rowsOf(),
        (row) =>
          (row.x * Math.cos(radians()) + row.y * Math.sin(radians())) / Math.hypot(row.x, row.y),
      ).token
    }”.`,
  size: () => {
    const scores = rowsOf().map((row) => row.score);
    return `Length ${query.size}: scores go from ${Math.min(...scores).toFixed(1)} to ${Math.max(...scores).toFixed(1)}${
      query.score === "cosine" ? "; a cosine does not depend on the length" : ""
    }.`;
  },
};

export const scores: Lecture = (context) =>
  withControls(
    (changed) => [
      names("Score", query, "score", SCORES, effects, changed),
      names("Normalizer", query, "normalizer", NORMALIZERS, effects, changed),
      dial("Temperature", query, "temperature", [0.1, 4, 0.1], effects, changed),
      dial("Direction of the query", query, "angle", [-180, 180, 5], effects, changed),
      dial("Length of the query", query, "size", [0.2, 3, 0.1], effects, changed),
    ],
    () => {
      const rows = rowsOf();
      const spread = entropy(rows.map((row) => row.weight));
      return [
        figure(
          "A query and its keys",
          "The arrow is the query. A thicker line is a larger weight.",
          plane(context, rows),
        ),
        h(
          "div",
          {},
          figure(
            "Scores",
            "How well the query matches each key.",
            bars(context, rows, "score", SERIES[1]),
          ),
          figure(
            "Weights",
            `${query.normalizer} of the scores over ${query.temperature}; entropy ${spread.toFixed(2)} nats.`,
            bars(context, rows, "weight", (row) => context.colors.weight(row.weight), [0, 1]),
          ),
        ),
      ];
    },
    "charts",
  );
