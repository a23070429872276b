// Pins: up to two heads, each of a text and a layer, as a link writes them: "0.5.3,0.2.1".
import { place as placeOf, type Context } from "./context";
import { actionButton } from "./dom";
import type { Place } from "./source";

const nameOf = ({ text, layer, head }: Place) => `${text}.${layer}.${head}`;

export function pinsOf(pins: string): Place[] {
  return pins
    .split(",")
    .flatMap((part) => {
      const numbers = /^(\d+)\.(\d+)\.(\d+)$/.exec(part.trim());
      return numbers
        ? [{ text: Number(numbers[1]), layer: Number(numbers[2]), head: Number(numbers[3]) }]
        : [];
    })
    .slice(0, 2);
}
export const asPins = (pins: Place[]) => pins.map(nameOf).join();
const isPinned = (pins: string, place: Place) =>
  pinsOf(pins).some((one) => nameOf(one) === nameOf(place));

// The pins after another one: a third replaces the second, and a pin that is there is taken off.
export function withPin(pins: string, place: Place): string {
  const before = pinsOf(pins);
  if (isPinned(pins, place)) return asPins(before.filter((one) => nameOf(one) !== nameOf(place)));
  return asPins([...before.slice(0, 1), place]);
}

// "A" or "B" of a pinned head; otherwise nothing.
export function pinLetter(pins: string, place: Place): string {
  return ["A", "B"][pinsOf(pins).findIndex((one) => nameOf(one) === nameOf(place))] ?? "";
}

// Pins the head of the state, or takes its pin off.
export function pinButton(context: Context): HTMLButtonElement {
  const { state } = context;
  const here = placeOf(context);
  const isThere = isPinned(state.pins, here);
  return actionButton(
    {
      class: "pin-button",
      "aria-pressed": String(isThere),
      title: "Compare heads in the view Compare (p)",
      onclick: () => context.set({ pins: withPin(state.pins, here) }),
    },
    isThere ? "Pinned" : "Pin this head",
  );
}
