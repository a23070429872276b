// What changes in a prediction without some weights, as bars before and after.
import { SERIES } from "./color";
import type { Effect } from "./data";
import { h, table, visible } from "./dom";
import { probability } from "./format";

// A number beside a bar whose length is its share of `most`.
function bar(value: number, most: number, color: string): HTMLElement {
  const line = h("span", { class: "bar-line", "aria-hidden": "true" });
  line.style.cssText = `width:${(100 * value) / (most || 1)}%;background:${color}`;
  return h(
    "td",
    {},
    h(
      "span",
      { class: "bar-row" },
      h("span", { class: "bar-room" }, line),
      h("span", { class: "number" }, probability(value)),
    ),
  );
}

// The tokens whose probability or whose state changes; a column of numbers for each of `names`.
function bars(first: string, names: string[], rows: [string, ...number[]][]): HTMLElement {
  const most = Math.max(...rows.flatMap(([, ...values]) => values));
  return h(
    "div",
    { class: "scroll" },
    table(
      "effect-bars",
      [first, ...names],
      rows.map(([token, ...values]) =>
        h(
          "tr",
          {},
          h("th", { scope: "row", dir: "auto" }, visible(token.trim() || token)),
          ...values.map((value, at) => bar(value, most, SERIES[at])),
        ),
      ),
    ),
  );
}

export function effectPanel({ kind, sentence, probabilities, moved }: Effect): HTMLElement {
  return h(
    "section",
    { class: "effect", "aria-label": "What changes" },
    h("h2", {}, "What changes"),
    h("p", { class: "effect-said", role: "status" }, sentence),
    probabilities.length
      ? bars(kind, ["before", "after"], probabilities)
      : bars("token", ["change of its state"], moved),
  );
}
