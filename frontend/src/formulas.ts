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
