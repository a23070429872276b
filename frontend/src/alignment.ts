// The alignment view: weights of target words on source words, several mechanisms on one colour scale, with gold links.
import { legend } from "./colour";
import { interval, meansOnly, type Context, type Panel } from "./context";
import { layerName, queriesOf, type Text } from "./data";
import { choice, fill, h, s, saving } from "./dom";
import { unknownNote } from "./unknown";
import { cutName, wordNames } from "./word_names";

const [SHOWN, PANELS] = [60, 8]; // words on a side, and panels that are drawn at once
const READINGS: Record<string, string> = {
  output: "Each row shows what the model attended to when it predicted this word.",
  input: "Each row shows what the model attended to when it read this word.",
};
const alike = (one: Text, other: Text) => one.tokens.join("\n") === other.tokens.join("\n")
  && queriesOf(one).join("\n") === queriesOf(other).join("\n");

export interface AlignmentPanel { title: string; aligned: string; place: [string, string]; // layer and head
  rows: (query: number) => Promise<Float32Array> }

// The heads of a layer, or the layers of this text and of all texts with the same tokens.
export async function alignmentPanels({ source, state, text }: Context): Promise<AlignmentPanel[]> {
  const mean = (lines: Float32Array[]) => lines[0].map((_, at) =>
    lines.reduce((total, line) => total + line[at], 0) / lines.length);
  if (state.panels === "heads")
    return text.layers[state.layer].heads.map((_, head) =>
      ({ title: `head ${head}`, aligned: text.aligned, place: [layerName(text.layers[state.layer]), String(head)],
      rows: async (query: number) => (await source.rows(state.text, state.layer, query))[head] }));
  const numbers = source.titles.flatMap((_, at) => [at]); // typed texts that are not kept any more leave holes
  const texts = await Promise.all(numbers.map((at) => source.text(at)));
  const several = texts.filter((one) => alike(one, text)).length > 1;
  return texts.flatMap((other, n) => (alike(other, text) ? other.layers.map((layer, place): AlignmentPanel => {
    const title = `${several ? `${other.title} · ` : ""}${layerName(layer)}`;
    return { title, aligned: other.aligned, place: [title, "mean"],
      rows: async (query: number) => mean(await source.rows(numbers[n], place, query)) };
  }) : []));
}

// A gold link: a line of the paper's colour inside it, so that it is visible on every colour of the ramp.
const outline = (x: number, y: number, cell: number, sure: boolean): SVGElement[] => {
  const square = (name: string, inset: number, stroke: string) => s("rect", { class: name, x: x + inset, y: y + inset,
    width: cell - 0.6 - 2 * inset, height: cell - 0.6 - 2 * inset, fill: "none", stroke,
    "stroke-width": name === "gold" ? 2 : 1.2, "stroke-dasharray": sure || name !== "gold" ? null : "3 2" });
  return [square("halo", 2.4, "var(--paper)"), square("gold", 0.9, "var(--gold)")];
};

export function alignmentView(context: Context): Panel {
  const [tools, body] = [h("div", { class: "tools" }), h("div", { class: "panels" })];
  const notes = h("div", {});
  const element = h("div", {}, tools, h("p", { class: "hint about-reading" }), notes, body);
  let turn = 0;

  function drawTools() {
    const { text, state } = context;
    tools.replaceChildren(
      choice("Panels", state.panels, [["layers", "layers and mechanisms, mean of heads"],
        ["heads", `heads of ${layerName(text.layers[state.layer])}`]], (panels) => context.set({ panels })),
    );
  }
  // What the panels show: the words, and in which colours.
  const sides = (): [number, number][] => [interval(context.state.query, SHOWN, queriesOf(context.text).length),
    interval(context.text.queries ? 0 : context.state.query, SHOWN, context.text.tokens.length)];
  const look = () => [context.state.text, context.state.panels, context.state.scale, context.colours.css[9], sides(),
    context.state.panels === "heads" ? context.state.layer : ""].join();

  async function draw() {
    const mine = ++turn;
    const { text } = context;
    const gold = text.gold.length ? ` Outlined: ${text.gold.length} gold links; a dashed outline is a possible link.` : "";
    const note = text.queries ? READINGS[text.aligned] ?? "A row per target word, a column per source word."
      : "Self-attention: a row per query, a column per key.";
    element.querySelector(".about-reading")!.textContent = `${note}${gold}`;
    fill(notes, meansOnly(context), unknownNote(text));
    const found = await alignmentPanels(context);
    if (mine !== turn) return;
    const [rows, cols] = sides();
    body.replaceChildren();
    const wide = body.clientWidth; // read once: with panels in the page it costs their layout
    for (const [at, panel] of found.entries()) {
      if (at % PANELS === PANELS - 1) await new Promise((done) => setTimeout(done)); // keys and clicks come between
      const lines = await Promise.all(Array.from({ length: rows[1] - rows[0] }, (_, at) => panel.rows(rows[0] + at)));
      if (mine !== turn) return;
      const figure = matrix(lines, rows, cols, wide);
      const caption = h("figcaption", {}, h("span", { dir: "auto" }, panel.title),
        panel.aligned && panel.aligned !== text.aligned && h("span", { class: "hint" }, ` ${panel.aligned}-aligned`),
        saving(() => `${text.title} ${panel.title}`, () => figure, () => context.root,
          () => legend(context.colours, context.colours.scale, "weight")));
      const size = `contain-intrinsic-size:${figure.getAttribute("width")}px ${Number(figure.getAttribute("height")) + 30}px`;
      body.append(h("figure", { style: size }, caption, h("div", { class: "scroll" }, figure)));
    }
  }

  function matrix(lines: Float32Array[], rows: [number, number], cols: [number, number], all: number): SVGSVGElement {
    const { text, colours } = context;
    const [asking, asked] = [wordNames(queriesOf(text)), wordNames(text.tokens)];
    const room = (names: string[], letter = 12) => Math.max(...names.map((name) =>
      Math.min([...name].length, 14))) * letter * 0.58 + 10;
    const wide = Math.min(420, all - room(asking.slice(...rows)) - 4);
    const cell = Math.max(9, Math.min(26, 420 / lines.length, wide / (cols[1] - cols[0])));
    const size = Math.min(12, cell + 1);
    const [left, top] = [room(asking.slice(...rows)), room(asked.slice(...cols))];
    const [width, height] = [left + (cols[1] - cols[0]) * cell + 2, top + lines.length * cell + 2];
    const figure = s("svg", { class: "matrix", width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": "Weights of target words on source words" });
    const word = (name: string, x: number, y: number, turned: boolean) =>
      s("text", { x: 0, y: 0, transform: `translate(${x},${y})${turned ? " rotate(-90)" : ""}`,
      "text-anchor": turned ? "start" : "end", "dominant-baseline": "central", "font-size": size,
      fill: "currentColor" }, cutName(name, 14));
    for (let j = cols[0]; j < cols[1]; j++) figure.append(
      word(asked[j], left + (j - cols[0] + 0.5) * cell, top - 4, true));
    lines.forEach((line, row) => {
      figure.append(word(asking[rows[0] + row], left - 4, top + (row + 0.5) * cell, false));
      for (let j = cols[0]; j < cols[1]; j++) figure.append(
        s("rect", { x: left + (j - cols[0]) * cell, y: top + row * cell, width: cell - 0.6, height: cell - 0.6,
        fill: colours.weight(line[j]) }, s("title", {},
        `${asking[rows[0] + row]} → ${asked[j]}: ${line[j].toPrecision(4)}`)));
    });
    for (const [i, j, sure] of text.gold)
      if (i >= rows[0] && i < rows[1] && j >= cols[0] && j < cols[1])
        figure.append(...outline(left + (j - cols[0]) * cell, top + (i - rows[0]) * cell, cell, sure));
    return figure;
  }

  let drawn = "";
  return { element, update(before) {
    drawTools();
    const wanted = look();
    if (before && wanted === drawn) return; // another head: the panels stay
    drawn = wanted;
    void draw();
  }, close() { turn++; } };
}
