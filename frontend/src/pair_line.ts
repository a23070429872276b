// The weight of the chosen query on the chosen key, in words, and the keys that move both.
import type { Context } from "./context";
import { queriesOf } from "./data";
import { h, strong } from "./dom";
import { headsInWords } from "./head_sets";
import { wordNames } from "./word_names";

export function pairLine(context: Context, weight: number): HTMLElement {
  const { state, text, source } = context;
  const means = source.finest(state.text) ? " (the mean of a cell)" : "";
  return h("span", { class: "pair" }, strong(wordNames(queriesOf(text))[state.query]), ` ${state.query} → `,
    strong(wordNames(text.tokens)[state.key]), ` ${state.key}: `,
    h("output", { class: "weight" }, String(+weight.toPrecision(6))), `${means}, in ${headsInWords(context)}.`);
}

// Arrows move the query; with Shift they move the key.
export function movedBy(context: Context, event: KeyboardEvent, steps: Record<string, number>): boolean {
  const step = steps[event.key];
  if (step === undefined) return false;
  const { state, text } = context;
  const within = (at: number, size: number) => Math.max(0, Math.min(size - 1, at));
  context.set(event.shiftKey ? { key: within((state.key < 0 ? state.query : state.key) + step, text.tokens.length) }
    : { query: within(state.query + step, queriesOf(text).length) }, true);
  return true;
}
