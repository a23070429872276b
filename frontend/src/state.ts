// The state of the page. The address contains all of it, so every view is a link.

import { isView } from "./registry";

export interface State {
  view: string; // a file of views/
  text: number;
  model: string; // of the text; a link names it, so that a page of another model can say so
  layer: number; // its index in the list of layers
  head: number;
  query: number;
  key: number; // -1: none
  x: number; // the center of the map, in tokens; -1: the whole map
  y: number;
  zoom: number; // log2 of pixels to a weight
  pool: string; // mean, max
  scale: string; // linear, sqrt, log: of the colors of weights in all views
  color: string; // the statistic of the overview
  grid: string; // of the overview: maps, lines
  depth: number; // of the overview: the layer whose arcs are drawn; -1: the links of the sentence
  sort: string; // layer, or down by the statistic
  way: string; // of the words of a head: words, lines
  why: string; // yes: below the words of a head, why the weight is what it is
  heads: string; // one, layer, all, or heads with commas: "5.3,2.1" (layer.head), "0,2" of the layer
  side: string; // out, in, both
  pairs: string; // which sentence attends to which: all, AA, AB, BA, BB
  panels: string; // of the alignment: layers, heads
  figure: string; // the panels of the figure sheet, with commas; "": closed
  width: string; // of the figure, in cm
  ground: string; // of the figure: light, clear
  caption: string; // of the figure; "": written by the page
  captioned: string; // yes: the caption is inside the figure
  span: string; // the tokens of the figure: "3-12"; "": all that fit
  cover: string; // of a picture: light, colors
  tiles: string; // heads beside a picture: layer, all
  other: number; // the second text of compare; -1: none
  otherQuery: number; // its chosen word; -1: the one in the place of the first text's
  pair: string; // of the view compare: texts, heads; "": heads if some are pinned
  pins: string; // "text.layer.head,text.layer.head"
  table: string; // of the statistics view: the column that sorts the table of heads, with "-" downwards; "": charts
  find: string; // a role or a word in the table of heads
}

export const START: State = {
  view: "overview",
  text: 0,
  model: "",
  layer: 0,
  head: 0,
  query: 0,
  key: -1,
  x: -1,
  y: -1,
  zoom: 0,
  pool: "mean",
  scale: "sqrt",
  color: "weights",
  grid: "maps",
  depth: -1,
  sort: "layer",
  way: "words",
  why: "",
  heads: "one",
  side: "both",
  pairs: "all",
  panels: "layers",
  figure: "",
  width: "8.5",
  ground: "light",
  caption: "",
  captioned: "yes",
  span: "",
  cover: "light",
  tiles: "layer",
  other: -1,
  otherQuery: -1,
  pair: "",
  pins: "",
  table: "",
  find: "",
};

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
