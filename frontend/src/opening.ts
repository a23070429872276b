// What a text opens with, if the address does not say: a run of images the picture, a translation its alignment, a
// generation its words, all others the overview.
import { queriesOf, type Text } from "./data";
import type { State } from "./state";

// Whether the queries are the last keys, as in the last step of a generation.
const isGeneration = (text: Text): boolean =>
  text.queries !== null &&
  text.queries.length < text.tokens.length &&
  queriesOf(text).every(
    (token, at) => token === text.tokens[text.tokens.length - text.queries!.length + at],
  );

export function opening(text: Text): Partial<State> {
  if (text.picture) return { view: "picture" };
  if (text.effect || text.attribution) return { view: "whatif" };
  if (text.generation)
    return { view: "head", side: "out", query: Math.max(0, text.generation.prompt - 1) };
  if (text.queries === null) return { view: "overview" };
  return isGeneration(text) ? { view: "head" } : { view: "alignment", scale: "linear" };
}
