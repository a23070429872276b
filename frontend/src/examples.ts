// The strongest examples of the chosen head: over the documents of a corpus, or in the texts of the page.
import type { Context } from "./context";
import { hasSameHeads, type Example, type Text } from "./data";
import { cut, fill, h, hint, inPlace, joins, numberOf, visible } from "./dom";
import type { Source } from "./source";
import { toLink, type State } from "./state";

const [AROUND, TEXTS, SHOWN] = [6, 24, 5]; // tokens around an end of a link; texts that are read; examples

// Null: the page has one text and no corpus.
export function examplesOf(context: Context): HTMLElement | null {
  const { text, state, source } = context;
  const { examples } = text.layers[state.layer].heads[state.head];
  if (examples)
    return section(
      `Strongest examples in ${(text.documents ?? 0).toLocaleString("en")} documents`,
      examples.map((one) => line(one, h("span", { class: "hint" }, `document ${one.document}`))),
    );
  const numbers = Object.keys(source.titles).map(Number).slice(0, TEXTS);
  if (numbers.length < 2 || text.queries !== null) return null;
  const box = h("div", {});
  const known = read.get(source);
  if (known?.length === numbers.length) fill(box, inTexts(context, numbers, known));
  else
    whenSeen(box, async () => {
      const texts = await Promise.all(numbers.map((number) => source.text(number)));
      read.set(source, texts);
      fill(box, inTexts(context, numbers, texts));
    });
  return box;
}

// The texts of a page that were read: the next head is drawn at once.
const read = new WeakMap<Source, Text[]>();

// A server is asked for the other texts when a reader sees the place of the examples.
function whenSeen(element: Element, act: () => Promise<void>): void {
  const observer = new IntersectionObserver((entries) => {
    if (!entries.some(({ isIntersecting }) => isIntersecting)) return;
    observer.disconnect();
    void act();
  });
  observer.observe(element);
}

function inTexts(context: Context, numbers: number[], texts: Text[]): HTMLElement | null {
  const { text, state } = context;
  const found = texts
    .map((other, at) => ({ other, number: numbers[at] }))
    .filter(({ other }) => hasSameHeads(text, other) && hasExample(other, state))
    .map(({ other, number }) => ({
      number,
      title: other.title,
      example: exampleOf(other, state),
    }))
    .sort((a, b) => b.example.weight - a.example.weight);
  if (found.length < 2) return null;
  return section(
    `Strongest examples in ${found.length} texts of this page`,
    found
      .slice(0, SHOWN)
      .map(({ number, example, title }) => line(example, opener(context, number, title, example))),
  );
}

const section = (title: string, lines: HTMLElement[]) =>
  h(
    "section",
    { class: "examples" },
    h("h3", {}, title),
    hint("The underlined word attends to the filled one."),
    lines.length ? h("ol", {}, ...lines) : hint("None between two words that are no neighbors."),
  );

// Whether the strongest link of the head is one between words.
function hasExample({ layers, special }: Text, { layer, head }: State): boolean {
  const [query, key] = layers[layer].heads[head].strongest;
  return key >= 0 && !special.includes(query) && !special.includes(key);
}

// The strongest link of the head in a text, with its place in the text; as `HeadExample.of` of profiling/examples.py.
function exampleOf(text: Text, { layer, head }: State): Example & { link: [number, number] } {
  const [query, key, weight] = text.layers[layer].heads[head].strongest;
  const around = [query, key].flatMap((end) =>
    Array.from({ length: 2 * AROUND + 1 }, (_, n) => end - AROUND + n),
  );
  const places = [...new Set(around)]
    .filter((at) => at in text.tokens && !text.special.includes(at))
    .sort((a, b) => a - b);
  const [first, second] = [Math.min(query, key), Math.max(query, key)];
  const isApart = second - first > 2 * AROUND + 1;
  const gap = isApart ? places.filter((at) => at <= first + AROUND).length : -1;
  if (isApart) places.splice(gap, 0, -1);
  const tokens = places.map((at) => text.tokens[at] ?? "…");
  const [from, to] = [places.indexOf(query), places.indexOf(key)];
  return { weight, tokens, query: from, key: to, left_out: gap, document: 0, link: [query, key] };
}

// The title of a text, which opens it at the link.
function opener(
  context: Context,
  text: number,
  title: string,
  { link: [query, key] }: { link: [number, number] },
): HTMLAnchorElement {
  const change: Partial<State> = { view: "head", text, query, key };
  return h(
    "a",
    {
      href: toLink({ ...context.state, ...change }),
      onclick: inPlace(() => {
        context.set(change);
      }),
    },
    cut(title, 24),
  );
}

// "cat sat on the mat", with the query underlined and the key filled.
function line({ tokens, query, key, weight, left_out }: Example, where: HTMLElement): HTMLElement {
  const words = tokens.map((token, at) => {
    const isEnd = at === query || at === key;
    const spaced = at > 0 && !joins(token, tokens[at - 1]) ? " " : "";
    return h(
      "span",
      {},
      spaced,
      isEnd
        ? h("b", { class: at === query ? "from" : "to" }, visible(token))
        : at === left_out
          ? "…"
          : visible(token),
    );
  });
  return h(
    "li",
    {},
    h("span", { class: "example", dir: "auto" }, ...words),
    " ",
    numberOf(weight),
    " ",
    where,
  );
}
