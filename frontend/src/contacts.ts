// The contact map of a protein in the chosen head, as contact_maps of src/regard/stats/patterns.py computes it.
import type { ChartPlan } from "./chart";
import { rangeLegend } from "./legend";
import { headName, inText, place, type Context } from "./context";
import type { Text } from "./data";
import { fill, h, hint, strong } from "./dom";
import { shown } from "./format";
import { numbers } from "./numbers";
import { panelOf } from "./pin_figure";
import { TILE, type Range, type Source } from "./source";

// Residues of a protein and of a map that is drawn; the distance in the chain from which a contact counts; pairs listed.
const [LEAST, MOST, APART, LISTED] = [8, 512, 6, 20];
const RESIDUE = /^[▁Ġ]?[ACDEFGHIKLMNPQRSTVWYXBZUO]$/u;

// The tokens of a text that are residues; none if it is no protein.
export function residuesOf({ tokens, queries, special }: Text): number[] {
  const aside = new Set(special);
  const ordinary = tokens.flatMap((_, at) => (aside.has(at) ? [] : [at]));
  return !queries && ordinary.length >= LEAST && ordinary.every((at) => RESIDUE.test(tokens[at]))
    ? ordinary
    : [];
}

export function contactsOfHead(context: Context, width: number): ChartPlan[] {
  const { state, text, source, colors } = context;
  const count = residuesOf(text).length;
  if (!count || count > MOST || source.finest(state.text)) return [];
  return [
    {
      key: [
        "contacts",
        state.text,
        text.title,
        state.layer,
        state.head,
        colors.theme,
        width,
      ].join(),
      draw: () => {
        const [box, element] = [
          h("div", {}, hint("Computing …")),
          h("figure", { class: "contacts" }),
        ];
        element.append(box);
        void drawContacts(context, box, Math.min(560, Math.max(280, width - 40)));
        return { element, mark: () => undefined };
      },
    },
  ];
}

async function drawContacts(context: Context, box: HTMLElement, width: number) {
  const { text, colors } = context;
  const residues = residuesOf(text);
  const [size, about] = [residues.length, inText(headName(context))];
  const contacts = corrected(
    await weightsAmong(context.source, place(context), text.tokens.length, residues),
    size,
  );
  const most = contacts.reduce((a, b) => Math.max(a, b), 0) || 1;
  const name = (at: number) => `${text.tokens[residues[at]].replace(/^[▁Ġ]/u, "")}${at + 1}`;
  const names = residues.map((_, at) => name(at));
  const readout = h(
    "p",
    { class: "hint contact-readout", role: "status" },
    "Point at a pair of residues.",
  );
  const grid = { values: contacts, rows: [0, size] as Range, cols: [0, size] as Range, level: 0 };
  const panel = panelOf(grid, [names, names], {
    width,
    color: (value) => (value > 0 ? colors.of(Math.max(value / most, 0.004)) : colors.css[0]),
    label: `Contact map, ${about}`,
    onCell: (pair) => {
      panel.mark(pair ?? [-1, -1]);
      if (pair)
        fill(
          readout,
          strong(`${names[pair[0]]} – ${names[pair[1]]}`),
          `: ${shown(contacts[pair[0] * size + pair[1]])}`,
        );
    },
  });
  const legend = rangeLegend(colors, 0, most, "contact; gray: 0 or less");
  fill(
    box,
    h("figcaption", {}, `Contact map, ${about}`),
    hint(
      "The weights between residues in both directions, less the product of what each residue gives and receives (APC). " +
        "A large value off the diagonal is a pair that the head couples. Residues count from 1.",
    ),
    legend,
    panel.figure,
    readout,
    numbers(
      "Contact map",
      strongestPairs(contacts, size).map(([i, j]) => ({
        residues: `${name(i)}, ${name(j)}`,
        contact: contacts[i * size + j],
        "apart in the chain": j - i,
      })),
    ),
  );
}

// The weights of the head between residues, (size x size).
async function weightsAmong(
  source: Source,
  at: Parameters<Source["tile"]>[0],
  length: number,
  residues: number[],
) {
  const tiles = Math.ceil(length / TILE);
  const of = (tile: number) => Math.min(TILE, length - tile * TILE);
  const loaded = await Promise.all(
    Array.from({ length: tiles * tiles }, (_, n) =>
      source.tile(at, 0, Math.floor(n / tiles), n % tiles, "mean"),
    ),
  );
  return Float32Array.from(
    residues.flatMap((i) =>
      residues.map((j) => {
        const [row, col] = [Math.floor(i / TILE), Math.floor(j / TILE)];
        return loaded[row * tiles + col][(i % TILE) * of(col) + (j % TILE)];
      }),
    ),
  );
}

// S = W + W^T; C_ij = S_ij - (sum of row i) (sum of column j) / (sum of all).
function corrected(weights: Float32Array, size: number): Float32Array {
  const both = weights.map(
    (weight, at) => weight + weights[(at % size) * size + Math.floor(at / size)],
  );
  const sums = Array.from({ length: size }, (_, i) =>
    both.subarray(i * size, (i + 1) * size).reduce((a, b) => a + b, 0),
  );
  const all = sums.reduce((a, b) => a + b, 0) || 1;
  return both.map((value, at) => value - (sums[Math.floor(at / size)] * sums[at % size]) / all);
}

function strongestPairs(contacts: Float32Array, size: number): [number, number][] {
  const pairs: [number, number][] = [];
  for (let i = 0; i < size; i++) for (let j = i + APART; j < size; j++) pairs.push([i, j]);
  return pairs
    .sort(([a, b], [c, d]) => contacts[c * size + d] - contacts[a * size + b])
    .slice(0, LISTED);
}
