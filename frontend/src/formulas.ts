// The formulas of the lectures, as the definitions in src/regard/reference compute them. A test compares both.

export type Allowed = (i: number, j: number) => boolean; // may query i attend to key j?
const sum = (values: number[]) => values.reduce((total, value) => total + value, 0);

export const dot = (a: number[], b: number[]) => sum(a.map((value, at) => value * b[at]));

// A key that is masked has the score -∞ and the weight 0. A row without a key has weights of 0.
export function softmax(scores: number[]): number[] {
  const top = Math.max(...scores);
  if (top === -Infinity) return scores.map(() => 0);
  const all = scores.map((score) => Math.exp(score - top));
  const total = sum(all);
  return all.map((one) => one / total);
}

export const entropy = (weights: number[]) =>
  -sum(weights.map((weight) => (weight > 0 ? weight * Math.log(weight) : 0)));

// Normalizers of a row of scores.
function sparsemax(scores: number[]) {
  const ranked = [...scores].sort((a, b) => b - a);
  let [sum, threshold] = [0, 0];
  ranked.forEach((score, at) => {
    sum += score;
    if (1 + (at + 1) * score > sum) threshold = (sum - 1) / (at + 1);
  });
  return scores.map((score) => Math.max(score - threshold, 0));
}
function entmax15(scores: number[]) {
  // by bisection: the threshold at which the row sums to 1
  const half = scores.map((score) => score / 2);
  let [low, high] = [Math.max(...half) - 1, Math.max(...half)];
  for (let step = 0; step < 50; step++) {
    const middle = (low + high) / 2;
    if (half.reduce((total, score) => total + Math.max(score - middle, 0) ** 2, 0) > 1)
      low = middle;
    else high = middle;
  }
  return half.map((score) => Math.max(score - low, 0) ** 2);
}
const hardmax = (scores: number[]) =>
  scores.map((_, at) => (at === scores.indexOf(Math.max(...scores)) ? 1 : 0));
export const NORMALIZERS: Record<string, (scores: number[]) => number[]> = {
  softmax,
  "entmax 1.5": entmax15,
  sparsemax,
  hardmax,
};

// Scores of a query and a key of width 2, each with its formula.
export const SCORES: Record<string, [string, (q: number[], k: number[]) => number]> = {
  dot: ["q · k", (q, k) => dot(q, k)],
  "scaled dot": [
    "q · k / √D, so that scores keep their variance as D grows (D = 2 here)",
    (q, k) => dot(q, k) / Math.sqrt(q.length),
  ],
  additive: [
    "v · tanh(W q + U k), Bahdanau; here W = U = 1, v = (1, 1)",
    (q, k) => Math.tanh(q[0] + k[0]) + Math.tanh(q[1] + k[1]),
  ],
  bilinear: [
    "q W k, Luong's general; here W rotates by 90°: keys to the left of q score highest",
    (q, k) => -q[1] * k[0] + q[0] * k[1],
  ],
  cosine: [
    "c cos(q, k), c = 4: only the directions matter",
    (q, k) => (4 * dot(q, k)) / (Math.hypot(...q) * Math.hypot(...k) || 1),
  ],
};
export const MASKS: Record<string, (size: number) => Allowed> = {
  "no mask": () => () => true,
  causal: () => (i, j) => j <= i,
  padding: (real) => (_, j) => j < real,
  window: (size) => (i, j) => Math.abs(i - j) < size,
};

export interface Steps {
  products: number[]; // q · k
  scaled: number[]; // over √d and the temperature
  masked: number[]; // -∞ where the mask excludes the key
  weights: number[];
  output: number[];
}

// The attention of query `i`, step by step.
export function stepsOf(
  query: number[],
  keys: number[][],
  values: number[][],
  i: number,
  allowed: Allowed,
  temperature = 1,
): Steps {
  const products = keys.map((key) => dot(query, key));
  const scaled = products.map((one) => one / Math.sqrt(query.length) / temperature);
  const masked = scaled.map((score, j) => (allowed(i, j) ? score : -Infinity));
  const weights = softmax(masked);
  const output = (values[0] ?? []).map((_, channel) =>
    sum(weights.map((weight, j) => weight * values[j][channel])),
  );
  return { products, scaled, masked, weights, output };
}

// Independent normal numbers, the same at every opening.
export function normals(count: number, seed: number): number[] {
  let state = seed >>> 0;
  const uniform = () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return (state + 0.5) / 2 ** 32;
  };
  return Array.from(
    { length: count },
    () => Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform()),
  );
}

// Vectors of independent normal numbers, from one stream: streams of near seeds are alike. A larger width keeps the
// channels of a smaller one.
export function vectorsOf(count: number, width: number, seed: number): number[][] {
  const room = Math.max(width, 64);
  const drawn = normals(count * room, seed);
  return Array.from({ length: count }, (_, at) => drawn.slice(at * room, at * room + width));
}

// The maps of all heads: head h compares its own channels of the queries with those of the keys.
export function mapsOfHeads(queries: number[][], keys: number[][], heads: number): number[][][] {
  const width = (queries[0] ?? []).length / heads;
  const part = (x: number[], head: number) => x.slice(head * width, (head + 1) * width);
  return Array.from({ length: heads }, (_, head) =>
    queries.map((query, i) => {
      const own = keys.map((key) => part(key, head));
      return stepsOf(part(query, head), own, [], i, () => true).weights;
    }),
  );
}

// The mean cosine between the maps of two heads.
export function likeness(maps: number[][][]): number {
  const flat = maps.map((map) => map.flat());
  const all = flat.flatMap((one, at) =>
    flat
      .slice(at + 1)
      .map((other) => dot(one, other) / (Math.hypot(...one) * Math.hypot(...other))),
  );
  return all.length ? sum(all) / all.length : 1;
}

export interface Layer {
  products: number; // multiplications, as in table 1 of Vaswani et al. 2017: the scores, or one matrix of a recurrence
  kept: number; // numbers in memory beside the inputs, if all scores or states are stored
  path: number; // the most layers or steps from one token to another
}
// The costs of a layer for n tokens of width d, with a causal window of w tokens and h heads.
export function costsOf(n: number, d: number, h: number, w: number): Record<string, Layer> {
  const near = Math.min(w, n);
  const pairs = n * near - (near * (near - 1)) / 2;
  return {
    attention: { products: n * n * d, kept: h * n * n, path: 1 },
    window: { products: pairs * d, kept: h * pairs, path: Math.ceil((n - 1) / Math.max(w - 1, 1)) },
    "linear attention": { products: (n * d * d) / h, kept: (d * d) / h, path: 1 },
    recurrence: { products: n * d * d, kept: d, path: n - 1 },
  };
}

// RoPE: the pair of channels (m, m + D / 2) turns by position · base^(-2m / D).
const turn = (m: number, width: number, base: number) => base ** ((-2 * m) / width);
export function rotated(x: number[], position: number, base: number): number[] {
  const half = x.length / 2;
  const angle = (m: number) => position * turn(m % half, x.length, base);
  return x.map((one, m) =>
    m < half
      ? one * Math.cos(angle(m)) - x[m + half] * Math.sin(angle(m))
      : one * Math.cos(angle(m)) + x[m - half] * Math.sin(angle(m)),
  );
}
// The score of a vector with itself at a distance, as a share of that at distance 0, in the mean over all vectors.
export const decay = (distance: number, width: number, base: number) =>
  sum(Array.from({ length: width / 2 }, (_, m) => Math.cos(distance * turn(m, width, base)))) /
  (width / 2);

// Biases by distance, for keys before the query. ALiBi's slopes are 2^(-8 (h + 1) / H); of other numbers of heads than
// powers of two, the further slopes are every second one of the next power.
export function slope(head: number, heads: number): number {
  const power = 2 ** Math.floor(Math.log2(heads));
  return head < power
    ? 2 ** ((-8 * (head + 1)) / power)
    : 2 ** ((-8 * (2 * (head - power) + 1)) / (2 * power));
}
export function bucketOfT5(distance: number, buckets = 32, furthest = 128): number {
  const exact = buckets / 2;
  if (distance < exact) return distance;
  const ratio = Math.log(distance / exact) / Math.log(furthest / exact);
  return Math.min(exact + Math.floor(ratio * (buckets - exact)), buckets - 1);
}
export const tableOfT5 = (head: number) => vectorsOf(16, 32, 11)[head];
export const BIASES: Record<string, (distance: number, head: number, heads: number) => number> = {
  "no bias": () => 0,
  ALiBi: (distance, head, heads) => -slope(head, heads) * distance,
  KERPLE: (distance, head, heads) => -(head + 1) * Math.log1p(distance / heads),
  T5: (distance, head) => tableOfT5(head)[bucketOfT5(distance)],
};
// The weights of the last query of a text on the keys at each distance, if all products are equal.
export const weightsByDistance = (bias: string, length: number, head: number, heads: number) =>
  softmax(Array.from({ length }, (_, distance) => BIASES[bias](distance, head, heads)));
