// The state of the page. The address contains all of it, so every view is a link.

import { isView } from "./registry";

export const START = {
  view: "overview", // a file of views/
  text: 0,
  model: "", // of the text; a link names it, so that a page of another model can say so
  layer: 0, // its index in the list of layers
  head: 0,
  query: 0,
  key: -1, // -1: none
  x: -1, // the center of the map, in tokens; -1: the whole map
  y: -1,
  zoom: 0, // log2 of pixels to a weight
  pool: "mean", // mean, max
  scale: "sqrt", // linear, sqrt, log: of the colors of weights in all views
  color: "weights", // the statistic of the overview
  grid: "maps", // of the overview: maps, lines
  depth: -1, // of the overview: the layer whose arcs are drawn; -1: the links of the sentence
  sort: "layer", // layer, or down by the statistic
  way: "words", // of the words of a head: words, lines
  why: "", // yes: below the words of a head, why the weight is what it is
  heads: "one", // one, layer, all, or heads with commas: "5.3,2.1" (layer.head), "0,2" of the layer
  side: "both", // out, in, both
  pairs: "all", // which sentence attends to which: all, AA, AB, BA, BB
  panels: "layers", // of the alignment: layers, heads
  figure: "", // the panels of the figure sheet, with commas; "": closed
  width: "8.5", // of the figure, in cm
  ground: "light", // of the figure: light, clear
  caption: "", // of the figure; "": written by the page
  captioned: "yes", // yes: the caption is inside the figure
  span: "", // the tokens of the figure: "3-12"; "": all that fit
  cover: "light", // of a picture: light, colors
  tiles: "layer", // heads beside a picture: layer, all
  other: -1, // the second text of compare; -1: none
  otherQuery: -1, // its chosen word; -1: the one in the place of the first text's
  pair: "", // of the view compare: texts, heads; "": heads if some are pinned
  pins: "", // "text.layer.head,text.layer.head"
  table: "", // of the statistics view: the column that sorts the table of heads, with "-" downwards; "": charts
  find: "", // a role or a word in the table of heads
};
export type State = typeof START;

// Views of earlier pages, whose links lead to the same place.
export const MOVED: Record<string, Partial<State>> = {
  map: { view: "head" },
  pins: { view: "compare", pair: "heads" },
  text: { view: "head" },
};
// Ways of the view Text of earlier pages.
const MOVED_WAYS: Record<string, Partial<State>> = {
  heads: { way: "lines" },
  model: { way: "words", view: "overview", grid: "lines" },
  neurons: { way: "words", why: "yes" },
};

// Only values that differ from START, so that links stay short; and the head and the query, which a text begins with.
const ALWAYS = ["layer", "head", "query"];
export function toLink(state: State): string {
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(state))
    if (name !== "view" && (ALWAYS.includes(name) || value !== START[name as keyof State]))
      parts.set(name, typeof value === "number" ? String(+value.toFixed(3)) : value);
  return `#${state.view}${parts.size ? `?${parts}` : ""}`;
}

// Values that the link omits are those of START, or those with which the text begins. Null: not a link of this page.
export function fromLink(hash: string): Partial<State> | null {
  const [name, query] = hash.replace(/^#/, "").split("?");
  const { view = name, ...rest } = MOVED[name] ?? {};
  if (!isView(view)) return null;
  const found: Record<string, unknown> = { view, ...rest };
  for (const [name, value] of new URLSearchParams(query ?? "")) {
    const known = START[name as keyof State];
    if (typeof known === "number" && Number.isFinite(Number(value))) found[name] = Number(value);
    else if (typeof known === "string" && name !== "view") found[name] = value;
  }
  return { ...found, ...MOVED_WAYS[found.way as string] } as Partial<State>;
}
