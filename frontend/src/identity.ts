// The model, the text and their sizes, at the top of every view. On a phone it folds to one line.
import { plural } from "./format";
import type { Context } from "./context";
import { sizesOf } from "./data";
import { choice, cut, fill, h } from "./dom";

const NARROW = 760;

export function identity(context: Context, openText: (text: number) => void) {
  const summary = h("summary", {});
  const facts = h("div", { class: "texts" });
  const element = h("details", { class: "identity" }, summary, facts);
  element.open = context.root.clientWidth > NARROW || context.root.clientWidth === 0;

  let shown: unknown[] = [];

  function draw() {
    const { text, source, state } = context;
    const look = [text, source.titles.length];
    if (look.every((each, at) => each === shown[at])) return;
    shown = look;
    const focused = facts.contains(document.activeElement);
    const length = text.queries
      ? `${plural(text.queries.length, "query", "queries")} × ${plural(text.tokens.length, "key")}`
      : plural(text.tokens.length, "token");
    fill(
      summary,
      text.model && h("b", { class: "model", title: text.model }, cut(text.model, 60)),
      h("span", {}, sizesOf(text)),
      h("span", {}, length),
      h("span", { class: "folded-title", dir: "auto" }, text.title),
    );
    facts.replaceChildren(
      source.titles.length > 1
        ? choice(
            "Text",
            String(state.text),
            source.titles.flatMap((title, at): [string, string][] => [
              [String(at), cut(title, 90)],
            ]),
            (value) => openText(Number(value)),
          )
        : h("span", { class: "title", title: text.title, dir: "auto" }, cut(text.title, 120)),
    );
    if (focused) facts.querySelector("select")?.focus();
  }
  return { element, draw };
}
