// Charts of the chosen head and of its layer, and the curves of a run.
import * as Plot from "@observablehq/plot";
import { chart, scaleOfStatistic, type Chart, type ChartPlan } from "./chart";
import { SERIES } from "./color";
import { rangeLegend } from "./legend";
import { headName, inText, type Context } from "./context";
import { layerName, shortName, type Chart as Curves } from "./data";
import { visible } from "./dom";
import { shown } from "./format";
import { cutName, wordNames } from "./word_names";

const NAMED = 40; // tokens with their names on an axis

// `width`: pixels of the page.
export function chartsOfHead(context: Context, width: number): ChartPlan[] {
  const { text, state, colors } = context;
  const look = [state.text, text.title, state.layer, colors.theme, width].join();
  return [
    { key: `${look} ${state.head}`, draw: () => offsetsOf(context, width) },
    { key: `${look} ${state.head}`, draw: () => weightReceived(context, width) },
    { key: look, draw: () => similarityOf(context, width) },
  ];
}

export const curvesOfRun = (context: Context, width: number): ChartPlan[] =>
  context.text.charts.map((curves) => ({
    key: [context.state.text, context.text.title, curves.title, context.colors.theme, width].join(),
    draw: () => curvesOf(width, curves),
  }));

function offsetsOf(context: Context, width: number): Chart {
  const { text, state, source } = context;
  const { heads } = text.layers[state.layer];
  const rows = heads[state.head].offsets.map((weight, at) => ({
    offset: at - source.common.offsets,
    weight,
    mean: heads.reduce((total, each) => total + each.offsets[at], 0) / heads.length,
  }));
  return chart(width, {
    title: `Relative offsets, ${inText(headName(context))}`,
    said: "Mean weight by offset; −1 is the previous token. Ticks: the mean of the layer.",
    plot: {
      height: 220,
      x: { label: "offset" },
      y: { label: "weight", grid: true },
      marks: [
        Plot.barY(rows, { x: "offset", y: "weight", fill: SERIES[0], tip: true }),
        Plot.tickY(rows, { x: "offset", y: "mean", stroke: "currentColor", strokeWidth: 2 }),
        Plot.ruleY([0]),
      ],
    },
    rows: rows.map(({ offset, weight, mean }) => ({ offset, weight, "mean of the layer": mean })),
  });
}

interface Received {
  at: number;
  weight: number;
  token: string;
}

function weightReceived(context: Context, width: number): Chart {
  const { text, state } = context;
  const { received } = text.layers[state.layer].heads[state.head];
  const size = text.tokens.length / received.length;
  const rows = received.map((weight, part): Received => {
    const at = Math.round(part * size);
    return { at, weight, token: text.tokens[at] };
  });
  const names = wordNames(text.tokens);
  const isNamed = size === 1 && names.length <= NAMED && names.length * 11 < width - 100;
  const axis = isNamed
    ? {
        height: 260,
        marginBottom: 100,
        x: {
          label: null,
          ticks: rows.map(({ at }) => at),
          tickFormat: (at: number) => cutName(names[at], 12),
          tickRotate: -90,
        },
      }
    : { height: 200, x: { label: "token" } };
  const tip = Plot.tip(
    rows,
    Plot.pointerX({
      x: "at",
      y: "weight",
      title: ({ token, at, weight }: Received) => `${visible(token)} (${at}): ${shown(weight)}`,
    }),
  );
  return chart(width, {
    title: `Weight received, ${inText(headName(context))}`,
    said:
      size > 1
        ? "The weight that tokens receive: summed over queries, averaged over parts of the text."
        : "The weight that every token receives, summed over queries.",
    plot: {
      ...axis,
      y: { label: "weight received", grid: true },
      marks: [
        Plot.areaY(rows, {
          x: "at",
          y: "weight",
          fill: SERIES[1],
          fillOpacity: 0.3,
          curve: "step",
        }),
        Plot.lineY(rows, { x: "at", y: "weight", stroke: SERIES[1], curve: "step" }),
        tip,
        Plot.ruleY([0]),
      ],
    },
    rows: rows.map(({ at, token, weight }) => ({
      token: `${visible(token)} (${at})`,
      "weight received": weight,
    })),
  });
}

function similarityOf(context: Context, width: number): Chart {
  const { text, state, colors } = context;
  const layer = text.layers[state.layer];
  const rows = layer.similarity.flatMap((row, a) => row.map((cosine, b) => ({ a, b, cosine })));
  return chart(width, {
    title: `Similarity of heads, ${layerName(layer)}`,
    said: "The cosine between the maps of every two heads of the layer; 1: the same map.",
    plot: {
      height: 46 + layer.heads.length * 22,
      x: { label: "head" },
      y: { label: "head" },
      marginLeft: 44,
      color: scaleOfStatistic(context, [0, 1]),
      marks: [Plot.cell(rows, { x: "a", y: "b", fill: "cosine", inset: 0.5, tip: true })],
    },
    rows: rows.map(({ a, b, cosine }) => ({
      heads: `${shortName(layer, a)}, ${shortName(layer, b)}`,
      cosine,
    })),
    legend: rangeLegend(colors, 0, 1, "cosine"),
  });
}

function curvesOf(width: number, { title, x: across, y: up, series, band }: Curves): Chart {
  const points = series.flatMap(({ name, points }) =>
    points.map(([x, y]) => ({ series: name, x, y })),
  );
  const places = points.some(({ x }) => typeof x === "string")
    ? [...new Set(points.map(({ x }) => x))]
    : undefined;
  const domain = series.map((one) => one.name);
  return chart(width, {
    title,
    said: `${up} by ${across}.${band ? " The band: from the lowest to the highest of the random orders." : ""}`,
    plot: {
      height: 260,
      x: { label: across, domain: places },
      y: { label: up, grid: true },
      color: {
        domain,
        range: domain.map((_, at) => SERIES[at % SERIES.length]),
        legend: domain.length > 1,
      },
      marks: [
        band &&
          Plot.areaY(band, { x: "0", y1: "1", y2: "2", fill: "currentColor", fillOpacity: 0.15 }),
        Plot.line(points, { x: "x", y: "y", stroke: "series", tip: true }),
        Plot.dot(points, { x: "x", y: "y", fill: "series", r: 2.5 }),
      ],
    },
    rows: points.map(({ series, x, y }) => ({ series, [across]: x, [up]: y })),
  });
}
