// The image of a text under the weights of one link's query and head: what a patch attends to is lit.
import { headName, type Context } from "./context";
import { queriesOf, type Lead, type PicturePanel } from "./data";
import { actionButton, h, visible } from "./dom";
import { coverOf, photoOf, placeOf, shareOnScale } from "./patches";

export function litImage(
  context: Context,
  link: Pick<Lead, "layer" | "head" | "query">,
  color: string,
): HTMLElement {
  const { text, state } = context;
  const panels = text.picture!.panels.map(
    (panel) => [panel, h("canvas", { "aria-hidden": "true" })] as const,
  );
  const name = `${headName(context, link.layer, link.head)}: what ${visible(queriesOf(text)[link.query])} attends to`;
  const opened = () =>
    context.set({ view: "picture", layer: link.layer, head: link.head, query: link.query });
  const figure = actionButton(
    {
      class: "lit",
      style: `--own:${color}`,
      title: "Open it in Picture",
      onclick: opened,
      "data-waiting": "1",
    },
    ...panels.map(([panel, canvas]) =>
      h("span", { class: "lit-stage" }, h("img", { src: photoOf(panel), alt: "" }), canvas),
    ),
    h("span", {}, name),
  );
  void context.source.rows(state.text, link.layer, link.query).then((rows) => {
    const row = rows[link.head];
    const places = panels.map(([panel]) => patchesOf(panel).map((token) => row[token] ?? 0));
    const top = Math.max(...places.flat(), 1e-12);
    panels.forEach(([panel, canvas], at) => {
      coverOf(
        Float32Array.from(places[at], (weight) => shareOnScale(state.scale, weight / top)),
        panel.rows,
        panel.columns,
        "light",
        context.colors,
        canvas,
      );
    });
    figure.dataset.waiting = "0";
  });
  return figure;
}
const patchesOf = (panel: PicturePanel) =>
  Array.from({ length: panel.rows * panel.columns }, (_, at) => placeOf(panel, at));
