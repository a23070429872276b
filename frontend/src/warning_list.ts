// Warnings: one line for each kind, which unfolds to the warnings of single layers.
import type { Context } from "./context";
import type { Finding } from "./data";
import { actionButton, h, hint } from "./dom";

export function warningList(context: Context): HTMLElement {
  const { text } = context;
  const kinds = [...new Set(text.findings.map((finding) => finding.kind))];
  if (!kinds.length) return hint("None for this text.");
  return h(
    "div",
    { class: "warnings" },
    ...kinds.map((kind) => {
      const same = text.findings.filter((finding) => finding.kind === kind);
      const line =
        text.warnings?.[kind] ??
        `${same[0].sentence.split(/\.\s/)[0].replace(/\.$/, "")}${
          same.length > 1 ? `, and ${same.length - 1} more` : ""
        }.`;
      const details = h("details", {}, h("summary", {}, line));
      // Built at the first look: a large model has thousands.
      details.addEventListener(
        "toggle",
        () =>
          details.append(
            h(
              "ul",
              { class: "plain" },
              ...same.map((finding) => h("li", {}, button(context, finding))),
            ),
          ),
        { once: true },
      );
      return details;
    }),
  );
}

function button(context: Context, finding: Finding): HTMLElement {
  const layer = context.text.layers.findIndex((one) => one.number === finding.layer);
  return actionButton(
    {
      class: "line",
      onclick: () => context.set({ layer: Math.max(layer, 0), head: finding.heads[0] ?? 0 }),
    },
    finding.sentence,
  );
}
