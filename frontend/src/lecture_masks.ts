// The lecture on masks: a picture of every mask of regard.pieces, by the same rules.
import type { Context } from "./context";
import { h, hint, s } from "./dom";
import { plural } from "./format";
import { MASKS, type Allowed } from "./formulas";
import { dial, withControls, type Lecture } from "./lecture_controls";

export interface Mask {
  call: string;
  meaning: string;
  allowed: Allowed;
}

const N = 64; // tokens: enough that the block masks are sparse
const sizes = { window: 5, gap: 3, block: 4, prefix: 12 };
const DOCUMENTS = [28, 21, 15];
const [REAL, RANDOM] = [46, 1]; // keys that are no padding; random blocks of a row

const near: Allowed = (i, j) => MASKS.window(sizes.window)(i, j);
const causal = MASKS.causal(0);
const documentOf = (at: number) =>
  at < DOCUMENTS[0] ? 0 : at < DOCUMENTS[0] + DOCUMENTS[1] ? 1 : 2;
const blockOf = (at: number) => Math.floor(at / sizes.block);
// The random block of each row of blocks, by the size of a block: those of rg.random_blocks(size, 1, 64).
const RANDOM_BLOCKS: Record<number, number[]> = {
  2: [
    12, 3, 19, 28, 27, 14, 27, 21, 0, 22, 11, 9, 10, 25, 12, 20, 21, 16, 1, 15, 30, 23, 9, 26, 19,
    3, 27, 8, 25, 3, 18, 11,
  ],
  3: [12, 13, 13, 17, 6, 14, 18, 1, 12, 21, 4, 14, 8, 11, 2, 1, 9, 0, 9, 7, 20, 13],
  4: [12, 11, 3, 9, 13, 3, 8, 12, 1, 11, 14, 12, 10, 11, 0, 5],
  5: [12, 5, 9, 4, 5, 12, 5, 3, 0, 7, 2, 12, 12],
  6: [2, 1, 5, 2, 0, 2, 4, 6, 6, 5, 5],
  7: [2, 2, 7, 5, 3, 7, 2, 7, 3, 4],
  8: [2, 4, 2, 3, 3, 3, 7, 1],
  9: [2, 4, 2, 3, 3, 3, 7, 1],
  10: [2, 5, 4, 6, 6, 0, 1],
};
const isBigBird: Allowed = (i, j) =>
  Math.abs(blockOf(i) - blockOf(j)) <= 1 ||
  blockOf(i) === 0 ||
  blockOf(j) === 0 ||
  RANDOM_BLOCKS[sizes.block][blockOf(i)] === blockOf(j);

function masks(): Mask[] {
  const { window: w, gap, block, prefix } = sizes;
  const one = (call: string, meaning: string, allowed: Allowed) => ({ call, meaning, allowed });
  return [
    one("no mask", "Every query may attend to every key (encoders).", () => true),
    one("causal()", "No query may attend to a later key (decoders).", causal),
    one(`window(${w})`, `The token itself and the ${w - 1} nearest keys on each side.`, near),
    one(
      `causal() & window(${w})`,
      `The token itself and the ${w - 1} keys before it (Mistral).`,
      (i, j) => causal(i, j) && near(i, j),
    ),
    one(
      `dilated(${w}, ${gap})`,
      "A window with gaps (Longformer).",
      (i, j) => Math.abs(i - j) % gap === 0 && Math.abs(i - j) <= (w - 1) * gap,
    ),
    one(
      `block_local(${block})`,
      "Only keys of the same block.",
      (i, j) => blockOf(i) === blockOf(j),
    ),
    one(
      `prefix(${prefix}) | causal()`,
      "Every query may attend to the prefix; the rest is causal (prefix LM).",
      (i, j) => j < prefix || j <= i,
    ),
    one(
      `window(${w}) | global_tokens([0])`,
      "A window, and a first token that attends to all and that all attend to (Longformer).",
      (i, j) => near(i, j) || i === 0 || j === 0,
    ),
    one(
      `bigbird(${N}, ${block}, num_random=${RANDOM})`,
      "Neighboring blocks, the first block, and a random block for each row of blocks (BigBird).",
      isBigBird,
    ),
    one(
      `documents([${DOCUMENTS.join(", ")}])`,
      "Packed texts: only pairs inside one text.",
      (i, j) => documentOf(i) === documentOf(j),
    ),
    one(
      `causal() & documents([${DOCUMENTS.join(", ")}])`,
      "The same, and each text is causal.",
      (i, j) => causal(i, j) && documentOf(i) === documentOf(j),
    ),
    one(
      `padding([${REAL}])`,
      "The keys after the end of the text are excluded.",
      MASKS.padding(REAL),
    ),
  ];
}

// One path for all allowed pairs: a stroke per run of keys. Lines of the paper's color separate the cells.
function drawingOfMask({ call, meaning, allowed }: Mask): [SVGSVGElement, number] {
  let [runs, count] = ["", 0];
  for (let i = 0; i < N; i++)
    for (let j = 0; j < N; j++) {
      const first = j;
      while (j < N && allowed(i, j)) j++;
      if (j > first) runs += `M${first} ${i}h${j - first}v1h${first - j}z`;
      count += j - first;
    }
  const lines = Array.from({ length: N - 1 }, (_, at) => `M0 ${at + 1}H${N}M${at + 1} 0V${N}`).join(
    "",
  );
  const drawing = s(
    "svg",
    { viewBox: `0 0 ${N} ${N}`, role: "img", "aria-label": `${call}: ${meaning}` },
    s("rect", { width: N, height: N, fill: "var(--none)" }),
    s("path", { class: "allowed", d: runs, fill: "var(--more)" }),
    s("path", { d: lines, stroke: "var(--paper)", "stroke-width": 0.12 }),
  );
  return [drawing, count];
}

function card(mask: Mask): HTMLElement {
  const [drawing, count] = drawingOfMask(mask);
  const percent = Math.round((100 * count) / N / N);
  return h(
    "figure",
    { class: "mask" },
    h("figcaption", {}, h("code", {}, mask.call)),
    drawing,
    hint(
      `${mask.meaning} ${percent} % of all pairs${
        percent < 100 ? "; the other weights are exactly 0" : ""
      }.`,
    ),
  );
}

const effects = {
  window: () =>
    sizes.window === 1
      ? "Window 1: each token attends only to itself."
      : `Window ${sizes.window}: each token attends to itself and ${sizes.window - 1} before it; without causal() also to ${sizes.window - 1} after it.`,
  gap: () =>
    sizes.gap === 1
      ? "Gap 1: no key is left out, so dilated is a plain window."
      : `Gap ${sizes.gap}: of the keys around it a token sees each ${sizes.gap}${sizes.gap === 2 ? "nd" : sizes.gap === 3 ? "rd" : "th"} one, ` +
        `up to ${(sizes.window - 1) * sizes.gap} tokens away.`,
  block: () =>
    `Block ${sizes.block}: the text is ${plural(Math.ceil(N / sizes.block), "block")} of ${sizes.block} tokens; ` +
    `with BigBird a query sees at most ${Math.min(3 + 1 + RANDOM, Math.ceil(N / sizes.block))} of them.`,
  prefix: () =>
    sizes.prefix === 0
      ? "Prefix 0: there is no prefix, so only causal() is left."
      : `Prefix ${sizes.prefix}: every token sees the first ${plural(sizes.prefix, "token")}, also those that come later.`,
};

export const maskGallery: Lecture = (_: Context) => [
  hint(
    `${N} tokens. A row is a query, a column is a key. Filled: the query may attend to the key. Masks compose with &, | and ~, as in Regard.`,
  ),
  ...withControls(
    (changed) => [
      dial("Window", sizes, "window", [1, 16, 1], effects, changed),
      dial("Gap of the dilated window", sizes, "gap", [1, 6, 1], effects, changed),
      dial("Tokens in a block", sizes, "block", [2, 10, 1], effects, changed),
      dial("Tokens in the prefix", sizes, "prefix", [0, 40, 1], effects, changed),
    ],
    () => masks().map(card),
    "masks",
  ),
];
