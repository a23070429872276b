// The row of the frame that all views share: the switch of the color scale of weights, and its legend.
import { changeDetector } from "./changes";
import { scaleOf, SCALES } from "./color";
import type { Context } from "./context";
import { fill, h, segments } from "./dom";
import { weightLegend } from "./legend";

export function scaleRow(context: Context) {
  const element = h("section", { class: "scale", "aria-label": "Color scale" });
  let keys = 1; // how many keys a cell of the view sums over
  const isNew = changeDetector();

  function update() {
    const { state, text, colors } = context;
    const length = text.tokens.length;
    colors.scale = scaleOf(state.scale, length, keys);
    const isPicture = state.view === "picture"; // its legend ends at the largest weight on a patch
    if (!isNew(isPicture, state.scale, length, keys, colors.theme)) return;
    fill(
      element,
      h("span", { class: "scale-name" }, "Weight"),
      segments("Color scale of weights", state.scale, SCALES, (scale) => context.set({ scale })),
      isPicture ? null : weightLegend(colors, colors.scale),
    );
  }
  return {
    element,
    update,
    keysPerCell(count: number) {
      keys = count;
      update();
    },
  };
}
