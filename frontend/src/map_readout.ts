// What the cell under the crosshair says; the tooltip of its number has all digits.
import type { Context } from "./context";
import { queriesOf } from "./data";
import { h, strong, visible, weightOutput } from "./dom";
import type { MapFrame } from "./map_frame";
import type { MapTiles } from "./map_tiles";

export function tellCell(
  { text, state }: Context,
  frame: MapFrame,
  tiles: MapTiles,
  readout: HTMLElement,
  i: number,
  j: number,
) {
  const level = frame.levelOf();
  const value = tiles.valueAt(level, i, j);
  const [query, key] = [visible(queriesOf(text)[i]), visible(text.tokens[j])];
  const weight = weightOutput(value);
  const ends = (at: number, all: number) => {
    const first = Math.floor(at / 2 ** level) * 2 ** level;
    return `${first}–${Math.min(first + 2 ** level, all) - 1}`;
  };
  const how =
    state.pool === "max" ? "the strongest weight" : "summed over keys, averaged over queries";
  const line =
    level === 0
      ? h("span", {}, strong(query), ` ${i} → `, strong(key), ` ${j}: `, weight)
      : h(
          "span",
          {},
          `queries ${ends(i, queriesOf(text).length)} → keys ${ends(j, text.tokens.length)}: `,
          weight,
          `, ${how} (`,
          strong(query),
          " → ",
          strong(key),
          "; zoom in for single weights)",
        );
  if (line.textContent !== readout.textContent) readout.replaceChildren(line);
}
