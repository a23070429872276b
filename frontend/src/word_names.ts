// The names of words: "the (1)", "the (2)" where a word occurs more than once.
import { queriesOf, type Text } from "./data";
import { visible } from "./dom";

const made = new WeakMap<string[], string[]>();

export function wordNames(tokens: string[]): string[] {
  const found = made.get(tokens);
  if (found) return found;
  const count = (counts: Map<string, number>, name: string) =>
    counts.set(name, (counts.get(name) ?? 0) + 1).get(name)!;
  const [all, seen] = [new Map<string, number>(), new Map<string, number>()];
  const words = tokens.map(visible);
  for (const word of words) count(all, word);
  const names = words.map((word) => (all.get(word)! > 1 ? `${word} (${count(seen, word)})` : word));
  made.set(tokens, names);
  return names;
}

// The names of the rows and of the columns of a map.
export const namesOfMap = (text: Text): [string[], string[]] => [
  wordNames(queriesOf(text)),
  wordNames(text.tokens),
];

// Cuts a name, and keeps its number.
export function cutName(name: string, size: number): string {
  const [, word, number] = /^(.*?)( \(\d+\))?$/su.exec(name)!;
  const room = Math.max(3, size - (number?.length ?? 0));
  return `${[...word].length > room ? `${[...word].slice(0, room - 1).join("")}…` : word}${number ?? ""}`;
}

// The places of a word in a text: "it", or "it (2)" for its second occurrence. Case does not matter.
export function placesOf(wish: string, tokens: string[]): number[] {
  const [wanted, names] = [wish.trim().toLowerCase(), wordNames(tokens)];
  const matches = (at: number) =>
    visible(tokens[at]).toLowerCase() === wanted || names[at].toLowerCase() === wanted;
  return wanted ? tokens.flatMap((_, at) => (matches(at) ? [at] : [])) : [];
}
