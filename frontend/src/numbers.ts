// The numbers of a chart as a table: for the keyboard, for screen readers, and to be copied.
import { actionButton, fill, h, hint, table } from "./dom";
import { counted, exact } from "./format";

export type Row = Record<string, string | number>;
const MOST = 400;

const opened = new Set<string>(); // the charts whose numbers stay open when they are drawn again

// A list of rows that is filled when it is opened. `chosen` makes the first cell of a row a button.
export function numbers(chart: string, rows: Row[], chosen?: (at: number) => void): HTMLElement {
  const box = h("div", {
    class: "scroll",
    tabindex: 0,
    role: "region",
    "aria-label": `Numbers: ${chart}`,
  });
  const list = h(
    "details",
    {
      class: "chart-numbers",
      "data-chart": chart,
      open: opened.has(chart),
      ontoggle: () => {
        list.open ? opened.add(chart) : opened.delete(chart);
        fillIn();
      },
    },
    h("summary", {}, "Numbers"),
    box,
  );
  const said = (value: string | number) => (typeof value === "number" ? counted(value) : value);
  // The chart is drawn again: the focus goes to the same row.
  const choose = (event: Event, at: number) => {
    const root = (event.target as Element).getRootNode() as Document;
    chosen!(at);
    const again = root.querySelector(`details[data-chart="${CSS.escape(chart)}"]`);
    again?.querySelectorAll<HTMLElement>("tbody button")[at]?.focus();
  };
  const cell = (value: string | number, column: number, at: number) =>
    h(
      "td",
      { dir: "auto", title: typeof value === "number" ? exact(value) : null },
      column === 0 && chosen
        ? actionButton({ class: "line", onclick: (event: Event) => choose(event, at) }, said(value))
        : said(value),
    );
  function fillIn() {
    if (!list.open || box.childElementCount) return;
    fill(
      box,
      table(
        "numbers",
        Object.keys(rows[0] ?? {}),
        rows
          .slice(0, MOST)
          .map((row, at) =>
            h("tr", {}, ...Object.values(row).map((value, column) => cell(value, column, at))),
          ),
      ),
      rows.length > MOST && hint(`The first ${MOST} of ${rows.length} rows.`),
    );
  }
  fillIn();
  return list;
}
