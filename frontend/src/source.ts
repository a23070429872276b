// The sources of weights: a page with embedded queries and keys, or requests to a server or a notebook kernel.
import {
  bytes,
  type Common,
  floats,
  halves,
  type Pool,
  queriesOf,
  sizeOf,
  type Text,
  weightOf,
} from "./data";
import { inParts, nextTask } from "./pause";

export const TILE = 128;
const PART = 200_000; // weights that are computed in one go: some milliseconds
const WINDOW = 64; // the most rows and columns of a window that a server gives
const LARGE = 1_000_000; // characters of coded queries that are worth a task of their own

export interface Source {
  common: Common;
  titles: string[]; // by number; typed texts that are not kept any more leave holes
  text(t: number): Promise<Text>;
  finest(t: number): number; // the level of the smallest cells; 0: single weights
  precision(t: number): string;
  tile(
    at: Place,
    level: number,
    row: number,
    col: number,
    pool: Pool,
    signal?: AbortSignal,
  ): Promise<Float32Array>;
  rows(t: number, layer: number, query: number): Promise<Float32Array[]>; // for each head (J)
  columns(t: number, layer: number, key: number): Promise<Float32Array[]>; // for each head (I)
  window(t: number, layer: number, rows: Range, cols: Range): Promise<Float32Array[]>; // for each head (rows x cols)
  pair(at: Place, query: number, key: number): Promise<[Float32Array, Float32Array] | null>; // c q and k
  // With a live model: the number of a typed text. `question` are the other fields of the request.
  read?(text: string, signal: AbortSignal, question?: object): Promise<number>;
}
export interface Place {
  text: number;
  layer: number;
  head: number;
}
export type Range = [number, number]; // the first, and the one after the last

type Maps =
  | {
      form: "dot";
      half: boolean;
      width: number;
      keyHeads: number;
      query: string;
      key: string;
      row_statistic: string;
      mask?: string;
    }
  | { form: "weights"; weights: string }
  | { form: "cells"; level: number; cells: string };
interface Dot {
  q: Float32Array;
  k: Float32Array;
  r: Float32Array;
  mask: Uint8Array | null;
  width: number;
  share: number;
}

// A cache of the last few values.
export class Cache<T> {
  private items = new Map<string, T>();
  constructor(private size: number) {}
  has(name: string) {
    return this.items.has(name);
  }
  get(name: string, make: () => T): T {
    const found = this.items.get(name) ?? make();
    this.items.delete(name);
    this.items.set(name, found);
    if (this.items.size > this.size) this.items.delete(this.items.keys().next().value!);
    if (found instanceof Promise) found.catch(() => this.items.delete(name)); // so that the next look asks again
    return found;
  }
}

export class Embedded implements Source {
  titles: string[];
  private made = new Map<string, Dot>();
  private whole = new Cache<Float32Array>(16);
  private pooled = new Cache<Float32Array>(64);
  private bytesOfCells = new Cache<Uint8Array>(200);
  private filling = new Map<string, Promise<void>>();
  private weights = new Cache<Float32Array>(24);

  constructor(
    public common: Common,
    private texts: (Text & { maps: Maps[] })[],
  ) {
    this.titles = texts.map((text) => text.title);
  }
  async text(t: number) {
    return this.texts[t];
  }
  finest(t: number) {
    const [first] = this.texts[t].maps;
    return first.form === "cells" ? first.level : 0;
  }
  precision(t: number) {
    const [first] = this.texts[t].maps;
    if (first.form === "cells")
      return `This page has cells of ${2 ** first.level} × ${2 ** first.level} weights of this text; regard view shows single weights.`;
    return first.form === "dot" && first.half
      ? "Weights are computed from queries and keys in half precision: about three digits."
      : "";
  }

  // Queries and keys of a long text are decoded in a task of their own, so that the page answers before and after it.
  private async decoded(t: number, layer: number): Promise<void> {
    const maps = this.texts[t].maps[layer];
    if (maps.form !== "dot" || maps.query.length < LARGE || this.made.has(`${t}.${layer}`)) return;
    await nextTask();
    this.dot(t, layer);
    await nextTask();
  }

  private dot(t: number, layer: number): Dot {
    const maps = this.texts[t].maps[layer];
    if (maps.form !== "dot") throw new Error("no queries and keys");
    const name = `${t}.${layer}`;
    if (!this.made.has(name)) {
      const read = (coded: string) => (maps.half ? halves(bytes(coded).buffer) : floats(coded));
      const share = this.texts[t].layers[layer].heads.length / maps.keyHeads;
      const mask = maps.mask ? bytes(maps.mask) : null;
      this.made.set(name, {
        q: read(maps.query),
        k: read(maps.key),
        r: floats(maps.row_statistic),
        mask,
        width: maps.width,
        share,
      });
    }
    return this.made.get(name)!;
  }

  // w_ij = exp(c q_i . k_j - r_i) of one query, or of one key if `turned`; of all the others or those of a range.
  private line(
    t: number,
    layer: number,
    head: number,
    fixed: number,
    turned: boolean,
    out: Float32Array,
    at = 0,
    range?: Range,
  ) {
    const { q, k, r, mask, width, share } = this.dot(t, layer);
    const text = this.texts[t];
    const [I, J] = sizeOf(text);
    const [top, left] = [head * I, Math.floor(head / share) * J];
    const [first, last] = range ?? [0, turned ? I : J];
    for (let other = first; other < last; other++) {
      const [i, j] = turned ? [other, fixed] : [fixed, other];
      const [bit, to] = [i * J + j, at + other - first];
      if (mask && !((mask[bit >> 3] >> (bit & 7)) & 1)) {
        out[to] = 0;
        continue;
      }
      let score = 0;
      const [a, b] = [(top + i) * width, (left + j) * width];
      for (let d = 0; d < width; d++) score += q[a + d] * k[b + d];
      out[to] = Math.min(Math.exp(score - r[top + i]), 1); // a large score may round above r
    }
  }

  private dense({ text: t, layer, head }: Place): Float32Array {
    return this.whole.get(`${t}.${layer}.${head}`, () => {
      const text = this.texts[t];
      const [I, J] = sizeOf(text);
      const maps = text.maps[layer];
      if (maps.form === "weights")
        return this.weights
          .get(`${t}.${layer}`, () => floats(maps.weights))
          .subarray(head * I * J, (head + 1) * I * J);
      const out = new Float32Array(I * J);
      for (let i = 0; i < I; i++) this.line(t, layer, head, i, false, out, i * J);
      return out;
    });
  }

  // The cells of all heads of a layer, a byte each.
  private coded(t: number, layer: number): Uint8Array {
    return this.bytesOfCells.get(`${t}.${layer}`, () =>
      bytes((this.texts[t].maps[layer] as { cells: string }).cells),
    );
  }

  // The whole head in cells of 2^level x 2^level weights, from the level below.
  private pooledCells(at: Place, level: number, pool: Pool): Float32Array {
    const text = this.texts[at.text];
    const [I, J] = sizeOf(text);
    const maps = text.maps[at.layer];
    if (maps.form === "cells" && level === maps.level) {
      const size = Math.ceil(I / 2 ** level) * Math.ceil(J / 2 ** level);
      return Float32Array.from(
        this.coded(at.text, at.layer).subarray(at.head * size, (at.head + 1) * size),
        weightOf,
      );
    }
    if (level === 0) return this.dense(at);
    return this.pooled.get(`${at.text}.${at.layer}.${at.head}.${level}.${pool}`, () => {
      const below = this.pooledCells(at, level - 1, pool);
      const [rows, cols] = [Math.ceil(I / 2 ** (level - 1)), Math.ceil(J / 2 ** (level - 1))];
      return halved(below, rows, cols, pool, (row) =>
        Math.min(2 ** (level - 1), I - row * 2 ** (level - 1)),
      );
    });
  }

  // The weights of a head of a long text are computed in parts, so that the page answers meanwhile.
  private async prepared(at: Place): Promise<void> {
    const text = this.texts[at.text];
    const [I, J] = sizeOf(text);
    const name = `${at.text}.${at.layer}.${at.head}`;
    if (text.maps[at.layer].form !== "dot" || I * J < PART || this.whole.has(name)) return;
    await this.decoded(at.text, at.layer);
    if (!this.filling.has(name))
      this.filling.set(
        name,
        (async () => {
          const out = new Float32Array(I * J);
          const step = Math.ceil(PART / J);
          for (let first = 0; first < I; first += step) {
            for (let i = first; i < Math.min(first + step, I); i++)
              this.line(at.text, at.layer, at.head, i, false, out, i * J);
            await nextTask();
          }
          this.whole.get(name, () => out);
          this.filling.delete(name);
        })(),
      );
    await this.filling.get(name);
  }

  async tile(at: Place, level: number, row: number, col: number, pool: Pool) {
    await this.prepared(at);
    const text = this.texts[at.text];
    const whole = this.pooledCells(at, Math.max(level, this.finest(at.text)), pool);
    const [rows, cols] = sizeOf(text).map((n) => Math.ceil(n / 2 ** level));
    const [height, width] = [Math.min(TILE, rows - row * TILE), Math.min(TILE, cols - col * TILE)];
    const out = new Float32Array(height * width);
    for (let y = 0; y < height; y++) {
      const start = (row * TILE + y) * cols + col * TILE;
      out.set(whole.subarray(start, start + width), y * width);
    }
    return out;
  }

  private async weightLines(t: number, layer: number, fixed: number, turned: boolean) {
    await this.decoded(t, layer);
    const text = this.texts[t];
    const [I, J] = sizeOf(text);
    const maps = text.maps[layer];
    return text.layers[layer].heads.map((_, head) => {
      const out = new Float32Array(turned ? I : J);
      if (maps.form === "dot") this.line(t, layer, head, fixed, turned, out);
      else if (maps.form === "weights") {
        const whole = this.dense({ text: t, layer, head });
        for (let other = 0; other < out.length; other++)
          out[other] = turned ? whole[other * J + fixed] : whole[fixed * J + other];
      } else {
        // a cell's weight, spread over its keys
        const size = 2 ** maps.level;
        const [coded, rows, cols] = [
          this.coded(t, layer),
          Math.ceil(I / size),
          Math.ceil(J / size),
        ];
        const cell = (i: number, j: number) =>
          weightOf(coded[(head * rows + Math.floor(i / size)) * cols + Math.floor(j / size)]) /
          size;
        for (let other = 0; other < out.length; other++)
          out[other] = turned ? cell(other, fixed) : cell(fixed, other);
      }
      return out;
    });
  }
  rows(t: number, layer: number, query: number) {
    return this.weightLines(t, layer, query, false);
  }
  columns(t: number, layer: number, key: number) {
    return this.weightLines(t, layer, key, true);
  }

  async window(t: number, layer: number, rows: Range, cols: Range) {
    if (this.texts[t].maps[layer].form !== "dot") return windowOfRows(this, t, layer, rows, cols);
    await this.decoded(t, layer);
    const [tall, wide] = [rows[1] - rows[0], cols[1] - cols[0]];
    return this.texts[t].layers[layer].heads.map((_, head) => {
      const out = new Float32Array(tall * wide);
      for (let row = 0; row < tall; row++)
        this.line(t, layer, head, rows[0] + row, false, out, row * wide, cols);
      return out;
    });
  }

  async pair(at: Place, i: number, j: number): Promise<[Float32Array, Float32Array] | null> {
    const text = this.texts[at.text];
    if (text.maps[at.layer].form !== "dot") return null;
    await this.decoded(at.text, at.layer);
    const { q, k, width, share } = this.dot(at.text, at.layer);
    const top = (at.head * queriesOf(text).length + i) * width;
    const left = (Math.floor(at.head / share) * text.tokens.length + j) * width;
    return [q.subarray(top, top + width), k.subarray(left, left + width)];
  }
}

// Merges 2 x 2 cells: the greatest weight, or the mean over queries of the sum over keys. `tall` gives the queries of a row.
function halved(
  below: Float32Array,
  rows: number,
  cols: number,
  pool: Pool,
  tall: (row: number) => number,
) {
  const [height, width] = [Math.ceil(rows / 2), Math.ceil(cols / 2)];
  const out = new Float32Array(height * width);
  for (let y = 0; y < rows; y++) {
    const share =
      pool === "max"
        ? 1
        : tall(y) / (tall(y - (y % 2)) + (y - (y % 2) + 1 < rows ? tall(y - (y % 2) + 1) : 0));
    for (let x = 0; x < cols; x++) {
      const at = (y >> 1) * width + (x >> 1);
      const value = below[y * cols + x];
      out[at] = pool === "max" ? Math.max(out[at], value) : out[at] + value * share;
    }
  }
  return out;
}

// A window as parts of whole rows.
async function windowOfRows(
  source: Source,
  t: number,
  layer: number,
  rows: Range,
  cols: Range,
): Promise<Float32Array[]> {
  const [tall, wide] = [rows[1] - rows[0], cols[1] - cols[0]];
  const lines = await inParts(
    Array.from({ length: tall }, (_, at) => rows[0] + at),
    (row) => source.rows(t, layer, row),
  );
  return lines[0].map((_, head) => {
    const out = new Float32Array(tall * wide);
    lines.forEach((line, row) => {
      out.set(line[head].subarray(...cols), row * wide);
    });
    return out;
  });
}

// A request with a body is posted.
export type Ask = (path: string, signal?: AbortSignal, body?: object) => Promise<ArrayBuffer>;

// Requests paths from the server or the kernel; src/regard/viewer/answers.py answers them.
export class Live implements Source {
  private texts = new Cache<Promise<Text>>(1000);
  private lines = new Cache<Promise<Float32Array[]>>(200);
  private steps = new Map<string, number>(); // the last line of each layer that was asked for
  private constructor(
    public common: Common,
    public titles: string[],
    private ask: Ask,
  ) {}

  static async open(ask: Ask) {
    const about = await asJson<Common & { titles: string[]; typed?: [number, string][] }>(
      ask("texts"),
    );
    for (const [at, title] of about.typed ?? []) about.titles[at] = title;
    return new Live(about, about.titles, ask);
  }
  async read(text: string, signal: AbortSignal, question: object = {}) {
    const { texts, refused } = await asJson<{ texts: [number, string][]; refused?: string }>(
      this.ask("read", signal, { text, ...question }),
    );
    if (refused) throw new Error(refused);
    for (const [at, title] of texts) this.titles[at] = title;
    return texts[0][0];
  }
  finest() {
    return 0;
  }
  precision() {
    return "";
  }
  text(t: number) {
    return this.texts.get(`${t}`, () => asJson<Text>(this.ask(`text/${t}`)));
  }
  async tile(at: Place, level: number, row: number, col: number, pool: Pool, signal?: AbortSignal) {
    const tile = await this.ask(
      `tile/${at.text}/${at.layer}/${at.head}/${level}/${row}/${col}/${pool}`,
      signal,
    );
    return level ? halves(tile) : new Float32Array(tile);
  }
  private cut(path: string, t: number, layer: number) {
    return this.lines.get(path, async () => {
      const heads = (await this.text(t)).layers[layer].heads.length;
      const all = new Float32Array(await this.ask(path));
      const size = all.length / heads;
      return Array.from({ length: heads }, (_, head) =>
        all.subarray(head * size, (head + 1) * size),
      );
    });
  }
  // After a step from word to word, the line of the next word in this direction is fetched too.
  private line(kind: string, t: number, layer: number, at: number) {
    const name = `${kind}/${t}/${layer}`;
    const next = 2 * at - (this.steps.get(name) ?? at);
    this.steps.set(name, at);
    const found = this.cut(`${name}/${at}`, t, layer);
    if (Math.abs(next - at) === 1)
      void Promise.all([this.text(t), found]).then(
        ([text]) => {
          const { length } = kind === "rows" ? queriesOf(text) : text.tokens;
          if (next >= 0 && next < length)
            this.cut(`${name}/${next}`, t, layer).catch(() => undefined);
        },
        () => undefined,
      );
    return found;
  }
  rows(t: number, layer: number, query: number) {
    return this.line("rows", t, layer, query);
  }
  columns(t: number, layer: number, key: number) {
    return this.line("columns", t, layer, key);
  }
  window(t: number, layer: number, rows: Range, cols: Range) {
    if (Math.max(rows[1] - rows[0], cols[1] - cols[0]) > WINDOW)
      return windowOfRows(this, t, layer, rows, cols);
    const size = `${rows[1] - rows[0]}/${cols[1] - cols[0]}`;
    return this.cut(`window/${t}/${layer}/${rows[0]}/${cols[0]}/${size}`, t, layer);
  }
  async pair(at: Place, i: number, j: number): Promise<[Float32Array, Float32Array] | null> {
    try {
      const both = new Float32Array(
        await this.ask(`pair/${at.text}/${at.layer}/${at.head}/${i}/${j}`),
      );
      return [both.subarray(0, both.length / 2), both.subarray(both.length / 2)];
    } catch {
      return null;
    }
  }
}

const asJson = async <T>(answer: Promise<ArrayBuffer>): Promise<T> =>
  JSON.parse(new TextDecoder().decode(await answer));
