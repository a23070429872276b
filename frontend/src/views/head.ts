// The view of a head: its words above, its map below, and why a weight is what it is. They are linked: a word that is
// pointed at marks its row, and a weight its words.
import { changeDetector } from "../changes";
import { meansOnly, type Context, type Panel } from "../context";
import { fill, h, segments } from "../dom";
import { generationSteps } from "../generation";
import { headMap } from "../head_map";
import { headTiles } from "../head_tiles";
import { layerRows } from "../layer_rows";
import { linesMode } from "../lines";
import type { Mode } from "../mode";
import { whyWeight } from "../neurons";
import type { View } from "../registry";
import { isPair, pairChoice } from "../sentences";
import { wordsMode } from "../words";

export const view: View = {
  place: 2,
  make: headView,
  figure: "words,map",
  keys: [
    ["pointing", "a word marks its row of the map, a weight its words"],
    ["+ −", "zoom"],
    ["0", "the whole map"],
    ["/", "find a token"],
  ],
};

function headView(context: Context): Panel {
  const [tools, notes] = [h("div", { class: "tools" }), h("div", {})];
  const body = h("section", { class: "head-words", "aria-label": "Words of the head" });
  const why = whyWeight(context);
  const map = headMap(context, (query, key) => mode?.point(query, key), why.element);
  const tiles = headTiles(context, (head) => mode?.preview(head));
  const [steps, layers] = [generationSteps(context), layerRows(context)];
  const element = h(
    "div",
    { class: "head-view" },
    steps.element,
    h("div", { class: "head-tools" }, h("div", {}, tools, tiles.head), tiles.element),
    notes,
    body,
    map.element,
    layers.element,
  );
  let mode: Mode | null = null;
  let way = "";
  const isDrawingNew = changeDetector();

  function drawTools() {
    const { state, text } = context;
    fill(
      tools,
      segments(
        "Words as",
        way,
        [
          ["words", "Words"],
          ["lines", "Lines"],
        ],
        (way) => context.set({ way }),
      ),
      way === "words" &&
        text.queries === null &&
        segments(
          "Direction",
          state.side,
          [
            ["out", "Attends to"],
            ["in", "Receives from"],
            ["both", "Both"],
          ],
          (side) => context.set({ side }),
        ),
      way === "lines" && isPair(context) && pairChoice(context),
    );
  }

  function drawWords() {
    const wanted = context.state.way === "lines" ? "lines" : "words";
    if (wanted !== way) {
      mode?.close();
      way = wanted;
      mode = (way === "lines" ? linesMode : wordsMode)(context, body, map.point);
    }
    drawTools();
    fill(notes, meansOnly(context));
    mode!.draw();
  }

  return {
    element,
    update(before) {
      const { state, text, colors } = context;
      steps.draw();
      tiles.draw();
      const isNew = isDrawingNew(
        state.text,
        text.title,
        state.layer,
        state.head,
        state.way,
        state.heads,
        state.side,
        state.pairs,
        state.scale,
        colors.theme,
      );
      if (isNew || !mode?.moved?.()) drawWords();
      why.update();
      map.update(before); // below the words, so after them
      layers.draw();
    },
    key(event) {
      const from = event.composedPath()[0] as Node;
      if (tiles.key(event)) return true;
      return body.contains(from) || steps.element.contains(from)
        ? mode!.key(event)
        : map.key!(event);
    },
    close() {
      mode?.close();
      why.close();
      map.close!();
    },
  };
}
