// The lecture on biases: what is added to a score by distance, and the weights that it gives.
import * as Plot from "@observablehq/plot";
import { SERIES } from "./color";
import type { Context } from "./context";
import { shown, plural } from "./format";
import { BIASES, slope, weightsByDistance } from "./formulas";
import { dial, figure, names, withControls, type Lecture, plotOf } from "./lecture_controls";

const chosen = { bias: "ALiBi", heads: 8, head: 2, power: 7 };
const NEAR = 32;
const length = () => 2 ** chosen.power;
const head = () => Math.min(chosen.head, chosen.heads - 1);
const weights = () => weightsByDistance(chosen.bias, length(), head(), chosen.heads);
const share = (keys: number) =>
  weights()
    .slice(0, keys)
    .reduce((all, one) => all + one, 0);

function line(context: Context, label: string, values: number[], color: string, floor?: number) {
  return plotOf(context, {
    height: 230,
    marginLeft: 52,
    x: { label: "distance to the key" },
    y: {
      label,
      grid: true,
      ...(floor === undefined ? {} : { domain: [floor, Math.max(...values)] }),
    },
    marks: [
      Plot.ruleY([0]),
      Plot.line(
        values.map((value, distance) => ({ distance, value })),
        { x: "distance", y: "value", stroke: color, strokeWidth: 1.8, curve: "step-after" },
      ),
    ],
  });
}

const SAID: Record<string, () => string> = {
  "no bias": () => "No bias: every distance has the same score.",
  ALiBi: () =>
    `ALiBi: head ${head()} subtracts ${+slope(head(), chosen.heads).toPrecision(3)} for each position.`,
  KERPLE: () =>
    `KERPLE: −${head() + 1} log(1 + distance / ${chosen.heads}); both numbers are learned in a model.`,
  T5: () =>
    "T5: a learned number for each bucket; here random. All distances from 128 share one bucket.",
};
const effects = {
  bias: () => SAID[chosen.bias](),
  heads: () => `${plural(chosen.heads, "head")}: each has a bias of its own.`,
  head: () =>
    `Head ${head()}: the nearest ${plural(Math.min(NEAR, length()), "key")} have ${shown(share(NEAR))} of the weight.`,
  power: () => `${plural(length(), "key")}: the query is the last of ${length()} tokens.`,
};

export const biasLecture: Lecture = (context) =>
  withControls(
    (changed) => [
      names("Bias", chosen, "bias", BIASES, effects, changed),
      dial("Head", chosen, "head", [0, 15, 1], effects, changed),
      dial("Number of heads", chosen, "heads", [1, 16, 1], effects, changed),
      dial("Length of the text", chosen, "power", [3, 11, 1], effects, changed),
    ],
    () => [
      figure(
        "What is added to the score",
        "By the distance between the query and a key before it.",
        line(
          context,
          "bias",
          Array.from({ length: length() }, (_, distance) =>
            BIASES[chosen.bias](distance, head(), chosen.heads),
          ),
          SERIES[1],
        ),
      ),
      figure(
        "Weights of the last query",
        `All products q · k are equal, so only the bias decides. The nearest ${NEAR} keys have ${shown(share(NEAR))} of the weight.`,
        line(context, "weight", weights(), SERIES[0], 0),
      ),
    ],
    "charts",
  );
