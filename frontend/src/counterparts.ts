// Which token of one text stands in the place of which token of another.

const LARGEST = 4_000_000; // pairs of tokens that are compared; longer texts are paired by place

// For each token of `a` the token of `b` in its place, or -1. Equal tokens are paired by a longest common subsequence.
// Between two such pairs, as many tokens as in the other text are changed words: each goes with the one in its place.
export function counterparts(a: string[], b: string[]): number[] {
  const out = new Array<number>(a.length).fill(-1);
  let start = 0;
  let [endA, endB] = [a.length, b.length];
  while (start < Math.min(endA, endB) && a[start] === b[start]) out[start] = start++;
  while (endA > start && endB > start && a[endA - 1] === b[endB - 1]) out[--endA] = --endB;
  if ((endA - start) * (endB - start) <= LARGEST)
    pairEqual(a, b, [start, endA], [start, endB], out);
  let next = 0; // the first token of b after the last pair
  for (let i = 0; i < a.length; i++) {
    if (out[i] >= 0) {
      next = out[i] + 1;
      continue;
    }
    let after = i;
    while (after < a.length && out[after] < 0) after++;
    const limit = after < a.length ? out[after] : b.length;
    if (limit - next === after - i) for (let at = i; at < after; at++) out[at] = next++;
    i = after - 1;
  }
  return out;
}

// Whether two texts have half of their words in common, in the same order. Only then words are compared by their places.
export function shareWords(a: string[], b: string[], special = new Set<number>()): boolean {
  const isWord = (token: string) =>
    /[\p{L}\p{N}]/u.test(token) && token !== "<unk>" && token !== "</s>";
  const left = special.size ? new Set([...special].map((at) => a[at])) : new Set<string>();
  const [one, other] = [a, b].map((tokens) =>
    tokens.filter((token) => isWord(token) && !left.has(token)),
  );
  const equal = counterparts(one, other).filter(
    (at, place) => at >= 0 && other[at] === one[place],
  ).length;
  return a.join("\n") === b.join("\n") || 2 * equal >= Math.max(one.length, other.length, 1);
}

function pairEqual(
  a: string[],
  b: string[],
  [a0, a1]: number[],
  [b0, b1]: number[],
  out: number[],
) {
  const width = b1 - b0 + 1;
  const longest = new Uint32Array((a1 - a0 + 1) * width); // of a[i ...] and b[j ...]
  for (let i = a1 - a0 - 1; i >= 0; i--)
    for (let j = b1 - b0 - 1; j >= 0; j--)
      longest[i * width + j] =
        a[a0 + i] === b[b0 + j]
          ? longest[(i + 1) * width + j + 1] + 1
          : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
  for (let i = 0, j = 0; i < a1 - a0 && j < b1 - b0; ) {
    if (a[a0 + i] === b[b0 + j]) out[a0 + i++] = b0 + j++;
    else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) i++;
    else j++;
  }
}

// Half of the sum of differences of two rows of weights, from 0 (the same) to 1 (no key in common). `keys` are the
// counterparts of the keys of `a`; the weight on keys without a counterpart counts as a difference.
export function rowChange(a: Float32Array, b: Float32Array, keys: number[]): number {
  let [total, paired] = [0, 0];
  keys.forEach((other, at) => {
    total += Math.abs(a[at] - (other < 0 ? 0 : b[other]));
    paired += other < 0 ? 0 : b[other];
  });
  return Math.min(
    1,
    (total + Math.max(0, b.reduce((sum, weight) => sum + weight, 0) - paired)) / 2,
  );
}
