// The chosen head in words and numbers.
import type { Context } from "./context";
import { h, hint, strong } from "./dom";
import { examplesOf } from "./examples";
import { shown } from "./format";
import { label } from "./labels";
import { leftOut, strongestLink } from "./strongest_link";

// The chosen head: its roles with their scores on shuffled words, its strongest link and its statistics.
export function aboutHead(context: Context): HTMLElement {
  const { text, state, source } = context;
  const about = text.layers[state.layer].heads[state.head];
  const roles = about.roles.map(({ kind, offset, score, null: shuffled, chance }) => {
    const { meaning, letter, byPosition } = source.common.kinds[kind];
    const target =
      offset === null ? meaning : `the token at offset ${offset > 0 ? "+" : ""}${offset}`;
    const share = kind === "broad" ? "of the largest entropy" : "of its weight";
    const by = kind === "broad" ? "" : `, ${shown(chance)} by chance`;
    const other = byPosition
      ? `by position, not by content: ${shown(shuffled)} on shuffled words too`
      : `${shown(shuffled)} on shuffled words`;
    return h(
      "p",
      { class: "role" },
      h("span", { class: "chip" }, letter),
      `attends to ${target}: `,
      strong(shown(score)),
      ` ${share}; ${other}${by}.`,
    );
  });
  const link = h(
    "p",
    {},
    ...strongestLink(text, about),
    h("br", {}),
    h("span", { class: "hint" }, leftOut(text)),
  );
  const numbers = Object.entries(about.values).map(([name, value]) =>
    h(
      "tr",
      { title: source.common.statistics[name] ?? "" },
      h("th", { scope: "row" }, label(source.common, name)),
      h("td", { class: "number" }, shown(value)),
    ),
  );
  const { note } = text.layers[state.layer];
  return h(
    "div",
    { class: "about" },
    note && hint(note),
    ...(roles.length ? roles : [text.has_roles && hint("No role on this text.")]),
    link,
    examplesOf(context),
    h("table", { class: "numbers" }, h("tbody", {}, ...numbers)),
  );
}
