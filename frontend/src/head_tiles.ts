// Tiles of heads with a colour each: a click chooses a head or drops it, pointing at a tile shows this head alone.
import { headName, type Context } from "./context";
import { layerName, shortName } from "./data";
import { choice, fill, h } from "./dom";
import { headColours, isChosen, listedHeads, nameOfHead, ownColour, toggled, type Head } from "./head_sets";
import { smallMap } from "./small_map";

export interface Tiles { element: HTMLElement; draw(): void; key(event: KeyboardEvent): boolean }

export function headTiles(context: Context, preview: (head: Head | null) => void): Tiles {
  const row = h("div", { class: "head-tiles-row", role: "group", "aria-label": "Heads of the layer" });
  const head = h("div", { class: "head-tiles-head" });
  const others = h("div", { class: "head-tiles-others", role: "group", "aria-label": "Chosen heads of other layers" });
  const element = h("div", { class: "head-tiles" }, head, row, others);
  let painted = "";

  function tile(at: Head): HTMLButtonElement {
    const name = headName(context, ...at);
    const roles = context.text.layers[at[0]].heads[at[1]].roles.map((role) => role.kind).join(", ");
    const button = h("button", { type: "button", class: "head-tile", title: roles ? `${name}: ${roles}` : name, "aria-label": name,
      onclick: () => context.set({ heads: toggled(context, at), layer: at[0], head: at[1] }),
      onpointerenter: () => preview(at), onpointerleave: () => preview(null), onfocus: () => preview(at),
      onblur: () => preview(null) }, smallMap(context, ...at), h("span", { "aria-hidden": "true" }, at[1]));
    button.dataset.place = nameOfHead(at);
    return button;
  }

  function drawHead() {
    const { state, text } = context;
    const options: [string, string][] = [["one", "this head"], ["layer", "mean of the layer"], ["all", "mean of all"]];
    if (isChosen(state)) options.push(["set", `${listedHeads(context).length} chosen`]);
    const step = (by: number, said: string, sign: string) => h("button", { type: "button", "aria-label": said, title: said,
      onclick: () => context.set({ layer: (state.layer + by + text.layers.length) % text.layers.length }) }, sign);
    fill(head, choice("Heads", isChosen(state) ? "set" : state.heads, options,
      (heads) => { if (heads !== "set") context.set({ heads }); }),
      text.layers.length > 1 && h("span", { class: "head-tiles-layer" }, step(-1, "Tiles of the previous layer", "‹"),
        h("b", {}, layerName(text.layers[state.layer])), step(1, "Tiles of the next layer", "›")),
      h("span", { class: "hint" }, "Click tiles to choose heads; point at one to see it alone."));
  }

  // The colour of a head: of the set if it is chosen, otherwise its own, pale.
  function mark() {
    const { state } = context;
    const colours = headColours(context);
    const all = state.heads === "all" || state.heads === "layer";
    const buttons = [...row.querySelectorAll<HTMLButtonElement>(".head-tile")];
    for (const button of buttons) {
      const place = button.dataset.place!;
      const at = place.split(".").map(Number) as Head;
      button.setAttribute("aria-pressed", String(colours.has(place)));
      button.style.setProperty("--own", all ? "var(--soft)" : colours.get(place) ?? ownColour(at));
      button.tabIndex = at[1] === state.head ? 0 : -1;
    }
    const elsewhere = isChosen(state) ? listedHeads(context).filter(([layer]) => layer !== state.layer) : [];
    fill(others, ...elsewhere.map((at) => h("button", { type: "button", class: "picked",
      title: `Drop ${headName(context, ...at)}`, style: `--own:${colours.get(nameOfHead(at))}`,
      onclick: () => context.set({ heads: toggled(context, at) }), onpointerenter: () => preview(at),
      onpointerleave: () => preview(null) }, `${shortName(context.text.layers[at[0]], at[1])} ×`)));
  }

  return {
    element,
    draw() {
      const { state, text, colours } = context;
      const wanted = [state.text, text.title, state.layer, state.scale, colours.css[9]].join();
      if (wanted !== painted) {
        painted = wanted;
        row.replaceChildren(...text.layers[state.layer].heads.map((_, at) => tile([state.layer, at])));
      }
      drawHead();
      mark();
    },
    // Arrows move between tiles; Tab reaches only one of them.
    key(event) {
      const buttons = [...row.querySelectorAll<HTMLButtonElement>(".head-tile")];
      const at = buttons.indexOf(event.composedPath()[0] as HTMLButtonElement);
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (at < 0 || step === undefined) return false;
      const next = buttons[Math.max(0, Math.min(buttons.length - 1, at + step))];
      buttons[at].tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
      return true;
    },
  };
}
