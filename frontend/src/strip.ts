// What one word attends to in every layer: a row per layer.
import { interval, type Context } from "./context";
import { layerName, queriesOf } from "./data";
import { cut, s, visible } from "./dom";
import { meanLine } from "./head_sets";
import { cutName, wordNames } from "./word_names";

const SHOWN = 72;

export async function strip(context: Context, query: number, room = 700): Promise<SVGSVGElement> {
  const { text } = context;
  const crossed = text.queries !== null;
  const [first, last] = interval(crossed ? 0 : query, SHOWN, text.tokens.length);
  const lines = await Promise.all(text.layers.map((layer, at) =>
    meanLine(context, new Map([[at, layer.heads.map((_, head) => head)]]), query)));
  const words = wordNames(text.tokens);
  const longest = Math.max(...words.slice(first, last).map((word) => Math.min([...word].length, 12)));
  const names = text.layers.map((layer) => cut(layerName(layer), 20));
  const [left, bottom] = [Math.max(58, 12 + 6.2 * Math.max(...names.map((name) => name.length))), longest * 6.5 + 8];
  const cell = Math.max(13, Math.min(30, (Math.min(room, 700) - left - 4) / (last - first)));
  const [width, height] = [left + (last - first) * cell + 4, text.layers.length * 18 + bottom];
  const figure = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `What ${visible(queriesOf(text)[query])} attends to in every layer` });
  lines.forEach((line, layer) => {
    figure.append(s("text", { x: left - 6, y: layer * 18 + 12, "text-anchor": "end", "font-size": 11,
      fill: "currentColor" }, names[layer]));
    for (let at = first; at < last; at++) {
      const node = s("rect", { x: left + (at - first) * cell, y: layer * 18, width: cell - 1, height: 16,
        fill: context.colours.weight(line[at]) },
        s("title", {}, `${layerName(text.layers[layer])}, ${words[at]}: ${line[at].toPrecision(4)}`));
      node.addEventListener("click", () => context.set({ layer }));
      figure.append(node);
    }
  });
  for (let at = first; at < last; at++)
    figure.append(
      s("text", { x: 0, y: 0,
      transform: `translate(${left + (at - first + 0.5) * cell},${text.layers.length * 18 + 4}) rotate(-90)`,
      "text-anchor": "end", "dominant-baseline": "central", "font-size": 11, fill: "currentColor",
      "font-weight": at === query && !crossed ? 700 : 400 }, cutName(words[at], 12)));
  return figure;
}
