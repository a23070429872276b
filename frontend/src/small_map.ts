// The small map of one head, as tiles, strips and tables show it.
import { paint } from "./colour";
import type { Context } from "./context";
import { bytes, weightOf } from "./data";
import { h } from "./dom";

export function smallMap({ text, colours }: Context, layer: number, head: number): HTMLCanvasElement {
  const [rows, cols] = text.layers[layer].small;
  const canvas = h("canvas", { "aria-hidden": "true", class: rows < 40 ? "crisp" : "" });
  paint(canvas, colours, Array.from(bytes(text.layers[layer].heads[head].thumbnail), weightOf), rows, cols);
  return canvas;
}
