// The grid of all heads as lines on a dark ground: a layer is drawn as it comes into view.
import { headName, interval, type Context } from "./context";
import { mostHeads, queriesOf, rolesOf } from "./data";
import { changeDetector } from "./changes";
import { fill, h, hint, s } from "./dom";
import { shown } from "./format";
import type { HeadGrid } from "./head_grid";
import { headColors, isChosen, nameOfHead, toggled, type Head } from "./head_sets";
import { pauses } from "./pause";
import { isShown } from "./sentences";
import type { Range } from "./source";
import { stepOf } from "./steps";
import { namesOfMap } from "./word_names";

// Words on a side; the most heads drawn at once; pixels of the labels and of the least and the greatest cell.
const [SMALL, AT_ONCE, LABELS, LEAST, GREATEST] = [40, 400, 30, 13, 96];
const FRAME = { stroke: "#2b333b", "stroke-width": "1" };
const STRENGTHS = [0.04, 0.1, 0.2, 0.35, 0.55, 0.8]; // lines of like weights are one path
// The colors of layers, bright on the dark ground.
const BRIGHT = [
  "#5cb8ff",
  "#ffb14e",
  "#2fd6a3",
  "#ff8fc7",
  "#ff8a5c",
  "#b9a8ff",
  "#e5dd6a",
  "#7fe3ff",
  "#ff9d9d",
  "#9be37a",
];

export function lineGrid(context: Context): HeadGrid {
  const element = h("div", { class: "line-grid" });
  const isNew = changeDetector();
  let turn = 0;
  let layers: SVGSVGElement[] = [];
  let cells = new Map<string, SVGGElement>();
  let framed: string[] = []; // the heads with a frame of their own
  let ranges: [Range, Range] = [
    [0, 0],
    [0, 0],
  ];
  let size = 0;
  const strongest = new Map<string, [number, number, number]>();
  const readout = h("p", { class: "model-readout", "aria-live": "polite" });
  const watch = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries)
        if (isIntersecting) {
          watch.unobserve(target);
          void drawLayer(layers.indexOf(target as unknown as SVGSVGElement));
        }
    },
    { rootMargin: "300px" },
  );

  function cell(at: Head): SVGGElement {
    const open = () =>
      context.set({ view: "head", layer: at[0], head: at[1], way: "lines", heads: "one" });
    const toggle = () =>
      context.set({
        heads: isChosen(context.state) ? toggled(context, at) : nameOfHead(at),
      });
    return s(
      "g",
      {
        transform: `translate(${LABELS + at[1] * size},0)`,
        class: "pick cell",
        role: "button",
        "aria-label": headName(context, ...at),
        "data-place": nameOfHead(at),
        tabindex: -1,
        onclick: (event: MouseEvent) => (event.shiftKey ? toggle() : open()),
        onfocus: () => {
          context.set({ layer: at[0], head: at[1] }, true);
          tell(at);
        },
        onpointerenter: () => tell(at),
        onkeydown: (event: KeyboardEvent) => {
          if (event.key === "Enter") open();
          else if (event.key === " ") {
            toggle();
            event.preventDefault();
          }
        },
      },
      s("rect", {
        x: 1,
        y: 1,
        width: size - 2,
        height: size - 2,
        rx: 2,
        fill: "#131920",
        class: "frame",
        ...FRAME,
      }),
    );
  }

  // The frame of the head of the state, and of the chosen heads in their colors; only frames that change are touched.
  function mark() {
    const { state } = context;
    const current = nameOfHead([state.layer, state.head]);
    const colors = isChosen(state) ? headColors(context) : new Map<string, string>();
    for (const place of new Set([...framed, current, ...colors.keys()])) {
      const group = cells.get(place);
      group?.setAttribute("tabindex", place === current ? "0" : "-1");
      const frame = group?.querySelector(".frame");
      frame?.setAttribute(
        "stroke",
        colors.get(place) ?? (place === current ? "#ffb86b" : FRAME.stroke),
      );
      frame?.setAttribute(
        "stroke-width",
        colors.has(place) || place === current ? "2.5" : FRAME["stroke-width"],
      );
    }
    framed = [current, ...colors.keys()];
  }

  function follow() {
    const { state, text } = context;
    ranges = [
      interval(state.query, SMALL, queriesOf(text).length),
      interval(text.queries ? 0 : state.query, SMALL, text.tokens.length),
    ];
    if (isNew(state.text, text.title, state.pairs, ranges)) draw();
  }

  function draw() {
    turn++;
    watch.disconnect();
    strongest.clear();
    const { state, text } = context;
    const columns = mostHeads(text);
    const tall = Math.max(48, (0.86 * window.innerHeight) / text.layers.length); // all layers on a screen, if they are not many
    size = Math.max(LEAST, Math.min(GREATEST, tall, (element.clientWidth - LABELS - 18) / columns));
    const width = LABELS + columns * size;
    const svgRow = (height: number, ...children: SVGElement[]) =>
      s("svg", { width, height, class: "layer", viewBox: `0 0 ${width} ${height}` }, ...children);
    const label = (x: number, y: number, said: string | number, anchor: string) =>
      s("text", { x, y, "text-anchor": anchor, "font-size": 11, fill: "#aab4be" }, said);
    const every = Math.ceil(20 / size);
    const top = svgRow(
      18,
      ...Array.from({ length: columns }, (_, head) =>
        head % every ? null : label(LABELS + (head + 0.5) * size, 12, head, "middle"),
      ).filter((one) => one !== null),
    );
    layers = text.layers.map((layer, at) =>
      svgRow(
        size,
        label(LABELS - 8, size / 2 + 4, layer.number, "end"),
        ...layer.heads.map((_, head) => cell([at, head])),
      ),
    );
    cells = new Map(
      layers
        .flatMap((layer) => [...layer.querySelectorAll<SVGGElement>(".cell")])
        .map((group) => [group.dataset.place!, group]),
    );
    framed = [];
    const around =
      queriesOf(text).length > SMALL ? `The ${SMALL} words around the chosen one. ` : "";
    fill(
      element,
      hint(
        `A row is a layer; in a head, queries are on the left, keys on the right. Brighter lines are larger weights. ${around}` +
          "Shift and click, or Space, chooses several heads.",
      ),
      readout,
      h(
        "div",
        { class: "model-ground" },
        h("div", { class: "scroll" }, top, ...layers, legend(width)),
      ),
    );
    mark();
    tell([state.layer, state.head]);
    if (layers.length * columns > AT_ONCE)
      layers.forEach((layer) => {
        watch.observe(layer);
      });
    else void drawAll();
  }

  async function drawAll() {
    const [mine, pause] = [turn, pauses()];
    for (const layer of layers.keys()) {
      await drawLayer(layer);
      await pause();
      if (mine !== turn) return;
    }
  }

  async function drawLayer(layer: number) {
    const mine = turn;
    const { source, state } = context;
    const weights = await source.window(state.text, layer, ...ranges);
    if (mine !== turn) return;
    weights.forEach((values, head) => {
      cells.get(nameOfHead([layer, head]))?.append(...pathsOf(values, [layer, head]));
    });
    if (layer === state.layer) tell([layer, state.head]);
  }

  // The lines of each strength, with the least weight that has it.
  function legend(width: number): SVGSVGElement {
    const step = Math.min(70, (width - LABELS) / STRENGTHS.length);
    return s(
      "svg",
      {
        width,
        height: 22,
        class: "layer",
        viewBox: `0 0 ${width} 22`,
        role: "img",
        "aria-label": `Lines of weights from ${STRENGTHS.join(", from ")}`,
      },
      ...STRENGTHS.flatMap((least, strength) => [
        s("line", {
          x1: LABELS + strength * step,
          x2: LABELS + strength * step + 14,
          y1: 13,
          y2: 13,
          stroke: "#e8edf2",
          ...look(strength),
        }),
        s(
          "text",
          { x: LABELS + strength * step + 18, y: 17, "font-size": 11, fill: "#aab4be" },
          step < 60 ? String(least) : `≥ ${least}`,
        ),
      ]),
    );
  }
  const look = (strength: number) => ({
    "stroke-width": (0.7 + 0.25 * strength).toFixed(2),
    opacity: (0.22 + 0.15 * strength).toFixed(2),
  });

  // The lines of a head: one path for each strength.
  function pathsOf(values: Float32Array, at: Head): SVGPathElement[] {
    const [rows, cols] = ranges;
    const [left, right] = [(size - 8) / (rows[1] - rows[0]), (size - 8) / (cols[1] - cols[0])];
    const parts: string[][] = STRENGTHS.map(() => []);
    let best: [number, number, number] = [-1, -1, 0];
    for (let i = rows[0], n = 0; i < rows[1]; i++)
      for (let j = cols[0]; j < cols[1]; j++, n++) {
        const weight = values[n];
        if (!isShown(context, i, j)) continue;
        if (weight > best[2]) best = [i, j, weight];
        if (weight < STRENGTHS[0]) continue;
        const strength = STRENGTHS.findLastIndex((least) => weight >= least);
        parts[strength].push(
          `M4,${(4 + (i - rows[0] + 0.5) * left).toFixed(1)}L${(size - 4).toFixed(1)},${(4 + (j - cols[0] + 0.5) * right).toFixed(1)}`,
        );
      }
    strongest.set(nameOfHead(at), best);
    return parts.flatMap((path, strength) =>
      path.length
        ? [
            s("path", {
              d: path.join(""),
              fill: "none",
              stroke: BRIGHT[at[0] % BRIGHT.length],
              "pointer-events": "none",
              ...look(strength),
            }),
          ]
        : [],
    );
  }

  // The head under the pointer, and the largest weight that is drawn in it.
  function tell(at: Head) {
    const found = strongest.get(nameOfHead(at));
    const { text, source, state } = context;
    const roles = rolesOf(text, ...at).join(", ");
    const names = namesOfMap(text);
    const link =
      found && found[0] >= 0
        ? [
            ": its largest weight here, special tokens included, is “",
            h("b", {}, names[0][found[0]]),
            "” → “",
            h("b", {}, names[1][found[1]]),
            "” ",
            h("output", { class: "weight" }, shown(found[2])),
            source.finest(state.text) ? " (the mean of a cell)" : "",
            ".",
          ]
        : [];
    readout.replaceChildren(
      h("b", {}, headName(context, ...at)),
      roles ? ` (${roles})` : "",
      ...link,
    );
  }

  return {
    element,
    draw: follow,
    repaint: () => {},
    mark() {
      follow();
      mark();
    },
    move(key) {
      const { state, text } = context;
      const step = stepOf(key, text.layers[state.layer].heads.length);
      if (step === undefined) return false;
      const places = [...cells.keys()];
      cells.get(places[places.indexOf(nameOfHead([state.layer, state.head])) + step])?.focus();
      return true;
    },
    close() {
      turn++;
      watch.disconnect();
    },
  };
}
