// The first thing that a reader sees: the sentence with the arcs of one head, what they say, and finding cards.
import { drawArcs, type Arc } from "./arcs";
import { cards, stateLink } from "./cards";
import { headName, inText, strongest, type Context } from "./context";
import { depthBar } from "./depth";
import { queriesOf, type Lead, type Part } from "./data";
import { actionButton, fill, h, hint, s, spaced, visible } from "./dom";
import { shown } from "./format";
import { linkHeads, ofReceived } from "./link_heads";
import { colorOfTold, toldLinks } from "./told_links";
import { axesOf, nounOf } from "./labels";
import { litImage } from "./lit_image";
import { sentence } from "./parts";
import type { State } from "./state";
import { stepOf, within } from "./steps";
import { wordNames } from "./word_names";

const ARCS = 6; // of a layer
const [WHOLE, AROUND] = [70, 16]; // a longer text is cut to the words around both ends of the link

// The sentence stands above both columns of the overview, its words in the first of them, and below them the rest. On a
// phone the heads stand between the words and the rest.

const placeOf = ({ layer, head, query, key }: Lead) => ({ layer, head, query, key });

// The ranges of tokens to show: all, or those around the given ones.
export function ranges(size: number, around: number[]): [number, number][] {
  if (size <= WHOLE) return [[0, size]];
  const wanted = around
    .map((at): [number, number] => [Math.max(0, at - AROUND), Math.min(size, at + AROUND + 1)])
    .sort((a, b) => a[0] - b[0]);
  return wanted.reduce((joined: [number, number][], [first, last]) => {
    const before = joined.at(-1);
    if (before && first <= before[1]) before[1] = Math.max(before[1], last);
    else joined.push([first, last]);
    return joined;
  }, []);
}

export function firstView(context: Context) {
  const heading = h("div", { class: "lead-line" });
  const element = h("section", { class: "first", "aria-label": "What stands out" });
  const rest = h("section", { class: "first-rest", "aria-label": "Findings" });
  const [said, ranking] = [h("span", {}), h("ul", { class: "link-heads" })];
  let redraw: () => void = () => undefined;
  let arcsNow: () => Arc[] = () => [];
  let lit = ""; // whose light is drawn on an image
  const observer = new ResizeObserver(() => redraw());
  const depth = depthBar(context, () => {
    redraw();
    tellArcs();
  });

  // Words in order; the spans of both sides by index. A word opens the view of its head.
  function line(
    tokens: string[],
    shown: [number, number][],
    name: string,
    marked: number,
    wordOf: (at: number) => Partial<State>,
  ): [HTMLElement, Map<number, HTMLElement>] {
    const box = h("p", { class: "lead-words", role: "listbox", tabindex: 0, "aria-label": name });
    const spans = new Map<number, HTMLElement>();
    const word = (at: number) => {
      const to = wordOf(at);
      const span = h(
        "span",
        {
          dir: "auto",
          role: "option",
          "aria-selected": String(at === marked),
          title: `${visible(tokens[at])} · ${at}: ${"key" in to ? "its link" : "what it attends to"}, in Head`,
          onclick: () => open(wordOf(at)),
        },
        visible(tokens[at]),
      );
      spans.set(at, span);
      return span;
    };
    for (const [part, [first, last]] of shown.entries()) {
      if (part || first) box.append(" … ");
      box.append(...spaced(tokens, [first, last], word));
    }
    if (shown.at(-1)![1] < tokens.length) box.append(" …");
    return [box, spans];
  }

  function open(word: Partial<State>) {
    context.set({ view: "head", ...placeOf(chosenLink()), key: -1, ...word });
  }
  // The link of the sentence that ends at a word.
  const toldAt = (at: number) =>
    toldLinks(context.text)
      .filter(({ key }) => key === at)
      .map(placeOf)[0];

  // Arrows move between the words of a list that has the focus; Enter opens the word.
  function key(event: KeyboardEvent): boolean {
    const box = event.composedPath()[0] as HTMLElement;
    if (!element.contains(box) || !box.classList.contains("lead-words")) return false;
    const words = [...box.querySelectorAll<HTMLElement>("[role=option]")];
    const at = words.findIndex((word) => word.getAttribute("aria-selected") === "true");
    const step = stepOf(event.key, 10);
    if (step === undefined) {
      if (event.key !== "Enter" || at < 0) return false;
      words[at].click();
      return true;
    }
    const next = words[within(at + step, words.length)];
    words[at]?.setAttribute("aria-selected", "false");
    next.setAttribute("aria-selected", "true");
    next.scrollIntoView({ block: "nearest" });
    return true;
  }

  function stage(first: Lead): HTMLElement {
    const { text } = context;
    const ends = toldLinks(text).map((link) => link.key);
    const near = ranges(text.tokens.length, text.queries ? ends : [first.query, ...ends]);
    const [own, queries] = line(
      queriesOf(text),
      text.queries ? ranges(text.queries.length, [first.query]) : near,
      "The text",
      first.query,
      (query) => (text.queries ? undefined : toldAt(query)) ?? { query },
    );
    const [other, keys] = text.queries
      ? line(text.tokens, near, "What it attends to", first.key, (key) => toldAt(key) ?? { key })
      : [null, queries];
    const arcs = s("svg", { class: "arcs", "aria-hidden": "true" });
    const told = toldLinks(text);
    const from = queries.get(first.query);
    from?.classList.add("lead-query");
    told.forEach((link) => {
      const span = keys.get(link.key);
      span?.classList.add("lead-key");
      span?.style.setProperty("--own", colorOfTold(link, told));
    });
    // The links of each head in its color; those of the second head are a little higher, as they may lead to the same words.
    redraw = () => {
      const { weights } = depth;
      const { colors } = context;
      for (const [at, span] of keys) {
        span.style.background = weights ? colors.weight(weights[at]) : "";
        span.style.color = weights ? colors.textOn(weights[at]) : "";
      }
      drawArcs(arcs, arcsNow());
    };
    arcsNow = () => (depth.weights ? arcsOf(depth.weights) : arcsOfTold());
    const arcsOf = (weights: Float32Array) =>
      strongest(weights, ARCS).flatMap((key) =>
        from && keys.has(key)
          ? [
              {
                from,
                to: keys.get(key)!,
                share: weights[key],
                color: context.colors.line(weights[key]),
              },
            ]
          : [],
      );
    const arcsOfTold = () =>
      told.flatMap((link, number) =>
        link.links.flatMap(([key, weight]) =>
          from && keys.has(key)
            ? [
                {
                  from,
                  to: keys.get(key)!,
                  share: weight,
                  color: colorOfTold(link, told),
                  lift: 9 * number,
                  title: `${headName(context, link.layer, link.head)}: ${shown(weight)}`,
                },
              ]
            : [],
        ),
      );
    return h("div", { class: "lead-stage stage" }, arcs, own, other);
  }

  // A phrase of the heading that tells a link leads to it.
  function phrase(parts: Part[], link: Lead | undefined): (Node | string)[] {
    if (!link) return sentence(parts);
    const view = isOfWords() ? "head" : "picture";
    const found = stateLink(context, { view, ...placeOf(link) }, "phrase", ...sentence(parts));
    found.style.setProperty("--own", colorOfTold(link, toldLinks(context.text)));
    return [found];
  }
  const isOfWords = () => nounOf(context.text) === "word";

  // The image under the links of the sentence, and under the chosen head if that is another one.
  function drawLit() {
    const { state, text } = context;
    const box = element.querySelector(".lit-images");
    const told = toldLinks(text);
    const chosen = told.some(({ layer, head }) => layer === state.layer && head === state.head)
      ? []
      : [state];
    const wanted = [
      state.scale,
      ...chosen.flatMap(({ layer, head, query }) => [layer, head, query]),
    ].join();
    if (!box || lit === wanted) return;
    lit = wanted;
    box.replaceChildren(
      ...chosen.map((one) => litImage(context, one, "var(--accent)")),
      ...told.map((link) => litImage(context, link, colorOfTold(link, told))),
    );
  }

  // The link of the chosen head, if the heading tells one of its links; else the link that leads.
  function chosenLink(): Lead {
    const { state, text } = context;
    const told = toldLinks(text);
    return told.find(({ layer, head }) => layer === state.layer && head === state.head) ?? told[0];
  }

  function follow() {
    drawLit();
    drawDepth();
  }

  // Whose arcs are drawn: those of the heads of the sentence, or those of a layer.
  function tellArcs() {
    const { text } = context;
    const told = toldLinks(text);
    if (!told.length) return;
    const where = depth.weights
      ? inText(depth.layer())
      : told.map(({ layer, head }) => inText(headName(context, layer, head))).join(" and ");
    fill(
      said,
      isOfWords() ? "Arcs show what the word " : "Light falls on what the patch ",
      h("i", { dir: "auto" }, visible(queriesOf(text)[told[0].query])),
      ` attends to in ${where}`,
      isOfWords() && told.length > 1 && !depth.weights && ", each in its color",
      `${isOfWords() ? ": a thicker arc is a larger weight" : ""}. `,
    );
  }
  const about = ({ query }: Lead) => {
    const { text } = context;
    const find = wordNames(queriesOf(text))[query];
    return hint(
      said,
      isOfWords() && ofReceived(text),
      `Layers and heads count from 0. ${text.lead?.left_out ?? ""} `,
      stateLink(
        context,
        { view: "statistics", table: "head", find },
        "more",
        "All heads for “",
        h("bdi", {}, visible(queriesOf(text)[query])),
        "”",
      ),
    );
  };

  async function rank() {
    const { text } = context;
    fill(ranking);
    const lines = isOfWords() ? await linkHeads(context, toldLinks(text)) : [];
    if (text === context.text) fill(ranking, ...lines);
  }
  const drawDepth = () => {
    depth.element.hidden = nounOf(context.text) === "patch" || context.text.layers.length < 2;
    if (context.text.lead) depth.draw(context.text.lead.query);
  };

  function draw() {
    const { text } = context;
    const { lead } = text;
    observer.disconnect();
    redraw = () => undefined;
    arcsNow = () => [];
    if (!lead) {
      const found = cards(context);
      heading.replaceChildren(
        h("h1", { class: "lead-sentence" }, `Every head of ${text.model || "the model"}`),
      );
      element.replaceChildren();
      rest.replaceChildren(found ?? "");
      return;
    }
    const words = nounOf(text) === "patch" ? h("div", { class: "lit-images" }) : stage(lead);
    lit = "";
    heading.replaceChildren(
      h(
        "h1",
        { class: "lead-sentence" },
        ...(lead.heading ?? [[lead.sentence, -1] as [Part[], number]]).flatMap(([parts, at]) =>
          phrase(parts, toldLinks(text)[at]),
        ),
      ),
      context.tour
        ? actionButton(
            { class: "tour-button main-button", onclick: context.tour.play },
            `${context.tour.title} (${context.tour.steps.length} steps)`,
          )
        : "",
    );
    tellArcs();
    void rank();
    element.replaceChildren(words, ranking);
    rest.replaceChildren(
      depth.element,
      about(lead),
      text.cards?.length
        ? h(
            "p",
            { class: "hint card-key" },
            "In each small map below, ",
            axesOf(text).join(", "),
            ". Nearer the right end of the scale above: a larger weight.",
          )
        : "",
      cards(context) ?? "",
    );
    follow();
    observer.observe(words);
  }
  return {
    heading,
    element,
    rest,
    key,
    draw,
    follow,
    // what the card draws again
    shown: () => ({
      heading: heading.querySelector("h1")!,
      words: [...element.querySelectorAll(".lead-words")],
      arcs: arcsNow(),
      note: depth.weights ? depth.layer() : "",
    }),
    recolor: () => redraw(),
    close() {
      observer.disconnect();
      depth.close();
    },
  };
}
