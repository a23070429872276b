// The interface between the frame and its views: the context of a view, and the panel that it returns.
import type { Colours } from "./colour";
import { layerName, queriesOf, type Text } from "./data";
import { h } from "./dom";
import type { Place, Source } from "./source";
import type { State } from "./state";

export interface Context {
  root: HTMLElement;
  source: Source;
  state: State;
  text: Text;
  colours: Colours;
  set(change: Partial<State>, quiet?: boolean): void; // quiet: no history entry for the Back button
  tell(message: string): void; // for screen readers
  cells(keys: number): void; // how many keys a cell of this view sums over, for the legend
}
export interface Panel {
  element: HTMLElement;
  update(before: State | null): void;
  key?(event: KeyboardEvent): boolean; // true: this view handled the key
  close?(): void;
}

export const place = ({ state }: Context): Place => ({ text: state.text, layer: state.layer, head: state.head });
export const inText = (name: string) => name.replace(/^Layer/, "layer");
export const headName = (context: Context, layer = context.state.layer, head = context.state.head) =>
  `${layerName(context.text.layers[layer]).replace(/^l/, "L")}, head ${head}`;

// The heads that a view shows together: layer -> heads.
export function chosenHeads({ state, text }: Context): Map<number, number[]> {
  const everyone = (layer: number) => text.layers[layer].heads.map((_, head) => head);
  if (state.heads === "all") return new Map(text.layers.map((_, layer) => [layer, everyone(layer)]));
  if (state.heads === "layer") return new Map([[state.layer, everyone(state.layer)]]);
  const named = state.heads.split(",").map((part) => parseInt(part.trim(), 10)).filter((head) => head >= 0
    && head < text.layers[state.layer].heads.length);
  return new Map([[state.layer, named.length ? [...new Set(named)] : [state.head]]]);
}

// The mean over heads of the weights of a query, or (`turned`) of the weights on a key.
export async function meanLine(context: Context, heads: Map<number, number[]>, at: number,
  turned = false): Promise<Float32Array> {
  const { source, state, text } = context;
  const total = new Float32Array(turned ? queriesOf(text).length : text.tokens.length);
  let count = 0;
  for (const [layer, chosen] of heads) {
    const lines = await (turned ? source.columns(state.text, layer, at) : source.rows(state.text, layer, at));
    for (const head of chosen) {
      count++;
      for (let place = 0; place < total.length; place++) total[place] += lines[head][place];
    }
  }
  return total.map((value) => value / count);
}

// What the numbers of this text are, if they are not single weights.
export const meansOnly = ({ source, state }: Context): HTMLElement | null =>
  (source.finest(state.text) ? h("p", { class: "hint means" }, `${source.precision(state.text)} Here a number is the mean of a cell.`) : null);

// The indices of the largest values, the largest first.
export const strongest = (values: Float32Array, count: number): number[] =>
  Array.from(values.keys()).filter((at) => values[at] > 0).sort((a, b) => values[b] - values[a]).slice(0, count);

// The range of at most `size` tokens around a token.
export function interval(at: number, size: number, all: number): [number, number] {
  const first = Math.max(0, Math.min(at - Math.floor(size / 2), all - size));
  return [first, Math.min(first + size, all)];
}
