// The lecture on length: what attention, a window, linear attention and a recurrence cost as the text grows.
import * as Plot from "@observablehq/plot";
import { SERIES } from "./color";
import type { Context } from "./context";
import { h, hint } from "./dom";
import { counted } from "./format";
import { costsOf, type Layer } from "./formulas";
import { dial, figure, numbersTable, withControls, type Lecture, plotOf } from "./lecture_controls";

const powers = { length: 10, width: 9, heads: 3, window: 8 };
const [SHORT, LONG] = [4, 20];
const of = (name: keyof typeof powers) => 2 ** powers[name];
const costs = (length = of("length")) => costsOf(length, of("width"), of("heads"), of("window"));
const KINDS = Object.keys(costs());
const bytes = (numbers: number) => {
  const [size, unit] = [4 * numbers, ["B", "KiB", "MiB", "GiB", "TiB"]];
  const step = Math.min(Math.floor(Math.log2(Math.max(size, 1)) / 10), unit.length - 1);
  return `${+(size / 1024 ** step).toPrecision(3)} ${unit[step]}`;
};

function lines(context: Context) {
  const steps = Array.from({ length: LONG - SHORT + 1 }, (_, at) => 2 ** (SHORT + at));
  const points = steps.flatMap((n) =>
    KINDS.map((kind) => ({ n, kind, products: costs(n)[kind].products })),
  );
  return plotOf(context, {
    height: 320,
    marginLeft: 56,
    marginRight: 36,
    x: {
      type: "log",
      base: 2,
      label: "tokens",
      ticks: steps.filter((_, at) => at % 4 === 0),
      tickFormat: counted,
    },
    y: { type: "log", label: "multiplications", tickFormat: "~s", grid: true },
    color: { domain: KINDS, range: SERIES, legend: true },
    marks: [
      Plot.ruleX([of("length")], { strokeDasharray: "3 3" }),
      Plot.line(points, { x: "n", y: "products", stroke: "kind", strokeWidth: 2 }),
    ],
  });
}

function table(): HTMLElement {
  const heads = ["", "Multiplications", "Kept, if stored", "In float32", "Longest path"];
  const row = ([kind, { products, kept, path }]: [string, Layer]) => {
    const shown = [counted(products), counted(kept), bytes(kept), counted(path)];
    return h("tr", {}, h("th", { scope: "row" }, kind), ...shown.map((one) => h("td", {}, one)));
  };
  return numbersTable(heads, Object.entries(costs()).map(row));
}

const effects = {
  length: () => {
    const [n, d] = [of("length"), of("width")];
    const ratio = n > d ? n / d : d / n;
    return `${counted(n)} tokens: attention needs ${
      n === d ? "as many" : `${counted(ratio)} times ${n > d ? "as many" : "fewer"}`
    } multiplications ${n < d ? "than" : "as"} a recurrence.`;
  },
  width: () => `Width ${counted(of("width"))}: attention and recurrence meet at that many tokens.`,
  heads: () => `${counted(of("heads"))} heads: that many maps of n × n weights.`,
  window: () =>
    `Window ${counted(of("window"))}: a query sees itself and ${counted(of("window") - 1)} tokens before it.`,
};

export const lengthLecture: Lecture = (context) =>
  withControls(
    (changed) => [
      dial("Tokens n", powers, "length", [SHORT, LONG, 1], effects, changed),
      dial("Width d", powers, "width", [4, 13, 1], effects, changed),
      dial("Heads h", powers, "heads", [0, 5, 1], effects, changed),
      dial("Window w", powers, "window", [1, 12, 1], effects, changed),
    ],
    () => [
      figure(
        "Multiplications by length",
        "Attention n² d for the scores, and as many for the weighted sum; a window w n d; linear attention n d² / h; a recurrence n d² for each of its matrices.",
        lines(context),
      ),
      h(
        "div",
        {},
        hint(`${counted(of("length"))} tokens. Each step of a slider doubles its number.`),
        table(),
      ),
    ],
    "charts",
  );
