// The compare view: two texts side by side in one head, or two heads, of one text or of two, with their difference.
import { comparedHeads } from "../compare_heads";
import { canCompareTexts, comparedTexts } from "../compare_texts";
import type { Context, Panel } from "../context";
import { fill, h, segments } from "../dom";
import type { View } from "../registry";
import type { State } from "../state";

export const isOfHeads = ({ pair, pins }: State) =>
  (pair || (pins ? "heads" : "texts")) === "heads";

export const view: View = { place: 4, make: compareView, figure: "compare", hasNoHead: isOfHeads };

function compareView(context: Context): Panel {
  const [tools, body] = [h("div", { class: "tools" }), h("div", {})];
  const element = h("div", {}, tools, body);
  let panel: Panel | null = null;
  let drawn = false; // whether heads are drawn

  const chooser = () =>
    segments(
      "Compare",
      drawn ? "heads" : "texts",
      [
        ["texts", "Two texts"],
        ["heads", "Two heads"],
      ],
      (pair) => context.set({ pair }),
    );

  return {
    element,
    update(before) {
      const hasTexts = canCompareTexts(context);
      const wanted = !hasTexts || isOfHeads(context.state);
      const isNew = !panel || wanted !== drawn;
      if (isNew) {
        panel?.close?.();
        drawn = wanted;
        panel = (wanted ? comparedHeads : comparedTexts)(context);
        body.replaceChildren(panel.element);
        fill(tools, hasTexts && chooser());
      }
      panel!.update(isNew ? null : before);
    },
    key: (event) => panel?.key?.(event) ?? false,
    close: () => panel?.close?.(),
  };
}
