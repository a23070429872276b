// Two heads, of one text or of two, side by side on one scale, and their difference.
import { changeDetector } from "./changes";
import { interval, place, type Context, type Panel as PinsPanel } from "./context";
import { layerName, queriesOf, sizeOf, type Text } from "./data";
import { actionButton, choice, cut, fill, h, hint, strong, table } from "./dom";
import { exact, shown } from "./format";
import { headChoices } from "./head_choice";
import { differenceLegend } from "./legend";
import { panelOf, type Grid, type Panel } from "./pin_figure";
import { asPins, pinsOf } from "./pin_set";
import type { Place, Range } from "./source";
import type { State } from "./state";
import { arrowOf, within } from "./steps";
import { namesOfMap } from "./word_names";

const [WHOLE, NEAR, LISTED] = [64, 48, 8]; // cells of a whole map, words around the chosen ones, keys in the table
interface Side {
  place: Place;
  text: Text;
  letter: string;
}
const DRAWN: (keyof State)[] = ["view", "text", "layer", "head", "pins", "scale", "x", "y"]; // needs a new drawing

// Two sides: the pins; in place of a missing one the head of the state, and the head after it.
export async function chosenSides(context: Context): Promise<Side[]> {
  const { state, source, text } = context;
  const here = place(context);
  const places = pinsOf(state.pins);
  if (!places.length) places.push(here);
  if (places.length < 2) {
    const same = asPins(places) === asPins([here]);
    places.push(
      same ? { ...here, head: (here.head + 1) % text.layers[here.layer].heads.length } : here,
    );
  }
  return Promise.all(
    places.map(async (place, at) => {
      const of = source.titles[place.text] === undefined ? state.text : place.text;
      const own = await source.text(of);
      const layer = within(place.layer, own.layers.length);
      return {
        text: own,
        letter: "AB"[at],
        place: { text: of, layer, head: within(place.head, own.layers[layer].heads.length) },
      };
    }),
  );
}

// Whether two maps have equally many rows and columns, so that they have a difference.
export const haveSameSizes = ([a, b]: { text: Text }[]) =>
  sizeOf(a.text).join() === sizeOf(b.text).join();
// The first map minus the second, and the greatest size of a difference.
export function differenceOf([a, b]: { values: Float32Array }[]): [Float32Array, number] {
  const values = a.values.map((value, at) => value - b.values[at]);
  return [values, values.reduce((most, value) => Math.max(most, Math.abs(value)), 0)];
}

export function comparedHeads(context: Context): PinsPanel {
  const [tools, body, key] = [
    h("div", { class: "tools" }),
    h("div", { class: "pin-panels" }),
    h("div", { class: "pin-key" }),
  ];
  const readout = h("p", { class: "readout pin-readout", role: "status", "aria-live": "polite" });
  const [moved, lower] = [h("p", { class: "hint moved" }), h("div", { class: "pin-lower" })];
  const element = h(
    "div",
    { class: "pins-view" },
    h("h1", {}, "Two heads and their difference"),
    hint(
      "Both heads have one color scale. Pin heads with the key p or the button in Head, or choose them here.",
    ),
    tools,
    key,
    body,
    readout,
    moved,
    lower,
  );
  const areToolsNew = changeDetector();
  let turn = 0;
  let sides: Side[] = [];
  let grids: Grid[] = [];
  let panels: Panel[] = [];

  function chooser(side: Side, at: number): HTMLElement {
    const { titles } = context.source;
    const change = (part: Partial<Place>) =>
      context.set({
        pins: asPins(sides.map((one, n) => (n === at ? { ...one.place, ...part } : one.place))),
      });
    const { place, text, letter } = side;
    return h(
      "span",
      { class: "pin-side", role: "group", "aria-label": `Side ${letter}` },
      h("span", { class: "pin-letter" }, letter),
      titles.filter(Boolean).length > 1 &&
        choice(
          `Text of ${letter}`,
          String(place.text),
          titles.flatMap((title, n): [string, string][] => [[String(n), cut(title, 30)]]),
          (value) => change({ text: Number(value) }),
        ),
      ...headChoices(
        text,
        place,
        (part) => change({ ...(part.layer === undefined ? {} : { head: 0 }), ...part }),
        ` of ${letter}`,
      ),
    );
  }

  const captionOf = ({ text, place, letter }: Side) => [
    strong(letter),
    ` ${layerName(text.layers[place.layer])}, head ${place.head}`,
    sides[0].place.text !== sides[1].place.text
      ? h("span", { class: "hint" }, ` ${cut(text.title, 40)}`)
      : null,
  ];
  const alike = () => haveSameSizes(sides);

  // The words of A, and those of B where they are others.
  const bothNames = () => {
    const [one, other] = sides.map(({ text }) => namesOfMap(text));
    return one.map((names, way) =>
      names.map((name, at) => (name === other[way][at] ? name : `${name} | ${other[way][at]}`)),
    ) as [string[], string[]];
  };

  // What is shown: the whole map in at most 64 cells a side, or single weights near the chosen words.
  async function gridOf({ place, text }: Side, level: number): Promise<Grid> {
    const { source, state } = context;
    const [I, J] = sizeOf(text);
    if (state.x < 0)
      return {
        values: await source.tile(place, level, 0, 0, "mean"),
        rows: [0, I],
        cols: [0, J],
        level,
      };
    const near = (at: number, size: number): Range =>
      interval(Math.floor(Math.min(at, size - 1)), NEAR, size);
    const [rows, cols] = [near(state.y, I), near(state.x, J)];
    return {
      values: (await source.window(place.text, place.layer, rows, cols))[place.head],
      rows,
      cols,
      level: 0,
    };
  }

  async function draw() {
    const mine = ++turn;
    const found = await chosenSides(context);
    const longest = Math.max(...found.flatMap(({ text }) => sizeOf(text)));
    const finest = Math.max(...found.map(({ place }) => context.source.finest(place.text)));
    const level = Math.max(finest, Math.ceil(Math.log2(longest / WHOLE)), 0);
    const loaded = await Promise.all(found.map((side) => gridOf(side, level)));
    if (mine !== turn) return;
    [sides, grids] = [found, loaded];
    drawTools(longest);
    drawPanels();
    point([context.state.query, context.state.key]);
    void drawChanges();
  }

  function drawTools(longest: number) {
    const { state } = context;
    const sizes = sides.map(({ place, text }) => [
      place.text,
      text.title,
      text.layers.length,
      text.layers[place.layer].heads.length,
    ]);
    if (areToolsNew(...sizes, longest > WHOLE, state.x < 0, context.source.titles.length))
      fill(
        tools,
        ...sides.map(chooser),
        actionButton(
          {
            class: "pin-button",
            onclick: () => context.set({ pins: asPins([sides[1].place, sides[0].place]) }),
          },
          "Swap",
        ),
        longest > WHOLE &&
          actionButton(
            {
              class: "pin-button",
              "aria-pressed": String(state.x < 0),
              onclick: () =>
                context.set(
                  state.x < 0 ? { x: Math.max(state.key, 0), y: state.query } : { x: -1, y: -1 },
                ),
            },
            state.x < 0 ? `Show ${NEAR} words` : "Show the whole maps",
          ),
      );
    for (const { place, letter } of sides)
      for (const [name, value] of Object.entries(place)) {
        const select = tools.querySelector<HTMLSelectElement>(
          `select[aria-label="${name[0].toUpperCase()}${name.slice(1)} of ${letter}"]`,
        );
        if (select) select.value = String(value);
      }
  }

  function drawPanels() {
    const { state, colors } = context;
    const weight = (value: number) => colors.weight(value);
    const cells = grids[0].level
      ? `, in cells of ${2 ** grids[0].level} × ${2 ** grids[0].level}`
      : "";
    const width = Math.max(
      200,
      body.clientWidth > 760 ? body.clientWidth / 3 - 16 : body.clientWidth,
    );
    const drawn = sides.map((side, at) => ({
      caption: captionOf(side),
      panel: panelOf(grids[at], namesOfMap(side.text), {
        width,
        color: weight,
        label: `Weights of side ${side.letter}`,
        onCell,
      }),
    }));
    panels = drawn.map(({ panel }) => panel);
    const figures = drawn.map(({ caption, panel }) => figureOf(caption, panel));
    context.keysPerCell(2 ** grids[0].level);
    fill(key);
    fill(moved);
    if (!alike())
      figures.push(
        h(
          "p",
          { class: "hint no-difference" },
          "The difference cannot be drawn: the texts have different numbers of words.",
        ),
      );
    else {
      const [values, most] = differenceOf(grids);
      const color = colors.difference(most || 1);
      const panel = panelOf({ ...grids[0], values }, bothNames(), {
        width,
        color,
        label: "Differences of the weights",
        onCell,
      });
      panels.push(panel);
      figures.push(figureOf([strong("A − B")], panel));
      key.append(
        h(
          "span",
          {},
          most > 0 && differenceLegend(colors, most),
          h(
            "span",
            { class: "hint" },
            most
              ? `difference A − B${cells}: green: more weight in B; purple: more in A`
              : "A and B have the same weights: every difference is 0.",
          ),
        ),
      );
      if (grids[0].level === 0 && state.x < 0)
        fill(
          moved,
          "On average, ",
          h("output", {}, shown(apart(values))),
          " of a word's weight lies elsewhere in B than in A.",
        );
    }
    body.replaceChildren(...figures);
  }

  // Half of the sum of absolute differences of a row, averaged over the rows.
  const apart = (values: Float32Array) =>
    values.reduce((total, value) => total + Math.abs(value), 0) /
    2 /
    (grids[0].rows[1] - grids[0].rows[0]);

  const figureOf = (caption: Parameters<typeof h>[2][], panel: Panel) =>
    h("figure", {}, h("figcaption", {}, ...caption), panel.figure);

  function onCell(pair: [number, number] | null, click: boolean) {
    const { state } = context;
    if (!pair) return point([state.query, state.key]);
    if (!click) return point(pair);
    context.set(
      grids[0].level
        ? { query: pair[0], key: pair[1], x: pair[1], y: pair[0] }
        : { query: pair[0], key: pair[1] },
    );
  }

  // The weights of a pair in both heads, and their difference; of cells while cells are shown.
  function point([i, j]: [number, number]) {
    panels.forEach((panel) => {
      panel.mark([i, j]);
    });
    if (j < 0) return fill(readout, "Point at a cell, or click to choose it.");
    const { level } = grids[0];
    const value = (grid: Grid) => {
      const [row, col] = [(i - grid.rows[0]) >> level, (j - grid.cols[0]) >> level];
      return i < grid.rows[0] || i >= grid.rows[1] || j < grid.cols[0] || j >= grid.cols[1]
        ? null
        : grid.values[row * Math.ceil((grid.cols[1] - grid.cols[0]) / 2 ** level) + col];
    };
    const [a, b] = grids.map(value);
    const number = (value: number) => h("output", { title: exact(value) }, shown(value));
    const pairs = sides.map(({ text }): (string | undefined)[] => {
      const [queries, keys] = namesOfMap(text);
      return [queries[i], keys[j]];
    });
    const pair = ([query, key]: (string | undefined)[]) => [
      strong(query ?? "–"),
      ` ${i} → `,
      strong(key ?? "–"),
      ` ${j}: `,
    ];
    const isOne = pairs[0].join("\n") === pairs[1].join("\n"); // otherwise each number has the words of its own text
    const said = (value: number | null, { letter, text }: Side, at: number) => [
      at ? ", " : "",
      `${letter} `,
      ...(isOne ? [] : pair(pairs[at])),
      value !== null
        ? number(value)
        : i < queriesOf(text).length && j < text.tokens.length
          ? "not shown"
          : "no such words",
    ];
    fill(
      readout,
      ...(isOne ? pair(pairs[0]) : []),
      ...(isOne && a === null && b === null
        ? ["outside of what is shown"]
        : [a, b].flatMap((value, at) => said(value, sides[at], at))),
      ...(a !== null && b !== null && alike() ? [", A − B ", number(a - b)] : []),
      level
        ? ` (cells of ${2 ** level} × ${2 ** level}: summed over keys, averaged over queries; click for single weights)`
        : "",
    );
  }

  // The keys of the chosen query whose weights differ most.
  async function drawChanges() {
    const mine = turn;
    const { source, state } = context;
    if (!alike()) return fill(lower);
    const [a, b] = await Promise.all(
      sides.map(
        async ({ place }) => (await source.rows(place.text, place.layer, state.query))[place.head],
      ),
    );
    if (mine !== turn) return;
    const [ofQueries, ofKeys] = bothNames();
    const listed = [...a.keys()]
      .sort((x, y) => Math.abs(a[y] - b[y]) - Math.abs(a[x] - b[x]))
      .slice(0, LISTED);
    const signed = (value: number) => `${value < 0 ? "" : "+"}${shown(value)}`;
    fill(
      lower,
      h(
        "section",
        {},
        h("h2", {}, "“", ofQueries[state.query], "” in A and in B"),
        hint("The words whose weights differ most. The arrow keys move the word and the key."),
        table(
          "numbers changes",
          ["attends to", "A", "B", "A − B"],
          listed.map((at) =>
            h(
              "tr",
              {},
              h("th", { scope: "row", dir: "auto" }, ofKeys[at]),
              h("td", {}, shown(a[at])),
              h("td", {}, shown(b[at])),
              h("td", {}, signed(a[at] - b[at])),
            ),
          ),
        ),
      ),
    );
  }

  return {
    element,
    update(before) {
      const { state } = context;
      if (!before || !panels.length || !DRAWN.every((name) => before[name] === state[name]))
        return void draw();
      point([state.query, state.key]);
      if (before.query !== state.query) void drawChanges();
    },
    key(event) {
      const { state, text } = context;
      const step = arrowOf(event.key);
      if (!step) return false;
      const [query, key] = [
        within(state.query + step[0], queriesOf(text).length),
        within(Math.max(state.key, 0) + step[1], text.tokens.length),
      ];
      const outside =
        grids.length &&
        state.x >= 0 &&
        (
          [
            [query, grids[0].rows],
            [key, grids[0].cols],
          ] as [number, Range][]
        ).some(([at, [first, last]]) => at < first || at >= last);
      context.set(outside ? { query, key, x: key, y: query } : { query, key }, true);
      return true;
    },
    close() {
      turn++;
    },
  };
}
