// Words: the text itself, colored by what a word attends to and what attends to it, with arcs.
import { ARCS, drawArcs, widestOf, type Arc } from "./arcs";
import { headName, inText, interval, strongest, type Context } from "./context";
import { queriesOf, type Text } from "./data";
import { actionButton, h, hint, s, spaced, strong, visible, weighed } from "./dom";
import { shown } from "./format";
import {
  byLayer,
  drawnApart,
  headColors,
  headsInWords,
  lineOf,
  listedHeads,
  meanLine,
  nameOfHead,
  ownColor,
  type Head,
} from "./head_sets";
import type { Mode } from "./mode";
import { movedBy, pairLine } from "./pair_line";
import { within } from "./steps";

const SHOWN = 600; // words at a time
interface Directions {
  attended: Float32Array | null;
  received: Float32Array | null;
  norm: number;
}

export function wordsMode(
  context: Context,
  body: HTMLElement,
  linked: (query: number | null) => void,
): Mode {
  let turn = 0;
  let pointed: number | null = null;
  let inMap = false; // it is the map that is pointed at
  let only: Head | null = null; // shown alone
  let from = -1;
  let spans: HTMLElement[] = [];
  let redraw = () => {};
  let staged: Text | null = null; // the text whose words are in the page
  const queries = () => queriesOf(context.text);
  const crossed = () => context.text.queries !== null;
  const watch = new ResizeObserver(() => redraw());

  function word(tokens: string[], at: number, special: Set<number>, isQuery: boolean): HTMLElement {
    const token = tokens[at];
    const kind = special.has(at) ? "special" : token.startsWith("##") ? "piece" : "word";
    const span = h(
      "span",
      { class: kind, dir: "auto", title: `${visible(token)} · ${at}` },
      visible(token),
    );
    span.dataset.at = String(at);
    if (isQuery) {
      span.setAttribute("role", "option");
      span.addEventListener("click", (event) =>
        context.set(event.shiftKey && !crossed() ? { key: at } : { query: at }),
      );
      // Not pointerenter: words that are drawn below a resting pointer are not pointed at.
      span.addEventListener("pointermove", () => {
        if (pointed !== at) {
          pointed = at;
          void color(at);
          linked(at);
        }
      });
    } else span.addEventListener("click", () => context.set({ key: at }));
    return span;
  }

  function sentence(
    tokens: string[],
    range: [number, number],
    special: Set<number>,
    isQuery: boolean,
  ): HTMLElement {
    const box = h("div", {
      class: "words",
      ...(isQuery ? { role: "listbox", "aria-label": "Words of the text", tabindex: 0 } : {}),
    });
    box.append(...spaced(tokens, range, (at) => word(tokens, at, special, isQuery)));
    box.addEventListener("pointerleave", () => {
      pointed = null;
      void color(context.state.query);
      linked(null);
    });
    box.addEventListener("scroll", () => redraw());
    return box;
  }

  // The words stay in the page while they are the same: another head only colors them.
  function draw() {
    const { text, state } = context;
    const range = interval(state.query, SHOWN, queries().length);
    if (staged !== text || from !== range[0]) stageWords(range);
    void color(state.query);
  }

  function stageWords(range: [number, number]) {
    const { text } = context;
    [staged, from] = [text, range[0]];
    const special = new Set(text.special);
    const own = sentence(queries(), range, crossed() ? new Set() : special, true);
    const keys = crossed()
      ? sentence(text.tokens, [0, Math.min(text.tokens.length, SHOWN)], special, false)
      : null;
    spans = [...own.querySelectorAll<HTMLElement>("span")];
    const stage = h(
      "div",
      { class: "stage" },
      s("svg", { class: "arcs", "aria-hidden": "true" }),
      own,
      keys && hint("attends to"),
      keys,
    );
    watch.disconnect();
    watch.observe(stage);
    body.replaceChildren(
      queries().length > SHOWN ? steps(range) : "",
      stage,
      h("p", { class: "looks", "aria-live": "polite" }),
      h("p", { class: "chosen-pair", "aria-live": "polite" }),
    );
  }

  function steps([first, last]: [number, number]): HTMLElement {
    const move = (by: number, said: string) =>
      actionButton(
        {
          onclick: () => context.set({ query: within(context.state.query + by, queries().length) }),
        },
        said,
      );
    return hint(
      `Tokens ${first} to ${last - 1} of ${queries().length}. `,
      move(-SHOWN, "Earlier"),
      " ",
      move(SHOWN, "Later"),
    );
  }

  // Color every word by its weight with `query`, draw the strongest links as arcs, and write them out.
  async function color(query: number) {
    const mine = ++turn;
    const { state, text } = context;
    const listed = only ? [only] : listedHeads(context);
    const heads = byLayer(listed);
    const attended =
      inMap || state.side !== "in" || crossed() ? await meanLine(context, heads, query) : null;
    const received =
      !inMap && state.side !== "out" && !crossed()
        ? await meanLine(context, heads, query, true)
        : null;
    const rows =
      attended && (only || drawnApart(context))
        ? await Promise.all(listed.map((head) => lineOf(context, head, query)))
        : null;
    if (mine !== turn || !spans.length) return;
    // Arcs and lists leave out what is far below the strongest weight.
    const most = (values: Float32Array | null) => values?.reduce((a, b) => Math.max(a, b), 0) ?? 0;
    const norm = widestOf(text.tokens.length, most(attended), most(received));
    const keySpans = crossed()
      ? [...body.querySelectorAll<HTMLElement>(".words:not([role]) span")]
      : spans;
    tint(keySpans, { attended, received, norm });
    for (const span of spans) {
      // only words that change: each one costs a new style
      const selected = String(Number(span.dataset.at) === query);
      if (span.getAttribute("aria-selected") !== selected)
        span.setAttribute("aria-selected", selected);
    }
    for (const span of keySpans)
      span.classList.toggle("key-chosen", Number(span.dataset.at) === state.key);
    if (pointed === null) intoView(spans[query - from]);
    redraw = () =>
      drawLinks(query, keySpans, rows ? listed.map((head, at) => [head, rows[at]]) : null, {
        attended,
        received,
        norm,
      });
    redraw();
    tell(query, { attended, received, norm });
    const pair = body.querySelector(".chosen-pair");
    const weight = attended ?? (state.key >= 0 ? await meanLine(context, heads, query) : null);
    if (mine === turn)
      pair?.replaceChildren(
        ...(weight && state.key >= 0 && query === state.query && !only
          ? [pairLine(context, weight[state.key])]
          : []),
      );
  }

  // The color of a word is its weight; where both directions are shown, a bar below the word is the other one.
  function tint(keySpans: HTMLElement[], { attended, received }: Directions) {
    const { colors } = context;
    for (const span of keySpans) {
      const at = Number(span.dataset.at);
      const behind = attended ?? received!;
      span.style.background = colors.weight(behind[at]);
      span.style.color = colors.textOn(behind[at]);
      span.style.boxShadow =
        attended && received
          ? `0 1px ${colors.get("--paper")}, 0 5px ${colors.weight(received[at])}`
          : "";
    }
  }

  function drawLinks(
    query: number,
    keySpans: HTMLElement[],
    rows: [Head, Float32Array][] | null,
    { attended, received, norm }: Directions,
  ) {
    const figure = body.querySelector<SVGSVGElement>(".arcs");
    const start = spans[query - from];
    if (!figure || !start) return;
    const colors = headColors(context);
    const arcs: Arc[] = [];
    const add = (
      values: Float32Array,
      color: string | null,
      count: number,
      targets: (at: number) => HTMLElement | undefined,
      dashes?: string,
    ) => {
      for (const at of strongest(values, count)) {
        const to = targets(at);
        if (to)
          arcs.push({
            from: start,
            to,
            share: values[at] / norm,
            dashes,
            title: shown(values[at]),
            color: color ?? context.colors.line(values[at]),
          });
      }
    };
    const keyAt = (at: number) => (crossed() ? keySpans[at] : spans[at - from]);
    if (rows)
      for (const [head, row] of rows)
        add(row, colors.get(nameOfHead(head)) ?? ownColor(head), rows.length > 3 ? 3 : ARCS, keyAt);
    else if (attended) add(attended, null, ARCS, keyAt);
    if (received && !attended) add(received, null, ARCS, (at) => spans[at - from], "1 5");
    drawArcs(figure, arcs);
  }

  const swatch = (name: string, title: string) => h("span", { class: `swatch ${name}`, title });

  // What the word attends to, and what attends to it, as a sentence, which is the legend of the words too.
  function tell(query: number, { attended, received, norm }: Directions) {
    const { state, text } = context;
    const listed = (values: Float32Array, tokens: string[]) => {
      const visibleLinks = strongest(values, ARCS).filter((at) => values[at] >= norm / 100);
      return visibleLinks.length ? weighed(tokens, values, visibleLinks) : ["nothing"];
    };
    const line = body.querySelector(".looks");
    line?.replaceChildren(
      strong(visible(queries()[query])),
      ` (token ${query})`,
      ...(attended
        ? [
            text.attribution ? " depends on " : " attends to ",
            swatch("out", "the color of a word"),
            ...listed(attended, text.tokens),
          ]
        : []),
      ...(received
        ? [
            attended ? "; receives attention from " : " receives attention from ",
            swatch(
              attended ? "in" : "out",
              attended ? "the bar below a word" : "the color of a word",
            ),
            ...listed(received, queries()),
            `; mean over all words: ${shown(received.reduce((sum, weight) => sum + weight, 0) / received.length)}`,
          ]
        : []),
      `, in ${only ? inText(headName(context, ...only)) : headsInWords(context)}${context.source.finest(state.text) ? " (means, not weights of single words)" : ""}.`,
    );
  }

  // Scroll a hidden word into the middle of its box, without scrolling the page.
  function intoView(span: HTMLElement | undefined) {
    const box = span?.parentElement;
    if (!span || !box) return;
    const below = span.getBoundingClientRect().top - box.getBoundingClientRect().top;
    if (below < 0 || below > box.clientHeight - 30) box.scrollTop += below - box.clientHeight / 2;
  }

  return {
    draw,
    moved() {
      const near = context.state.query >= from && context.state.query < from + spans.length;
      if (near) void color(context.state.query);
      return near;
    },
    point(query, key = -1) {
      [pointed, inMap] = [query, query !== null];
      void color(query ?? context.state.query);
      for (const span of body.querySelectorAll<HTMLElement>("[data-at]"))
        span.classList.toggle(
          "key-pointed",
          Number(span.dataset.at) === key && (!crossed() || span.getAttribute("role") !== "option"),
        );
    },
    preview(head) {
      only = head;
      void color(pointed ?? context.state.query);
    },
    key: (event) => movedBy(context, event, 10),
    close() {
      turn++;
      staged = null;
      watch.disconnect();
    },
  };
}
