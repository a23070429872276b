// What the lectures share: a control with a sentence about its effect, and a figure that can be saved.
import * as Plot from "@observablehq/plot";
import { withGroupRoles } from "./chart_names";
import type { Context } from "./context";
import { h, hint, table } from "./dom";
import { counted } from "./format";

export type Lecture = (context: Context) => HTMLElement[];
export interface Control {
  element: HTMLElement;
  tell(): void;
}
// A plot as wide as there is room, at most `width` pixels.
export const plotOf = ({ root }: Context, options: Plot.PlotOptions, width = 620) =>
  Plot.plot({
    width: Math.min(width, Math.max(280, root.clientWidth - 40)),
    style: { background: "transparent", fontSize: "12px", fontFamily: "inherit" },
    ...options,
  });

function control(label: string, input: HTMLElement, effect: () => string): Control {
  const sentence = h("span", { class: "effect" });
  return {
    element: h("div", { class: "control" }, h("label", {}, h("span", {}, label), input), sentence),
    tell() {
      sentence.textContent = effect();
    },
  };
}

// A slider for `state[name]`; `effects[name]` says in a sentence what its value does.
export function dial<K extends string>(
  label: string,
  state: Record<K, number>,
  name: K,
  [low, high, step]: number[],
  effects: Record<K, () => string>,
  changed: () => void,
): Control {
  const input = h("input", {
    type: "range",
    min: low,
    max: high,
    step,
    value: state[name],
    "aria-label": label,
    oninput: () => {
      state[name] = Number(input.value);
      changed();
    },
  });
  return control(label, input, effects[name]);
}

function list(
  label: string,
  value: string,
  options: [string, string][],
  effect: () => string,
  chosen: (value: string) => void,
): Control {
  const input = h(
    "select",
    { "aria-label": label, onchange: () => chosen(input.value) },
    ...options.map(([name, said]) => h("option", { value: name, selected: name === value }, said)),
  );
  return control(label, input, effect);
}

// The base of periods: positions and RoPE have one.
export const baseList = (
  label: string,
  state: { base: number },
  effect: () => string,
  changed: () => void,
) =>
  list(
    label,
    String(state.base),
    [100, 10_000, 500_000].map((base) => [String(base), counted(base)]),
    effect,
    (value) => {
      state.base = Number(value);
      changed();
    },
  );

// A list of names; the chosen one is `state[name]`, and `effects[name]` says in a sentence what it does.
export function names<K extends string>(
  label: string,
  state: Record<K, string>,
  name: K,
  options: object,
  effects: Record<K, () => string>,
  changed: () => void,
): Control {
  const pairs = Object.keys(options).map((each): [string, string] => [each, each]);
  return list(label, state[name], pairs, effects[name], (value) => {
    state[name] = value;
    changed();
  });
}

// A table of numbers, which scrolls where it is wider than its room.
export const numbersTable = (heads: string[], rows: HTMLElement[]) =>
  h("div", { class: "scroll" }, table("numbers steps", heads, rows));

// The controls of a lecture and its figures; `draw` makes the figures again after every change.
export function withControls(
  make: (changed: () => void) => Control[],
  draw: () => HTMLElement[],
  kind: string,
): HTMLElement[] {
  const room = h("div", { class: kind });
  const changed = () => {
    room.replaceChildren(...draw());
    controls.forEach((one) => {
      one.tell();
    });
  };
  const controls = make(changed);
  changed();
  return [h("div", { class: "controls" }, ...controls.map((one) => one.element)), room];
}

export const figure = (title: string, said: string, drawing: Element, key: Element | null = null) =>
  h(
    "figure",
    {},
    h("figcaption", {}, title),
    hint(said),
    key,
    h("div", { class: "scroll" }, withGroupRoles(drawing)),
  );
