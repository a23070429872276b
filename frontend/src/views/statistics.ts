// The statistics view: charts of all heads, of the chosen head and of a run, or a table of all heads.
import { statisticsOf } from "../data";
import { changeDetector } from "../changes";
import type { Chart } from "../chart";
import { chartsOfHead, curvesOfRun } from "../charts_of_head";
import { mapsOfHeads, similarMaps } from "../charts_of_heads";
import { contactsOfHead } from "../contacts";
import type { Context, Panel } from "../context";
import { choice, fill, h, segments } from "../dom";
import { headTable } from "../head_table";
import { label } from "../labels";
import { pauses } from "../pause";
import type { View } from "../registry";
import type { State } from "../state";

const OF_TABLE: (keyof State)[] = ["view", "text", "layer", "head", "table", "find"]; // needs a new table

export const view: View = { place: 3, make: statisticsView, figure: "statistics" };

function statisticsView(context: Context): Panel {
  const [tools, body] = [h("div", { class: "tools" }), h("div", { class: "charts" })];
  const [heads, shape] = [headTable(context), h("div", { class: "tools" })];
  const element = h("div", {}, shape, tools, body, heads.element);
  const charts: (Chart & { key: string })[] = [];
  let turn = 0;
  const areToolsNew = changeDetector();
  let width = 0; // pixels of the page, read when it changes: later it would cost a layout for every key
  const resized = new ResizeObserver(() => {
    width = context.root.clientWidth;
  });

  const nameOfStatistic = () => {
    const names = statisticsOf(context.text);
    return names.includes(context.state.color) ? context.state.color : names[0];
  };

  function drawTools(isTable: boolean) {
    const { state, text, source } = context;
    tools.hidden = body.hidden = isTable;
    heads.element.hidden = !isTable;
    if (areToolsNew(state.text, text.title, isTable)) {
      fill(
        shape,
        segments(
          "Show",
          isTable ? "head" : "",
          [
            ["", "Charts"],
            ["head", "Table of heads"],
          ],
          (table) => context.set({ table }),
        ),
      );
      fill(
        tools,
        choice(
          "Statistic",
          nameOfStatistic(),
          statisticsOf(text).map((name) => [name, label(source.common, name)]),
          (color) => context.set({ color }),
        ),
      );
    }
    tools.querySelector("select")!.value = nameOfStatistic();
  }

  // Charts that would look the same stay in the page; between the others the browser answers keys.
  async function drawCharts() {
    const [mine, pause] = [++turn, pauses()];
    const plans = [
      ...mapsOfHeads(context, width, nameOfStatistic()),
      ...chartsOfHead(context, width),
      ...contactsOfHead(context, width),
      ...similarMaps(context, width),
      ...curvesOfRun(context, width),
    ];
    const isDrawn = (at: number) => charts[at]?.key === plans[at].key;
    charts.splice(plans.length).forEach((one) => {
      one.element.remove();
    });
    charts.forEach((one, at) => {
      if (isDrawn(at)) one.mark();
    });
    body.dataset.waiting = "1";
    for (const [at, { key, draw }] of plans.entries()) {
      if (isDrawn(at)) continue;
      await pause();
      if (mine !== turn) return;
      const before = charts[at];
      charts[at] = { ...draw(), key };
      charts[at].mark();
      if (before) before.element.replaceWith(charts[at].element);
      else body.append(charts[at].element);
    }
    body.dataset.waiting = "0";
  }

  return {
    element,
    update(before) {
      const { state } = context;
      const isTable = state.table !== "";
      drawTools(isTable);
      if (!before) {
        width = context.root.clientWidth;
        resized.observe(context.root);
      }
      if (!isTable) void drawCharts();
      else if (!before || !OF_TABLE.every((name) => before[name] === state[name])) heads.draw();
    },
    close() {
      turn++;
      resized.disconnect();
    },
  };
}
