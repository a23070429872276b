// The strongest link of a head in words, with its tokens in quotes.
import { queriesOf, type Head, type Text } from "./data";
import { numberOf, strong, visible } from "./dom";

// What `strongest_links` of src/regard/stats/strongest_links.py leaves out, as the first sentence of the page does.
export const leftOut = (text: Text): string =>
  text.queries
    ? "Left out: special tokens and punctuation."
    : "Left out: the word itself, its neighbors, links over more than 50 tokens, the first token, special tokens and punctuation.";

export function strongestLink(
  text: Text,
  { strongest: [query, key, weight] }: Head,
): (Node | string)[] {
  const quoted = (tokens: string[], at: number) =>
    at in tokens ? ["“", strong(visible(tokens[at])), "”"] : ["nothing"];
  return [
    "Strongest link: ",
    ...quoted(queriesOf(text), query),
    " → ",
    ...quoted(text.tokens, key),
    " ",
    numberOf(weight),
    ".",
  ];
}
