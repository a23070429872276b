// The strip of heads beside the big map: small maps of the layer; a click switches the head.
import { headName, type Context } from "./context";
import { rolesOf } from "./data";
import { h } from "./dom";
import { pinLetter } from "./pin_set";
import { smallMap, tilesOfLayer } from "./small_map";
import { stepOf } from "./steps";

export interface Strip {
  element: HTMLElement;
  update(): void;
}

export function headStrip(context: Context): Strip {
  const element = h("div", {
    class: "head-strip",
    role: "group",
    "aria-label": "Heads of this layer",
    onkeydown: (event: KeyboardEvent) => moved(event),
  });
  const fillTiles = tilesOfLayer(context, element, tile);

  function tile(layer: number, head: number): HTMLButtonElement {
    const roles = rolesOf(context.text, layer, head);
    const name = [headName(context, layer, head), ...roles].join(", ");
    const { kinds } = context.source.common;
    return h(
      "button",
      {
        type: "button",
        title: name,
        "aria-label": name,
        "data-head": head,
        onclick: () => context.set({ head }),
      },
      smallMap(context, layer, head),
      roles.length
        ? h("span", { class: "chip", "aria-hidden": "true" }, kinds[roles[0]].letter)
        : null,
      h("span", { class: "pin-letter", "aria-hidden": "true" }),
      h("span", { "aria-hidden": "true" }, head),
    );
  }

  // Arrows move between heads, while the map moves its cross with them.
  function moved(event: KeyboardEvent) {
    const step = stepOf(event.key, 1);
    if (step === undefined) return;
    event.stopPropagation();
    event.preventDefault();
    const count = context.text.layers[context.state.layer].heads.length;
    context.set({ head: (context.state.head + step + count) % count });
    element.querySelector<HTMLElement>("[aria-pressed='true']")?.focus();
  }

  return {
    element,
    update() {
      const { state } = context;
      fillTiles();
      for (const button of element.querySelectorAll<HTMLButtonElement>("button")) {
        const head = Number(button.dataset.head);
        button.setAttribute("aria-pressed", String(head === state.head));
        button.tabIndex = head === state.head ? 0 : -1;
        const letter = button.querySelector<HTMLElement>(".pin-letter")!;
        letter.textContent = pinLetter(state.pins, { text: state.text, layer: state.layer, head });
        letter.hidden = !letter.textContent;
      }
    },
  };
}
