// Lines from queries on the left to keys on the right; each chosen head in its color, or one mean.
import { interval, strongest, type Context } from "./context";
import { queriesOf } from "./data";
import { fill, h, hint, s, visible } from "./dom";
import { shown } from "./format";
import {
  byLayer,
  drawnApart,
  headColors,
  headsInWords,
  listedHeads,
  meanLine,
  nameOfHead,
  ownColor,
  type Head,
} from "./head_sets";
import type { Mode } from "./mode";
import { movedBy, pairLine } from "./pair_line";
import { pauses } from "./pause";
import { isShown } from "./sentences";
import type { Range } from "./source";
import { cutName, wordNames } from "./word_names";

const [LINES, TALL, LEAST, APART] = [56, 19, 0.03, 1.6]; // words, pixels of a word, least weight, pixels between heads
interface Bundle {
  color: string | null;
  values: Float32Array;
} // rows x cols

export function linesMode(
  context: Context,
  body: HTMLElement,
  linked: (query: number | null) => void,
): Mode {
  let turn = 0;
  let showOnly: (side: "query" | "key", at: number | null) => void = () => {};
  let only: Head | null = null; // shown alone
  const queries = () => queriesOf(context.text);

  function ranges(): [Range, Range] {
    const { state, text } = context;
    return [
      interval(state.query, LINES, queries().length),
      text.queries
        ? interval(0, LINES, text.tokens.length)
        : interval(state.query, LINES, text.tokens.length),
    ];
  }

  // The weights that are drawn: of each head, or their mean.
  async function bundles(rows: Range, cols: Range): Promise<Bundle[]> {
    const { source, state } = context;
    const heads = only ? [only] : listedHeads(context);
    const [colors, apart, pause] = [headColors(context), only || drawnApart(context), pauses()];
    const found = new Map<string, Float32Array>();
    const mean = new Float32Array((rows[1] - rows[0]) * (cols[1] - cols[0]));
    for (const [layer, chosen] of byLayer(heads)) {
      const weights = await source.window(state.text, layer, rows, cols);
      await pause();
      for (const head of chosen) {
        if (apart) found.set(nameOfHead([layer, head]), weights[head]);
        else
          weights[head].forEach((weight, at) => {
            mean[at] += weight / heads.length;
          });
      }
    }
    if (!apart) return [{ color: null, values: mean }];
    return heads.map((head) => ({
      values: found.get(nameOfHead(head))!,
      color: colors.get(nameOfHead(head)) ?? ownColor(head),
    }));
  }

  async function draw() {
    const mine = ++turn;
    const [rows, cols] = ranges();
    const found = await bundles(rows, cols);
    const heads = byLayer(only ? [only] : listedHeads(context));
    const row = await meanLine(context, heads, context.state.query);
    if (mine !== turn) return;
    const figure = drawing(found, rows, cols);
    const where = drawnApart(context)
      ? `${headsInWords(context).replace(/^the mean of /, "")}, each in the color of its tile`
      : headsInWords(context);
    const near = queries().length > LINES ? "Only words near the chosen word are shown. " : "";
    const beyond = h("p", { class: "hint beyond" });
    fill(beyond, unseen(row, cols));
    const pair = h("p", { class: "chosen-pair", "aria-live": "polite" });
    if (context.state.key >= 0 && !only) pair.append(pairLine(context, row[context.state.key]));
    body.replaceChildren(
      hint(
        `Lines go from queries on the left to keys on the right, in ${where}. A thicker line is a larger weight. ` +
          `${near}Point at a word on either side to see only its lines. Arrow keys move the query, with Shift the key.`,
      ),
      beyond,
      h("div", { class: "scroll" }, figure),
      pair,
    );
  }

  function drawing(found: Bundle[], rows: Range, cols: Range): SVGSVGElement {
    const width = Math.min(560, body.clientWidth);
    const [left, right] = [width * 0.3, width * 0.7];
    const height = Math.max(rows[1] - rows[0], cols[1] - cols[0]) * TALL + 14;
    const made = s("svg", {
      class: "lines",
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": "Lines from each word to the words that it attends to",
    });
    const group = s("g", { fill: "none" });
    made.append(group);
    found.forEach(({ color, values }, order) => {
      const shift = (order - (found.length - 1) / 2) * Math.min(APART, 12 / found.length);
      for (let i = rows[0]; i < rows[1]; i++)
        for (let j = cols[0]; j < cols[1]; j++) {
          const weight = values[(i - rows[0]) * (cols[1] - cols[0]) + j - cols[0]];
          if (weight >= LEAST && isShown(context, i, j))
            group.append(
              s("line", {
                x1: left,
                x2: right,
                y1: (i - rows[0]) * TALL + 11 + shift,
                y2: (j - cols[0]) * TALL + 11 + shift,
                stroke: color ?? context.colors.line(weight),
                "stroke-width": 0.6 + 2.6 * weight,
                opacity: color ? 0.12 + 0.88 * weight : null,
                "data-query": i,
                "data-key": j,
              }),
            );
        }
    });
    showOnly = (side, at) =>
      group.querySelectorAll<SVGLineElement>("line").forEach((line) => {
        line.style.display = at === null || Number(line.dataset[side]) === at ? "" : "none";
      });
    const point = (side: "query" | "key", at: number | null) => {
      showOnly(side, at);
      linked(side === "query" ? at : null);
    };
    side(made, rows, left - 8, (at) => point("query", at), true);
    side(made, cols, right + 8, (at) => point("key", at), false);
    made.addEventListener("pointerleave", () => point("query", null));
    return made;
  }

  // The words of one side. A click chooses a word; pointing at a word leaves only its lines.
  function side(
    made: SVGSVGElement,
    [first, last]: Range,
    x: number,
    show: (at: number) => void,
    isLeft: boolean,
  ) {
    const { state, text } = context;
    const [names, chosen] = [
      wordNames(isLeft ? queries() : text.tokens),
      isLeft ? state.query : state.key,
    ];
    const room = Math.floor((Math.min(560, body.clientWidth) * 0.3) / 8.4);
    for (let at = first; at < last; at++)
      made.append(
        s(
          "text",
          {
            x,
            y: (at - first) * TALL + 15,
            "text-anchor": isLeft ? "end" : "start",
            "font-size": 13,
            fill: at === chosen ? "var(--accent)" : "currentColor",
            direction: "ltr",
            class: "pick",
            "font-weight": at === chosen ? 700 : 400,
            onclick: () => context.set(isLeft ? { query: at } : { key: at }),
            onpointerenter: () => show(at),
          },
          cutName(names[at], room),
        ),
      );
  }

  // A sentence about the weights of the chosen word on words that are not drawn.
  function unseen(row: Float32Array, [first, last]: Range): string {
    const outside = row.map((weight, at) => (at < first || at >= last ? weight : 0));
    const share = outside.reduce((total, weight) => total + weight, 0);
    const [most] = strongest(outside, 1);
    return share < 0.05
      ? ""
      : `${shown(share)} of the weight of “${visible(queries()[context.state.query])}” goes to words ` +
          `that are not drawn, most to “${visible(context.text.tokens[most])}” (token ${most}).`;
  }

  return {
    draw: () => void draw(),
    point: (query) => showOnly("query", query),
    preview(head) {
      only = head;
      void draw();
    },
    key: (event) => movedBy(context, event, 1),
    close() {
      turn++;
    },
  };
}
