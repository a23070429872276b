// The overview: what stands out in the text, the grid of all heads, and the chosen head with warnings and roles.
import { aboutHead } from "../about_head";
import { plural, rangeOf } from "../format";
import { changeDetector } from "../changes";
import { rangeLegend } from "../legend";
import { headName, meansOnly, type Context, type Panel } from "../context";
import { shortName, statisticsOf } from "../data";
import { actionButton, choice, fill, h, hint, segments, strong } from "../dom";
import { firstView } from "../first";
import { card, CARD } from "../card";
import { download, fileName, pngBlob } from "../output";
import { typedPanel } from "../typed";
import { headGrid, type HeadGrid } from "../head_grid";
import { lineGrid } from "../line_grid";
import { axesOf, label, nounOf } from "../labels";
import type { View } from "../registry";
import { START } from "../state";
import { isPair, pairChoice } from "../sentences";
import { smallMap } from "../small_map";
import { warningList } from "../warning_list";

export const view: View = { place: 1, make: overview, figure: "heads", hasNoHead: true };

function overview(context: Context): Panel {
  const first = firstView(context);
  const tools = h("div", { class: "tools" });
  const key = h("div", { class: "reading-key" });
  const gridBox = h("div", {});
  let grid: HeadGrid | null = null;
  let drawnAs = "";
  const typed = context.source.common.live_model
    ? typedPanel(context, (text) => context.set({ text }), true)
    : null;
  const [head, rest] = [h("div", { class: "chosen-head" }), h("div", {})];
  const beside = h("aside", { class: "beside", "aria-label": "The chosen head" }, head, rest);
  const element = h(
    "div",
    { class: "overview-page" },
    first.heading,
    typed?.element,
    h(
      "div",
      { class: "overview" },
      first.element,
      h(
        "section",
        { class: "main", "aria-label": "All heads" },
        h("h2", {}, "All heads"),
        tools,
        gridBox,
        key,
      ),
      first.rest,
    ),
    beside,
  );
  const isGridNew = changeDetector();

  async function saveCard() {
    const figure = card(context, first.shown());
    const name = `${context.text.title} card`;
    const svg = new XMLSerializer().serializeToString(figure);
    download(await pngBlob(svg, ...CARD), fileName(name, "png"));
    context.tell("The card is saved.");
  }

  function drawGrid() {
    const wanted = context.state.grid === "lines" ? "lines" : "maps";
    if (wanted !== drawnAs) {
      grid?.close();
      drawnAs = wanted;
      grid = (wanted === "lines" ? lineGrid : headGrid)(context);
      gridBox.replaceChildren(grid.element);
    }
    drawTools();
    drawKey();
    grid!.draw();
  }

  function drawTools() {
    const { state, text, source } = context;
    const statistics = statisticsOf(text);
    const heads = segments(
      "Heads as",
      drawnAs,
      [
        ["maps", "Maps"],
        ["lines", "Lines"],
      ],
      (grid) => context.set({ grid }),
    );
    if (drawnAs === "lines")
      return fill(tools, heads, isPair(context) && pairChoice(context), meansOnly(context));
    const [isStatistic, name] = [
      statistics.includes(state.color),
      label(source.common, state.color),
    ];
    const isPlain = state.color === START.color && state.sort === START.sort;
    const open = !isPlain || (tools.querySelector("details")?.open ?? false);
    fill(
      tools,
      heads,
      h(
        "details",
        { class: "color-order", open },
        h("summary", {}, "Color and order"),
        choice(
          "Color by",
          state.color,
          [
            ["weights", "weights only"],
            ["role", "role"],
            ...statistics.map((name): [string, string] => [name, label(source.common, name)]),
          ],
          (color) => context.set({ color }),
        ),
        choice(
          "Order",
          state.sort,
          [
            ["layer", "layer by layer"],
            ["down", "highest first"],
            ["up", "lowest first"],
          ],
          (sort) =>
            context.set({
              sort,
              color: sort === "layer" || isStatistic ? state.color : statistics[0],
            }),
        ),
      ),
      isStatistic && hint(`${name}: ${source.common.statistics[state.color] ?? state.color}.`),
      isStatistic && rangeLegend(context.colors, ...ends(), name),
    );
  }

  // The lowest and the highest value of the statistic that colors the heads.
  function ends(): [number, number] {
    const { state, text } = context;
    return rangeOf(
      text.layers.flatMap((layer) => layer.heads.map((each) => each.values[state.color] ?? 0)),
    );
  }

  // How to read a small map, on the head of the first finding.
  function drawKey() {
    const { text, state } = context;
    key.hidden = drawnAs === "lines";
    const at = text.lead ?? state;
    const [[rows, columns], noun] = [axesOf(text), nounOf(text)];
    fill(
      key,
      h("span", { class: "key-columns", "aria-hidden": "true" }, `${columns} (keys) →`),
      h("span", { class: "key-rows", "aria-hidden": "true" }, `${rows} (queries) ↓`),
      smallMap(context, at.layer, at.head),
      hint(
        `Each picture is one head: L2.H1 is head 1 of layer 2. A row is a query: a ${noun} that attends to others. ` +
          `A column is a key: a ${noun} that is attended to. ${noun[0].toUpperCase()}${noun.slice(1)}${noun.endsWith("h") ? "es" : "s"} run from the first to the last. Nearer the right end of the ` +
          `scale above: a larger weight. A row of weights adds up to 1.${
            text.tokens.length > text.layers[0].small[1]
              ? " Here a cell stands for several tokens: its weights are summed over keys and averaged over queries."
              : ""
          }`,
        text.findings.some(({ heads }) => heads.length) &&
          h("span", { class: "warned-key", style: "display:block" }, "● a warning names this head"),
      ),
    );
  }

  function drawHead() {
    const { text, state } = context;
    fill(
      head,
      h(
        "h2",
        {},
        shortName(text.layers[state.layer], state.head),
        h("span", { class: "hint" }, ` ${headName(context)}`),
      ),
      aboutHead(context),
      h(
        "p",
        {},
        actionButton(
          { class: "main-button", onclick: () => context.set({ view: "head", x: -1, y: -1 }) },
          "Open this head",
        ),
      ),
    );
    beside.dataset.head = `${state.layer}.${state.head}`;
  }

  function drawRest() {
    const { source } = context;
    fill(
      rest,
      h("section", {}, h("h2", {}, "Warnings"), warningList(context), hint(source.common.caveat)),
      h("section", {}, h("h2", {}, "Roles"), ...roles()),
    );
  }

  function roles(): (HTMLElement | false)[] {
    const { text, source } = context;
    const earned = text.layers.flatMap((layer) =>
      layer.heads.flatMap((each) => each.roles.map((role) => role.kind)),
    );
    if (!text.has_roles)
      return [hint(text.why_no_roles ?? "No roles were computed for this text.")];
    const note = text.role_note ? `${text.role_note} ` : "";
    if (!earned.length) return [hint(`${note}No head has a role on this text.`)];
    return [
      h(
        "ul",
        { class: "plain" },
        ...Object.entries(source.common.kinds).flatMap(([kind, { letter, meaning }]) => {
          const count = earned.filter((each) => each === kind).length;
          return count
            ? [
                h(
                  "li",
                  {},
                  h("span", { class: "chip" }, letter),
                  strong(kind),
                  ` ${meaning} (${plural(count, "head")})`,
                ),
              ]
            : [];
        }),
      ),
      hint(note + source.common.roleCaveat),
    ];
  }

  return {
    element,
    acts: [["Save card", () => void saveCard()]],
    update(before) {
      const { state } = context;
      const isNew = isGridNew(
        state.text,
        state.grid,
        state.pairs,
        state.color,
        state.sort,
        context.colors.theme,
      );
      if (!before || before.text !== state.text) {
        first.draw();
        typed?.update(null);
        drawRest();
      }
      if (!before || isNew) drawGrid();
      else if (before.scale !== state.scale) {
        first.recolor();
        drawKey();
        grid!.repaint();
      }
      first.follow();
      grid!.mark();
      drawHead();
    },
    key(event) {
      if (first.key(event)) return true;
      const nothing = ["BODY", "MAIN"].includes(document.activeElement?.tagName ?? "BODY");
      if (event.key === "Enter" && nothing) {
        context.set({ view: "head", x: -1, y: -1 });
        return true;
      }
      return grid!.move(event.key);
    },
    close() {
      first.close();
      typed?.close();
      grid?.close();
    },
  };
}
