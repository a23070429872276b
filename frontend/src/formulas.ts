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
