// The alignment view: weights of target words on source words, several mechanisms on one color scale, with gold links.
import { changeDetector } from "../changes";
import { interval, meansOnly, type Context, type Panel } from "../context";
import { layerName, queriesOf, sizeOf, type Text } from "../data";
import { actionButton, choice, fill, h, s } from "../dom";
import { pauses } from "../pause";
import { panelOf } from "../pin_figure";
import { counted, shown } from "../format";
import type { View } from "../registry";
import type { Range } from "../source";
import { within } from "../steps";
import { unknownNote } from "../unknown";
import { namesOfMap } from "../word_names";

const [SHOWN, FEWEST, PITCH] = [60, 16, 11]; // words on a side: at most, at least; pixels between words, so that their names do not touch
const READINGS: Record<string, string> = {
  output: "Each row shows what the model attended to when it predicted this word.",
  input: "Each row shows what the model attended to when it read this word.",
};
const alike = (one: Text, other: Text) =>
  one.tokens.join("\n") === other.tokens.join("\n") &&
  queriesOf(one).join("\n") === queriesOf(other).join("\n");

export interface AlignmentPanel {
  title: string;
  aligned: string;
  place: [string, string]; // layer and head
  weights: (rows: Range, cols: Range) => Promise<Float32Array>;
} // row by row

// The heads of a layer, or the layers of this text and of all texts with the same tokens.
export async function alignmentPanels({ source, state, text }: Context): Promise<AlignmentPanel[]> {
  const mean = (heads: Float32Array[]) =>
    heads[0].map(
      (_, at) => heads.reduce((total, weights) => total + weights[at], 0) / heads.length,
    );
  if (state.panels === "heads")
    return text.layers[state.layer].heads.map((_, head) => ({
      title: `head ${head}`,
      aligned: text.aligned,
      place: [layerName(text.layers[state.layer]), String(head)],
      weights: async (rows, cols) =>
        (await source.window(state.text, state.layer, rows, cols))[head],
    }));
  const numbers = source.titles.flatMap((_, at) => [at]); // typed texts that are not kept any more leave holes
  const texts = await Promise.all(numbers.map((at) => source.text(at)));
  const several = texts.filter((one) => alike(one, text)).length > 1;
  return texts.flatMap((other, n) =>
    alike(other, text)
      ? other.layers.map((layer, place): AlignmentPanel => {
          const title = `${several ? `${other.title} · ` : ""}${layerName(layer)}`;
          return {
            title,
            aligned: other.aligned,
            place: [title, "mean"],
            weights: async (rows, cols) => mean(await source.window(numbers[n], place, rows, cols)),
          };
        })
      : [],
  );
}

// A gold link: a line of the paper's color inside it, so that it is visible on every color of the ramp.
const outline = (x: number, y: number, cell: number, sure: boolean): SVGElement[] => {
  const square = (name: string, inset: number, stroke: string) =>
    s("rect", {
      class: name,
      x: x + inset,
      y: y + inset,
      width: cell - 2 * inset,
      height: cell - 2 * inset,
      fill: "none",
      stroke,
      "stroke-width": name === "gold" ? 2 : 1.2,
      "stroke-dasharray": sure || name !== "gold" ? null : "3 2",
    });
  return [square("halo", 2.4, "var(--paper)"), square("gold", 0.9, "var(--gold)")];
};

export const view: View = {
  place: 6,
  make: alignmentView,
  figure: "alignment",
  hasTab: ({ text }) => text.queries !== null || text.gold.length > 0,
};

function alignmentView(context: Context): Panel {
  const [tools, body] = [h("div", { class: "tools" }), h("div", { class: "panels" })];
  const notes = h("div", {});
  const element = h("div", {}, tools, h("p", { class: "hint about-reading" }), notes, body);
  let turn = 0;

  function drawTools() {
    const { text, state } = context;
    tools.replaceChildren(
      choice(
        "Panels",
        state.panels,
        [
          ["layers", "layers and mechanisms, mean of heads"],
          ["heads", `heads of ${layerName(text.layers[state.layer])}`],
        ],
        (panels) => context.set({ panels }),
      ),
    );
  }
  // What the panels show: the words, and in which colors.
  const sides = (): Range[] => [
    interval(context.state.query, SHOWN, queriesOf(context.text).length),
    interval(context.text.queries ? 0 : context.state.query, most(), context.text.tokens.length),
  ];
  // As many columns as have room.
  const most = () =>
    Math.max(
      FEWEST,
      Math.min(SHOWN, Math.floor(((context.root.clientWidth || 800) - 140) / PITCH)),
    );
  // Which words the panels show, if they do not show all, and the way to the others.
  function partShown([rows, cols]: Range[]): HTMLElement | null {
    const { text, state } = context;
    const [I, J] = sizeOf(text);
    if (rows[1] - rows[0] === I && cols[1] - cols[0] === J) return null;
    const said = ([first, last]: Range, all: number, name: string) =>
      `${name} ${first} to ${last - 1} of ${counted(all)}`;
    const move = (by: number, face: string) =>
      actionButton({ onclick: () => context.set({ query: within(state.query + by, I) }) }, face);
    const step = Math.min(SHOWN, most());
    return h(
      "p",
      { class: "hint part-shown" },
      `Only a part is shown: ${said(rows, I, text.queries ? "target words" : "queries")}, ${said(
        cols,
        J,
        text.queries ? "source words" : "keys",
      )}, around the chosen word. `,
      move(-step, "Earlier"),
      " ",
      move(step, "Later"),
    );
  }
  const look = () => [
    context.state.text,
    context.state.panels,
    context.state.scale,
    context.colors.theme,
    sides(),
    context.state.panels === "heads" ? context.state.layer : "",
  ];

  async function draw() {
    const mine = ++turn;
    const { text } = context;
    const gold = text.gold.length
      ? ` Outlined: ${text.gold.length} gold links; a dashed outline is a possible link.`
      : "";
    const note = text.queries
      ? (READINGS[text.aligned] ?? "A row per target word, a column per source word.")
      : "Self-attention: a row per query, a column per key.";
    element.querySelector(".about-reading")!.textContent = `${note}${gold}`;
    fill(notes, meansOnly(context), unknownNote(text), partShown(sides()));
    const found = await alignmentPanels(context);
    if (mine !== turn) return;
    const [rows, cols] = sides();
    body.replaceChildren();
    const wide = body.clientWidth; // read once: with panels in the page it costs their layout
    const pause = pauses();
    for (const panel of found) {
      const weights = await panel.weights(rows, cols);
      if (mine !== turn) return;
      body.append(figureOf(panel, matrix(weights, rows, cols, wide)));
      await pause(); // keys and clicks come between
      if (mine !== turn) return;
    }
  }

  function figureOf(panel: AlignmentPanel, figure: SVGSVGElement): HTMLElement {
    const { text } = context;
    const size = `contain-intrinsic-size:${figure.getAttribute("width")}px ${Number(figure.getAttribute("height")) + 30}px`;
    return h(
      "figure",
      { style: size },
      h(
        "figcaption",
        {},
        h("span", { dir: "auto" }, panel.title),
        panel.aligned &&
          panel.aligned !== text.aligned &&
          h("span", { class: "hint" }, ` ${panel.aligned}-aligned`),
      ),
      h("div", { class: "scroll" }, figure),
    );
  }

  function matrix(values: Float32Array, rows: Range, cols: Range, all: number): SVGSVGElement {
    const { text, colors } = context;
    const [tall, wide] = [rows, cols].map(([first, last]) => last - first);
    const names = namesOfMap(text);
    const { figure, cells, cell } = panelOf({ values, rows, cols, level: 0 }, names, {
      width: all,
      color: (weight) => colors.weight(weight),
      label: "Weights of target words on source words",
      kind: "matrix",
      title: (i, j) =>
        `${names[0][rows[0] + i]} → ${names[1][cols[0] + j]}: ${shown(values[i * wide + j])}`,
      sizes: [PITCH, Math.min(26, 420 / tall, 420 / wide)],
    });
    for (const [i, j, sure] of text.gold)
      if (i >= rows[0] && i < rows[1] && j >= cols[0] && j < cols[1])
        cells.append(...outline((j - cols[0]) * cell, (i - rows[0]) * cell, cell, sure));
    return figure;
  }

  const arePanelsNew = changeDetector();
  return {
    element,
    update(before) {
      drawTools();
      const isNew = arePanelsNew(...look());
      if (before && !isNew) return; // another head: the panels stay
      void draw();
    },
    close() {
      turn++;
    },
  };
}
