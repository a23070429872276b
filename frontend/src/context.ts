// The interface between the frame and its views: the context of a view, and the panel that it returns.
import type { Colors } from "./color";
import { layerName, type Story, type Text } from "./data";
import { h } from "./dom";
import type { Place, Source } from "./source";
import type { State } from "./state";

export interface Context {
  root: HTMLElement;
  source: Source;
  state: State;
  text: Text;
  colors: Colors;
  set(change: Partial<State>, quiet?: boolean): void; // quiet: no history entry for the Back button
  isOwn: boolean; // the page is the whole document, and its address is the view
  tell(message: string): void; // for screen readers
  tour?: Story & { play(): void }; // the story of this page
  keysPerCell(keys: number): void; // how many keys a cell of this view sums over, for the legend
}
export interface Panel {
  element: HTMLElement;
  update(before: State | null): void;
  key?(event: KeyboardEvent): boolean; // true: this view handled the key
  close?(): void;
  acts?: [string, () => void][]; // in the menu, while the view is shown
}

export const place = ({ state }: Context): Place => ({
  text: state.text,
  layer: state.layer,
  head: state.head,
});
export const isPhone = (root: HTMLElement) => root.clientWidth <= 520; // as in story.css
export const inText = (name: string) => name.replace(/^Layer/, "layer");
export const headName = (
  context: Context,
  layer = context.state.layer,
  head = context.state.head,
) => `${layerName(context.text.layers[layer]).replace(/^l/, "L")}, head ${head}`;

// What the numbers of this text are, if they are not single weights.
export const meansOnly = ({ source, state }: Context): HTMLElement | null =>
  source.finest(state.text)
    ? h(
        "p",
        { class: "hint means" },
        `${source.precision(state.text)} Here a number is the mean of a cell.`,
      )
    : null;

// The indices of the largest values, the largest first.
export const strongest = (values: Float32Array, count: number): number[] =>
  Array.from(values.keys())
    .filter((at) => values[at] > 0)
    .sort((a, b) => values[b] - values[a])
    .slice(0, count);

// The range of at most `size` tokens around a token.
export function interval(at: number, size: number, all: number): [number, number] {
  const first = Math.max(0, Math.min(at - Math.floor(size / 2), all - size));
  return [first, Math.min(first + size, all)];
}
