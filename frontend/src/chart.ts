// A chart of the statistics view: its title, what it says, the drawing, and its numbers as a table.
import * as Plot from "@observablehq/plot";
import { cellGrid } from "./cell_grid";
import { withGroupRoles } from "./chart_names";
import type { Context } from "./context";
import { chartOf, h, hint, s } from "./dom";
import { numbers, type Row } from "./numbers";

export interface Chart {
  element: HTMLElement;
  mark(): void;
} // `mark`: after a change of the chosen head
// A chart that is drawn again only if `key` changes.
export interface ChartPlan {
  key: string;
  draw(): Chart;
}
export type Place = (
  x: number | string,
  y: number | string,
) => { x: number; y: number; width: number; height: number };
interface Options<T> {
  title: string;
  said: string;
  plot: Plot.PlotOptions;
  rows: Row[];
  values?: T[]; // of the rows
  chosen?: (value: T) => void; // by a click, or from the table
  legend?: SVGSVGElement;
  marks?: (place: Place) => SVGElement[]; // of the chosen head
}

export const scaleOfStatistic = ({ colors }: Context, domain: number[]) => ({
  type: "linear" as const,
  interpolate: (t: number) => colors.of(Math.max(t, 0.004)),
  domain,
});

export function chart<T>(
  width: number,
  { title, said, plot, rows, values = [], chosen, legend, marks }: Options<T>,
): Chart {
  const plotted = Plot.plot({
    width: Math.min(560, Math.max(280, width - 40)),
    marginBottom: 40,
    style: { background: "transparent", fontSize: "12px", fontFamily: "inherit" },
    ...plot,
  });
  const figure = chartOf(plotted);
  figure.setAttribute("role", "img");
  figure.setAttribute("aria-label", `${title}. ${said}`);
  const element = h(
    "figure",
    {},
    h("figcaption", {}, title),
    hint(said),
    legend,
    withGroupRoles(plotted),
    numbers(title.split(",")[0], rows, chosen && ((at) => chosen(values[at]))),
  );
  if (chosen)
    element.addEventListener("click", () => {
      const { value } = plotted as unknown as { value?: T };
      if (value) chosen(value);
    });
  const marked = s("g", { class: "chosen-mark", "pointer-events": "none", fill: "none" });
  if (marks) figure.append(marked);
  const place = placeOf(plotted);
  return {
    element,
    mark: () => {
      if (marks) marked.replaceChildren(...marks(place));
    },
  };
}

// Where a value is drawn: its cell of bands, or its point.
function placeOf(plotted: Plot.Plot): Place {
  const [across, down] = [plotted.scale("x"), plotted.scale("y")];
  return (x, y) => ({
    x: across!.apply(x),
    y: down!.apply(y),
    width: across!.bandwidth ?? 0,
    height: down!.bandwidth ?? 0,
  });
}

type Band = ((value: unknown) => number) & {
  domain(): unknown[];
  step(): number;
  bandwidth(): number;
};

// A mark of a plot whose axes are bands: a colored cell for each row and column, `inset` pixels smaller on each side.
export const bandCells =
  (
    color: (row: number, col: number) => string | null,
    inset = 0,
    opacity = 1,
  ): Plot.RenderFunction =>
  (_, { x, y }) => {
    const [across, down] = [x, y] as unknown as Band[];
    const group = cellGrid({
      rows: down.domain().length,
      cols: across.domain().length,
      wide: across.step(),
      tall: down.step(),
      gap: [
        2 * inset + across.step() - across.bandwidth(),
        2 * inset + down.step() - down.bandwidth(),
      ],
      color,
    });
    group.setAttribute(
      "transform",
      `translate(${across(across.domain()[0]) + inset},${down(down.domain()[0]) + inset})`,
    );
    group.setAttribute("fill-opacity", String(opacity));
    return group;
  };
