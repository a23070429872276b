// The sentences of a pair of texts, and which pairs of them a view shows.
import type { Context } from "./context";
import { choice } from "./dom";

// The ends of the sentences of a pair: after every special token except the first.
export function sentences(tokens: string[], special: number[]): number[] {
  const ends = special.filter((at) => at > 0).map((at) => at + 1);
  return ends.length && ends.at(-1)! >= tokens.length ? ends : [...ends, tokens.length];
}

export const isPair = ({ text }: Context) =>
  text.queries === null && sentences(text.tokens, text.special).length > 1;

export const pairChoice = ({ state, set }: Context) =>
  choice(
    "Sentences",
    state.pairs,
    [
      ["all", "all"],
      ["AA", "A → A"],
      ["AB", "A → B"],
      ["BA", "B → A"],
      ["BB", "B → B"],
    ],
    (pairs) => set({ pairs }),
  );

// Whether a link from query i to key j is between the chosen sentences.
export function isShown({ state, text }: Context, i: number, j: number): boolean {
  if (state.pairs === "all" || text.queries !== null) return true;
  const [end] = sentences(text.tokens, text.special);
  const letter = (at: number) => (at < end ? "A" : "B");
  return letter(i) + letter(j) === state.pairs;
}
