// "Go to" of the map: a token, a query, or a query and a key.
import type { Context } from "./context";
import { queriesOf, sizeOf } from "./data";
import { h } from "./dom";
import { placesOf } from "./word_names";

// `show` moves the map to a pair, `none` says that no token matches.
export function mapSearch(
  context: Context,
  show: (i: number, j: number) => void,
  none: (wish: string) => void,
) {
  let matches: number[] = [];
  let asked = "";
  const element = h("input", {
    type: "search",
    class: "go-to",
    placeholder: "token, 12 or 12,34",
    "aria-label": "Jump to a token, a query, or a query and a key",
    onkeydown: (event: KeyboardEvent) => event.key === "Enter" && void jump(element.value),
  });

  async function jump(wish: string) {
    const { text, state, source } = context;
    const [I, J] = sizeOf(text);
    const numbers = /^\s*(\d+)(?:\s*,\s*(\d+))?\s*$/.exec(wish);
    if (!wish.trim()) return;
    if (numbers) {
      const i = Math.min(Number(numbers[1]), I - 1);
      return show(i, Math.min(Number(numbers[2] ?? i), J - 1));
    }
    if (asked !== wish) matches = placesOf(wish, queriesOf(text));
    asked = wish;
    if (!matches.length) return none(wish);
    const next = matches[(matches.indexOf(state.query) + 1) % matches.length];
    const row = (await source.rows(state.text, state.layer, next))[state.head];
    show(
      next,
      row.reduce((best, value, at) => (value > row[best] ? at : best), 0),
    );
  }

  return {
    element,
    focus() {
      element.focus();
      element.select();
    },
  };
}
