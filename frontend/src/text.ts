// The text view: what a word attends to, and what attends to it, in chosen heads; as words, lines or neurons.
import { aboutHead } from "./overview";
import { chosenHeads, headName, inText, meanLine, meansOnly, place, interval, strongest, type Context, type Panel } from "./context";
import { SERIES } from "./colour";
import { layerName, queriesOf } from "./data";
import { choice, cut, fill, h, joins, s, saving, segments, shown, strong, visible } from "./dom";
import { strip } from "./strip";

const [SHOWN, LINES, SMALL, NEURONS, ARCS] = [600, 56, 40, 14, 5]; // tokens in each mode, links drawn as arcs
const LISTED = 2000; // queries in a list to choose from

export function textView(context: Context): Panel {
  const [tools, body] = [h("div", { class: "tools" }), h("div", {})];
  const notes = h("div", {});
  const element = h("div", { class: "text-view" }, tools, notes, body);
  let turn = 0;
  let pointed: number | null = null;
  let from = -1;
  let spans: HTMLElement[] = [];

  const queries = () => queriesOf(context.text);
  const crossed = () => context.text.queries !== null;

  function drawTools() {
    const { state, text } = context;
    const pairs = sentences(text.tokens, text.special).length > 1 && !crossed();
    const custom = !["one", "layer", "all"].includes(state.heads);
    fill(
      tools,
      segments("How", state.way, [["words", "Words"], ["heads", "Head view"], ["model", "Model view"],
        ["neurons", "Neurons"]], (way) => context.set({ way })),
      state.way !== "model" && state.way !== "neurons"
        && choice("Heads", custom ? "set" : state.heads,
        [["one", "this head"], ["layer", "mean of the layer"], ["all", "mean of all"], ["set", "chosen heads of the layer…"]],
        (heads) => context.set({ heads: heads === "set" ? `${state.head},` : heads })),
      custom && h("label", { class: "choice" }, h("span", {}, "Numbers"),
        h("input", { value: state.heads, size: 10, "aria-label": "Numbers of heads, separated by commas",
        onchange: (event: Event) => context.set({ heads: (event.target as HTMLInputElement).value || "one" }) })),
      state.way === "words" && !crossed() && segments("Direction", state.side,
        [["out", "Attends to"], ["in", "Receives from"], ["both", "Both"]], (side) => context.set({ side })),
      pairs && state.way !== "words" && state.way !== "neurons"
        && choice("Sentences", state.pairs, [["all", "all"], ["AA", "A → A"], ["AB", "A → B"], ["BA", "B → A"],
        ["BB", "B → B"]], (pair) => context.set({ pairs: pair })),
      state.way !== "words" && saving(() => `${text.title} ${state.way} ${headName(context)}`,
        () => body.querySelector("svg"), () => context.root),
    );
  }

  // Words

  function word(tokens: string[], at: number, special: Set<number>, isQuery: boolean): HTMLElement {
    const token = tokens[at];
    const kind = special.has(at) ? "special" : token.startsWith("##") ? "piece" : "word";
    const span = h("span", { class: kind, dir: "auto", title: `${token} · ${at}` }, visible(token));
    span.dataset.at = String(at);
    if (isQuery) {
      span.setAttribute("role", "option");
      span.addEventListener("click", () => context.set({ query: at }));
      span.addEventListener("pointerenter", () => { pointed = at; void colour(at); });
    }
    return span;
  }

  function sentence(tokens: string[], [first, last]: [number, number], special: Set<number>,
    isQuery: boolean): HTMLElement {
    const box = h("div", { class: "words", ...(isQuery
      ? { role: "listbox", "aria-label": "Words of the text", tabindex: 0 } : {}) });
    for (let at = first; at < last; at++) {
      if (at > first && !joins(tokens[at], tokens[at - 1])) box.append(" ");
      box.append(word(tokens, at, special, isQuery));
    }
    box.addEventListener("pointerleave", () => { pointed = null; void colour(context.state.query); });
    return box;
  }

  function drawWords() {
    const { text, state } = context;
    const special = new Set(text.special);
    const window_ = interval(state.query, SHOWN, queries().length);
    from = window_[0];
    const own = sentence(queries(), window_, crossed() ? new Set() : special, true);
    const keys = crossed() ? sentence(text.tokens, [0, Math.min(text.tokens.length, SHOWN)], special, false) : null;
    spans = [...own.querySelectorAll<HTMLElement>("span")];
    const arcs = s("svg", { class: "arcs", "aria-hidden": "true" });
    const move = (by: number, said: string) => h("button",
      { type: "button", onclick: () => context.set({
      query: Math.max(0, Math.min(queries().length - 1, state.query + by)) }) }, said);
    const long = queries().length > SHOWN && h("p", { class: "hint" },
      `Tokens ${window_[0]} to ${window_[1] - 1} of ${queries().length}. `, move(-SHOWN, "Earlier"), " ",
      move(SHOWN, "Later"));
    const stage = h("div", { class: "stage" }, arcs, own, keys && h("p", { class: "hint" }, "attends to"), keys);
    body.replaceChildren(h("p", { class: "hint" }, "Point at a word, or choose it, to see what it attends to ",
      h("span", { class: "swatch out" }), " and, as a bar below a word, what attends to it ",
      h("span", { class: "swatch in" }), ". The left and right arrow keys move."),
      long || "", stage, h("p", { class: "readout looks", "aria-live": "polite" }),
        h("div", { class: "lower" }, h("section", { class: "strip" }, h("h2", {}, "All layers")),
        h("section", {}, h("h2", {}, headName(context)), aboutHead(context))));
    void colour(state.query);
    void strip(context, state.query, body.querySelector(".strip")?.clientWidth).then((figure) => {
      const room = body.querySelector(".strip"); if (room) room.replaceChildren(
      h("h2", {}, "All layers", saving(() => `${text.title} layers`, () => figure, () => context.root)),
      h("p", { class: "hint" }, "What the chosen word attends to: the mean of the heads of each layer."),
      h("div", { class: "scroll" }, figure)); });
  }

  // Colour every word by its weight with `query`, draw the strongest links as arcs, and write them out.
  async function colour(query: number) {
    const mine = ++turn;
    const { state, text } = context;
    const heads = chosenHeads(context);
    const looks = state.side !== "in" || crossed() ? await meanLine(context, heads, query) : null;
    const seen = state.side !== "out" && !crossed() ? await meanLine(context, heads, query, true) : null;
    if (mine !== turn || !spans.length) return;
    const { colours } = context;
    // Arcs and lists leave out what is far below the strongest weight.
    const most = (values: Float32Array | null) => values?.reduce((a, b) => Math.max(a, b), 0) ?? 0;
    const norm = Math.max(Math.min(1, 10 / text.tokens.length), most(looks), most(seen));
    const keySpans = crossed() ? [...body.querySelectorAll<HTMLElement>(".words:not([role]) span")] : spans;
    keySpans.forEach((span) => {
      const at = Number(span.dataset.at);
      const behind = looks ?? seen!; // a bar below the word only where both directions are shown
      span.style.background = colours.weight(behind[at]);
      span.style.color = colours.textOn(behind[at]);
      span.style.boxShadow = looks && seen ? `0 1px ${colours.get("--paper")}, 0 5px ${colours.weight(seen[at])}` : "";
    });
    spans.forEach((span) => span.setAttribute("aria-selected", String(Number(span.dataset.at) === query)));
    const links = looks ? strongest(looks, ARCS) : [];
    if (pointed === null) intoView(spans[query - from]);
    const scaled = (values: Float32Array | null) => values?.map((weight) => weight / norm) ?? null;
    drawArcs(query, scaled(looks), links, keySpans, seen ? strongest(seen, ARCS) : [], scaled(seen), norm);
    const which = state.heads === "one" ? inText(headName(context)) : state.heads === "layer"
      ? `the mean of ${layerName(text.layers[state.layer])}` : state.heads === "all" ? "the mean of all heads"
      : `heads ${state.heads.replace(/,\s*$/, "")} of ${layerName(text.layers[state.layer])}`;
    const listed = (list: number[], values: Float32Array, tokens: string[]) => {
      const visibleLinks = list.filter((at) => values[at] >= norm / 100);
      return visibleLinks.length ? visibleLinks.flatMap((at, n) => [n ? ", " : "", strong(visible(tokens[at])), ` ${shown(values[at])}`])
        : ["nothing"];
    };
    const line = body.querySelector(".looks");
    line?.replaceChildren(strong(visible(queries()[query])), ` (token ${query})`,
      ...(looks ? [" attends to ", ...listed(links, looks, text.tokens)] : []),
      ...(seen ? [looks ? "; receives attention from " : " receives attention from ", ...listed(strongest(seen, ARCS), seen, queries())]
      : []), `, in ${which}${context.source.finest(state.text) ? " (means, not weights of single words)" : ""}.`);
    if (pointed === null && line) context.tell(line.textContent ?? "");
  }

  // Scroll a hidden word into the middle of its box, without scrolling the page.
  function intoView(span: HTMLElement | undefined) {
    const box = span?.parentElement;
    if (!span || !box) return;
    const below = span.getBoundingClientRect().top - box.getBoundingClientRect().top;
    if (below < 0 || below > box.clientHeight - 30) box.scrollTop += below - box.clientHeight / 2;
  }

  function drawArcs(query: number, looks: Float32Array | null, links: number[], keySpans: HTMLElement[], back: number[],
    seen: Float32Array | null, norm: number) {
    const arcs = body.querySelector<SVGSVGElement>(".arcs");
    const start = spans[query - from];
    if (!arcs || !start) return;
    const origin = arcs.getBoundingClientRect();
    const middle = (span: HTMLElement) => { const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
      return [box.left + box.width / 2 - origin.left, box.top - origin.top, box.height]; };
    const path = (target: HTMLElement | undefined, weight: number, dashes: string | null = null) => {
      if (!target || target === start || weight < 0.03) return null;
      const [[x1, y1], [x2, y2, tall]] = [middle(start), middle(target)];
      const below = target.parentElement !== start.parentElement;
      const lift = Math.min(46, 14 + Math.abs(x2 - x1) * 0.12);
      const way = below ? `M${x1},${y1 + tall} C${x1},${(y1 + y2 + tall) / 2} ${x2},${(y1 + y2 + tall) / 2} ${x2},${y2}`
        : `M${x1},${y1 + 4} C${x1},${Math.min(y1, y2) - lift} ${x2},${Math.min(y1, y2) - lift} ${x2},${y2 + 4}`;
      return s("path", { d: way, fill: "none", stroke: context.colours.line(weight * norm),
        "stroke-width": 1 + 3 * weight, "stroke-dasharray": dashes, "stroke-linecap": "round" });
    };
    const outward = links.map((at) => path(crossed() ? keySpans[at] : spans[at - from], looks![at]));
    const inward = context.state.side === "in" ? back.map((at) => path(spans[at - from], seen![at], "1 5")) : [];
    arcs.replaceChildren(...[...outward, ...inward].filter((each) => each !== null));
  }

  // Lines from queries on the left to keys on the right

  const allowed = (i: number, j: number) => {
    const { pairs } = context.state;
    if (pairs === "all" || crossed()) return true;
    const ends = sentences(context.text.tokens, context.text.special);
    const letter = (at: number) => (at < ends[0] ? "A" : "B");
    return letter(i) + letter(j) === pairs;
  };

  async function drawHeads() {
    const mine = ++turn;
    const { text, state } = context;
    const heads = chosenHeads(context);
    const [rows, cols] = [interval(state.query, LINES, queries().length),
      crossed() ? interval(0, LINES, text.tokens.length) : interval(state.query, LINES, text.tokens.length)];
    const tall = 19;
    const width = Math.min(560, body.clientWidth);
    const [left, right] = [width * 0.3, width * 0.7];
    const height = Math.max(rows[1] - rows[0], cols[1] - cols[0]) * tall + 14;
    const figure = s("svg", { class: "lines", width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": "Lines from each word to the words that it attends to" });
    const lines = s("g", { fill: "none" });
    figure.append(lines);
    const side = (tokens: string[], [first, last]: [number, number], isLeft: boolean) => {
      for (let at = first; at < last; at++) {
        const node = s("text", { x: isLeft ? left - 8 : right + 8, y: (at - first) * tall + 15,
          "text-anchor": isLeft ? "end" : "start", "font-size": 13, fill: "currentColor", direction: "ltr",
          class: isLeft ? "pick" : "", "font-weight": isLeft && at === state.query ? 700 : 400 },
          cut(visible(tokens[at]), Math.floor(left / 8.4)));
        if (isLeft) node.addEventListener("click", () => context.set({ query: at }));
        if (isLeft) node.addEventListener("pointerenter", () => only(at));
        figure.append(node);
      }
    };
    side(queries(), rows, true);
    side(text.tokens, cols, false);
    const only = (query: number | null) => lines.querySelectorAll<SVGLineElement>("line").forEach(
      (line) => { line.style.display = query === null || Number(line.dataset.query) === query ? "" : "none"; });
    figure.addEventListener("pointerleave", () => only(null));
    const colours = new Map((heads.get(state.layer) ?? []).map((head) => [head, SERIES[head % SERIES.length]]));
    const beyond = h("p", { class: "hint beyond" });
    body.replaceChildren(
      h("p", { class: "hint" },
      `Lines go from queries on the left to keys on the right. A thicker line is a larger weight. ${queries().length > LINES ? "Only words near the chosen word are shown. " : ""}Point at a word to see only its lines.`), beyond, h("div", { class: "scroll" }, figure));
    const join = (i: number, row: Float32Array, colour: string | null) => {
      for (let j = cols[0]; j < cols[1]; j++)
        if (row[j] >= 0.03 && allowed(i, j))
          lines.append(s("line", { x1: left, y1: (i - rows[0]) * tall + 11, x2: right, y2: (j - cols[0]) * tall + 11,
            stroke: colour ?? context.colours.line(row[j]), "stroke-width": 0.6 + 2.6 * row[j],
            opacity: colour ? 0.12 + 0.88 * row[j] : null, "data-query": i }));
    };
    const mean = ["one", "layer", "all"].includes(state.heads);
    for (let i = rows[0]; i < rows[1]; i++) {
      if (mean) {
        const row = await meanLine(context, heads, i);
        if (mine !== turn) return;
        join(i, row, null);
        if (i === state.query) fill(beyond, unseen(row, cols));
      } else {
        const weights = await context.source.rows(state.text, state.layer, i);
        if (mine !== turn) return;
        for (const head of heads.get(state.layer)!) join(i,
          weights[head].map((weight) => weight / Math.sqrt(heads.get(state.layer)!.length)), colours.get(head)!);
      }
    }
  }

  // A sentence about the weights of the chosen word on words that are not drawn.
  function unseen(row: Float32Array, [first, last]: [number, number]): string {
    const outside = row.map((weight, at) => (at < first || at >= last ? weight : 0));
    const share = outside.reduce((total, weight) => total + weight, 0);
    const [most] = strongest(outside, 1);
    return share < 0.05 ? "" : `${Math.round(100 * share)} % of the weight of “${visible(queries()[context.state.query])}” goes to words that are not drawn, most to “${visible(context.text.tokens[most])}” (token ${most}).`;
  }

  async function drawModel() {
    const mine = ++turn;
    const { text, state } = context;
    const [rows, cols] = [interval(state.query, SMALL, queries().length),
      crossed() ? interval(0, SMALL, text.tokens.length) : interval(state.query, SMALL, text.tokens.length)];
    const columns = Math.max(...text.layers.map((layer) => layer.heads.length));
    const pitch = Math.max(20, Math.min(72, (body.clientWidth - 24) / columns));
    const [size, gap] = [pitch * 0.89, pitch * 0.11];
    const [width, height] = [24 + columns * (size + gap), 20 + text.layers.length * (size + gap)];
    const figure = s("svg", { class: "model", width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": "Every head of every layer as lines" });
    for (let head = 0; head < columns; head++) figure.append(
      s("text", { x: 24 + head * (size + gap) + size / 2, y: 12, "text-anchor": "middle", "font-size": 11,
      fill: "currentColor" }, head));
    body.replaceChildren(
      h("p", { class: "hint" },
      `Every head of every layer; queries on the left, keys on the right. ${queries().length > SMALL ? "The words around the chosen one. " : ""}Click a head to see its words.`), h("div", { class: "scroll" }, figure));
    const [left, right] = [(size - 6) / (rows[1] - rows[0]), (size - 6) / (cols[1] - cols[0])];
    for (const [layer, about] of text.layers.entries()) {
      const top = 20 + layer * (size + gap);
      figure.append(s("text", { x: 16, y: top + size / 2 + 4, "text-anchor": "end", "font-size": 11,
        fill: "currentColor" }, about.number));
      const cells = about.heads.map((_, head) => {
        const chosen = layer === state.layer && head === state.head;
        const cell = s("g", { transform: `translate(${24 + head * (size + gap)},${top})`, class: "pick", tabindex: 0,
          role: "button", "aria-label": headName(context, layer, head),
          onclick: () => context.set({ layer, head, way: "heads", heads: "one" }),
          onkeydown: (event: KeyboardEvent) => event.key === "Enter"
          && context.set({ layer, head, way: "heads", heads: "one" }) },
          s("rect", { width: size, height: size, fill: "var(--none)", stroke: chosen ? "var(--accent)" : "var(--line)",
          "stroke-width": chosen ? 2 : 1 }));
        return figure.appendChild(cell);
      });
      const paths = cells.map(() => [[], [], []] as string[][]);
      const asked = Array.from({ length: rows[1] - rows[0] }, (_, at) =>
        context.source.rows(state.text, layer, rows[0] + at));
      for (let i = rows[0]; i < rows[1]; i++) {
        const weights = await asked[i - rows[0]];
        if (mine !== turn) return;
        weights.forEach((row, head) => {
          for (let j = cols[0]; j < cols[1]; j++)
            if (row[j] >= 0.08 && allowed(i, j)) paths[head][row[j] > 0.6 ? 2 : row[j] > 0.25 ? 1
              : 0].push(`M4,${(3 + (i - rows[0] + 0.5) * left).toFixed(1)}L${size - 4},${(3 + (j - cols[0] + 0.5) * right).toFixed(1)}`);
        });
      }
      cells.forEach((cell, head) => paths[head].forEach((path, strength) => path.length
        && cell.append(s("path", { d: path.join(""), stroke: SERIES[layer % SERIES.length],
        "stroke-width": 0.6 + 0.6 * strength, opacity: 0.25 + 0.3 * strength, fill: "none" }))));
    }
  }

  // Neurons: how each channel of q and k adds to the score of a pair.
  async function drawNeurons() {
    const mine = ++turn;
    const { text, state, source } = context;
    const row = (await source.rows(state.text, state.layer, state.query))[state.head];
    const keys = strongest(row, NEURONS);
    if (state.key >= 0 && !keys.includes(state.key)) keys.unshift(state.key);
    const pairs = await Promise.all(keys.map((key) => source.pair(place(context), state.query, key)));
    if (mine !== turn) return;
    const found = keys.flatMap((key, at) => (pairs[at] ? [{ key, q: pairs[at]![0], k: pairs[at]![1] }] : []));
    if (!found.length) { body.replaceChildren(h("p", { class: "hint" },
      "Neurons cannot be shown for this text. They need scores that are dot products, and queries and keys in the page or from a server.")); return; }
    const size = found[0].q.length;
    const [left, beside, band] = body.clientWidth < 600 ? [84, 96, 20] : [150, 150, 20];
    const cell = Math.max(2, Math.min(14, 560 / size, (body.clientWidth - left - beside) / size));
    const most = (lists: Iterable<number>[]) => Math.max(
      ...lists.map((list) => Math.max(...Array.from(list, Math.abs))), 1e-9);
    const products = found.map(({ q, k }) => q.map((value, d) => value * k[d]));
    const [mostQ, mostK, mostP] = [most([found[0].q]), most(found.map(({ k }) => k)), most(products)];
    const height = 46 + found.length * (band * 2 + 12) + 30;
    const figure = s("svg", { class: "neurons", width: left + size * cell + beside, height,
      viewBox: `0 0 ${left + size * cell + beside} ${height}`, role: "img",
      "aria-label": "Products of queries and keys by channel" });
    const stripe = (values: ArrayLike<number>, top: number, greatest: number, label: string, bold = false) => {
      figure.append(s("text", { x: left - 8, y: top + 14, "text-anchor": "end", "font-size": 12, fill: "currentColor",
        "font-weight": bold ? 600 : 400 }, label));
      for (let d = 0; d < size; d++) figure.append(s("rect",
        { x: left + d * cell, y: top, width: cell * 0.95, height: band - 3,
        fill: values[d] > 0 ? "var(--more)" : "var(--less)", "fill-opacity": Math.abs(values[d]) / greatest },
        s("title", {}, `channel ${d}: ${values[d].toPrecision(4)}`)));
    };
    stripe(found[0].q, 12, mostQ, `c q  ${cut(visible(queries()[state.query]), left / 12)}`, true);
    found.forEach(({ key, k }, at) => {
      const top = 46 + at * (band * 2 + 12);
      stripe(k, top, mostK, `k  ${cut(visible(text.tokens[key]), left / 10)}`);
      stripe(products[at], top + band, mostP, "product");
      const score = products[at].reduce((total, value) => total + value, 0);
      figure.append(s("text", { x: left + size * cell + 10, y: top + 14, "font-size": 12, fill: "currentColor" },
        `weight ${shown(row[key])}`), s("text", { x: left + size * cell + 10, y: top + band + 14, "font-size": 12,
        fill: "currentColor" }, `score ${score.toFixed(2)}`));
    });
    const [first, last] = interval(state.query, LISTED, queries().length);
    const chosen = choice("Query", String(state.query),
      queries().slice(first, last).map((token, at): [string, string] =>
        [String(first + at), `${first + at} ${visible(token)}`]),
      (value) => context.set({ query: Number(value) }));
    body.replaceChildren(h("div", { class: "tools" }, chosen),
      h("p", { class: "hint" },
      `${headName(context)}: a score is the sum of its products; blue is positive, red is negative. Shown are the keys with the largest weights.`), h("div", { class: "scroll" }, figure));
  }

  function draw() {
    const { way } = context.state;
    drawTools();
    fill(notes, meansOnly(context));
    spans = [];
    if (way === "heads") void drawHeads();
    else if (way === "model") void drawModel();
    else if (way === "neurons") void drawNeurons();
    else drawWords();
  }

  return {
    element,
    update(before) {
      const { state } = context;
      const near = state.query >= from && state.query < from + spans.length;
      const same = before && spans.length && near && (
        ["view", "text", "layer", "head", "way", "heads", "side",
        "pairs", "scale"] as const).every((name) => before[name] === state[name]);
      if (!same) return draw();
      if (before.query === state.query) return;
      void colour(state.query);
      void strip(context, state.query, body.querySelector(".strip")?.clientWidth).then((figure) => body.querySelector(".strip .scroll")?.replaceChildren(figure));
    },
    key(event) {
      const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 }[event.key];
      if (step === undefined || context.state.way === "model") return false;
      context.set({ query: Math.max(0, Math.min(queries().length - 1, context.state.query + step)) }, true);
      return true;
    },
  };
}

// The ends of the sentences of a pair: after every special token except the first.
export function sentences(tokens: string[], special: number[]): number[] {
  const ends = special.filter((at) => at > 0).map((at) => at + 1);
  return ends.length && ends.at(-1)! >= tokens.length ? ends : [...ends, tokens.length];
}
