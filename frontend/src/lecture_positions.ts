// The lecture on positions: sin and cos of position / base^(2m / D), as a heatmap, as curves, and their dot products.
import * as Plot from "@observablehq/plot";
import { interpolateRgb } from "d3-interpolate";
import { bandCells } from "./chart";
import { SERIES } from "./color";
import type { Context } from "./context";
import { counted } from "./format";
import { baseList, dial, figure, withControls, type Lecture, plotOf } from "./lecture_controls";

const sizes = { positions: 64, width: 32, base: 10000 };
const angle = (position: number, channel: number) =>
  position / sizes.base ** ((channel - (channel % 2)) / sizes.width);
const wave = (position: number, channel: number) =>
  channel % 2 ? Math.cos(angle(position, channel)) : Math.sin(angle(position, channel));
const every = (count: number, step = 1) =>
  Array.from({ length: Math.ceil(count / step) }, (_, at) => at * step);
// The number of positions after which the last pair of channels repeats.
const longest = () => 2 * Math.PI * sizes.base ** ((sizes.width - 2) / sizes.width);

function heatmap(context: Context): HTMLElement {
  const { colors } = context;
  const range = [colors.get("--less"), colors.get("--none"), colors.get("--more")];
  const [negative, positive] = [
    interpolateRgb(range[1], range[0]),
    interpolateRgb(range[1], range[2]),
  ];
  // Steps of 1/100, so that cells of like values are one path.
  const colorOf = (value: number) =>
    (value < 0 ? negative : positive)(Math.round(Math.abs(value) * 100) / 100);
  const chart = plotOf(context, {
    height: 340,
    x: {
      type: "band",
      domain: every(sizes.width),
      label: "channel",
      ticks: every(sizes.width, sizes.width > 16 ? 4 : 1),
    },
    y: {
      type: "band",
      domain: every(sizes.positions),
      label: "position",
      ticks: every(sizes.positions, 8),
    },
    color: { type: "linear", domain: [-1, 0, 1], range, label: "value" },
    marks: [bandCells((position, channel) => colorOf(wave(position, channel)))],
  });
  const heat = document.createElement("div");
  heat.append(chart.legend("color", { marginLeft: 14, marginRight: 14 })!, chart); // room for the minus of "−1"
  return heat;
}

function curves(context: Context) {
  const channels = [0, 1, 4, 8, 12].filter((channel) => channel < sizes.width);
  const points = channels.flatMap((channel) =>
    every(sizes.positions * 4).map((at) => ({
      channel: `channel ${channel}`,
      position: at / 4,
      value: wave(at / 4, channel),
    })),
  );
  return plotOf(context, {
    height: 240,
    y: { label: "value" },
    x: { label: "position" },
    color: { domain: channels.map((channel) => `channel ${channel}`), range: SERIES, legend: true },
    marks: [Plot.line(points, { x: "position", y: "value", stroke: "channel" })],
  });
}

function products(context: Context) {
  const found = every(2 * sizes.positions - 1)
    .map((at) => at - sizes.positions + 1)
    .map((offset) => ({
      offset,
      product: every(sizes.width / 2).reduce(
        (total, m) => total + Math.cos(angle(offset, 2 * m)),
        0,
      ),
    }));
  return plotOf(context, {
    height: 200,
    x: { label: "offset j − i" },
    y: { label: "p_i · p_j" },
    marks: [Plot.line(found, { x: "offset", y: "product", stroke: SERIES[2] }), Plot.ruleY([0])],
  });
}

const effects = {
  positions: () =>
    `Length ${sizes.positions}: the table has ${sizes.positions} rows, one for each token.`,
  width: () =>
    `Width ${sizes.width}: ${sizes.width / 2} pairs of a sine and a cosine, each pair slower than the pair before.`,
  base: () =>
    `Base ${counted(sizes.base)}: the fastest pair repeats after 6.3 positions, the slowest after ` +
    `${counted(Math.round(longest()))}.`,
};

export const positions: Lecture = (context) =>
  withControls(
    (changed) => [
      dial("Length of the text", sizes, "positions", [16, 128, 8], effects, changed),
      dial("Width of a vector", sizes, "width", [8, 64, 4], effects, changed),
      baseList("Base of the periods", sizes, effects.base, changed),
    ],
    () => [
      figure(
        "Sinusoidal positions",
        "Each row is added to the vector of one token: sines in even channels, cosines in odd channels.",
        heatmap(context),
      ),
      figure(
        "The same values as curves",
        "Low channels have short periods, high channels long periods. Together they identify a position, as the hands of a clock show a time.",
        curves(context),
      ),
      figure(
        "Their dot products",
        "The dot product of two positions depends only on their distance. RoPE uses this inside the score.",
        products(context),
      ),
    ],
    "charts",
  );
