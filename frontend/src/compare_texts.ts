// Two texts side by side in the chosen head, and the heads in which the chosen word changes most: two texts of the page,
// or a text and what a model answers to a question about it.
import { haveSameSizes } from "./compare_heads";
import { changeDetector } from "./changes";
import { headName, inText, interval, place, strongest, type Context, type Panel } from "./context";
import { counterparts, rowChange, shareWords } from "./counterparts";
import { hasSameHeads, queriesOf, shortName, sizeOf, type Text } from "./data";
import {
  actionButton,
  choice,
  cut,
  fill,
  h,
  hint,
  spaced,
  strong,
  table,
  visible,
  weighed,
} from "./dom";
import { shown } from "./format";
import { panelOf } from "./pin_figure";
import { asPins } from "./pin_set";
import { TILE } from "./source";
import type { State } from "./state";
import { arrowOf } from "./steps";
import { unknownNote } from "./unknown";
import { namesOfMap } from "./word_names";

const [WORDS, LISTED, SHORT] = [400, 8, 2048]; // tokens of a text, heads in the list, keys up to which all layers count

// A text with its number, the chosen query, and its weights in the chosen layer.
interface Side {
  text: Text;
  number: number;
  query: number;
  rows: Float32Array[];
}
interface Change {
  layer: number;
  head: number;
  change: number;
  keys: [number, number];
  weights: [number, number];
}

const numbersOf = ({ source }: Context) => source.titles.flatMap((_, at) => [at]);
export const canCompareTexts = (context: Context) => numbersOf(context).length > 1;

// In the view What if the second text is an answer: there may be none yet, and `between` tells what it changes.
export interface Asked {
  between: HTMLElement;
  answered(answer: Text | null): void;
}

// The direction of the first word with letters: "auto" would not look into words that have a direction of their own.
const directionOf = (tokens: string[], special: Set<number>) =>
  /\p{Script=Arabic}|\p{Script=Hebrew}|\p{Script=Syriac}/u.test(
    tokens.find((token, at) => !special.has(at) && /\p{L}/u.test(token)) ?? "",
  )
    ? "rtl"
    : "ltr";

// The second text: the chosen one, or the first other one with the same heads.
export async function secondText(
  context: Context,
  isAnswer = false,
): Promise<[number, Text] | null> {
  const { source, state, text } = context;
  const wanted = (isAnswer ? [state.other] : [state.other, ...numbersOf(context)]).filter(
    (at) => at !== state.text && source.titles[at] !== undefined,
  );
  for (const at of wanted) {
    const other = await source.text(at);
    if (hasSameHeads(text, other)) return [at, other];
    if (at === state.other) return null;
  }
  return null;
}

// The place of each query and key of a text in another one, -1 for none, and whether they share words at all.
function placesIn(text: Text, other: Text) {
  const paired = shareWords(text.tokens, other.tokens, new Set(text.special));
  const queriesPaired = paired && (!text.queries || shareWords(queriesOf(text), queriesOf(other)));
  const queries = queriesPaired
    ? counterparts(queriesOf(text), queriesOf(other))
    : queriesOf(text).map(() => -1);
  const keys = text.queries ? counterparts(text.tokens, other.tokens) : queries;
  return { paired, queriesPaired, queries, keys };
}

// The chosen word of the second text; -1: none.
const secondQuery = ({ query, otherQuery }: State, other: Text, queries: number[]) =>
  otherQuery >= 0 ? Math.min(otherQuery, queriesOf(other).length - 1) : (queries[query] ?? -1);

// What a figure of two texts shows: each text with its number and its chosen word.
export async function textsOfFigure(context: Context) {
  const { state, text } = context;
  const sides = [{ text, number: state.text, query: state.query }];
  const found = await secondText(context);
  if (!found) return sides;
  const [number, other] = found;
  const query = secondQuery(state, other, placesIn(text, other).queries);
  return [...sides, { text: other, number, query: Math.max(0, query) }];
}

export function comparedTexts(context: Context, asked?: Asked): Panel {
  const { source } = context;
  const [chooser, buttons] = [1, 2].map(() => h("span", { style: "display:contents" }));
  const [tools, pair, changes, maps] = [
    h("div", { class: "tools" }, chooser, buttons),
    h("div", { class: "pair" }),
    h("section", {}),
    h("div", { class: "pair" }),
  ];
  const element = h(
    "div",
    { class: "compare" },
    ...(asked ? [pair, asked.between, tools] : [tools, pair]),
    maps,
    changes,
  );
  const areTextsNew = changeDetector();
  let turn = 0;
  let paired = true; // the texts share words, so that a word of one has its place in the other
  let queriesPaired = true; // the same for the queries, which for a translator are other words

  function drawTools(other: number, second: Text | null, query: number) {
    const { state } = context;
    const options = numbersOf(context)
      .filter((at) => at !== state.text)
      .map((at): [string, string] => [String(at), cut(source.titles[at], 60)]);
    const isChosen = other >= 0;
    const hadFocus = chooser.contains((chooser.getRootNode() as Document).activeElement);
    // The same list stays, so that it keeps the focus while the keyboard chooses.
    if (areTextsNew(isChosen, JSON.stringify(options)))
      fill(
        chooser,
        !asked &&
          options.length > 0 &&
          choice(
            "Second text",
            String(other),
            isChosen ? options : [["-1", "choose a text"], ...options],
            (value) => context.set({ other: Number(value), otherQuery: -1 }),
          ),
      );
    const select = chooser.querySelector("select");
    if (select) select.value = String(other);
    if (hadFocus) select?.focus();
    fill(
      buttons,
      !asked &&
        second &&
        actionButton(
          {
            onclick: () =>
              context.set({
                text: other,
                other: state.text,
                query: Math.max(query, 0),
                otherQuery: -1,
                key: -1,
              }),
          },
          "Exchange the texts",
        ),
      second &&
        haveSameSizes([context, { text: second }]) &&
        actionButton(
          {
            onclick: () =>
              context.set({
                view: "compare",
                pair: "heads",
                pins: asPins([place(context), { ...place(context), text: other }]),
              }),
          },
          "Difference of the maps",
        ),
    );
  }

  async function draw() {
    const mine = ++turn;
    const { state, text } = context;
    const isThere = state.other >= 0 && source.titles[state.other] !== undefined;
    const [found, chosen] = await Promise.all([
      secondText(context, Boolean(asked)),
      isThere ? source.text(state.other) : null,
    ]);
    if (mine !== turn) return;
    asked?.answered(chosen);
    if (!found) return drawNone(isThere && state.other !== state.text ? state.other : -1);
    const [number, other] = found;
    const places = placesIn(text, other);
    ({ paired, queriesPaired } = places);
    const { queries, keys } = places;
    const query = secondQuery(state, other, queries);
    drawTools(number, other, query);
    const layers =
      Math.max(text.tokens.length, other.tokens.length) <= SHORT
        ? text.layers.map((_, at) => at)
        : [state.layer];
    const [rows, others] = await Promise.all([
      layersOf(state.text, state.query, layers),
      query < 0 ? null : layersOf(number, query, layers),
    ]);
    if (mine !== turn) return;
    const at = layers.indexOf(state.layer);
    const sides: Side[] = [
      { text, number: state.text, query: state.query, rows: rows[at] },
      { text: other, number, query, rows: others?.[at] ?? [] },
    ];
    // A word of the second text chooses the word of the first in its place, or is chosen alone if there is none.
    const choose = [
      (chosen: number) => context.set({ query: chosen, ...unpaired() }),
      (chosen: number) => {
        const back = queries.indexOf(chosen);
        context.set(back >= 0 ? { query: back, otherQuery: -1 } : { otherQuery: chosen });
      },
    ];
    pair.replaceChildren(...sides.map((side, n) => column(side, choose[n])));
    const drawn = await Promise.all(
      sides.map((side, n) => wholeMap(side, sides[1 - n].text, choose[n])),
    );
    if (mine !== turn) return;
    maps.replaceChildren(...drawn);
    if (text.attribution || other.attribution) return changes.replaceChildren(); // their numbers are no weights
    if (!paired)
      return fill(
        changes,
        h("p", { class: "hint few-words" }, "These texts share few words: choose a word in each."),
      );
    drawChanges(text, other, others && changed(layers, rows, others, keys), query);
  }
  // Another word of the first text chooses its counterpart, but only if words have one.
  const unpaired = () => (queriesPaired ? { otherQuery: -1 } : {});
  async function drawNone(chosen: number) {
    drawTools(chosen, null, 0);
    changes.replaceChildren();
    maps.replaceChildren();
    const { state, text } = context;
    const mine = turn;
    const rows = asked && (await source.rows(state.text, state.layer, state.query));
    if (mine !== turn) return;
    fill(
      pair,
      rows &&
        column({ text, number: state.text, query: state.query, rows }, (query) =>
          context.set({ query }),
        ),
      hint(
        chosen >= 0
          ? "These two texts have different layers or heads, so they are not compared. Choose another text."
          : asked
            ? source.common.live_model && "The answer stands here, beside the text."
            : "There is no second text with the same heads.",
      ),
    );
  }
  const layersOf = (number: number, query: number, layers: number[]) =>
    Promise.all(layers.map((layer) => source.rows(number, layer, query)));

  // One text: its words with their weights.
  function column({ text, query, rows }: Side, choose: (query: number) => void): HTMLElement {
    const row = query < 0 ? null : rows[context.state.head];
    const best = row ? strongest(row, 3) : [];
    return h(
      "section",
      { class: "side" },
      h("h2", { dir: "auto" }, cut(text.title, 90)),
      wordList(
        queriesOf(text),
        query,
        text.queries ? null : row,
        choose,
        new Set(text.queries ? [] : text.special),
      ),
      text.queries && hint("attends to"),
      text.queries && wordList(text.tokens, -1, row, null, new Set(text.special)),
      unknownNote(text),
      h(
        "p",
        { class: "readout", dir: "ltr" },
        ...(row
          ? [
              strong(visible(queriesOf(text)[query])),
              text.attribution ? " depends on " : " attends to ",
              ...weighed(text.tokens, row, best),
              ".",
            ]
          : ["This text has no word in the place of the chosen one. Choose one here."]),
      ),
    );
  }

  async function wholeMap(
    side: Side,
    beside: Text,
    choose: (query: number) => void,
  ): Promise<HTMLElement> {
    const { text, number, query } = side;
    const { source, colors } = context;
    const sizes = sizeOf(text);
    const width = Math.min(
      480,
      maps.clientWidth > 640 ? maps.clientWidth / 2 - 18 : maps.clientWidth,
    );
    let level = source.finest(number);
    while (Math.max(...sizes) > TILE << level) level++;
    const values = await source.tile({ ...place(context), text: number }, level, 0, 0, "mean");
    const grid = {
      values,
      rows: [0, sizes[0]] as [number, number],
      cols: [0, sizes[1]] as [number, number],
      level,
    };
    const panel = panelOf(grid, namesOfMap(text), {
      width,
      color: (weight) => colors.weight(weight),
      label: `All weights of ${inText(headName(context))} on this text`,
      onCell: (pair, click) => {
        if (pair && click) choose(pair[0]);
      },
      beside: namesOfMap(beside),
    });
    panel.mark([query, -1]);
    return h(
      "section",
      { class: "side" },
      h("h2", {}, `${headName(context)}: all words`),
      h("div", { class: "scroll" }, panel.figure),
      hint(
        "A row is a query, a column is a key. ",
        actionButton(
          {
            class: "quiet",
            onclick: () =>
              context.set({
                view: "head",
                text: number,
                query: query < 0 ? text.start.query : query,
                key: -1,
                x: -1,
                y: -1,
              }),
          },
          "Open the map",
        ),
      ),
    );
  }

  function wordList(
    tokens: string[],
    query: number,
    row: Float32Array | null,
    choose: ((at: number) => void) | null,
    special: Set<number>,
  ): HTMLElement {
    const range = interval(Math.max(query, 0), WORDS, tokens.length);
    const word = (at: number) => {
      const span = h(
        "span",
        {
          class: special.has(at) ? "special" : "word",
          dir: "auto",
          title: row ? `${visible(tokens[at])}: ${shown(row[at])}` : visible(tokens[at]),
          ...(choose
            ? { role: "option", "aria-selected": String(at === query), onclick: () => choose(at) }
            : {}),
        },
        visible(tokens[at]),
      );
      if (row) {
        span.style.background = context.colors.weight(row[at]);
        span.style.color = context.colors.textOn(row[at]);
      }
      return span;
    };
    return h(
      "div",
      {
        class: "words",
        dir: directionOf(tokens, special),
        ...(choose ? { role: "listbox", tabindex: 0, "aria-label": "Words" } : {}),
      },
      ...spaced(tokens, range, word),
    );
  }

  function drawChanges(text: Text, other: Text, found: Change[] | null, query: number) {
    if (!found) return changes.replaceChildren();
    const word = visible(queriesOf(text)[context.state.query]);
    const now = visible(queriesOf(other)[query]);
    const best = (weight: number, at: number, side: Text) =>
      h("td", {}, h("bdi", {}, cut(visible(side.tokens[at]), 16)), ` ${shown(weight)}`);
    fill(
      changes,
      h("h2", {}, `Heads in which “${word}”${now === word ? "" : ` or “${now}”`} changes most`),
      hint(
        "The change is half of the sum of all differences between the two rows " +
          "of weights: 0 if they are the same, 1 if they share no word. " +
          "Words are compared with those in their place. The last two columns name the word that has most weight in each text.",
      ),
      h(
        "div",
        { class: "scroll" },
        table(
          "changes",
          ["head", "change", "most on (first)", "most on (second)"],
          found.map(({ layer, head, change, keys, weights }) =>
            h(
              "tr",
              {},
              h(
                "th",
                { scope: "row" },
                actionButton(
                  {
                    class: "line",
                    "aria-pressed": String(
                      layer === context.state.layer && head === context.state.head,
                    ),
                    onclick: () => context.set({ layer, head }),
                  },
                  shortName(text.layers[layer], head),
                ),
              ),
              h("td", { class: "number" }, shown(change)),
              best(weights[0], keys[0], text),
              best(weights[1], keys[1], other),
            ),
          ),
        ),
      ),
    );
  }

  return {
    element,
    update() {
      void draw();
    },
    key(event) {
      const step = arrowOf(event.key)?.[1];
      if (!step) return false;
      const query = context.state.query + step;
      if (query >= 0 && query < queriesOf(context.text).length)
        context.set({ query, ...unpaired() }, true);
      return true;
    },
    close() {
      turn++; // what is being drawn has no place any more
    },
  };
}

// The heads with the largest change of the chosen row, the largest first.
function changed(
  layers: number[],
  rows: Float32Array[][],
  others: Float32Array[][],
  keys: number[],
): Change[] {
  const most = (row: Float32Array) => strongest(row, 1)[0] ?? 0;
  return layers
    .flatMap((layer, at) =>
      rows[at].map((row, head): Change => {
        const other = others[at][head];
        const places: [number, number] = [most(row), most(other)];
        return {
          layer,
          head,
          change: rowChange(row, other, keys),
          keys: places,
          weights: [row[places[0]], other[places[1]]],
        };
      }),
    )
    .sort((a, b) => b.change - a.change)
    .slice(0, LISTED);
}
