// The grid of all heads. Each row is one canvas, drawn while it is near the screen, under the buttons of its heads, which
// are made when the row comes near, so that thousands of heads cost what the visible ones cost.
import { headName, type Context } from "./context";
import { type HeadPlace, layerName, mostHeads, shortName } from "./data";
import { actionButton, cut, h } from "./dom";
import { rangeOf, shown } from "./format";
import { headOrder } from "./head_order";
import { label } from "./labels";
import { smallMap } from "./small_map";
import { stepOf } from "./steps";
import { colorOfTold, toldLinks } from "./told_links";

// Pixels: of a small map, at most and at least; from which on there is room for a name and for a number; of their lines.
const [LARGEST, SMALLEST, NAMED, NUMBERED, LINE] = [76, 7, 46, 34, 14];
const [PER_ROW, AT_ONCE] = [12, 12]; // heads of a row, if they are sorted by a statistic; rows that are made at once

export interface HeadGrid {
  element: HTMLElement;
  draw(): void;
  repaint(): void; // after a change of colors
  mark(): void; // after a change of the chosen head
  move(key: string): boolean;
  close(): void;
}
interface Row {
  element: HTMLElement;
  canvas: HTMLCanvasElement;
  heads: HeadPlace[];
  near: boolean;
  made: boolean;
}
interface Sizes {
  cell: number;
  gap: number;
  name: number;
  gauge: number;
}

export function headGrid(context: Context): HeadGrid {
  const element = h("div", { class: "heads", role: "grid", "aria-label": "All heads" });
  let rows: Row[] = [];
  let order: HeadPlace[] = [];
  let rowOf = new Map<string, Row>();
  let places = new Map<string, HTMLButtonElement>();
  let warned = new Set<string>();
  let soft = ""; // the color of names, read once: to ask the browser for it costs a layout
  let chosen: HTMLButtonElement | undefined;
  let columns = 1;
  let ends: [number, number] = [0, 1];
  let sizes: Sizes = { cell: LARGEST, gap: 5, name: LINE, gauge: 0 };
  const of = new Map<Element, Row>();

  const seen = new IntersectionObserver(
    (entries) =>
      entries.forEach(({ target, isIntersecting }) => {
        const row = of.get(target)!;
        row.near = isIntersecting;
        if (isIntersecting) {
          fillRow(row);
          paintRow(row);
        } else row.canvas.width = 0;
      }),
    { rootMargin: "400px" },
  );
  const resized = new ResizeObserver(() => {
    if (measure()) repaint();
  });

  const grouped = () => context.state.sort === "layer";
  const nameOf = ({ layer }: HeadPlace) => {
    const { text } = context;
    const name = layerName(text.layers[layer]);
    return name === `layer ${text.layers[layer].number}`
      ? `L${text.layers[layer].number}`
      : cut(name, 24);
  };

  // The sizes that fit into the width. True if they changed.
  function measure(): boolean {
    const longest = grouped() ? Math.max(...rows.map(({ heads }) => nameOf(heads[0]).length)) : 0;
    const left = longest ? Math.max(20, 8 + 6.6 * longest) : 0;
    const room = Math.max(0, element.clientWidth - left - 8);
    const gap = room / columns < 22 ? 1 : room / columns < 44 ? 3 : 6;
    const cell = Math.max(SMALLEST, Math.min(LARGEST, Math.floor(room / columns) - gap));
    const gauge =
      context.state.color in context.text.layers[0].heads[0].values
        ? cell >= NUMBERED
          ? LINE
          : 5
        : 0;
    const wanted = { cell, gap, name: cell >= NAMED ? LINE : 0, gauge };
    const changed = JSON.stringify(wanted) !== JSON.stringify(sizes);
    sizes = wanted;
    const pixels = { columns, cell, gap, left, foot: sizes.name + gauge };
    for (const [name, value] of Object.entries(pixels))
      element.style.setProperty(`--${name}`, name === "columns" ? String(value) : `${value}px`);
    element.classList.toggle("small", cell < NUMBERED);
    soft = context.colors.get("--soft");
    return changed;
  }

  function draw() {
    const { text, state } = context;
    order = headOrder(context);
    const values = order.map(
      ({ layer, head }) => text.layers[layer].heads[head].values[state.color] ?? 0,
    );
    ends = rangeOf(values);
    columns = grouped() ? mostHeads(text) : Math.min(PER_ROW, order.length);
    const parts = grouped()
      ? text.layers.map((_, layer) => order.filter((one) => one.layer === layer))
      : Array.from({ length: Math.ceil(order.length / PER_ROW) }, (_, at) =>
          order.slice(at * PER_ROW, (at + 1) * PER_ROW),
        );
    seen.disconnect();
    of.clear();
    [places, rowOf, chosen] = [new Map(), new Map(), undefined];
    warned = new Set(
      text.findings.flatMap((finding) => finding.heads.map((head) => `${finding.layer}.${head}`)),
    );
    const names = grouped() ? [columnNames()] : [];
    rows = parts.map((part, at) => row(part, at + names.length + 1));
    rows.slice(0, AT_ONCE).forEach(fillRow);
    element.setAttribute("aria-rowcount", String(rows.length + names.length));
    element.replaceChildren(...names, ...rows.map((each) => each.element));
    element.classList.toggle("loose", !grouped());
    measure();
    rows.forEach((each) => {
      seen.observe(each.element);
    });
    mark();
  }

  function columnNames(): HTMLElement {
    return h(
      "div",
      { class: "row names", role: "row" },
      h("span", { class: "axis" }),
      ...Array.from({ length: columns }, (_, head) =>
        h(
          "span",
          { class: "axis", role: "columnheader", "aria-label": `head ${head}` },
          `H${head}`,
        ),
      ),
    );
  }

  function row(heads: HeadPlace[], at: number): Row {
    const canvas = h("canvas", {
      class: "row-maps",
      width: 0,
      "aria-hidden": "true",
      style: `--count:${heads.length}`,
    });
    const made = h(
      "div",
      { class: "row", role: "row", "aria-rowindex": at },
      grouped() &&
        h(
          "span",
          {
            class: "axis",
            role: "rowheader",
            title: layerName(context.text.layers[heads[0].layer]),
          },
          nameOf(heads[0]),
        ),
      canvas,
    );
    const found = { element: made, canvas, heads, near: false, made: false };
    of.set(made, found);
    for (const { layer, head } of heads) rowOf.set(`${layer}.${head}`, found);
    return found;
  }

  // Make the buttons of a row, once.
  function fillRow(found: Row) {
    if (!found.made) found.canvas.before(...found.heads.map(button));
    found.made = true;
  }
  function buttonOf({ layer, head }: HeadPlace): HTMLButtonElement | undefined {
    const found = rowOf.get(`${layer}.${head}`);
    if (found) fillRow(found);
    return places.get(`${layer}.${head}`);
  }

  function button({ layer, head }: HeadPlace): HTMLButtonElement {
    const { text, state, source } = context;
    const about = text.layers[layer].heads[head];
    const value = about.values[state.color];
    const told = toldLinks(text);
    const isTold = told.some((link) => link.layer === layer && link.head === head);
    const warning = warned.has(`${text.layers[layer].number}.${head}`);
    const said = [
      headName(context, layer, head),
      value === undefined ? "" : `${label(source.common, state.color)} ${shown(value)}`,
      about.roles.map((role) => role.kind).join(" and "),
      warning ? "has a warning" : "",
    ]
      .filter(Boolean)
      .join(", ");
    const made = actionButton({
      role: "gridcell",
      "aria-label": said,
      "aria-selected": "false",
      tabindex: -1,
      title: `${shortName(text.layers[layer], head)}: ${said}`,
      "data-place": `${layer}.${head}`,
      class: [warning && "warned", isTold && "told"].filter(Boolean).join(" ") || null,
      style: isTold ? `--own:${colorOfTold({ layer, head }, told)}` : null,
    });
    if (about.roles.length)
      made.append(
        h(
          "span",
          { class: `chip${state.color === "role" ? " big" : ""}`, "aria-hidden": "true" },
          about.roles.map((role) => source.common.kinds[role.kind].letter).join(""),
        ),
      );
    places.set(`${layer}.${head}`, made);
    return made;
  }

  function paintRow({ canvas, heads }: Row) {
    const { text, state, colors } = context;
    const { cell, gap, name, gauge } = sizes;
    const dots = window.devicePixelRatio || 1;
    const [width, height] = [heads.length * (cell + gap) - gap, cell + name + gauge];
    [canvas.width, canvas.height] = [Math.round(width * dots), Math.round(height * dots)];
    const pen = canvas.getContext("2d")!;
    pen.scale(dots, dots);
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.font = "10px system-ui, sans-serif";
    heads.forEach(({ layer, head }, at) => {
      const [left, small] = [at * (cell + gap), smallMap(context, layer, head)];
      pen.imageSmoothingEnabled = small.width > cell * dots;
      pen.drawImage(small, left, 0, cell, cell);
      const value = text.layers[layer].heads[head].values[state.color];
      if (gauge && value !== undefined) {
        const share = (value - ends[0]) / (ends[1] - ends[0] || 1);
        pen.fillStyle = colors.of(Math.max(share, 0.004));
        pen.fillRect(left, cell, cell, gauge);
        pen.fillStyle = colors.on(Math.max(share, 0.004));
        if (gauge === LINE) pen.fillText(shown(value), left + cell / 2, cell + gauge / 2 + 0.5);
      }
      pen.fillStyle = soft;
      if (name)
        pen.fillText(
          shortName(text.layers[layer], head),
          left + cell / 2,
          cell + gauge + name / 2 + 0.5,
          cell,
        );
    });
  }
  const repaint = () => rows.filter((each) => each.near).forEach(paintRow);

  // Tab reaches only the chosen head; arrows move between heads.
  function mark() {
    for (const [at, { element }] of rows.entries())
      element.classList.toggle("at-depth", grouped() && at === context.state.depth);
    const wanted = buttonOf(context.state);
    if (wanted === chosen) return;
    for (const [each, is] of [
      [chosen, false],
      [wanted, true],
    ] as const) {
      if (!each) continue;
      each.tabIndex = is ? 0 : -1;
      each.setAttribute("aria-selected", String(is));
    }
    chosen = wanted;
  }

  const placeOf = (event: Event) => {
    const found = (event.target as Element)
      .closest<HTMLElement>("[data-place]")
      ?.dataset.place?.split(".")
      .map(Number);
    return found && { layer: found[0], head: found[1] };
  };
  element.addEventListener("click", (event) => {
    const at = placeOf(event);
    if (at) context.set({ ...at, view: "head", x: -1, y: -1 });
  });
  element.addEventListener("focusin", (event) => {
    const at = placeOf(event);
    if (at) context.set(at, true);
  });
  resized.observe(element);
  const printed = () => rows.forEach(paintRow);
  addEventListener("beforeprint", printed);

  return {
    element,
    draw,
    repaint,
    mark,
    move(key) {
      const { state } = context;
      const at = order.findIndex(({ layer, head }) => layer === state.layer && head === state.head);
      const width = grouped() ? context.text.layers[state.layer].heads.length : PER_ROW;
      const step = stepOf(key, width);
      if (step === undefined) return false;
      if (order[at + step]) buttonOf(order[at + step])?.focus();
      return true;
    },
    close() {
      seen.disconnect();
      resized.disconnect();
      removeEventListener("beforeprint", printed);
    },
  };
}
