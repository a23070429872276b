// The figure sheet: chosen panels at the size that they have in a paper, with legend and caption, to be saved.
import { Colors, scaleOf, SCALES } from "./color";
import { headName, interval, type Context } from "./context";
import { queriesOf, type Text } from "./data";
import { actionButton, choice, cut, fill, h, hint, labelled, s, segments, visible } from "./dom";
import {
  TALLEST,
  FONT,
  INK,
  linesOfText,
  NORMAL,
  SMALL,
  round,
  widthOf,
  write,
  type Drawn,
  type Frame,
} from "./figure_frame";
import { headChoices } from "./head_choice";
import { legendInPoints, weightLegend } from "./legend";
import { CSV_HEAD, DRAW, PANELS } from "./figure_panels";
import {
  csvText,
  download,
  DPI,
  fileName,
  printDocument,
  printedPage,
  PT,
  pngBlob,
  svgBlob,
} from "./output";
import { viewOf } from "./registry";
import type { State } from "./state";

// Millimeters: the height of a figure on A4 with its margins. Points: a panel is made no lower.
const [PAGE, SHORTEST] = [247, 90];
const [LISTED, MARGIN] = [400, 4]; // words in a list to choose from; points around a figure
const LEGENDS: Record<string, string> = {
  log: "logarithmic",
  linear: "linear",
  sqrt: "square-root",
};
const legendName = ({ scale }: State) => `${LEGENDS[scale] ?? scale} scale`;

export interface Figure {
  svg: SVGSVGElement;
  text: string;
  rows: Drawn["rows"];
  width: number;
  height: number;
  name: string;
}

// The panels, the legend and the caption, as one SVG; its size is in mm.
async function drawFigure(
  context: Context,
  chosen: string[],
  colors: Colors,
  width = widthOfState(context.state),
  tallest = TALLEST,
): Promise<Figure> {
  const { state, text } = context;
  colors.scale = scaleOf(state.scale, text.tokens.length);
  const frame: Frame = {
    context,
    width: width * PT - 2 * MARGIN,
    colors,
    span: spanOf(state.span, text),
    tallest,
  };
  const panels = await Promise.all(
    chosen.map(async (panel) =>
      [await DRAW[panel](frame)].flat().map((one) => ({ panel, ...one })),
    ),
  );
  const drawn = panels.flat();
  const body = s("g", { transform: `translate(${MARGIN},${MARGIN})` });
  let y = 0;
  let x = 0;
  let tall = 0; // of the row of panels
  drawn.forEach((panel, at) => {
    const title = drawn.length > 1 ? `${"abcdefg"[at]}\u2002${panel.title}` : panel.title;
    const across = Math.max(panel.width, widthOf(title, NORMAL, true));
    if (x && x + across > frame.width) {
      y += tall;
      [x, tall] = [0, 0];
    }
    body.append(write(title, x, y + 5, { size: NORMAL, bold: true }));
    panel.node.setAttribute("transform", `translate(${round(x)},${round(y + 14)})`);
    panel.node.setAttribute("data-panel", panel.panel);
    body.append(panel.node);
    x += across + 20;
    tall = Math.max(tall, 14 + panel.height + 10);
  });
  y += tall;
  const keys = [...new Set(drawn.map((panel) => panel.keys).filter(Boolean))];
  if (keys.length) {
    const ofCells = scaleOf(state.scale, text.tokens.length, keys[0]);
    const uniform = keys.length === 1 ? ofCells.uniform : 0; // panels with cells of other sizes
    const legend = legendInPoints(weightLegend(colors, { ...ofCells, uniform }), SMALL);
    legend.node.setAttribute("transform", `translate(0,${round(y)})`);
    const name = `weight, ${legendName(state)}`;
    const isBeside = legend.width + 4 + widthOf(name, SMALL) <= frame.width;
    if (!isBeside) y += 10;
    body.append(
      legend.node,
      isBeside
        ? write(name, legend.width + 4, y + legend.height - 16)
        : write(name, 8, y + legend.height - 6),
    );
    y += legend.height + 4;
  }
  const caption = state.caption || captionOf(context, drawn);
  if (state.captioned !== "no")
    for (const line of linesOfText(caption, frame.width)) {
      body.append(write(line, 0, y + 5, { size: NORMAL }));
      y += 10.5;
    }
  const height = Math.ceil(((y + 2 * MARGIN) / PT) * 10) / 10;
  if (height > PAGE && tallest > SHORTEST)
    return drawFigure(context, chosen, colors, width, tallest * 0.85);
  const svg = s(
    "svg",
    {
      xmlns: "http://www.w3.org/2000/svg",
      width: `${width}mm`,
      height: `${height}mm`,
      viewBox: `0 0 ${round(width * PT)} ${round(height * PT)}`,
      "font-family": FONT,
      role: "img",
      "aria-label": caption,
      fill: INK,
    },
    s("title", {}, drawn.map(({ title }) => title).join("; ")),
    s("desc", {}, caption),
  );
  if (state.ground !== "clear")
    svg.append(s("rect", { class: "ground", width: "100%", height: "100%", fill: "#ffffff" }));
  svg.append(body);
  return {
    svg,
    text: caption,
    rows: [CSV_HEAD, ...drawn.flatMap((panel) => panel.rows)],
    width,
    height,
    name: `${text.title.slice(0, 41).replace(/\S*$/, (last) => (text.title.length > 40 ? "" : last))} ${headName(context)} ${chosen.join(" ")}`,
  };
}

// Model, text, layer and head, and one sentence for each panel.
function captionOf(context: Context, drawn: Drawn[]): string {
  const { text, state } = context;
  const model = (text as Text & { model?: string }).model;
  const heads = drawn.find((panel) => panel.heads)?.heads;
  const about = `${model ? `${model}, ` : ""}“${cut(text.title, 160)}”${/[.!?…]$/.test(text.title) ? "" : "."}${heads ? ` ${heads}.` : ""}`;
  const said = drawn
    .map((panel, at) => (drawn.length > 1 ? `(${"abcdefg"[at]}) ${panel.said}` : panel.said))
    .join(" ");
  const scale = drawn.some((panel) => panel.keys)
    ? ` Weights are shown on a ${legendName(state)}.`
    : "";
  const precision = context.source.precision(state.text);
  return `${about} ${said}${scale}${precision ? ` ${precision}` : ""}`;
}

// In mm; a link may say anything.
const widthOfState = ({ width }: State) =>
  Number(width) >= 4 && Number(width) <= 60 ? Number(width) * 10 : 85;

// "3-12": the tokens 3 to 12.
function spanOf(span: string, text: Text): [number, number] | null {
  const found = /^(\d+)\s*[-–]\s*(\d+)$/.exec(span.trim());
  if (!found) return null;
  const first = Math.min(Number(found[1]), queriesOf(text).length - 1);
  return [first, Math.max(first, Math.min(Number(found[2]), queriesOf(text).length - 1)) + 1];
}

const serialized = (figure: Figure) => new XMLSerializer().serializeToString(figure.svg);
export const documentOf = (figure: Figure) =>
  printedPage(serialized(figure), figure.width, figure.height, figure.name);

export function figureSheet(context: Context) {
  const controls = h("div", { class: "controls" });
  const preview = h("div", { class: "figure-paper" });
  const status = h("p", { class: "hint", role: "status" });
  const caption = h("textarea", {
    rows: 5,
    "aria-label": "Caption",
    spellcheck: false,
    oninput: () => change({ caption: caption.value }),
  });
  const element = h(
    "dialog",
    { class: "figure-sheet", "aria-label": "Figure" },
    h(
      "div",
      { class: "figure-head" },
      h("h2", {}, "Figure"),
      actionButton({ class: "quiet", onclick: () => element.close() }, "Close"),
    ),
    h(
      "div",
      { class: "figure-body" },
      h("div", { class: "figure-room scroll" }, preview, status),
      controls,
    ),
  );
  let turn = 0;
  let shown: Figure | null = null;
  let drawnFor = "";

  const chosen = () => context.state.figure.split(",").filter((panel) => panel in DRAW);
  const change = (change: Partial<State>) => context.set(change, true);
  element.addEventListener("close", () => {
    if (context.state.figure) context.set({ figure: "" });
  });

  async function draw() {
    const mine = ++turn;
    try {
      const figure = await drawFigure(context, chosen(), new Colors(preview));
      if (mine !== turn) return;
      shown = figure;
      preview.replaceChildren(figure.svg);
      preview.dataset.ground = context.state.ground;
      if (!context.state.caption) caption.value = figure.text;
      const share = figure.svg.getBoundingClientRect().width / ((figure.width / 25.4) * 96);
      status.textContent = `${figure.width} × ${figure.height} mm, shown at ${
        share > 0.99 ? "its size" : `${Math.round(100 * share)} % of its size`
      }. Letters have 7 and 8 points.`;
      if (context.state.span && !spanOf(context.state.span, context.text))
        status.textContent = `Tokens “${context.state.span}” are not understood. Write the first and the last, such as 0-20.`;
    } catch (error) {
      if (mine === turn)
        status.textContent = `This figure could not be drawn: ${(error as Error).message}`;
    }
  }

  async function save(kind: "svg" | "png" | "csv" | "pdf") {
    const figure = shown;
    if (!figure) return;
    const file = fileName(figure.name, kind);
    if (kind === "pdf")
      return printDocument(documentOf(figure), context.root, fileName(figure.name, "pdf"));
    if (kind === "csv")
      return download(
        new Blob(["\ufeff", csvText(figure.rows)], { type: "text/csv;charset=utf-8" }),
        file,
      );
    const text = serialized(figure);
    try {
      download(
        kind === "svg"
          ? svgBlob(text)
          : await pngBlob(text, (figure.width / 25.4) * DPI, (figure.height / 25.4) * DPI),
        file,
      );
    } catch (error) {
      status.textContent = `Not saved: ${(error as Error).message}`;
    }
  }

  function drawControls() {
    const { state, text } = context;
    const panels = h(
      "fieldset",
      {},
      h("legend", {}, "Panels"),
      ...PANELS.map(([panel, said]) => {
        const box = h("input", {
          type: "checkbox",
          value: panel,
          checked: chosen().includes(panel),
          onchange: () => {
            const wanted = PANELS.map(([name]) => name).filter((name) =>
              name === panel ? box.checked : chosen().includes(name),
            );
            if (!wanted.length) {
              box.checked = true;
              status.textContent = "A figure needs one panel.";
              return;
            }
            change({ figure: wanted.join(",") });
          },
        });
        return h("label", { class: "check" }, box, said);
      }),
    );
    const [first, last] = interval(state.query, LISTED, queriesOf(text).length);
    const button = (kind: "svg" | "png" | "csv" | "pdf", said: string, title: string) =>
      actionButton({ title, onclick: () => void save(kind) }, said);
    fill(
      controls,
      panels,
      ...headChoices(text, state, (part) => {
        change(part);
        if (part.layer !== undefined) drawControls();
      }),
      choice(
        "Word",
        String(state.query),
        queriesOf(text)
          .slice(first, last)
          .map((token, at): [string, string] => [
            String(first + at),
            `${visible(token)} · ${first + at}`,
          ]),
        (value) => change({ query: Number(value) }),
      ),
      labelled(
        "Tokens",
        h("input", {
          size: 9,
          value: state.span,
          placeholder: "all, or 0-20",
          "aria-label": "Tokens, from first to last, such as 0-20",
          onchange: (event: Event) =>
            change({ span: (event.target as HTMLInputElement).value.trim() }),
        }),
      ),
      set(
        "Width",
        state.width,
        [
          ["8.5", "8.5 cm"],
          ["17", "17 cm"],
        ],
        (width) => change({ width }),
      ),
      set(
        "Background",
        state.ground,
        [
          ["light", "White"],
          ["clear", "Transparent"],
        ],
        (ground) => change({ ground }),
      ),
      set("Color scale", state.scale, SCALES, (scale) => change({ scale })),
      set(
        "Caption",
        state.captioned,
        [
          ["yes", "In the figure"],
          ["no", "Left out"],
        ],
        (captioned) => change({ captioned }),
      ),
      caption,
      h(
        "p",
        {},
        actionButton(
          {
            class: "quiet",
            onclick: () => {
              change({ caption: "" });
            },
          },
          "Restore the automatic caption",
        ),
      ),
      h(
        "p",
        { class: "figure-save", role: "group", "aria-label": "Save the figure" },
        h("span", {}, "Save"),
        button(
          "pdf",
          "PDF…",
          "Opens the print of the browser; choose “Save as PDF”. The page has the size of the figure.",
        ),
        button("svg", "SVG", "Vector graphics, with its text as text"),
        button("png", "PNG", "300 dots per inch"),
        button("csv", "CSV", "The numbers that are shown"),
      ),
      hint(
        "PDF opens the browser's print: choose “Save as PDF”. The page has the size of the figure.",
      ),
    );
    if (state.caption) caption.value = state.caption;
  }

  // A group of buttons that stay where they are, so that the keyboard keeps its place.
  function set(
    label: string,
    value: string,
    options: [string, string][],
    chosen: (value: string) => void,
  ) {
    const group = segments(label, value, options, (name) => {
      group.querySelectorAll("button").forEach((button, at) => {
        button.setAttribute("aria-pressed", String(options[at][0] === name));
      });
      chosen(name);
    });
    return h("div", { class: "choice" }, h("span", {}, label), group);
  }

  return {
    element,
    update() {
      const { state } = context;
      if (!chosen().length) {
        if (element.open) element.close();
        return;
      }
      const opening = !element.open;
      if (opening) {
        element.showModal();
        drawControls();
      }
      const wanted = JSON.stringify(state);
      if (!opening && wanted === drawnFor) return;
      drawnFor = wanted;
      void draw();
    },
    // Puts the figure of the view where the browser's print finds it. In a page that is a file nothing waits for a
    // server, so this ends before the print that calls it begins.
    async beforePrint() {
      const panels = element.open
        ? chosen()
        : (viewOf(context.state.view).figure ?? "").split(",").filter(Boolean);
      if (
        !panels.length ||
        context.root.querySelector(":scope > .figure-print, :scope > .story-pages")
      )
        return;
      const paper = context.root.appendChild(h("div", { class: "figure-paper figure-print" }));
      try {
        const width = element.open ? widthOfState(context.state) : 170;
        paper.replaceChildren((await drawFigure(context, panels, new Colors(paper), width)).svg);
      } catch {
        paper.remove();
      }
    },
    afterPrint() {
      context.root.querySelectorAll(":scope > .figure-print").forEach((paper) => {
        paper.remove();
      });
    },
  };
}
