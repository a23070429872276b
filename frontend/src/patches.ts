// Drawing of weights over an image: a pixel for each patch, stretched by the browser without smoothing.
import type { Context } from "./context";
import { STEPS, type Colors } from "./color";
import type { PicturePanel } from "./data";
import { h, s } from "./dom";
import { shown } from "./format";

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
  if (canvas.width !== columns) canvas.width = columns;
  if (canvas.height !== rows) canvas.height = rows;
  const picture = new ImageData(columns, rows);
  places.forEach((share, at) => {
    picture.data.set(pixel(share, cover, colors), 4 * at);
  });
  canvas.getContext("2d")!.putImageData(picture, 0, 0);
  return canvas;
}
function pixel(share: number, cover: string, colors: Colors): number[] {
  if (cover === "light") return [...NIGHT, Math.round(255 * OPAQUE * (1 - share))];
  const color = colors.table[share <= 0 ? 0 : 1 + Math.round(Math.min(share, 1) * (STEPS - 1))];
  return [color & 255, (color >> 8) & 255, (color >> 16) & 255, Math.round(255 * MIX)];
}

// The legend: what a weight looks like, from 0 to the largest.
export function legendOfCover(
  { state, colors }: Context,
  top: number,
  scaled: (share: number) => number,
): SVGSVGElement {
  const [width, steps] = [200, 50];
  const figure = s("svg", {
    class: "legend",
    width: width + 60,
    height: 34,
    viewBox: `-20 0 ${width + 60} 34`,
    role: "img",
    "aria-label": `Weights from 0 to ${shown(top)}`,
  });
  const photo = s("rect", { width, height: 10, fill: "#d9c8a9" });
  figure.append(photo);
  for (let at = 0; at < steps; at++) {
    const [red, green, blue, alpha] = pixel((at + 0.5) / steps, state.cover, colors);
    figure.append(
      s("rect", {
        x: (at * width) / steps,
        width: width / steps + 0.5,
        height: 10,
        fill: `rgb(${red},${green},${blue})`,
        "fill-opacity": alpha / 255,
      }),
    );
  }
  for (const share of [0, 0.01, 0.1, 0.25, 0.5, 1]) {
    const x = scaled(share) * width;
    if (
      share &&
      share < 1 &&
      (x < 34 || x > width - 34 || (share === 0.25 && state.scale === "log"))
    )
      continue;
    figure.append(
      s("line", { x1: x, x2: x, y1: 10, y2: 14, stroke: "currentColor" }),
      s(
        "text",
        { x, y: 27, "font-size": 11, "text-anchor": "middle", fill: "currentColor" },
        shown(share * top),
      ),
    );
  }
  return figure;
}
