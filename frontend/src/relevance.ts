// The relevance of every token for a prediction: its color and its bar, up where it raises the score, down where it lowers it.
import type { Colors } from "./color";
import type { Text } from "./data";
import { h, joins, s, visible } from "./dom";
import { exact, shown } from "./format";

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
    signedLegend(colors, most),
  );
}

// From the strongest orange, -most, over 0 to the strongest blue, +most.
function signedLegend(colors: Colors, most: number): SVGSVGElement {
  const [width, parts] = [240, 61];
  const label = (x: number, said: string, anchor: string) =>
    s("text", { x, y: 25, "font-size": 11, "text-anchor": anchor, fill: "currentColor" }, said);
  return s(
    "svg",
    {
      class: "legend",
      width: width + 180,
      height: 30,
      viewBox: `-90 0 ${width + 180} 30`,
      role: "img",
      "aria-label": `Relevance from ${shown(-most)}, which lowers the score, to ${shown(most)}, which raises it`,
    },
    ...Array.from({ length: parts }, (_, at) =>
      s("rect", {
        x: (at * width) / parts,
        width: width / parts + 0.5,
        height: 10,
        fill: colors.signed((2 * at) / (parts - 1) - 1),
      }),
    ),
    label(0, `lowers ${shown(-most)}`, "middle"),
    label(width / 2, "0", "middle"),
    label(width, `raises ${shown(most)}`, "middle"),
  );
}
