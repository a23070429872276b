// The lecture on heads: the same width, split among 1 to 32 heads; their maps, and what they cost.
import { cellGrid } from "./cell_grid";
import type { Context } from "./context";
import { h, hint, s } from "./dom";
import { counted, plural, shown } from "./format";
import { likeness, mapsOfHeads, vectorsOf } from "./formulas";
import { dial, withControls, type Lecture } from "./lecture_controls";

const TOKENS = ["The", "cat", "sat", "on", "the", "mat", "and", "the", "dog", "ran", "to", "it"];
const WIDTH = 32;
const chosen = { power: 2, length: 12 };
const heads = () => 2 ** chosen.power;
const vectors = (seed: number) => vectorsOf(TOKENS.length, WIDTH, seed).slice(0, chosen.length);
const maps = () => mapsOfHeads(vectors(1), vectors(2), heads());

const SIDE = 120;
function card({ colors }: Context, map: number[][], head: number): HTMLElement {
  const cell = SIDE / map.length;
  const drawing = s(
    "svg",
    { viewBox: `0 0 ${SIDE} ${SIDE}`, role: "img", "aria-label": `The map of head ${head}` },
    cellGrid({
      rows: map.length,
      cols: map.length,
      wide: cell,
      tall: cell,
      color: (i, j) => colors.weight(map[i][j]),
      title: (i, j) => `${TOKENS[i]} → ${TOKENS[j]}: ${shown(map[i][j])}`,
    }),
  );
  return h("figure", { class: "mask" }, h("figcaption", {}, `Head ${head}`), drawing);
}

function costs(): HTMLElement {
  const [count, n] = [heads(), chosen.length];
  const rows: [string, number][] = [
    [`Width of a head, d / h = ${WIDTH} / ${count}`, WIDTH / count],
    ["Parameters, 4 d²", 4 * WIDTH ** 2],
    ["Multiplications for the scores, n² d", n ** 2 * WIDTH],
    ["Scores, h n²", count * n ** 2],
  ];
  const row = ([what, number]: [string, number]) =>
    h("tr", {}, h("th", { scope: "row" }, what), h("td", {}, counted(number)));
  return h("table", { class: "numbers" }, h("tbody", {}, ...rows.map(row)));
}

const effects = {
  power: () => `${plural(heads(), "head")} of width ${WIDTH / heads()}.`,
  length: () =>
    `${plural(chosen.length, "token")}: each head has ${counted(chosen.length ** 2)} weights.`,
};

export const headLecture: Lecture = (context) =>
  withControls(
    (changed) => [
      dial("Number of heads", chosen, "power", [0, 5, 1], effects, changed),
      dial("Tokens", chosen, "length", [2, TOKENS.length, 1], effects, changed),
    ],
    () => {
      const found = maps();
      const said =
        found.length > 1
          ? `The mean cosine between the maps of two heads is ${likeness(found).toFixed(2)}.`
          : "One head has one map: all that a query reads is one weighted mean.";
      return [
        costs(),
        hint(
          `Queries and keys of width ${WIDTH} are random numbers. Each head compares its own channels. ${said} ` +
            "A row is a query, a column is a key; dark is a large weight.",
        ),
        h("div", { class: "masks" }, ...found.map((map, head) => card(context, map, head))),
      ];
    },
    "head-maps",
  );
