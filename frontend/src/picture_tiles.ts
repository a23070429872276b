// A map over the image for every head of a layer, or of all layers.
import { headName, type Context } from "./context";
import { layerLabel, layerName, mostHeads, type PicturePanel } from "./data";
import { actionButton, choice, fill, h, hint } from "./dom";
import { shown } from "./format";
import { coverOf, placeOf, shareOnScale, thumbnail } from "./patches";
import type { PictureTokens } from "./picture_tokens";
import { stepOf } from "./steps";

const ACROSS = 4; // tiles beside each other, if they are those of one layer

export function pictureTiles(context: Context, tokens: PictureTokens) {
  const element = h("section", { class: "tiles" });
  let tiles = new Map<string, HTMLButtonElement>();
  let turn = 0;
  let built = "";

  async function draw() {
    const mine = ++turn;
    const { state, text, source } = context;
    const layers = state.tiles === "all" ? [...text.layers.keys()] : [state.layer];
    const at = tokens.shown;
    const active = tokens.patchOf.get(at)?.[0] ?? 0;
    const panel = tokens.panels[active];
    if (!panel || tokens.choosesKeys) return fill(element);
    const lines = await Promise.all(
      layers.map((layer) =>
        tokens.isTurned
          ? source.columns(state.text, layer, at)
          : source.rows(state.text, layer, at),
      ),
    );
    if (mine !== turn) return;
    const wanted = [state.text, layers.join(), active].join("|");
    if (built !== wanted) {
      built = wanted;
      build(layers, panel);
    }
    layers.forEach((layer, row) => {
      lines[row].forEach((values, head) => {
        drawTile(layer, head, values, panel);
      });
    });
  }

  function build(layers: number[], panel: PicturePanel) {
    const { text, state } = context;
    const mine = built;
    void thumbnail(panel).then((photo) => {
      if (built === mine) element.style.setProperty("--photo", `url("${photo}")`);
    });
    element.style.setProperty(
      "--shape",
      tokens.isSound ? "5 / 2" : `${panel.width} / ${panel.height}`,
    );
    element.style.setProperty("--columns", String(layers.length > 1 ? mostHeads(text) : ACROSS));
    tiles = new Map();
    const rows = layers.map((layer) =>
      h(
        "div",
        { class: "tile-row", role: "row" },
        layers.length > 1 &&
          h("span", { class: "axis", role: "rowheader" }, layerLabel(text.layers[layer])),
        ...text.layers[layer].heads.map((_, head) => tile(layer, head)),
      ),
    );
    fill(
      element,
      h("h2", {}, "Every head"),
      choice(
        "Show",
        state.tiles,
        [
          ["layer", `heads of ${layerName(text.layers[state.layer])}`],
          ["all", "heads of all layers"],
        ],
        (chosen) => context.set({ tiles: chosen }),
      ),
      hint(
        `The same token in every head, each on its own scale. The number is ` +
          `the share of the weight that is on ${tokens.isSound ? "the sound" : "patches"}.`,
      ),
      h(
        "div",
        {
          class: `tile-grid${layers.length > 1 ? " all" : ""}`,
          role: "grid",
          "aria-label": "Heads",
        },
        ...rows,
      ),
    );
  }

  function tile(layer: number, head: number): HTMLButtonElement {
    const name = headName(context, layer, head);
    const made = actionButton(
      {
        class: "tile",
        role: "gridcell",
        title: name,
        "aria-label": name,
        "data-place": `${layer}.${head}`,
        onclick: () => context.set({ layer, head, heads: "one" }),
      },
      h("canvas", { "aria-hidden": "true" }),
      h("span", { class: "tile-name", "aria-hidden": "true" }, head),
      h("span", { class: "share", "aria-hidden": "true" }),
    );
    tiles.set(`${layer}.${head}`, made);
    return made;
  }

  function drawTile(layer: number, head: number, values: Float32Array, panel: PicturePanel) {
    const found = tiles.get(`${layer}.${head}`);
    if (!found) return;
    const { state, colors } = context;
    const isChosen = layer === state.layer && head === state.head;
    found.setAttribute("aria-selected", String(isChosen));
    found.tabIndex = isChosen ? 0 : -1;
    const top = tokens.largest(values, true);
    const shares = Float32Array.from({ length: panel.rows * panel.columns }, (_, patch) =>
      shareOnScale(state.scale, values[placeOf(panel, patch)] / top),
    );
    coverOf(shares, panel.rows, panel.columns, state.cover, colors, found.querySelector("canvas")!);
    const share = tokens.shareOfPatches(values);
    found.querySelector(".share")!.textContent = shown(share);
  }

  return {
    element,
    draw,
    // The next drawing builds the tiles again.
    clear() {
      built = "";
    },
    key(from: HTMLElement, key: string) {
      const all = [...tiles.values()];
      const step = stepOf(
        key,
        context.state.tiles === "all"
          ? context.text.layers[context.state.layer].heads.length
          : ACROSS,
      );
      const next =
        step === undefined ? undefined : all[all.indexOf(from as HTMLButtonElement) + step];
      if (!next) return false;
      const place = next.dataset.place!;
      const [layer, head] = place.split(".").map(Number);
      context.set({ layer, head, heads: "one" }, true);
      tiles.get(place)?.focus();
      return true;
    },
    close() {
      turn++;
    },
  };
}
