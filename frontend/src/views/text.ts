// The text view: what words attend to, and what attends to them, in chosen heads; as words, lines or a model.
import { meansOnly, type Context, type Panel } from "../context";
import { fill, h, segments, choice } from "../dom";
import { headTiles } from "../head_tiles";
import { linesMode } from "../lines";
import { modelMode } from "../model";
import type { MakeMode, Mode } from "../mode";
import type { View } from "../registry";
import { isPair } from "../sentences";
import type { State } from "../state";
import { wordsMode } from "../words";

const MODES: Record<string, MakeMode> = {
  words: wordsMode,
  heads: linesMode,
  model: modelMode,
};
const NAMES: [string, string][] = [
  ["words", "Words"],
  ["heads", "Head view"],
  ["model", "Model view"],
];
const DRAWN: (keyof State)[] = [
  "view",
  "text",
  "layer",
  "head",
  "way",
  "heads",
  "side",
  "pairs",
  "scale",
]; // needs a new drawing

export const view: View = { place: 3, make: textView, figure: "words", hasQuestions: true };

function textView(context: Context): Panel {
  const [tools, body, notes] = [h("div", { class: "tools" }), h("div", {}), h("div", {})];
  const tiles = headTiles(context, (head) => mode?.preview?.(head));
  const element = h("div", { class: "text-view" }, tools, tiles.element, notes, body);
  let mode: Mode | null = null;
  let way = "";

  function drawTools() {
    const { state, text } = context;
    fill(
      tools,
      segments("How", way, NAMES, (way) => context.set({ way })),
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
      isPair(context) &&
        (way === "heads" || way === "model") &&
        choice(
          "Sentences",
          state.pairs,
          [
            ["all", "all"],
            ["AA", "A → A"],
            ["AB", "A → B"],
            ["BA", "B → A"],
            ["BB", "B → B"],
          ],
          (pairs) => context.set({ pairs }),
        ),
    );
  }

  function draw() {
    const wanted = context.state.way in MODES ? context.state.way : "words";
    if (wanted !== way || !mode) {
      mode?.close?.();
      way = wanted;
      mode = MODES[way](context, body);
    }
    drawTools();
    tiles.draw();
    fill(notes, meansOnly(context));
    mode.draw();
  }

  return {
    element,
    update(before) {
      const { state } = context;
      // The model view shows all heads, so that another choice of them needs no new drawing.
      const names =
        way === "model"
          ? DRAWN.filter((name) => !["heads", "layer", "head"].includes(name))
          : DRAWN;
      if (!before || !names.every((name) => before[name] === state[name]) || !mode?.moved?.(before))
        return draw();
      tiles.draw();
    },
    key: (event) => tiles.key(event) || (mode?.key?.(event) ?? false),
    close() {
      mode?.close?.();
    },
  };
}
