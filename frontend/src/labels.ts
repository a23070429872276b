// Statistics in plain words, with their name beside them: "spread (entropy)".
import type { Common, Text } from "./data";

export const label = (common: Common, name: string): string => common.labels?.[name] ?? name;
// What the rows and the columns of a map are.
export const axesOf = (text: Text): [string, string] =>
  text.queries
    ? ["target words attend", "source words are attended to"]
    : ["rows attend", "columns are attended to"];
// What a token is called in a sentence.
export const nounOf = ({ picture }: Text): string =>
  picture && picture.kind !== "sound" ? "patch" : "word";
