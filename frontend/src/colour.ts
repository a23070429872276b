// One sequential colour scale with evenly changing lightness: readable in grey and with colour blindness.
import { interpolateRgbBasis } from "d3-interpolate";
import { s } from "./dom";

const read = (root: Element, name: string) => getComputedStyle(root).getPropertyValue(name).trim();
const channels = (colour: string): number[] => {
  const number = parseInt(colour.slice(1), 16);
  return colour.startsWith("#") ? [number >> 16, (number >> 8) & 255, number & 255]
    : colour.match(/[\d.]+/g)!.map(Number);
};

export const STEPS = 255;

export class Colours {
  css: string[] = []; // 0: nothing, 1 to 255: from least to most
  table = new Uint32Array(STEPS + 1);
  private root: Element;

  constructor(root: Element) {
    this.root = root;
    this.read();
  }
  read() {
    const between = interpolateRgbBasis(read(this.root, "--ramp").split(",").map((stop) => stop.trim()));
    this.css = [read(this.root, "--none"), ...Array.from({ length: STEPS }, (_, at) => between(at / (STEPS - 1)))];
    this.css.forEach((colour, at) => {
      const [red, green, blue] = channels(colour);
      this.table[at] = (255 << 24) | (blue << 16) | (green << 8) | red;
    });
  }
  get(name: string) { return read(this.root, name); }
  of(share: number) { return this.css[share <= 0 ? 0 : 1 + Math.round(Math.min(share, 1) * (STEPS - 1))]; }
  // A text colour that is readable on this colour.
  on(share: number) { return share > 0.5 ? this.get("--paper") : this.get("--ink"); }
}

export interface Scale { kind: string; floor: number; place: (weight: number) => number; ticks: number[] }

// Maps weights to 0 ... 1. The logarithmic scale ends at a tenth of a uniform weight or lower.
export function scaleOf(kind: string, J: number): Scale {
  if (kind === "linear") return { kind, floor: 0, place: (weight) => weight, ticks: [0, 0.25, 0.5, 0.75, 1] };
  const decades = Math.max(2, Math.ceil(Math.log10(Math.max(J, 2))) + 1);
  const place = (weight: number) => (weight <= 0 ? 0 : Math.max(1e-6, 1 + Math.log10(Math.min(weight, 1)) / decades));
  return { kind, floor: 10 ** -decades, place, ticks: Array.from({ length: decades + 1 },
    (_, at) => 10 ** (at - decades)) };
}

export function legend(colours: Colours, scale: Scale, said: string): SVGSVGElement {
  const [width, steps] = [240, 60];
  const figure = s("svg", { class: "legend", width: width + 40, height: 32, viewBox: `-20 0 ${width + 40} 32`,
    role: "img", "aria-label": `Colours: ${said}` });
  for (let at = 0; at < steps; at++) figure.append(
    s("rect", { x: (at * width) / steps, y: 0, width: width / steps + 0.5, height: 9,
    fill: colours.of((at + 0.5) / steps) }));
  const every = Math.ceil(scale.ticks.length / 5);
  scale.ticks.forEach((tick, at) => {
    if ((scale.ticks.length - 1 - at) % every) return;
    const x = scale.kind === "linear" ? tick * width : (at / (scale.ticks.length - 1)) * width;
    const label = tick === 0 ? "0" : tick < 0.01 ? tick.toExponential(0).replace("e-", "e−")
      : String(+tick.toPrecision(2));
    figure.append(s("line", { x1: x, x2: x, y1: 9, y2: 13, stroke: "currentColor" }),
      s("text", { x, y: 25, "font-size": 11, "text-anchor": "middle", fill: "currentColor" }, label));
  });
  return figure;
}

// Paints `rows` x `cols` cells with values from 0 to 1.
export function paint(canvas: HTMLCanvasElement, colours: Colours, places: ArrayLike<number>, rows: number,
  cols: number) {
  canvas.width = cols;
  canvas.height = rows;
  const picture = new Uint32Array(rows * cols);
  for (let at = 0; at < picture.length; at++) {
    const share = places[at];
    picture[at] = colours.table[share <= 0 ? 0 : 1 + Math.round(Math.min(share, 1) * (STEPS - 1))];
  }
  canvas.getContext("2d")!.putImageData(new ImageData(new Uint8ClampedArray(picture.buffer), cols, rows), 0, 0);
}

// Distinct colours for heads and series (Okabe and Ito), for the light and the dark theme.
export const SERIES = ["#1b80c4", "#d98200", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8f8a2c", "#7a6fd0",
  "#b04a7a", "#4a7f6f", "#a86b32", "#6b7280"];
