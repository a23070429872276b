// The order of heads in the overview and in figures: layer by layer, or by a statistic.
import type { Context } from "./context";

export interface HeadPlace {
  layer: number;
  head: number;
}

export function headOrder({ state, text }: Context): HeadPlace[] {
  const all = text.layers.flatMap((layer, at) =>
    layer.heads.map((_, head) => ({ layer: at, head })),
  );
  if (state.sort === "layer") return all;
  const value = ({ layer, head }: HeadPlace) =>
    text.layers[layer].heads[head].values[state.color] ?? 0;
  return all.sort((a, b) => (state.sort === "down" ? value(b) - value(a) : value(a) - value(b)));
}
