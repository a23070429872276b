// The order of heads in the overview and in figures: layer by layer, or by a statistic.
import { everyHead, type HeadPlace } from "./data";
import type { Context } from "./context";

export function headOrder({ state, text }: Context): HeadPlace[] {
  const all = everyHead(text);
  if (state.sort === "layer") return all;
  const value = ({ layer, head }: HeadPlace) =>
    text.layers[layer].heads[head].values[state.color] ?? 0;
  return all.sort((a, b) => (state.sort === "down" ? value(b) - value(a) : value(a) - value(b)));
}
