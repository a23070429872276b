// Sets of heads: which heads a view shows together, how a link writes them, and the color of each.
import { SERIES } from "./color";
import { everyHead, layerName, queriesOf, shortName, type Text } from "./data";
import type { Source } from "./source";
import type { State } from "./state";

export type Head = [number, number]; // the index of its layer, and its number in the layer
interface Shown {
  source: Source;
  state: State;
  text: Text;
}

const DISTINCT = SERIES.slice(0, 8);
export const MEANS: [string, string][] = [
  ["one", "this head"],
  ["layer", "mean of the layer"],
  ["all", "mean of all"],
];
export const nameOfHead = ([layer, head]: Head) => `${layer}.${head}`;
export const isChosen = ({ heads }: State) => !MEANS.some(([name]) => name === heads);

// The heads of a link: "5.3,2.1", or "0,2" for heads of the layer of the state. Heads that do not exist are skipped.
function namedHeads({ state, text }: Shown): Head[] {
  const found = new Map<string, Head>();
  for (const part of state.heads.split(",")) {
    const numbers = /^\s*(?:(\d+)\.)?(\d+)\s*$/.exec(part);
    if (!numbers) continue;
    const head: Head = [
      numbers[1] === undefined ? state.layer : Number(numbers[1]),
      Number(numbers[2]),
    ];
    if (head[1] < (text.layers[head[0]]?.heads.length ?? 0)) found.set(nameOfHead(head), head);
  }
  return [...found.values()];
}

// The heads that a view shows together, in the order of the link.
export function listedHeads(context: Shown): Head[] {
  const { state, text } = context;
  const all = () => everyHead(text).map(({ layer, head }): Head => [layer, head]);
  if (state.heads === "all") return all();
  if (state.heads === "layer") return all().filter(([layer]) => layer === state.layer);
  const chosen = isChosen(state) ? namedHeads(context) : [];
  return chosen.length ? chosen : [[state.layer, state.head]];
}

export function byLayer(heads: Head[]): Map<number, number[]> {
  const found = new Map<number, number[]>();
  for (const [layer, head] of heads) found.set(layer, [...(found.get(layer) ?? []), head]);
  return found;
}

// The link after a click on a head: it is added to the chosen heads or removed from them.
// From a mean of the layer or of all heads, a click starts a new set.
export function toggled(context: Shown, head: Head): string {
  const { state } = context;
  const before = state.heads === "layer" || state.heads === "all" ? [] : listedHeads(context);
  const left = before.filter((each) => nameOfHead(each) !== nameOfHead(head));
  const after = left.length < before.length ? left : [...before, head];
  return after.length ? after.map(nameOfHead).join() : "one";
}

// A color for each listed head. A head has the same color in every view, unless an earlier head of the set has it.
export function headColors(context: Shown): Map<string, string> {
  const found = new Map<string, string>();
  const taken = new Set<string>();
  for (const head of listedHeads(context)) {
    const own = ownColor(head);
    const color = taken.has(own) ? (SERIES.find((one) => !taken.has(one)) ?? own) : own;
    taken.add(color);
    found.set(nameOfHead(head), color);
  }
  return found;
}
export const ownColor = ([layer, head]: Head) => DISTINCT[(head + 3 * layer) % DISTINCT.length];

// Whether heads are drawn one by one, each in its color, and not as one mean.
export const drawnApart = (context: Shown) =>
  isChosen(context.state) && listedHeads(context).length <= SERIES.length;

// Whether the words show the mean of all heads, or of a layer, and not single heads.
export const shownMean = ({ view, way, heads }: State) =>
  view === "head" && way === "words" && ["layer", "all"].includes(heads);

// "layer 2, head 1", "the mean of all heads", "the mean of L0.H1, L2.H3".
export function headsInWords(context: Shown): string {
  const { state, text } = context;
  if (state.heads === "all") return "the mean of all heads";
  if (state.heads === "layer") return `the mean of ${layerName(text.layers[state.layer])}`;
  const heads = listedHeads(context);
  if (heads.length === 1) return `${layerName(text.layers[heads[0][0]])}, head ${heads[0][1]}`;
  const names = heads.slice(0, 6).map(([layer, head]) => shortName(text.layers[layer], head));
  return `the mean of ${names.join(", ")}${heads.length > 6 ? ` and ${heads.length - 6} more` : ""}`;
}

// The mean over heads of the weights of a query, or (`turned`) of the weights on a key.
export async function meanLine(
  { source, state, text }: Shown,
  heads: Map<number, number[]>,
  at: number,
  turned = false,
): Promise<Float32Array> {
  const total = new Float32Array(turned ? queriesOf(text).length : text.tokens.length);
  let count = 0;
  for (const [layer, chosen] of heads) {
    const lines = await (turned
      ? source.columns(state.text, layer, at)
      : source.rows(state.text, layer, at));
    for (const head of chosen) {
      count++;
      for (let place = 0; place < total.length; place++) total[place] += lines[head][place];
    }
  }
  return total.map((value) => value / count);
}

// The weights of one head for a query.
export const lineOf = async (
  { source, state }: Shown,
  [layer, head]: Head,
  at: number,
): Promise<Float32Array> => (await source.rows(state.text, layer, at))[head];
