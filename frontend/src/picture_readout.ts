// What the token attends to, in words: the strongest links, and the share of patches and of every other kind of token.
import { inText, strongest, type Context } from "./context";
import { queriesOf } from "./data";
import { h, strong, visible, weighed } from "./dom";
import { shown, seconds } from "./format";
import { headsInWords } from "./head_sets";
import type { PictureTokens } from "./picture_tokens";

const LISTED = 5; // strongest links

export function linksInWords(
  context: Context,
  tokens: PictureTokens,
  values: Float32Array,
  at: number,
): (Node | string)[] {
  const { text } = context;
  const others = tokens.isTurned ? queriesOf(text) : text.tokens;
  const list = weighed(others, values, strongest(values, LISTED));
  return [
    strong(visible(tokens.names[at])),
    ` (token ${at})`,
    tokens.isTurned ? " receives attention from " : " attends to ",
    ...(list.length ? list : ["nothing"]),
    `, in ${inText(headsInWords(context))}. `,
    ...(tokens.isTurned ? [] : [sharesOfKinds(context, tokens, values)]),
    timeOf(context, tokens, values),
  ];
}

function sharesOfKinds(
  { text }: Context,
  tokens: PictureTokens,
  values: Float32Array,
): HTMLElement {
  const kindOf = (at: number) =>
    tokens.patchOf.has(at)
      ? tokens.isSound
        ? "the sound"
        : "patches"
      : /^\[REG/.test(text.tokens[at])
        ? "registers"
        : text.special.includes(at)
          ? visible(text.tokens[at])
          : "words";
  const total = new Map<string, number>();
  values.forEach((weight, at) => {
    total.set(kindOf(at), (total.get(kindOf(at)) ?? 0) + weight);
  });
  const said = [...total]
    .filter(([, weight]) => weight > 0)
    .map(([kind, weight]) => `${shown(weight)} on ${kind}`);
  return h("span", { class: "parts" }, `Of its weight, ${said.join(", ")}. `);
}

const timeOf = ({ text }: Context, tokens: PictureTokens, values: Float32Array) =>
  text.picture?.seconds && !tokens.isTurned
    ? `The center of its weight is at ${seconds(tokens.center(values))}.`
    : "";
