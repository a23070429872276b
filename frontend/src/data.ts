// The data of the page, as src/regard/viewer/sheet.py writes it.
import { plural } from "./format";
import type { State } from "./state";

export type Pool = "mean" | "max";
export interface Role {
  kind: string;
  offset: number | null;
  score: number;
  null: number;
  chance: number;
}
// A link in a document of a corpus, among the tokens around its ends; `left_out` is the place of a gap, or -1.
export interface Example {
  weight: number;
  tokens: string[];
  query: number;
  key: number;
  left_out: number;
  document: number; // from 1
}
export interface Head {
  values: Record<string, number>;
  strongest: [number, number, number];
  thumbnail: string;
  roles: Role[];
  offsets: number[];
  received: number[];
  examples?: Example[]; // of a corpus: the strongest first, each from another document
}
export interface HeadPlace {
  layer: number; // its index in the list of layers
  head: number;
}
// `note` says what is special about a layer: its kind, and that its numbers are shares of |weight|.
export interface Layer {
  name: string;
  number: number;
  note?: string;
  small: [number, number];
  similarity: number[][];
  heads: Head[];
}
// A sentence in parts; a part is plain, a token, or the name of a head.
export type Part = [string, "" | "token" | "head"];
export interface Lead {
  layer: number;
  head: number;
  query: number;
  key: number;
  weight: number;
  links: [number, number][];
  sentence: Part[];
  other?: Lead | null;
  heading?: [Part[], number][];
  left_out?: string;
} // the number of the link that a part of the heading tells; -1: none
export interface Card {
  kind: string;
  title: string;
  sentence: Part[];
  note: string;
  state: Partial<State>;
  heads: [number, number][] | null;
  bars: number[] | null;
  at: number;
}
export interface Finding {
  kind: string;
  layer: number;
  heads: number[];
  value: number;
  sentence: string;
}
// Values of x are numbers, or labels in order.
export interface Chart {
  title: string;
  x: string;
  y: string;
  series: { name: string; points: [number | string, number][] }[];
  band?: [number, number, number][];
} // x, low, high
// An image under the weights: the token of the patch in row r and column c is start + r * columns + c, or in `tokens`.
export interface PicturePanel {
  rows: number;
  columns: number;
  width: number;
  height: number;
  image: string;
  start: number;
  tokens?: number[];
}
export interface Picture {
  kind: "image" | "video" | "sound";
  panels: PicturePanel[];
  seconds?: number;
}
// What changes without some weights: of the text with the title `of`. Each edit as the server reads it, and in words.
export interface Effect {
  of: string;
  edits: [string, string][];
  kind: string;
  sentence: string;
  probabilities: [string, number, number][];
  moved: [string, number][];
}
export interface Text {
  title: string;
  tokens: string[];
  queries: string[] | null;
  special: number[];
  start: { layer: number; head: number; query: number };
  layers: Layer[];
  places: [number, number][] | null;
  findings: Finding[];
  has_roles: boolean;
  why_no_roles?: string; // texts that older versions saved do not have it
  role_note?: string; // how many queries roles are means over, "" for all; older versions did not save it
  gold: [number, number, boolean][];
  aligned: string;
  charts: Chart[];
  picture?: Picture | null;
  documents?: number; // of a corpus: the statistics are means over so many
  written?: string; // the text as it was typed
  effect?: Effect; // of a text without some weights
  generation?: { prompt: number; labels: string[] }; // of a text that a model continued: row n - 1 predicted token n
  attribution?: {
    of: string;
    method: string;
    sentence: string;
    test: string[];
    relevance?: number[];
  }; // its maps have signs; the relevance of each token
  unknown?: string[]; // its pieces that the model reads as <unk>
  // Runs that were saved before version 0.6 have none of these.
  model?: string;
  lead?: Lead | null;
  cards?: Card[];
  warnings?: Record<string, string>; // kind: one line for all warnings of it
}
// The model behind the page: it reads a request with these fields. Without it the page has no input.
export interface LiveModel {
  name: string;
  kind: "text" | "translation";
  fields: string[];
  methods?: string[]; // of attribution
  characters: number;
  tokens: number;
  steps?: number;
}
// Views of the page in an order, each a link with a sentence, as src/regard/viewer/story.py reads it.
export interface Step {
  link: string;
  sentence: string;
}
export interface Story {
  title: string;
  steps: Step[];
}
export interface Common {
  statistics: Record<string, string>;
  labels?: Record<string, string>;
  kinds: Record<string, { letter: string; meaning: string; byPosition: boolean }>;
  queries: number;
  caveat: string;
  roleCaveat: string;
  offsets: number;
  thumbnail: number;
  live_model?: LiveModel;
  story?: Story;
}

// The name of a mechanism, or "layer N" in place of a module path.
export const layerName = ({ name, number }: Layer): string =>
  name.length < 40 && name !== `${number}` && !name.includes(".") ? name : `layer ${number}`;
// "2", or the name of a mechanism: for tables, lists and axes of layers.
export const layerLabel = (layer: Layer): string => layerName(layer).replace(/^layer /, "");
// "L2.H1", or "Bahdanau, head 0" for a layer that has the name of a mechanism.
export const shortName = (layer: Layer, head: number): string => {
  const name = layerName(layer);
  return name === `layer ${layer.number}` ? `L${layer.number}.H${head}` : `${name}, head ${head}`;
};
// "6 layers × 12 heads"
export const sizesOf = ({ layers }: Text): string => {
  const heads = [...new Set(layers.map((layer) => layer.heads.length))];
  return `${plural(layers.length, "layer")} × ${
    heads.length === 1
      ? plural(heads[0], "head")
      : `${Math.min(...heads)} to ${Math.max(...heads)} heads`
  }`;
};
export const rolesOf = (text: Text, layer: number, head: number): string[] =>
  text.layers[layer].heads[head].roles.map((role) => role.kind);
export const statisticsOf = (text: Text): string[] => Object.keys(text.layers[0].heads[0].values);
// The heads of the layer that has most.
export const mostHeads = ({ layers }: Text): number =>
  Math.max(...layers.map(({ heads }) => heads.length));
// Every head, layer by layer.
export const everyHead = ({ layers }: Text): HeadPlace[] =>
  layers.flatMap(({ heads }, layer) => heads.map((_, head) => ({ layer, head })));
// A text as it was given, whose weights are those of the model: it can be asked about.
export const isPlain = (text: Text): boolean =>
  !text.queries && !text.picture && !text.generation && !text.attribution && !text.effect;
export const queriesOf = (text: Text): string[] => text.queries ?? text.tokens;

// The rows and the columns of a map: the numbers of queries and of keys.
export const sizeOf = (text: Text): [number, number] => [
  queriesOf(text).length,
  text.tokens.length,
];

export function bytes(base64: string): Uint8Array {
  const text = atob(base64);
  const out = new Uint8Array(text.length); // a loop: Uint8Array.from takes ten times as long
  for (let at = 0; at < text.length; at++) out[at] = text.charCodeAt(at);
  return out;
}
export const floats = (base64: string): Float32Array => new Float32Array(bytes(base64).buffer);

// The value of every float16, by its bits. A table, because a long text has millions of them.
let halfValues: Float32Array | null = null;
function halfValue(bits: number): number {
  const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
  const size =
    exponent === 0
      ? fraction * 2 ** -24
      : exponent === 31
        ? Infinity
        : (1 + fraction / 1024) * 2 ** (exponent - 15);
  return bits & 0x8000 ? -size : size;
}

// Decodes float16 without Float16Array, which not every browser has.
export function halves(buffer: ArrayBufferLike): Float32Array {
  halfValues ??= Float32Array.from({ length: 1 << 16 }, (_, bits) => halfValue(bits));
  const coded = new Uint16Array(buffer);
  const out = new Float32Array(coded.length);
  for (let at = 0; at < out.length; at++) out[at] = halfValues[coded[at]];
  return out;
}

// The inverse of quantize() in sheet.py. Byte 1 is a positive weight below 4e-6, so it is not 0.
export const weightOf = (byte: number): number =>
  byte < 2 ? byte * 1e-6 : ((byte - 1) / 254) ** 2;

// Whether the heads of two texts can be compared: the same layers, with as many heads, of the same kind of attention.
export const hasSameHeads = (one: Text, other: Text): boolean =>
  (one.queries === null) === (other.queries === null) &&
  one.layers.map(({ name, heads }) => `${name} ${heads.length}`).join() ===
    other.layers.map(({ name, heads }) => `${name} ${heads.length}`).join();
