// Tiles of heads with a color each: a click chooses a head or drops it, pointing at a tile shows this head alone.
import { headName, type Context } from "./context";
import { layerName, rolesOf, shortName } from "./data";
import { choice, fill, h } from "./dom";
import {
  headColors,
  isChosen,
  listedHeads,
  nameOfHead,
  ownColor,
  toggled,
  type Head,
} from "./head_sets";
import { smallMap, tilesOfLayer } from "./small_map";
import { arrowOf, within } from "./steps";

export interface Tiles {
  element: HTMLElement;
  draw(): void;
  key(event: KeyboardEvent): boolean;
}

export function headTiles(context: Context, preview: (head: Head | null) => void): Tiles {
  const row = h("div", {
    class: "head-tiles-row",
    role: "group",
    "aria-label": "Heads of the layer",
  });
  const head = h("div", { class: "head-tiles-head" });
  const others = h("div", {
    class: "head-tiles-others",
    role: "group",
    "aria-label": "Chosen heads of other layers",
  });
  const element = h("div", { class: "head-tiles" }, head, row, others);
  const fillTiles = tilesOfLayer(context, row, (...at) => tile(at));

  function tile(at: Head): HTMLButtonElement {
    const name = headName(context, ...at);
    const roles = rolesOf(context.text, ...at).join(", ");
    const button = h(
      "button",
      {
        type: "button",
        class: "head-tile",
        title: roles ? `${name}: ${roles}` : name,
        "aria-label": name,
        onclick: () => context.set({ heads: toggled(context, at), layer: at[0], head: at[1] }),
        onpointerenter: () => preview(at),
        onpointerleave: () => preview(null),
        onfocus: () => preview(at),
        onblur: () => preview(null),
      },
      smallMap(context, ...at),
      h("span", { "aria-hidden": "true" }, at[1]),
    );
    button.dataset.place = nameOfHead(at);
    return button;
  }

  function drawHead() {
    const { state, text } = context;
    const options: [string, string][] = [
      ["one", "this head"],
      ["layer", "mean of the layer"],
      ["all", "mean of all"],
    ];
    if (isChosen(state)) options.push(["set", `${listedHeads(context).length} chosen`]);
    fill(
      head,
      choice("Heads", isChosen(state) ? "set" : state.heads, options, (heads) => {
        if (heads !== "set") context.set({ heads });
      }),
      text.layers.length > 1 &&
        h("b", { class: "head-tiles-layer" }, layerName(text.layers[state.layer])),
      h("span", { class: "hint" }, "Click tiles to choose heads; point at one to see it alone."),
    );
  }

  // The color of a head: of the set if it is chosen, otherwise its own, pale.
  function mark() {
    const { state } = context;
    const colors = headColors(context);
    const all = state.heads === "all" || state.heads === "layer";
    const buttons = [...row.querySelectorAll<HTMLButtonElement>(".head-tile")];
    for (const button of buttons) {
      const place = button.dataset.place!;
      const at = place.split(".").map(Number) as Head;
      button.setAttribute("aria-pressed", String(colors.has(place)));
      button.style.setProperty("--own", all ? "var(--soft)" : (colors.get(place) ?? ownColor(at)));
      button.tabIndex = at[1] === state.head ? 0 : -1;
    }
    const elsewhere = isChosen(state)
      ? listedHeads(context).filter(([layer]) => layer !== state.layer)
      : [];
    fill(
      others,
      ...elsewhere.map((at) =>
        h(
          "button",
          {
            type: "button",
            class: "picked",
            title: `Drop ${headName(context, ...at)}`,
            style: `--own:${colors.get(nameOfHead(at))}`,
            onclick: () => context.set({ heads: toggled(context, at) }),
            onpointerenter: () => preview(at),
            onpointerleave: () => preview(null),
          },
          `${shortName(context.text.layers[at[0]], at[1])} ×`,
        ),
      ),
    );
  }

  return {
    element,
    draw() {
      fillTiles();
      drawHead();
      mark();
    },
    // Arrows move between tiles; Tab reaches only one of them.
    key(event) {
      const buttons = [...row.querySelectorAll<HTMLButtonElement>(".head-tile")];
      const at = buttons.indexOf(event.composedPath()[0] as HTMLButtonElement);
      const step = arrowOf(event.key)?.[1];
      if (at < 0 || !step) return false;
      const next = buttons[within(at + step, buttons.length)];
      buttons[at].tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
      return true;
    },
  };
}
