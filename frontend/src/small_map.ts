// The small map of one head, and tiles for the heads of a layer, as strips, tiles and tables show them.
import { changeDetector } from "./changes";
import { drawCells } from "./color";
import type { Context } from "./context";
import { bytes, weightOf } from "./data";
import { h } from "./dom";

export function smallMap(
  { text, colors }: Context,
  layer: number,
  head: number,
): HTMLCanvasElement {
  const [rows, cols] = text.layers[layer].small;
  const canvas = h("canvas", { "aria-hidden": "true", class: rows < 40 ? "crisp" : "" });
  const weights = Array.from(bytes(text.layers[layer].heads[head].thumbnail), weightOf);
  return drawCells(
    canvas,
    rows,
    cols,
    Uint32Array.from(weights, (weight) => colors.cell(weight)),
  );
}

// Fills a box with a tile for each head of the layer, once for each layer and its colors.
export function tilesOfLayer(
  context: Context,
  box: Element,
  tile: (layer: number, head: number) => Element,
): () => void {
  const isNew = changeDetector();
  return () => {
    const { state, text, colors } = context;
    if (isNew(state.text, text.title, state.layer, state.scale, colors.theme))
      box.replaceChildren(
        ...text.layers[state.layer].heads.map((_, head) => tile(state.layer, head)),
      );
  };
}
