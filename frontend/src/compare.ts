// The compare view: two texts side by side in the chosen head, and the heads in which the chosen word changes most.
import { paint } from "./colour";
import { headName, inText, interval, place, strongest, type Context, type Panel } from "./context";
import { counterparts, rowChange } from "./counterparts";
import { queriesOf, type Text } from "./data";
import { choice, cut, fill, h, joins, shown, strong, visible } from "./dom";
import { TILE, type Place } from "./source";
import { typedPanel } from "./typed";

const [WORDS, LISTED, SHORT] = [400, 8, 2048]; // tokens of a text, heads in the list, keys up to which all layers count

// A text with its number, the chosen query, and its weights in the chosen layer.
interface Side { text: Text; number: number; query: number; rows: Float32Array[] }
interface Change { layer: number; head: number; change: number; keys: [number, number]; weights: [number, number] }

const numbersOf = ({ source }: Context) => source.titles.flatMap((_, at) => [at]);
export const canCompare = (context: Context) =>
  !!context.source.common.live_model || numbersOf(context).length > 1;
const sameHeads = (one: Text, other: Text) => (one.queries === null) === (other.queries === null)
  && one.layers.map((layer) => layer.heads.length).join() === other.layers.map((layer) => layer.heads.length).join();

export function compareView(context: Context): Panel {
  const { source } = context;
  const [tools, pair, changes, maps] = [h("div", { class: "tools" }), h("div", { class: "pair" }), h("section", {}),
    h("div", { class: "pair" })];
  const typed = source.common.live_model
    ? typedPanel(context, (other) => context.set({ other })) : null;
  const element = h("div", { class: "compare" }, typed?.element ?? "", tools, pair, changes, maps);
  let turn = 0;

  // The second text: the chosen one, or the first other one with the same heads.
  async function second(): Promise<[number, Text] | null> {
    const { state, text } = context;
    const wanted = [state.other, ...numbersOf(context)].filter((at) => at !== state.text
      && source.titles[at] !== undefined);
    for (const at of wanted) {
      const other = await source.text(at);
      if (sameHeads(text, other)) return [at, other];
      if (at === state.other) return null;
    }
    return null;
  }

  function drawTools(other: number, query: number) {
    const { state } = context;
    const options = numbersOf(context).filter((at) => at !== state.text)
      .map((at): [string, string] => [String(at), cut(source.titles[at], 60)]);
    fill(tools, options.length > 0 && choice("Second text", String(other), options,
      (value) => context.set({ other: Number(value) })),
    other >= 0 && h("button", { type: "button", 
      onclick: () => context.set({ text: other, other: state.text, query: Math.max(query, 0), key: -1 }) },
    "Exchange the texts"));
  }

  async function draw() {
    const mine = ++turn;
    const { state, text } = context;
    typed?.update();
    const found = await second();
    if (mine !== turn) return;
    if (!found) {
      drawTools(-1, 0);
      changes.replaceChildren();
      maps.replaceChildren();
      return fill(pair, h("p", { class: "hint" }, state.other >= 0
        ? "These two texts have different layers or heads, so they are not compared. Choose another text."
        : "There is no second text with the same heads."));
    }
    const [number, other] = found;
    const queries = counterparts(queriesOf(text), queriesOf(other));
    const keys = text.queries ? counterparts(text.tokens, other.tokens) : queries;
    const query = queries[state.query] ?? -1;
    drawTools(number, query);
    const layers = Math.max(text.tokens.length, other.tokens.length) <= SHORT ? text.layers.map((_, at) => at)
      : [state.layer];
    const [rows, others] = await Promise.all([layersOf(state.text, state.query, layers),
      query < 0 ? null : layersOf(number, query, layers)]);
    if (mine !== turn) return;
    const at = layers.indexOf(state.layer);
    const sides: Side[] = [{ text, number: state.text, query: state.query, rows: rows[at] },
      { text: other, number, query, rows: others?.[at] ?? [] }];
    pair.replaceChildren(...sides.map((side, n) => column(side, n === 0 ? (chosen) => context.set({ query: chosen })
      : (chosen) => { const back = queries.indexOf(chosen); if (back >= 0) context.set({ query: back }); })));
    maps.replaceChildren(...sides.map(wholeMap));
    drawChanges(text, other, others && changed(layers, rows, others, keys), query);
  }
  const layersOf = (number: number, query: number, layers: number[]) =>
    Promise.all(layers.map((layer) => source.rows(number, layer, query)));

  // One text: its words with their weights.
  function column({ text, query, rows }: Side, choose: (query: number) => void): HTMLElement {
    const row = query < 0 ? null : rows[context.state.head];
    const best = row ? strongest(row, 3) : [];
    const links = best.flatMap((at, n) => [n ? ", " : "", strong(visible(text.tokens[at])), ` ${shown(row![at])}`]);
    return h("section", { class: "side", dir: "auto" }, h("h2", {}, cut(text.title, 90)),
      words(queriesOf(text), query, text.queries ? null : row, choose, new Set(text.queries ? [] : text.special)),
      text.queries && h("p", { class: "hint" }, "attends to"),
      text.queries && words(text.tokens, -1, row, null, new Set(text.special)),
      h("p", { class: "readout" }, ...(row ? [strong(visible(queriesOf(text)[query])), " attends to ", ...links, "."]
        : ["This text has no word in the place of the chosen one. Choose another word."])));
  }

  function wholeMap({ text, number, query }: Side): HTMLElement {
    const canvas = h("canvas", { role: "img", "aria-label": `All weights of ${inText(headName(context))} on this text` });
    void drawMap(canvas, { ...place(context), text: number }, text);
    return h("section", { class: "side" }, h("h2", {}, `${headName(context)}: all words`), canvas,
      h("p", { class: "hint" }, "A row looks, a column is looked at. ", h("button", { type: "button", class: "quiet",
        onclick: () => context.set({ view: "map", text: number, query: Math.max(query, 0), key: -1, x: -1, y: -1 }) },
      "Open the map")));
  }

  function words(tokens: string[], query: number, row: Float32Array | null, choose: ((at: number) => void) | null,
    special: Set<number>): HTMLElement {
    const [first, last] = interval(Math.max(query, 0), WORDS, tokens.length);
    const box = h("div", { class: "words", ...(choose ? { role: "listbox", tabindex: 0, "aria-label": "Words" } : {}) });
    for (let at = first; at < last; at++) {
      if (at > first && !joins(tokens[at], tokens[at - 1])) box.append(" ");
      const span = h("span", { class: special.has(at) ? "special" : "word", dir: "auto",
        title: row ? `${visible(tokens[at])}: ${row[at].toPrecision(4)}` : visible(tokens[at]) }, visible(tokens[at]));
      if (choose) { span.setAttribute("role", "option"); span.setAttribute("aria-selected", String(at === query));
        span.addEventListener("click", () => choose(at)); }
      if (row) {
        span.style.background = context.colours.weight(row[at]);
        span.style.color = context.colours.textOn(row[at]);
      }
      box.append(span);
    }
    return box;
  }

  async function drawMap(canvas: HTMLCanvasElement, at: Place, text: Text) {
    const sizes = [queriesOf(text).length, text.tokens.length];
    let level = source.finest(at.text);
    while (Math.max(...sizes) > TILE << level) level++;
    const [rows, cols] = sizes.map((size) => Math.ceil(size / 2 ** level));
    const values = await source.tile(at, level, 0, 0, "mean");
    paint(canvas, context.colours, values, rows, cols);
    canvas.classList.toggle("crisp", rows < TILE / 2);
    canvas.style.aspectRatio = `${cols} / ${rows}`;
  }

  function drawChanges(text: Text, other: Text, found: Change[] | null, query: number) {
    if (!found) return changes.replaceChildren();
    const word = visible(queriesOf(text)[context.state.query]);
    const now = visible(queriesOf(other)[query]);
    const best = (weights: Float32Array | number, at: number, side: Text) =>
      `${cut(visible(side.tokens[at]), 16)} ${shown(weights as number)}`;
    fill(changes, h("h2", {}, "Heads in which ", strong(word), now === word ? null : " → ",
      now === word ? null : strong(now), " changes most"),
      h("p", { class: "hint" }, "The change is half of the sum of all differences between the two rows of weights: 0 if they are the same, 1 if they share no word. Words are compared with those in their place."),
      h("div", { class: "scroll" }, h("table", { class: "changes" }, h("thead", {}, h("tr", {},
        ...["head", "change", "attends most to, first text", "second text"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, ...found.map(({ layer, head, change, keys, weights }) => h("tr", {},
        h("th", { scope: "row" }, h("button", { type: "button", class: "line",
          "aria-pressed": String(layer === context.state.layer && head === context.state.head),
          onclick: () => context.set({ layer, head }) }, headName(context, layer, head))),
        h("td", { class: "number" }, shown(change)), h("td", { dir: "auto" }, best(weights[0], keys[0], text)),
        h("td", { dir: "auto" }, best(weights[1], keys[1], other))))))));
  }

  return {
    element,
    update() { void draw(); },
    key(event) {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return false;
      const query = context.state.query + step;
      if (query >= 0 && query < queriesOf(context.text).length) context.set({ query }, true);
      return true;
    },
    close() { typed?.close(); },
  };
}

// The heads with the largest change of the chosen row, the largest first.
function changed(layers: number[], rows: Float32Array[][], others: Float32Array[][], keys: number[]): Change[] {
  const most = (row: Float32Array) => strongest(row, 1)[0] ?? 0;
  return layers.flatMap((layer, at) => rows[at].map((row, head): Change => {
    const other = others[at][head];
    const places: [number, number] = [most(row), most(other)];
    return { layer, head, change: rowChange(row, other, keys), keys: places,
      weights: [row[places[0]], other[places[1]]] };
  })).sort((a, b) => b.change - a.change).slice(0, LISTED);
}
