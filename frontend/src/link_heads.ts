// The heads in which a word attends most to another one, with their weights: whether one head leads, or several do.
import { stateLink } from "./cards";
import type { Context } from "./context";
import { queriesOf, shortName, type Lead, type Text } from "./data";
import { h, strong, visible } from "./dom";
import { shown, statisticInCell } from "./format";

const [LISTED, LONGEST] = [3, 2048]; // heads of a link; tokens up to which all layers are asked

// What the number in parentheses is: of all the weight that the word receives in the head, the part of this link.
export const ofReceived = (text: Text): string =>
  text.layers[0].heads[0].received.length === text.tokens.length
    ? "In parentheses: the share of this link in all the weight that the word receives in the head. "
    : "";

// A line for each of some links of one word. None where the page has no single weights.
export async function linkHeads(context: Context, links: Lead[]): Promise<HTMLElement[]> {
  const { source, state, text } = context;
  if (source.finest(state.text) || text.tokens.length > LONGEST) return [];
  // A head in which every word attends to this one says less of the link than one in which no other does.
  const shareOf = (layer: number, head: number, key: number, weight: number) => {
    const { received } = text.layers[layer].heads[head];
    return received.length === text.tokens.length
      ? ` (${statisticInCell(weight / received[key])})`
      : "";
  };
  const named = (layer: number, head: number, key: number, weight: number) =>
    `${shortName(text.layers[layer], head)} ${shown(weight)}${shareOf(layer, head, key, weight)}`;
  const rows = await Promise.all(
    text.layers.map((_, layer) => source.rows(state.text, layer, links[0].query)),
  );
  return links.map((link) => {
    const { query, key } = link;
    const ranked = rows
      .flatMap((heads, layer) => heads.map((row, head) => ({ layer, head, weight: row[key] })))
      .sort((a, b) => b.weight - a.weight)
      .slice(0, LISTED);
    return h(
      "li",
      {},
      strong(visible(queriesOf(text)[query])),
      " → ",
      strong(visible(text.tokens[key])),
      ":",
      ...ranked.flatMap(({ layer, head, weight }, at) => [
        at ? ", " : " ",
        layer === link.layer && head === link.head // the sentence leads to it
          ? strong(named(layer, head, key, weight))
          : stateLink(
              context,
              { view: "head", layer, head, query, key },
              "more",
              named(layer, head, key, weight),
            ),
      ]),
    );
  });
}
