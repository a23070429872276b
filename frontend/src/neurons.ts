// Why a weight is what it is: how each channel of q and k adds to the score of a pair.
import { changeDetector } from "./changes";
import { headName, place, strongest, type Context } from "./context";
import { queriesOf } from "./data";
import { cut, h, hint, s, visible } from "./dom";
import { shown } from "./format";

const [NEURONS, BAND] = [14, 20]; // keys, pixels of a row
interface Found {
  key: number;
  q: Float32Array;
  k: Float32Array;
}

export function whyWeight(context: Context) {
  const body = h("div", {});
  const element = h(
    "details",
    {
      class: "why-weight",
      ontoggle: () => context.set({ why: element.open ? "yes" : "" }, true),
    },
    h("summary", {}, "Why this weight: the channels of q and k"),
    body,
  );
  let turn = 0;
  const isNew = changeDetector();

  // Computed while it is open, and once for each row.
  function update() {
    const { state, text, colors } = context;
    element.open = state.why === "yes";
    if (!element.open) return;
    const { layer, head, query, key } = state;
    if (isNew(state.text, text.title, layer, head, query, key, colors.theme)) void draw();
  }

  async function draw() {
    const mine = ++turn;
    const { state, source } = context;
    const row = (await source.rows(state.text, state.layer, state.query))[state.head];
    const keys = strongest(row, NEURONS);
    if (state.key >= 0 && !keys.includes(state.key)) keys.unshift(state.key);
    const pairs = await Promise.all(
      keys.map((key) => source.pair(place(context), state.query, key)),
    );
    if (mine !== turn) return;
    const found = keys.flatMap((key, at): Found[] =>
      pairs[at] ? [{ key, q: pairs[at]![0], k: pairs[at]![1] }] : [],
    );
    if (!found.length) {
      body.replaceChildren(
        hint(
          "The channels cannot be shown for this text. They need scores that are dot products, and queries and keys in the page or from a server.",
        ),
      );
      return;
    }
    const figure = drawing(found, row);
    body.replaceChildren(
      hint(
        `${headName(context)}: a score is the sum of its products; blue is positive, red is negative. Shown are the keys with the largest weights.`,
      ),
      h("div", { class: "scroll" }, figure),
    );
  }

  function drawing(found: Found[], row: Float32Array): SVGSVGElement {
    const { state, text } = context;
    const size = found[0].q.length;
    const [left, beside] = body.clientWidth < 600 ? [84, 96] : [150, 150];
    const cell = Math.max(2, Math.min(14, 560 / size, (body.clientWidth - left - beside) / size));
    const most = (lists: Iterable<number>[]) =>
      Math.max(...lists.map((list) => Math.max(...Array.from(list, Math.abs))), 1e-9);
    const products = found.map(({ q, k }) => q.map((value, d) => value * k[d]));
    const [mostQ, mostK, mostP] = [
      most([found[0].q]),
      most(found.map(({ k }) => k)),
      most(products),
    ];
    const [width, height] = [left + size * cell + beside, 46 + found.length * (BAND * 2 + 12) + 30];
    const made = s("svg", {
      class: "neurons",
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": "Products of queries and keys by channel",
    });
    const note = (text: string, y: number) =>
      made.append(
        s("text", { x: left + size * cell + 10, y, "font-size": 12, fill: "currentColor" }, text),
      );
    const stripe = (
      values: ArrayLike<number>,
      top: number,
      greatest: number,
      label: string,
      bold = false,
    ) => {
      made.append(
        s(
          "text",
          {
            x: left - 8,
            y: top + 14,
            "text-anchor": "end",
            "font-size": 12,
            fill: "currentColor",
            "font-weight": bold ? 600 : 400,
          },
          label,
        ),
      );
      for (let d = 0; d < size; d++)
        made.append(
          s(
            "rect",
            {
              x: left + d * cell,
              y: top,
              width: cell * 0.95,
              height: BAND - 3,
              fill: values[d] > 0 ? "var(--more)" : "var(--less)",
              "fill-opacity": Math.abs(values[d]) / greatest,
            },
            s("title", {}, `channel ${d}: ${shown(values[d])}`),
          ),
        );
    };
    stripe(
      found[0].q,
      12,
      mostQ,
      `c q  ${cut(visible(queriesOf(text)[state.query]), left / 12)}`,
      true,
    );
    found.forEach(({ key, k }, at) => {
      const top = 46 + at * (BAND * 2 + 12);
      stripe(k, top, mostK, `k  ${cut(visible(text.tokens[key]), left / 10)}`);
      stripe(products[at], top + BAND, mostP, "product");
      note(`weight ${shown(row[key])}`, top + 14);
      note(
        `score ${shown(products[at].reduce((total, value) => total + value, 0))}`,
        top + BAND + 14,
      );
    });
    return made;
  }

  return {
    update,
    element,
    close() {
      turn++;
    },
  };
}
