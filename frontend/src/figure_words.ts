// A panel of a figure: the words with the arcs of the chosen one.
import { ARCS, arcOf, heightOf, LEAST, spot, widestOf } from "./arcs";
import { interval, headName, strongest } from "./context";
import { layerLabel, queriesOf } from "./data";
import { s } from "./dom";
import {
  box,
  NORMAL,
  shortToken,
  SMALL,
  widest,
  widthOf,
  write,
  INK,
  type Drawn,
  type Frame,
  tokensOf,
  pairOf,
  capital,
} from "./figure_frame";
import { inCell, shown } from "./format";
import { byLayer, headsInWords, listedHeads, meanLine } from "./head_sets";
import type { Row } from "./output";
import { wordNames } from "./word_names";

const [PITCH, THICKEST] = [9.2, 2.8]; // points of a word; of the widest arc

// The weight of an arc: as in a cell, and also if it is small.
const arcWeight = (value: number) => inCell(value) || shown(value);

export async function wordsWithArcs(frame: Frame): Promise<Drawn> {
  const { context, width } = frame;
  const { text, state } = context;
  const heads = byLayer(listedHeads(context));
  const room = Math.floor(width / PITCH);
  const keys = tokensOf(frame, "keys", room);
  if (keys[1] - keys[0] > room) keys[1] = keys[0] + room;
  const query = wordNames(queriesOf(text))[state.query];
  const weights = await meanLine(context, heads, state.query);
  const one = [...heads.values()].flat().length === 1;
  const label = one
    ? String([...heads.values()].flat()[0])
    : `mean of ${[...heads].map(([layer, list]) => `${layerLabel(text.layers[layer])}: ${list.join(" ")}`).join("; ")}`;
  const rows: Row[] = [];
  for (let j = keys[0]; j < keys[1]; j++)
    rows.push([
      "words",
      one || heads.size === 1 ? layerLabel(text.layers[[...heads.keys()][0]]) : "all",
      label,
      "weight",
      ...pairOf(text, state.query, j),
      weights[j],
    ]);
  const node = s("g", {});
  const [across, height] = text.queries
    ? crossWords(frame, node, keys, weights)
    : selfWords(frame, node, keys, weights);
  const left = 1 - weights.slice(...keys).reduce((total, value) => total + value, 0);
  const outside =
    left > 0.005 && (keys[0] > 0 || keys[1] < text.tokens.length)
      ? ` Tokens ${keys[0]} to ${keys[1] - 1} of ${text.tokens.length}; ${Math.round(left * 100)} % of the weight is outside.`
      : "";
  return {
    node,
    width: across,
    height,
    title: `What “${query}” attends to`,
    rows,
    keys: 1,
    heads: one ? headName(context, ...listedHeads(context)[0]) : capital(headsInWords(context)),
    said: `What “${query}” attends to; a thicker arc is a larger weight.${outside}`,
  };
}

// The x of the middle of every word, its width, and whether words are turned because a line has no room for them.
function spread(
  tokens: string[],
  width: number,
): { at: number[]; wide: number[]; turned: boolean } {
  const size = tokens.map((token) => widthOf(shortToken(token), NORMAL, true) + 5);
  const total = size.reduce((a, b) => a + b, 0);
  const turned = total > width;
  const pitch = Math.min(width / tokens.length, 16);
  let x = 0;
  const at = size.map((each) => {
    const step = turned ? pitch : each;
    x += step;
    return x - step / 2;
  });
  return { at, wide: turned ? size.map(() => pitch) : size, turned };
}

// The arcs of the chosen word, the strongest last: the places of their words, and the share of the widest arc.
function arcShares(frame: Frame, weights: Float32Array, [first, last]: [number, number]) {
  const shown = weights.subarray(first, last);
  const widest = widestOf(weights.length, ...shown);
  return strongest(shown, ARCS)
    .map((at) => ({ at, share: shown[at] / widest, weight: shown[at] }))
    .filter(({ share }) => share >= LEAST)
    .map((arc) => ({
      ...arc,
      color: frame.colors.line(arc.weight),
    }))
    .reverse();
}

function selfWords(
  frame: Frame,
  node: SVGGElement,
  [first, last]: [number, number],
  weights: Float32Array,
) {
  const { text, state } = frame.context;
  const tokens = text.tokens.slice(first, last);
  const { at, wide, turned } = spread(tokens, frame.width);
  const tall = turned ? widest(tokens, NORMAL) + 6 : 13;
  const here = state.query - first;
  const arcs =
    at[here] === undefined
      ? []
      : arcShares(frame, weights, [first, last]).filter((arc) => arc.at !== here);
  const rise = (j: number) => 0.75 * heightOf(Math.abs(at[j] - at[here]));
  const top = Math.max(0, ...arcs.map((arc) => rise(arc.at))) + 10;
  const sheet = { width: frame.width, height: top + tall };
  for (const arc of arcs)
    node.append(
      arcOf(arc, spot(at[here], top, tall), spot(at[arc.at], top, tall), sheet, {
        widest: THICKEST,
      }),
    );
  const most = arcs.at(-1);
  if (most) {
    const [x, y] = [(at[here] + at[most.at]) / 2, top - rise(most.at) - 4];
    const said = arcWeight(most.weight);
    const wide = widthOf(said, SMALL) + 3;
    node.append(
      s("rect", { ...box([x - wide / 2, y - 4, wide, 8]), fill: "#ffffff" }),
      write(said, x, y, { anchor: "middle" }),
    );
  }
  tokens.forEach((token, j) => {
    wordBox(
      frame,
      node,
      token,
      [at[j], top, wide[j], tall],
      weights[first + j],
      turned,
      j === here,
    );
  });
  return [at.at(-1)! + wide.at(-1)! / 2, top + tall];
}

function wordBox(
  frame: Frame,
  node: SVGGElement,
  token: string,
  [x, y, wide, tall]: number[],
  weight: number | null,
  turned: boolean,
  chosen: boolean,
) {
  node.append(
    s("rect", {
      class: "cell",
      ...box([x - wide / 2 + 0.3, y, wide - 0.6, tall]),
      fill: weight === null ? "none" : frame.colors.weight(weight),
      stroke: chosen ? INK : "none",
      "stroke-width": 1,
    }),
  );
  const look = { size: NORMAL, bold: chosen, fill: frame.colors.textOn(weight ?? 0), token: true };
  node.append(
    turned
      ? write(shortToken(token), x, y + 3, { ...look, turned, anchor: "end" })
      : write(shortToken(token), x, y + tall / 2, { ...look, anchor: "middle" }),
  );
}

// Two texts: the queries above, the keys below, and a line for every weight.
function crossWords(
  frame: Frame,
  node: SVGGElement,
  [first, last]: [number, number],
  weights: Float32Array,
) {
  const { text, state } = frame.context;
  const room = Math.floor(frame.width / PITCH);
  const above = interval(state.query, room, queriesOf(text).length);
  const [own, keys] = [queriesOf(text).slice(...above), text.tokens.slice(first, last)];
  const [top, low] = [spread(own, frame.width), spread(keys, frame.width)];
  const tall = (tokens: string[], turned: boolean) => (turned ? widest(tokens, NORMAL) + 6 : 13);
  const [upper, lower] = [tall(own, top.turned), tall(keys, low.turned)];
  const [start, end] = [upper, upper + 40];
  const sheet = { width: frame.width, height: end + lower };
  for (const arc of arcShares(frame, weights, [first, last]))
    node.append(
      arcOf(
        arc,
        spot(top.at[state.query - above[0]], 0, start),
        spot(low.at[arc.at], end, lower),
        sheet,
        { widest: THICKEST, apart: true },
      ),
    );
  own.forEach((token, i) => {
    wordBox(
      frame,
      node,
      token,
      [top.at[i], 0, top.wide[i], upper],
      null,
      top.turned,
      i === state.query - above[0],
    );
  });
  keys.forEach((token, j) => {
    wordBox(
      frame,
      node,
      token,
      [low.at[j], end, low.wide[j], lower],
      weights[first + j],
      low.turned,
      false,
    );
  });
  const ends = [top, low].map(({ at, wide }) => at.at(-1)! + wide.at(-1)! / 2);
  return [Math.max(...ends), end + lower];
}
