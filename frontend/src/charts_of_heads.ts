// Charts of all heads: maps of a statistic and of roles, and heads with similar maps. They do not depend on the chosen
// head, which has a mark of its own.
import * as Plot from "@observablehq/plot";
import { bandCells, chart, type Chart, type ChartPlan, type Place } from "./chart";
import { SERIES } from "./color";
import { rangeLegend } from "./legend";
import { headName, type Context } from "./context";
import { layerLabel, shortName, type Head } from "./data";
import { s } from "./dom";
import { rangeOf, shown, statisticInCell } from "./format";
import { label as plainLabel } from "./labels";

// Pixels of a page without numbers in cells; the most heads with numbers, and with names; pixels around a cell.
const [NARROW, NUMBERED, ALL_NAMED, INSET] = [520, 400, 150, 0.7];
interface ChartHead {
  name: string;
  layer: string;
  at: number;
  head: number;
  roles: string[];
}

const headsOf = ({ text }: Context): ChartHead[] =>
  text.layers.flatMap((layer, at) =>
    layer.heads.map(({ roles }, head) => ({
      name: shortName(layer, head),
      layer: layerLabel(layer),
      at,
      head,
      roles: roles.map(({ kind }) => kind),
    })),
  );

const lookOf = ({ state, text, colors }: Context, width: number) =>
  [state.text, text.title, colors.theme, width].join();

// `width`: pixels of the page.
export function mapsOfHeads(context: Context, width: number, statistic: string): ChartPlan[] {
  const look = lookOf(context, width);
  return [
    { key: `${look} ${statistic}`, draw: () => mapOfStatistic(context, width, statistic) },
    ...(context.text.has_roles ? [{ key: look, draw: () => mapOfRoles(context, width) }] : []),
  ];
}

export const similarMaps = (context: Context, width: number): ChartPlan[] =>
  context.text.places
    ? [
        {
          key: lookOf(context, width),
          draw: () => similarHeads(context, width, context.text.places!),
        },
      ]
    : [];

const open =
  (context: Context) =>
  ({ at, head }: ChartHead) =>
    context.set({ layer: at, head });

// The axes of a grid with a cell for each head.
function gridOf({ text }: Context) {
  const layers = text.layers.map(layerLabel);
  return {
    x: { label: "head", tickSize: 0, type: "band" as const },
    y: { label: "layer", tickSize: 0, type: "band" as const, domain: layers },
    height: 46 + layers.length * 34,
    marginLeft: 30 + 7 * Math.max(2, ...layers.map((name) => name.length)),
  };
}

const frameOfChosen =
  ({ state, text }: Context) =>
  (place: Place) => {
    const cell = place(state.head, layerLabel(text.layers[state.layer]));
    return [
      ["var(--paper)", 4],
      ["var(--accent)", 2],
    ].map(([stroke, wide]) => s("rect", { ...cell, stroke, "stroke-width": wide }));
  };

// A cell for each head.
const cellsOfHeads = ({ text }: Context, opacity: number, color: (head: Head) => string) =>
  bandCells(
    (layer, at) => {
      const head = text.layers[layer].heads[at];
      return head ? color(head) : null;
    },
    INSET,
    opacity,
  );

function mapOfStatistic(context: Context, width: number, name: string): Chart {
  const { text, source, colors } = context;
  const heads = headsOf(context);
  const value = ({ at, head }: ChartHead) => text.layers[at].heads[head].values[name];
  const [low, high] = rangeOf(heads.map(value));
  const share = (number: number) => Math.max((number - low) / (high - low || 1), 0.004);
  const title = plainLabel(source.common, name);
  const inCells =
    width <= NARROW || heads.length > NUMBERED
      ? null
      : Plot.text(heads, {
          x: "head",
          y: "layer",
          fontSize: 10,
          text: (one: ChartHead) => statisticInCell(value(one)),
          fill: (one: ChartHead) => colors.on(share(value(one))),
          pointerEvents: "none",
        });
  return chart(width, {
    title: `Map of ${title}`,
    said: source.common.statistics[name] ?? "",
    plot: {
      ...gridOf(context),
      marks: [
        cellsOfHeads(context, 1, ({ values }) => colors.of(share(values[name]))),
        inCells,
        tipOf(heads, (one) => `${headName(context, one.at, one.head)}: ${shown(value(one))}`),
      ],
    },
    rows: heads.map((one) => ({ head: one.name, [name]: value(one) })),
    values: heads,
    chosen: open(context),
    legend: rangeLegend(colors, low, high, title),
    marks: frameOfChosen(context),
  });
}

const tipOf = (heads: ChartHead[], said: (one: ChartHead) => string) =>
  Plot.tip(heads, Plot.pointer({ x: "head", y: "layer", title: said }));

function mapOfRoles(context: Context, width: number): Chart {
  const { source, colors } = context;
  const heads = headsOf(context);
  const first = (roles: string[]) => roles[0] ?? "none";
  const kinds = Object.keys(source.common.kinds).filter((kind) =>
    heads.some(({ roles }) => first(roles) === kind),
  );
  const fills = new Map([
    ...kinds.map((kind, at): [string, string] => [kind, SERIES[at]]),
    ["none", colors.get("--none")],
  ]);
  const letters = ({ roles }: ChartHead) =>
    roles.map((role) => source.common.kinds[role].letter).join("");
  return chart(width, {
    title: "Map of roles",
    said: "The letters of all roles of a head, colored by the role with the highest score.",
    plot: {
      ...gridOf(context),
      color: {
        type: "ordinal",
        domain: [...fills.keys()],
        range: [...fills.values()],
        legend: true,
      },
      marks: [
        cellsOfHeads(context, 0.55, ({ roles }) => fills.get(roles[0]?.kind ?? "none")!),
        Plot.text(
          heads.filter(({ roles }) => roles.length),
          {
            x: "head",
            y: "layer",
            text: letters,
            fontWeight: 600,
            fontSize: 10,
            pointerEvents: "none",
          },
        ),
        tipOf(heads, ({ at, head, roles }) => `${headName(context, at, head)}: ${first(roles)}`),
      ],
    },
    rows: heads.map(({ name, roles }) => ({ head: name, roles: roles.join(", ") || "none" })),
    values: heads,
    chosen: open(context),
    marks: frameOfChosen(context),
  });
}

// The points whose names do not lie over each other, in a plot of this width: the first of those that would.
function apart<T extends { x: number; y: number; name: string }>(points: T[], width: number): T[] {
  const [[left, right], [low, high]] = (["x", "y"] as const).map((way) =>
    rangeOf(points.map((point) => point[way])),
  );
  const pixels = ({ x, y }: T) => [
    ((x - left) / (right - left || 1)) * (width - 108),
    ((y - low) / (high - low || 1)) * 292,
  ];
  return points.reduce<T[]>((kept, one) => {
    const [x, y] = pixels(one);
    const isFree = kept.every((other) => {
      const [u, v] = pixels(other);
      return Math.abs(x - u) > 2.8 * (one.name.length + other.name.length) || Math.abs(y - v) > 11;
    });
    if (isFree) kept.push(one);
    return kept;
  }, []);
}

function similarHeads(context: Context, width: number, places: [number, number][]): Chart {
  const { text, state } = context;
  const [layers, heads] = [text.layers.map(layerLabel), headsOf(context)];
  const points = heads.map((one, at) => ({ ...one, x: places[at][0], y: places[at][1] }));
  const named = new Set(
    heads.length <= ALL_NAMED ? apart(points, Math.min(560, Math.max(280, width - 40))) : [],
  );
  const said =
    "Each point is a head; near points have similar weights (classical scaling of the Jensen-Shannon distance). Colors are layers.";
  const ofChosen = (place: Place) => {
    const found = points.find(({ at, head }) => at === state.layer && head === state.head)!;
    const { x, y } = place(found.x, found.y);
    return [
      s("circle", { cx: x, cy: y, r: 8, stroke: "var(--accent)", "stroke-width": 2 }),
      // over the names of others
      s(
        "text",
        {
          x,
          y: y - 9,
          "font-size": 9,
          "text-anchor": "middle",
          fill: "currentColor",
          stroke: "var(--paper)",
          "stroke-width": 3,
          "paint-order": "stroke",
        },
        found.name,
      ),
    ];
  };
  return chart(width, {
    title: "Heads with similar maps",
    said,
    plot: {
      height: 380,
      inset: 24,
      x: { ticks: [], label: null },
      y: { ticks: [], label: null },
      color: {
        domain: layers,
        label: "layer",
        range: layers.map((_, at) => SERIES[at % SERIES.length]),
        legend: layers.length < 13,
      },
      marks: [
        Plot.dot(points, {
          x: "x",
          y: "y",
          fill: "layer",
          r: 5,
          fillOpacity: 0.8,
          tip: true,
          title: (one: ChartHead) => headName(context, one.at, one.head),
        }),
        Plot.text([...named], {
          x: "x",
          y: "y",
          text: "name",
          dy: -9,
          fontSize: 9,
          pointerEvents: "none",
        }),
      ],
    },
    rows: points.map(({ name, x, y }) => ({ head: name, x, y })),
    values: heads,
    chosen: open(context),
    marks: ofChosen,
  });
}
