// Finding cards: a sentence, a small picture, and a link to the place on the page that shows it.
import type { Context } from "./context";
import { shortName, type Card } from "./data";
import { h, inPlace, s } from "./dom";
import { sentence } from "./parts";
import { smallMap } from "./small_map";
import { START, toLink, type State } from "./state";

const [WIDE, TALL] = [104, 46]; // pixels of the bars

// A link to a state of the page, which is also an address.
export function stateLink(
  context: Context,
  change: Partial<State>,
  look: string,
  ...children: (Node | string)[]
): HTMLAnchorElement {
  const { state } = context;
  const kept = {
    ...START,
    text: state.text,
    model: state.model,
    scale: state.scale,
    pins: state.pins,
    ...change,
  };
  return h(
    "a",
    {
      class: look,
      href: toLink(kept),
      onclick: inPlace(() => {
        const { text: _, ...same } = kept; // what the address says, and no more
        context.set({ ...same, scale: state.scale, pins: state.pins });
      }),
    },
    ...children,
  );
}

// A bar for each token, or for each part of a long text; one of them is marked.
function bars(values: number[], marked: number): SVGSVGElement {
  const most = Math.max(...values, 1e-9);
  const step = WIDE / values.length;
  return s(
    "svg",
    {
      class: "bars",
      width: WIDE,
      height: TALL,
      viewBox: `0 0 ${WIDE} ${TALL}`,
      "aria-hidden": "true",
    },
    ...values.map((value, at) =>
      s("rect", {
        x: (at * step).toFixed(2),
        y: (TALL - 1 - (value / most) * (TALL - 2)).toFixed(2),
        width: Math.max(step - 1, step * 0.7).toFixed(2),
        height: Math.max(1, (value / most) * (TALL - 2)).toFixed(2),
        class: at === marked ? "marked" : null,
      }),
    ),
  );
}

function pictureOfCard(context: Context, card: Card): HTMLElement {
  if (card.bars) return h("span", { class: "card-picture" }, bars(card.bars, card.at));
  return h(
    "span",
    { class: "card-picture", "aria-hidden": "true" },
    ...(card.heads ?? []).map(([layer, head]) =>
      h(
        "span",
        { class: "card-head" },
        smallMap(context, layer, head),
        h("span", {}, shortName(context.text.layers[layer], head)),
      ),
    ),
  );
}

export function cards(context: Context): HTMLElement | null {
  const found = context.text.cards ?? [];
  return found.length
    ? h(
        "ul",
        { class: "cards", "aria-label": "Findings" },
        ...found.map((card) =>
          h(
            "li",
            {},
            stateLink(
              context,
              card.state,
              `card card-${card.kind}`,
              pictureOfCard(context, card),
              h("span", { class: "card-title" }, card.title),
              h("span", { class: "card-sentence" }, ...sentence(card.sentence)),
              h("span", { class: "hint" }, card.note),
            ),
          ),
        ),
      )
    : null;
}
