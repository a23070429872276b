// One ramp of colors for every view, and one mapping from a weight to a color. The lightness of the ramp (ramp.json,
// the same as src/regard/drawing/color.py) changes evenly: it is readable in gray and with color blindness.
import { interpolateRgb } from "d3-interpolate";
import ramp from "./ramp.json";

type Rgb = [number, number, number];
const read = (root: Element, name: string) => getComputedStyle(root).getPropertyValue(name).trim();
export const rgb = (hex: string): Rgb => {
  const number = parseInt(hex.slice(1), 16);
  return [number >> 16, (number >> 8) & 255, number & 255];
};
// Relative luminance, as the contrast of WCAG defines it.
const luminance = (color: Rgb) => {
  const [red, green, blue] = color.map((value) =>
    value <= 10 ? value / 3294.6 : ((value / 255 + 0.055) / 1.055) ** 2.4,
  );
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
};
// Black or white: the contrast with any color is at least 4.58.
const inkOn = (color: Rgb) => (luminance(color) > 0.179 ? "#000000" : "#ffffff");
const partsOf = (css: string) => css.match(/\d+/g)!.map(Number) as Rgb;
export const textOver = (css: string) => inkOn(partsOf(css));
const between = (stops: Rgb[], share: number): Rgb => {
  const place = share * (stops.length - 1);
  const at = Math.min(Math.floor(place), stops.length - 2);
  return [0, 1, 2].map((part) =>
    Math.round(stops[at][part] + (place - at) * (stops[at + 1][part] - stops[at][part])),
  ) as Rgb;
};

const STEPS = 255;
// The kinds of scale, in the order of the switch.
export const SCALES: [string, string][] = [
  ["linear", "Linear"],
  ["sqrt", "Square root"],
  ["log", "Log"],
];

export interface Scale {
  kind: string;
  floor: number;
  place: (weight: number) => number;
  ticks: number[];
  uniform: number;
}

// Maps weights to 0 ... 1. The logarithmic scale ends at a tenth of a uniform weight or lower. `keys`: how many keys a
// cell sums over, so that `uniform` is what a row of equal weights has in a cell.
export function scaleOf(kind: string, J: number, keys = 1): Scale {
  const uniform = Math.min(1, keys / Math.max(J, 1));
  if (kind === "linear")
    return { kind, floor: 0, place: (weight) => weight, ticks: [0.25, 0.5, 0.75, 1], uniform };
  if (kind === "sqrt")
    return { kind, floor: 0, place: Math.sqrt, ticks: [0.01, 0.1, 0.25, 0.5, 1], uniform };
  const decades = Math.max(2, Math.ceil(Math.log10(Math.max(J, 2))) + 1);
  const place = (weight: number) =>
    weight <= 0 ? 0 : Math.max(1e-6, 1 + Math.log10(Math.min(weight, 1)) / decades);
  return {
    kind,
    floor: 10 ** -decades,
    place,
    ticks: Array.from({ length: decades + 1 }, (_, at) => 10 ** (at - decades)),
    uniform,
  };
}

export class Colors {
  css: string[] = []; // 0: exactly 0; 1 to 255: the ramp; then the ramp of weights below 0
  table = new Uint32Array(); // the same as pixels
  scale = scaleOf("sqrt", 1); // the scale of the frame
  private texts: string[] = [];
  private byName = new Map<string, string>();
  private root: Element;

  constructor(root: Element) {
    this.root = root;
    this.read();
  }
  // The ramp starts at the color that is nearer to the paper, so it is turned in the dark theme.
  read() {
    this.byName.clear();
    const isDark = luminance(rgb(this.get("--paper"))) < 0.2;
    const stops = (isDark ? [...ramp].reverse() : ramp).map(rgb);
    const above = Array.from({ length: STEPS }, (_, at) => between(stops, at / (STEPS - 1)));
    const below = above.map(
      ([red, green, blue]): Rgb => [blue, Math.round((red + green) / 2), red],
    ); // orange for blue
    const all = [rgb(this.get("--none")), ...above, ...below];
    this.css = all.map(([red, green, blue]) => `rgb(${red}, ${green}, ${blue})`);
    this.texts = all.map(inkOn);
    this.table = Uint32Array.from(all, (color) => pixelOf(...color));
  }
  // What differs between the themes, for those who keep a drawing.
  get theme() {
    return this.css[9];
  }
  // A color of the style sheet. Kept, because to ask the browser for one after a change of the page costs a layout.
  get(name: string): string {
    const kept = this.byName.get(name) || read(this.root, name);
    this.byName.set(name, kept);
    return kept;
  }
  // A share of the ramp: for statistics that are not weights, which have a legend of their own.
  of(share: number) {
    return this.css[step(share)];
  }
  on(share: number) {
    return this.texts[step(share)];
  }
  pixel(share: number) {
    return this.table[step(share)];
  }
  // A share from -1 to 1: orange below 0.
  signed(share: number) {
    return this.css[share < 0 ? STEPS + step(-share) : step(share)];
  }
  textOnSigned(share: number) {
    return this.texts[share < 0 ? STEPS + step(-share) : step(share)];
  }
  // A weight: its color, the color of text on it, its pixel, and the color of a line on the paper.
  weight(weight: number) {
    return this.css[this.step(weight)];
  }
  textOn(weight: number) {
    return this.texts[this.step(weight)];
  }
  cell(weight: number) {
    return this.table[this.step(weight)];
  }
  line(weight: number) {
    return this.of(Math.max(0.3, this.scale.place(weight)));
  }
  // A difference, from -most to most: --second-more below 0, --first-more above.
  difference(most: number): (value: number) => string {
    const [more, less] = ["--first-more", "--second-more"].map((name) =>
      interpolateRgb(this.get("--none"), this.get(name)),
    );
    return (value) =>
      value > 0 ? more(Math.min(1, value / most)) : less(Math.min(1, -value / most));
  }
  private step(weight: number) {
    return weight > 0
      ? step(this.scale.place(weight))
      : weight < 0
        ? STEPS + step(this.scale.place(-weight))
        : 0;
  }
}
const step = (share: number) => (share > 0 ? 1 + Math.round(Math.min(share, 1) * (STEPS - 1)) : 0);

// Draws a cell as a pixel; the browser makes it large.
export function drawCells<Canvas extends HTMLCanvasElement>(
  canvas: Canvas,
  rows: number,
  cols: number,
  pixels: Uint32Array,
): Canvas {
  [canvas.width, canvas.height] = [cols, rows];
  const picture = new ImageData(new Uint8ClampedArray(pixels.buffer as ArrayBuffer), cols, rows);
  canvas.getContext("2d")!.putImageData(picture, 0, 0);
  return canvas;
}
// A color as a pixel.
export const pixelOf = (red: number, green: number, blue: number, opacity = 255) =>
  ((opacity << 24) | (blue << 16) | (green << 8) | red) >>> 0;

// Cells as an image, a pixel each.
export function pictureOf(
  values: ArrayLike<number>,
  rows: number,
  cols: number,
  color: (value: number) => string,
): HTMLCanvasElement {
  const known = new Map<string, number>();
  const pixels = Uint32Array.from(values, (value) => {
    const css = color(value);
    if (!known.has(css)) known.set(css, pixelOf(...partsOf(css)));
    return known.get(css)!;
  });
  return drawCells(document.createElement("canvas"), rows, cols, pixels);
}

// Distinct colors for heads and series (Okabe and Ito), for the light and the dark theme.
export const SERIES = [
  "#1b80c4",
  "#d98200",
  "#009e73",
  "#cc79a7",
  "#d55e00",
  "#56b4e9",
  "#8f8a2c",
  "#7a6fd0",
  "#b04a7a",
  "#4a7f6f",
  "#a86b32",
  "#6b7280",
];
