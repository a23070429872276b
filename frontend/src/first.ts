// The first thing that a reader sees: the sentence with the arcs of one head, what they say, and finding cards.
import { drawArcs } from "./arcs";
import { cards, stateLink } from "./cards";
import { headName, inText, type Context } from "./context";
import { queriesOf, type Lead } from "./data";
import { h, joins, s, visible } from "./dom";
import { sentence } from "./parts";

const [WHOLE, AROUND] = [70, 16]; // a longer text is cut to the words around both ends of the link

export interface First { element: HTMLElement; draw(): void; recolour(): void; close(): void }

// The ranges of tokens to show: all, or those around the given ones.
export function ranges(size: number, around: number[]): [number, number][] {
  if (size <= WHOLE) return [[0, size]];
  const wanted = around.map((at): [number, number] => [Math.max(0, at - AROUND), Math.min(size, at + AROUND + 1)])
    .sort((a, b) => a[0] - b[0]);
  return wanted.reduce((joined: [number, number][], [first, last]) => {
    const before = joined.at(-1);
    if (before && first <= before[1]) before[1] = Math.max(before[1], last); else joined.push([first, last]);
    return joined;
  }, []);
}

export function firstView(context: Context): First {
  const element = h("section", { class: "first", "aria-label": "What stands out" });
  let redraw = () => undefined as void;
  const observer = new ResizeObserver(() => redraw());

  // Words in order; the spans of both sides by index.
  function line(tokens: string[], shown: [number, number][], name: string): [HTMLElement, Map<number, HTMLElement>] {
    const box = h("p", { class: "lead-words", "aria-label": name });
    const spans = new Map<number, HTMLElement>();
    for (const [part, [first, last]] of shown.entries()) {
      if (part || first) box.append(" … ");
      for (let at = first; at < last; at++) {
        if (at > first && !joins(tokens[at], tokens[at - 1])) box.append(" ");
        const span = h("span", { dir: "auto", title: `${tokens[at]} · ${at}` }, visible(tokens[at]));
        spans.set(at, box.appendChild(span));
      }
    }
    if (shown.at(-1)![1] < tokens.length) box.append(" …");
    return [box, spans];
  }

  function stage(lead: Lead): HTMLElement {
    const { text } = context;
    const near = ranges(text.tokens.length, text.queries ? [lead.key] : [lead.query, lead.key]);
    const [own, looks] = line(queriesOf(text), text.queries ? ranges(text.queries.length, [lead.query]) : near, "The text");
    const [other, keys] = text.queries ? line(text.tokens, near, "What it looks at") : [null, looks];
    const arcs = s("svg", { class: "arcs", "aria-hidden": "true" });
    redraw = () => {
      for (const span of [...looks.values(), ...keys.values()]) span.removeAttribute("style");
      for (const [key, weight] of lead.links) {
        const span = keys.get(key);
        if (span) span.style.cssText = `background:${context.colours.weight(weight)};color:${context.colours.textOn(weight)}`;
      }
      looks.get(lead.query)?.classList.add("lead-query");
      const from = looks.get(lead.query);
      drawArcs(arcs, lead.links.flatMap(([key, weight]) => (from && keys.has(key)
        ? [{ from, to: keys.get(key)!, share: weight, colour: context.colours.line(weight) }] : [])));
    };
    return h("div", { class: "lead-stage stage" }, arcs, own, other);
  }

  function draw() {
    const { text } = context;
    const { lead } = text;
    observer.disconnect();
    redraw = () => undefined;
    if (!lead) {
      const found = cards(context);
      element.replaceChildren(h("h1", {}, `Every head of ${text.model || "the model"}`), found ?? "");
      return;
    }
    const place = { layer: lead.layer, head: lead.head, query: lead.query };
    const words = stage(lead);
    element.replaceChildren(
      h("div", { class: "lead-line" }, h("h1", { class: "lead-sentence" }, ...sentence(lead.sentence)),
        context.tour ? h("button", { type: "button", class: "tour-button main-button", onclick: context.tour.play },
          `${context.tour.title} (${context.tour.steps.length} steps)`) : ""),
      h("p", { class: "hint" }, `Arcs show what ${visible(queriesOf(text)[lead.query])} attends to in ${
        inText(headName(context, lead.layer, lead.head))}: a thicker arc is a larger weight. `,
        stateLink(context, { ...place, view: "text" }, "more", "Every word of this head"), " · ",
        stateLink(context, { ...place, key: lead.key, view: "map" }, "more", "Its map")),
      words, cards(context) ?? "");
    observer.observe(words);
  }
  return { element, draw, recolour: () => redraw(), close: () => observer.disconnect() };
}
