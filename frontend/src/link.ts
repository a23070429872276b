// What the address asks for and this page does not have, in words.
import type { Context } from "./context";
import { queriesOf } from "./data";
import { fromLink, MOVED, START, type State } from "./state";

// The state of an address; one with an unknown view is read as that of the first view. Null: the address is empty.
export const stateOf = (hash: string): Partial<State> | null =>
  fromLink(hash) ??
  (hash.length > 1 ? fromLink(`#${START.view}?${hash.split("?")[1] ?? ""}`) : null);

const listed = (parts: string[]) => parts.join(", ").replace(/, ([^,]*)$/, " and $1");

// A sentence, or "". The text of the context is the one that is shown.
export function lackingOf(hash: string, { text, source, state }: Context, views: string[]): string {
  const [view, query] = hash.replace(/^#/, "").split("?");
  const given = new URLSearchParams(query ?? "");
  const layer =
    text.layers[Math.min(Math.max(Number(given.get("layer")) || 0, 0), text.layers.length - 1)];
  const sizes: [string, number, number][] = [
    ["text", source.titles.length, 0],
    ["layer", text.layers.length, 0],
    ["head", layer.heads.length, 0],
    ["query", queriesOf(text).length, 0],
    ["key", text.tokens.length, -1],
  ];
  const wrong = sizes.flatMap(([name, size, least]) => {
    const value = given.get(name);
    if (
      value === null ||
      (/^-?\d+$/.test(value) &&
        Number(value) >= least &&
        Number(value) < size &&
        (name !== "text" || source.titles[Number(value)] !== undefined))
    )
      return [];
    return [
      `${name} ${value.slice(0, 20)} (there ${size === 1 ? "is only 0" : `are 0 to ${size - 1}`})`,
    ];
  });
  if (view && !views.includes(MOVED[view]?.view ?? view))
    wrong.unshift(`a view “${view.slice(0, 20)}”`);
  const model = given.get("model") ?? "";
  const other =
    model && model !== state.model
      ? `This link is of the model ${model.slice(0, 60)}; this page shows ${state.model || "another one"}.`
      : "";
  return [
    wrong.length
      ? `This page has not what the link names: ${listed(wrong)}. The nearest is shown.`
      : "",
    other,
  ]
    .filter(Boolean)
    .join(" ");
}
