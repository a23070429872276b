// The relevance of every token for a prediction: its color and its bar, up where it raises the score, down where it lowers it.
import type { Colors } from "./color";
import type { Text } from "./data";
import { h, joins, visible } from "./dom";
import { exact, shown } from "./format";
import { legendOf } from "./legend";

const TALL = 34; // pixels of the longest bar

export function relevancePicture(text: Text, colors: Colors, values: number[]): HTMLElement {
  const most = Math.max(...values.map(Math.abs), 1e-12);
  const [raises, lowers] = [values.some((value) => value > 0), values.some((value) => value < 0)];
  const bar = (value: number, up: boolean) => {
    const line = h("span", { class: "relevance-bar" });
    line.style.cssText = `height:${up === value > 0 ? (TALL * Math.abs(value)) / most : 0}px;background:${colors.signed(value / most)}`;
    return h(
      "span",
      { class: `relevance-room ${up ? "up" : "down"}`, "aria-hidden": "true" },
      line,
    );
  };
  const words = text.tokens.slice(0, values.length).map((token, at) => {
    const value = values[at];
    const word = h("span", { class: "relevance-word", dir: "auto" }, visible(token));
    word.style.cssText = `background:${colors.signed(value / most)};color:${colors.textOnSigned(value / most)}`;
    return h(
      "span",
      {
        class: "relevance-token",
        role: "listitem",
        "data-at": at,
        "data-value": value,
        title: `${visible(token)} (token ${at}): ${value > 0 ? "+" : ""}${exact(value)}`,
        ...(at && joins(token, text.tokens[at - 1]) ? { "data-joined": "" } : {}),
      },
      raises && bar(value, true),
      word,
      lowers && bar(value, false),
      h("span", { class: "relevance-number" }, shown(value)),
    );
  });
  return h(
    "figure",
    { class: "relevance" },
    h("figcaption", {}, "Relevance of each token"),
    h(
      "div",
      { class: "relevance-words", role: "list", "aria-label": "Relevance of each token" },
      ...words,
    ),
    legendOf({
      said: `Relevance from ${shown(-most)}, which lowers the score, to ${shown(most)}, which raises it`,
      color: (share) => colors.signed(2 * share - 1),
      ticks: [
        [0, `lowers ${shown(-most)}`],
        [0.5, "0"],
        [1, `raises ${shown(most)}`],
      ],
    }),
  );
}
