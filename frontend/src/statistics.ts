// The statistics view: maps of a statistic and of roles, offsets, similarity, weight received, and curves of a run.
import * as Plot from "@observablehq/plot";
import { named } from "./chart_names";
import { headName, inText, type Context, type Panel } from "./context";
import { rangeLegend, SERIES } from "./colour";
import { layerLabel, layerName, shortName } from "./data";
import { chartOf, choice, fill, h, saving, segments, shown, visible } from "./dom";
import { headTable } from "./head_table";
import { label as plainLabel } from "./labels";
import { numbers, type Row } from "./numbers";
import type { State } from "./state";
import { cutName, wordNames } from "./word_names";

const NAMED = 40; // tokens with their names on an axis
const DRAWN: (keyof State)[] = ["view", "text", "layer", "head", "colour", "table", "find", "scale"]; // needs a new drawing

export function statisticsView(context: Context): Panel {
  const [tools, body] = [h("div", { class: "tools" }), h("div", { class: "charts" })];
  const [heads, shape] = [headTable(context), h("div", { class: "tools" })];
  const element = h("div", {}, shape, tools, body, heads.element);

  type More = { chosen?: (value: any) => void; values?: any[]; key?: SVGSVGElement };
  const chart = (title: string, said: string, options: Plot.PlotOptions, rows: Row[],
    { chosen, values = [], key }: More = {}) => {
    const made = Plot.plot({ width: Math.min(560, Math.max(280, context.root.clientWidth - 40)),
      marginBottom: 40, style: { background: "transparent", fontSize: "12px", fontFamily: "inherit" }, ...options });
    const figure = chartOf(made);
    figure.setAttribute("role", "img");
    figure.setAttribute("aria-label", `${title}. ${said}`);
    const box = h("figure", {}, h("figcaption", {}, title,
      saving(() => `${context.text.title} ${title}`, () => made, () => context.root, () => key ?? null)),
      h("p", { class: "hint" }, said), key, named(made),
      numbers(title.split(",")[0], rows, chosen && ((at) => chosen(values[at]))));
    if (chosen) box.addEventListener("click", () => { const value = (made as any).value; if (value) chosen(value); });
    return box;
  };

  const colourScale = (domain: number[]) => ({ type: "linear" as const,
    interpolate: (t: number) => context.colours.of(Math.max(t, 0.004)), domain });

  function draw() {
    const isTable = context.state.table !== "";
    fill(shape, segments("Show", isTable ? "head" : "", [["", "Charts"], ["head", "Table of heads"]],
      (table) => context.set({ table })));
    tools.hidden = body.hidden = isTable;
    heads.element.hidden = !isTable;
    if (isTable) heads.draw();
    else drawCharts();
  }

  function drawCharts() {
    const { text, state, source } = context;
    const names = Object.keys(text.layers[0].heads[0].values);
    const name = names.includes(state.colour) ? state.colour : names[0];
    tools.replaceChildren(choice("Statistic", name, names.map((each) => [each, plainLabel(source.common, each)]),
      (colour) => context.set({ colour })));
    const layers = text.layers.map(layerLabel);
    const heads = text.layers.flatMap((layer, at) => layer.heads.map((head, number) => ({
      layer: layerLabel(layer), at, head: number, value: head.values[name],
        roles: head.roles.map((role) => source.common.kinds[role.kind].letter).join(""),
      kind: head.roles[0]?.kind ?? "none", x: 0, y: 0, chosen: at === state.layer && number === state.head,
    })));
    const values = heads.map((head) => head.value);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const go = (value: { at: number; head: number }) => context.set({ layer: value.at, head: value.head });
    const grid = { x: { label: "head", tickSize: 0, type: "band" as const },
      y: { label: "layer", tickSize: 0, type: "band" as const, domain: layers },
      height: 46 + text.layers.length * 34, marginLeft: 30 + 7 * Math.max(2, ...layers.map((name) => name.length)) };
    const chosen = [["var(--paper)", 4], ["var(--accent)", 2]].map(([stroke, strokeWidth]) => Plot.cell(
      heads.filter((head) => head.chosen), { x: "head", y: "layer", fill: "none", stroke, strokeWidth } as any));
    const figures = [
      chart(`Map of ${plainLabel(source.common, name)}`, source.common.statistics[name] ?? "",
        { ...grid, color: colourScale([low, high]), marks: [
        Plot.cell(heads, { x: "head", y: "layer", fill: "value", inset: 0.7, tip: true,
          title: (d: any) => `${headName(context, d.at, d.head)}: ${shown(d.value)}` }),
        context.root.clientWidth <= 520 ? null : Plot.text(heads,
          { x: "head", y: "layer", text: (d: any) => (Math.abs(d.value) >= 10 ? d.value.toFixed(0)
          : d.value.toFixed(2)), fill: (d: any) => context.colours.on((d.value - low) / (high - low || 1) || 0.004), fontSize: 10,
          pointerEvents: "none" }), ...chosen] }, heads.map((each) => ({ head: shortName(text.layers[each.at], each.head), [name]: each.value })),
        { chosen: go, values: heads, key: rangeLegend(context.colours, low, high, plainLabel(source.common, name)) }),
    ];
    if (text.has_roles) {
      const kinds = Object.keys(source.common.kinds).filter((kind) => heads.some((head) => head.kind === kind));
      figures.push(chart("Map of roles", "The letters of all roles of a head, coloured by the role with the highest score.",
        { ...grid, color: { domain: [...kinds, "none"],
        range: [...SERIES.slice(0, kinds.length), context.colours.get("--none")], legend: true }, marks: [
        Plot.cell(heads, { x: "head", y: "layer", fill: "kind", fillOpacity: 0.55, inset: 0.7, tip: true,
          title: (d: any) => `${headName(context, d.at, d.head)}: ${d.kind}` }),
        Plot.text(heads, { x: "head", y: "layer", text: "roles", fontWeight: 600, fontSize: 10,
          pointerEvents: "none" }), ...chosen] }, heads.map((each) => ({ head: shortName(text.layers[each.at], each.head),
        roles: text.layers[each.at].heads[each.head].roles.map((role) => role.kind).join(", ") || "none" })),
        { chosen: go, values: heads }));
    }
    const head = text.layers[state.layer].heads[state.head];
    const offsets = head.offsets.map((weight, at) =>
      ({ offset: at - source.common.offsets, weight,
      mean: text.layers[state.layer].heads.reduce((total, each) => total + each.offsets[at],
      0) / text.layers[state.layer].heads.length }));
    figures.push(chart(`Relative offsets, ${inText(headName(context))}`,
      "Mean weight by offset; −1 is the previous token. Ticks: the mean of the layer.",
      { height: 220, x: { label: "offset" }, y: { label: "weight", grid: true },
      marks: [Plot.barY(offsets, { x: "offset", y: "weight", fill: SERIES[0], tip: true }),
      Plot.tickY(offsets, { x: "offset", y: "mean", stroke: "currentColor", strokeWidth: 2 }), Plot.ruleY([0])] },
      offsets.map(({ offset, weight, mean }) => ({ offset, weight, "mean of the layer": mean }))));
    const size = text.tokens.length / head.received.length;
    const received = head.received.map((weight, at) =>
      ({ at: Math.round(at * size), weight, token: text.tokens[Math.round(at * size)] }));
    const tokenNames = wordNames(text.tokens).map((name) => cutName(name, 12));
    const isNamed = size === 1 && tokenNames.length <= NAMED && tokenNames.length * 11 < context.root.clientWidth - 100;
    const axis = isNamed ? { height: 260, marginBottom: 100, x: { label: null, ticks: received.map(({ at }) => at),
      tickFormat: (at: number) => tokenNames[at], tickRotate: -90 } } : { height: 200, x: { label: "token" } };
    figures.push(chart(`Weight received, ${inText(headName(context))}`,
      size > 1 ? "The weight that tokens receive: summed over queries, averaged over parts of the text."
      : "The weight that every token receives, summed over queries.",
      { ...axis, y: { label: "weight received", grid: true },
      marks: [Plot.areaY(received, { x: "at", y: "weight", fill: SERIES[1], fillOpacity: 0.3, curve: "step" }),
      Plot.lineY(received, { x: "at", y: "weight", stroke: SERIES[1], curve: "step" }),
      Plot.tip(received, Plot.pointerX({ x: "at", y: "weight",
      title: (d: any) => `${visible(d.token)} (${d.at}): ${shown(d.weight)}` })), Plot.ruleY([0])] },
      received.map(({ at, token, weight }) => ({ token: `${visible(token)} (${at})`, "weight received": weight }))));
    const similarity = text.layers[state.layer].similarity.flatMap((row, a) =>
      row.map((cosine, b) => ({ a, b, cosine })));
    figures.push(chart(`Similarity of heads, ${layerName(text.layers[state.layer])}`,
      "The cosine between the maps of every two heads of the layer; 1: the same map.",
      { height: 46 + text.layers[state.layer].heads.length * 22, x: { label: "head" }, y: { label: "head" },
      marginLeft: 44, color: colourScale([0, 1]), marks: [Plot.cell(similarity,
      { x: "a", y: "b", fill: "cosine", inset: 0.5, tip: true })] }, similarity.map(({ a, b, cosine }) =>
      ({ heads: [a, b].map((one) => shortName(text.layers[state.layer], one)).join(", "), cosine })), { key: rangeLegend(context.colours, 0, 1, "cosine") }));
    if (text.places) {
      heads.forEach((each, at) => { [each.x, each.y] = text.places![at]; });
      figures.push(
        chart("Heads with similar maps",
        "Each point is a head; near points have similar weights (classical scaling of the Jensen-Shannon distance). Colours are layers.", { height: 380, inset: 24, x: { ticks: [], label: null }, y: { ticks: [], label: null }, color: { domain: layers, range: layers.map((_, at) => SERIES[at % SERIES.length]), legend: layers.length < 13, label: "layer" }, marks: [
        Plot.dot(heads, { x: "x", y: "y", fill: "layer", r: 5, fillOpacity: 0.8, tip: true,
          title: (d: any) => `${headName(context, d.at, d.head)}` }),
        Plot.text(heads.filter((each) => each.chosen || heads.length <= 150), { x: "x", y: "y", text: (d: any) => shortName(text.layers[d.at], d.head), dy: -9, fontSize: 9,
          pointerEvents: "none" }),
        Plot.dot(heads.filter((each) => each.chosen),
          { x: "x", y: "y", r: 8, stroke: "var(--accent)", strokeWidth: 2 })] },
        heads.map((each) => ({ head: shortName(text.layers[each.at], each.head), x: each.x, y: each.y })), { chosen: go, values: heads }));
    }
    for (const each of text.charts) {
      const points = each.series.flatMap(({ name: series, points: list }) => list.map(([x, y]) => ({ series, x, y })));
      const places = points.some(({ x }) => typeof x === "string") ? [...new Set(points.map(({ x }) => x))] : undefined;
      const domain = each.series.map((one) => one.name);
      figures.push(chart(each.title, `${each.y} by ${each.x}.`,
        { height: 260, x: { label: each.x, domain: places }, y: { label: each.y, grid: true },
        color: { domain, range: domain.map((_, at) => SERIES[at % SERIES.length]), legend: domain.length > 1 },
        marks: [Plot.line(points, { x: "x", y: "y", stroke: "series", tip: true }),
        Plot.dot(points, { x: "x", y: "y", fill: "series", r: 2.5 })] },
        points.map(({ series, x, y }) => ({ series, [each.x]: x, [each.y]: y }))));
    }
    body.replaceChildren(...figures);
  }
  let width = 0;
  return { element, update(before) {
    const isSame = before && body.childElementCount && width === context.root.clientWidth
      && DRAWN.every((name) => before[name] === context.state[name]);
    width = context.root.clientWidth;
    if (!isSame) draw();
  } };
}
