// What the lectures share: a control with a sentence about its effect, and a figure that can be saved.
import { withGroupRoles } from "./chart_names";
import type { Context } from "./context";
import { h } from "./dom";

export type Lecture = (context: Context) => HTMLElement[];
export interface Control {
  element: HTMLElement;
  tell(): void;
}
export const STYLE = { background: "transparent", fontSize: "12px", fontFamily: "inherit" };
export const roomOf = (context: Context) =>
  Math.min(620, Math.max(280, context.root.clientWidth - 40));

function control(label: string, input: HTMLElement, effect: () => string): Control {
  const sentence = h("span", { class: "effect" });
  return {
    element: h("div", { class: "control" }, h("label", {}, h("span", {}, label), input), sentence),
    tell() {
      sentence.textContent = effect();
    },
  };
}

// A slider; `effect` says in a sentence what its value does.
export function dial(
  label: string,
  value: number,
  [low, high, step]: number[],
  effect: () => string,
  moved: (value: number) => void,
): Control {
  const input = h("input", {
    type: "range",
    min: low,
    max: high,
    step,
    value,
    "aria-label": label,
    oninput: () => moved(Number(input.value)),
  });
  return control(label, input, effect);
}

export function list(
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
    h("p", { class: "hint" }, said),
    key,
    h("div", { class: "scroll" }, withGroupRoles(drawing)),
  );
