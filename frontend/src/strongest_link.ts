// The strongest link of a head in words, with its tokens in quotes.
import { queriesOf, type Head, type Text } from "./data";
import { numberOf, strong, visible } from "./dom";

// What `LayerProfile.strongest` leaves out.
export const LEFT_OUT = "Left out: links from special tokens, and from a token that can attend to only one token.";

export function strongestLink(text: Text, { strongest: [query, key, weight] }: Head): (Node | string)[] {
  const quoted = (tokens: string[], at: number) => (at in tokens ? ["“", strong(visible(tokens[at])), "”"] : ["nothing"]);
  return ["Strongest link: ", ...quoted(queriesOf(text), query), " → ", ...quoted(text.tokens, key), " ", numberOf(weight), "."];
}
