// The lecture on one query: scores, scaling, mask, softmax and weighted sum, with every number.
import type { Context } from "./context";
import { h } from "./dom";
import { entropy, MASKS, stepsOf, type Steps, vectorsOf } from "./formulas";
import { dial, names, numbersTable, type Lecture, withControls } from "./lecture_controls";

const TOKENS = ["The", "cat", "sat", "on", "the", "mat"];
const CHANNELS = 3; // of a value: few enough that a table shows them
const chosen = { query: 3, width: 4, temperature: 1, mask: "causal", size: 3 };

const number = (value: number) =>
  value === -Infinity
    ? "−∞"
    : value
        .toFixed(2)
        .replace("-", "−")
        .replace(/^−(0\.00)$/, "$1");
const vectors = (width: number, seed: number) => vectorsOf(TOKENS.length, width, seed);

function steps(): [Steps, number[][]] {
  const values = vectors(CHANNELS, 5);
  const queries = vectors(chosen.width, 1);
  const allowed = MASKS[chosen.mask](chosen.size);
  const found = stepsOf(
    queries[chosen.query],
    vectors(chosen.width, 3),
    values,
    chosen.query,
    allowed,
    chosen.temperature,
  );
  return [found, values];
}

function table(context: Context): HTMLElement {
  const [found, values] = steps();
  const heads = ["Key", "q · k", "scaled", "masked", "weight", "value", "weight × value"];
  const vector = (all: number[]) => `(${all.map(number).join(", ")})`;
  const row = (token: string, j: number) => {
    const weight = found.weights[j];
    const share = h("td", {}, number(weight));
    share.style.boxShadow = `inset 0 -4px ${context.colors.weight(weight)}`;
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, token),
      ...[found.products[j], found.scaled[j], found.masked[j]].map((one) =>
        h("td", {}, number(one)),
      ),
      share,
      h("td", {}, vector(values[j])),
      h("td", {}, vector(values[j].map((one) => weight * one))),
    );
  };
  const total = h(
    "tr",
    { class: "total" },
    h("th", { scope: "row" }, "Sum"),
    ...["", "", ""].map((text) => h("td", {}, text)),
    h("td", {}, number(found.weights.reduce((all, one) => all + one, 0))),
    h("td", {}, "output"),
    h("td", {}, vector(found.output)),
  );
  return numbersTable(heads, [...TOKENS.map(row), total]);
}

const effects = {
  query: () =>
    `Query ${chosen.query}, “${TOKENS[chosen.query]}”: each row of the table is one key.`,
  width: () =>
    `d = ${chosen.width}: q · k has a standard deviation of about ${Math.sqrt(chosen.width).toFixed(1)}; divided by √d it has 1.`,
  temperature: () => {
    const nats = entropy(steps()[0].weights);
    return `Temperature ${chosen.temperature}: the entropy is ${nats.toFixed(2)} nats, as of ${Math.exp(nats).toFixed(1)} equal keys.`;
  },
  mask: () => {
    const hidden = steps()[0].masked.filter((score) => score === -Infinity).length;
    return `${chosen.mask}: ${hidden} of ${TOKENS.length} keys have the score −∞ and the weight 0.`;
  },
  size: () =>
    chosen.mask === "padding"
      ? `The first ${chosen.size} keys are words, the others are padding.`
      : chosen.mask === "window"
        ? `The window holds the token and ${chosen.size - 1} on each side.`
        : "Only the masks padding and window have a size.",
};

export const stepLecture: Lecture = (context) =>
  withControls(
    (changed) => [
      dial("Query", chosen, "query", [0, TOKENS.length - 1, 1], effects, changed),
      dial("Width d of q and k", chosen, "width", [1, 64, 1], effects, changed),
      dial("Temperature", chosen, "temperature", [0.1, 4, 0.1], effects, changed),
      names("Mask", chosen, "mask", MASKS, effects, changed),
      dial("Size of the mask", chosen, "size", [1, TOKENS.length, 1], effects, changed),
    ],
    () => [table(context)],
    "step-view",
  );
