// Drawing of weights over an image: a pixel for each patch, stretched by the browser without smoothing.
import type { Context } from "./context";
import { drawCells, pixelOf, type Colors } from "./color";
import type { PicturePanel } from "./data";
import { h } from "./dom";
import { shown } from "./format";
import { legendOf } from "./legend";

const [NIGHT, OPAQUE, MIX] = [[9, 12, 16], 0.88, 0.74]; // color of the dark, its strength, and that of colors
const [TILE, DECADES] = [260, 3]; // pixels of the image in a tile; decades of the logarithmic scale

// The token of a patch, counted row by row.
export const placeOf = (panel: PicturePanel, patch: number): number =>
  panel.tokens?.[patch] ?? panel.start + patch;

// The image of a panel. A saved run that somebody edited cannot make the page load anything else.
export const photoOf = (panel: PicturePanel): string =>
  /^data:image\/(png|jpeg);base64,[A-Za-z0-9+/=]*$/.test(panel.image) ? panel.image : "";

// A small copy of an image: many tiles show it, and browsers scale a large one again for each.
export async function thumbnail(panel: PicturePanel): Promise<string> {
  const image = new Image();
  image.src = photoOf(panel);
  await image.decode().catch(() => undefined);
  if (!image.width) return "";
  const canvas = h("canvas", {
    width: TILE,
    height: Math.max(1, Math.round((TILE * image.height) / image.width)),
  });
  canvas.getContext("2d")!.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

// The share of the largest weight, on the scale of colors.
export const shareOnScale = (scale: string, share: number): number =>
  scale === "linear"
    ? share
    : scale === "sqrt"
      ? Math.sqrt(share)
      : share <= 0
        ? 0
        : Math.max(0, 1 + Math.log10(share) / DECADES);

// The cover of an image: dark where the weight is small, or a color everywhere.
export function coverOf(
  places: Float32Array,
  rows: number,
  columns: number,
  cover: string,
  colors: Colors,
  canvas = h("canvas"),
): HTMLCanvasElement {
  return drawCells(
    canvas,
    rows,
    columns,
    Uint32Array.from(places, (share) => pixelOf(...pixel(share, cover, colors))),
  );
}
type Pixel = [number, number, number, number];
function pixel(share: number, cover: string, colors: Colors): Pixel {
  if (cover === "light") return [...NIGHT, Math.round(255 * OPAQUE * (1 - share))] as Pixel;
  const color = colors.pixel(share);
  return [color & 255, (color >> 8) & 255, (color >> 16) & 255, Math.round(255 * MIX)];
}

// A pixel over a color in place of the image.
const onImage = (over: Pixel) =>
  [217, 200, 169].map((below, at) => Math.round(below + (over[3] / 255) * (over[at] - below)));

// The legend: what a weight looks like, from 0 to the largest.
export function legendOfCover(
  { state, colors }: Context,
  top: number,
  scaled: (share: number) => number,
): SVGSVGElement {
  const places = [0, 0.01, 0.1, 0.25, 0.5, 1].map((share) => [scaled(share), share]);
  return legendOf({
    said: `Weights from 0 to ${shown(top)}`,
    color: (share) => `rgb(${onImage(pixel(share, state.cover, colors))})`,
    ticks: places
      .filter(
        ([place, share]) =>
          share === 0 ||
          share === 1 ||
          (place > 0.17 && place < 0.83 && (share !== 0.25 || state.scale !== "log")),
      )
      .map(([place, share]) => [place, shown(share * top)]),
  });
}
