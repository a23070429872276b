// The weight of the chosen query on the chosen key, in words, and the keys that move both.
import { stateLink } from "./cards";
import type { Context } from "./context";
import { queriesOf } from "./data";
import { h, strong, weightOutput } from "./dom";
import { headsInWords } from "./head_sets";
import { stepOf, within } from "./steps";
import { wordNames } from "./word_names";

export function pairLine(context: Context, weight: number): HTMLElement {
  const { state, text, source } = context;
  const means = source.finest(state.text) ? " (the mean of a cell)" : "";
  return h(
    "span",
    { class: "pair" },
    strong(wordNames(queriesOf(text))[state.query]),
    ` ${state.query} → `,
    strong(wordNames(text.tokens)[state.key]),
    ` ${state.key}: `,
    weightOutput(weight),
    `${means}, in ${headsInWords(context)}. `,
    source.common.live_model?.fields.includes("edits") &&
      stateLink(context, { ...state, view: "whatif" }, "more", "What if it were 0?"),
  );
}

// Arrows move the query; with Shift they move the key. Up and down move by `row` words.
export function movedBy(context: Context, event: KeyboardEvent, row: number): boolean {
  const step = stepOf(event.key, row);
  if (step === undefined) return false;
  const { state, text } = context;
  context.set(
    event.shiftKey
      ? { key: within((state.key < 0 ? state.query : state.key) + step, text.tokens.length) }
      : { query: within(state.query + step, queriesOf(text).length) },
    true,
  );
  return true;
}
