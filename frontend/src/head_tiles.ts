// Tiles of heads with a color each: a click goes to a head, or, where several are chosen, chooses it or drops it. Pointing
// at a tile shows this head alone.
import { headName, type Context } from "./context";
import { rolesOf, shortName } from "./data";
import { actionButton, choice, fill, h } from "./dom";
import {
  headColors,
  isChosen,
  listedHeads,
  MEANS,
  nameOfHead,
  ownColor,
  toggled,
  type Head,
} from "./head_sets";
import { pinLetter } from "./pin_set";
import { smallMap, tilesOfLayer } from "./small_map";
import { stepOf } from "./steps";

export interface Tiles {
  head: HTMLElement; // which heads are shown together
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
  const head = h("span", { class: "head-tiles-head" });
  const others = h("div", {
    class: "head-tiles-others",
    role: "group",
    "aria-label": "Chosen heads of other layers",
  });
  const element = h("div", { class: "head-tiles" }, row, others);
  const fillTiles = tilesOfLayer(context, row, (...at) => tile(at));

  let alone: Head | null = null;

  // Not pointerenter: a tile that is drawn below a resting pointer is not pointed at.
  function show(at: Head | null) {
    if (at?.join() === alone?.join()) return;
    alone = at;
    preview(at);
  }

  function tile(at: Head): HTMLButtonElement {
    const name = headName(context, ...at);
    const roles = rolesOf(context.text, ...at);
    const said = [name, ...roles].join(", ");
    const { kinds } = context.source.common;
    const button = actionButton(
      {
        class: "head-tile",
        title: said,
        "aria-label": said,
        onclick: (event: MouseEvent) => choose(at, event.shiftKey),
        onpointermove: () => show(at),
        onpointerleave: () => show(null),
        onfocus: () => show(at),
        onblur: () => show(null),
      },
      smallMap(context, ...at),
      roles.length > 0 && h("b", { class: "chip", "aria-hidden": "true" }, kinds[roles[0]].letter),
      h("b", { class: "pin-letter", "aria-hidden": "true" }),
      h("span", { "aria-hidden": "true" }, at[1]),
    );
    button.dataset.place = nameOfHead(at);
    return button;
  }

  // Among several heads a click chooses or drops one; with Shift it begins a set.
  function choose(at: Head, isShift: boolean) {
    const { state } = context;
    const isSet = isShift || state.heads !== "one";
    context.set({
      layer: at[0],
      head: at[1],
      ...(isSet ? { heads: toggled(context, at) } : {}),
    });
  }

  function drawHead() {
    const { state } = context;
    const several = isChosen(state);
    const options = [
      ...MEANS,
      ["set", several ? `${listedHeads(context).length} chosen` : "several"] as [string, string],
    ];
    fill(
      head,
      choice("Heads", several ? "set" : state.heads, options, (heads) =>
        context.set({
          heads: heads === "set" ? nameOfHead([state.layer, state.head]) : heads,
        }),
      ),
      several &&
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
      const letter = button.querySelector<HTMLElement>(".pin-letter")!;
      letter.textContent = pinLetter(state.pins, { text: state.text, layer: at[0], head: at[1] });
      letter.hidden = !letter.textContent;
      button.style.setProperty("--own", all ? "var(--soft)" : (colors.get(place) ?? ownColor(at)));
      button.tabIndex = at[1] === state.head ? 0 : -1;
    }
    const elsewhere = isChosen(state)
      ? listedHeads(context).filter(([layer]) => layer !== state.layer)
      : [];
    fill(
      others,
      ...elsewhere.map((at) =>
        actionButton(
          {
            class: "picked",
            title: `Drop ${headName(context, ...at)}`,
            style: `--own:${colors.get(nameOfHead(at))}`,
            onclick: () => context.set({ heads: toggled(context, at) }),
            onpointermove: () => show(at),
            onpointerleave: () => show(null),
          },
          `${shortName(context.text.layers[at[0]], at[1])} ×`,
        ),
      ),
    );
  }

  return {
    head,
    element,
    draw() {
      fillTiles();
      drawHead();
      mark();
    },
    // Arrows move between tiles, and go to their heads unless several are chosen; Tab reaches only one of them.
    key(event) {
      const buttons = [...row.querySelectorAll<HTMLButtonElement>(".head-tile")];
      const at = buttons.indexOf(event.composedPath()[0] as HTMLButtonElement);
      const step = stepOf(event.key, 1);
      if (at < 0 || !step) return false;
      const next = (at + step + buttons.length) % buttons.length;
      buttons[at].tabIndex = -1;
      buttons[next].tabIndex = 0;
      buttons[next].focus();
      if (!isChosen(context.state)) context.set({ head: next });
      return true;
    },
  };
}
