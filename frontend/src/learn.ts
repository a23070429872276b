// Small experiments in the page: positions, masks, scores, and the effect of a temperature.
import * as Plot from "@observablehq/plot";
import type { Context, Panel } from "./context";
import { SERIES } from "./colour";
import { choice, h, s, saving, segments, slider } from "./dom";

type Mask = (i: number, j: number) => boolean;
const N = 28;
let [window_, block, gap, prefix] = [5, 7, 3, 6];

// The masks of regard.pieces, by the same rules; true: i may attend to j.
const MASKS: [string, string, string[], () => Mask][] = [
  ["none", "Every query may attend to every key (encoders).", [], () => () => true],
  ["causal()", "j ≤ i: no query may attend to a later key (decoders).", [], () => (i, j) => j <= i],
  ["window(w)", "|i − j| < w: the nearest keys on both sides, and the token itself.", ["window"],
    () => (i, j) => Math.abs(i - j) < window_],
  ["causal() & window(w)", "The token itself and the w − 1 keys before it (Mistral).", ["window"],
    () => (i, j) => j <= i && i - j < window_],
  ["dilated(w, d)", "A window with gaps: every d-th key (Longformer).", ["window", "gap"],
    () => (i, j) => Math.abs(i - j) % gap === 0 && Math.abs(i - j) < (window_ - 1) * gap + 1],
  ["block_local(b)", "Only keys of the same block.", ["block"],
    () => (i, j) => Math.floor(i / block) === Math.floor(j / block)],
  ["prefix(p) | causal()", "All queries may attend to the first p keys; the rest is causal (prefix LM).", ["prefix"],
    () => (i, j) => j < prefix || j <= i],
  ["window(w) | global_tokens([0])", "A window, and one global token: it attends to all tokens, and all attend to it (Longformer).", ["window"],
    () => (i, j) => Math.abs(i - j) < window_ || i === 0 || j === 0],
  ["bigbird(...)", "A window of blocks, a global block, and random blocks (BigBird).", ["block"], () => (i, j) => {
    const [a, b] = [Math.floor(i / block), Math.floor(j / block)];
    return Math.abs(a - b) <= 1 || i < block || j < block
      || Math.floor(Math.abs(Math.sin(a * 127.1 + 3) * 1e4)) % Math.ceil(N / block) === b;
  }],
  ["documents([12, 9, 7])", "Packed texts: pairs inside the same text.", [],
    () => { const of = (n: number) => (n < 12 ? 0 : n < 21 ? 1 : 2); return (i, j) => of(i) === of(j); }],
  ["causal() & documents([12, 9, 7])", "The same, each text causal.", [],
    () => { const of = (n: number) => (n < 12 ? 0 : n < 21 ? 1 : 2); return (i, j) => j <= i && of(i) === of(j); }],
  ["padding([20])", "Keys after the end of the text are excluded.", [], () => (_, j) => j < 20],
];

// Normalisers of a row of scores.
const softmax = (scores: number[]) => { const top = Math.max(...scores);
  const all = scores.map((score) => Math.exp(score - top)); const sum = all.reduce((a, b) => a + b, 0);
  return all.map((one) => one / sum); };
function sparsemax(scores: number[]) {
  const ranked = [...scores].sort((a, b) => b - a);
  let [sum, threshold] = [0, 0];
  ranked.forEach((score, at) => { sum += score; if (1 + (at + 1) * score > sum) threshold = (sum - 1) / (at + 1); });
  return scores.map((score) => Math.max(score - threshold, 0));
}
function entmax15(scores: number[]) { // by bisection: the threshold at which the row sums to 1
  const half = scores.map((score) => score / 2);
  let [low, high] = [Math.max(...half) - 1, Math.max(...half)];
  for (let step = 0; step < 50; step++) {
    const middle = (low + high) / 2;
    if (half.reduce((total, score) => total + Math.max(score - middle, 0) ** 2, 0) > 1) low = middle;
      else high = middle;
  }
  return half.map((score) => Math.max(score - low, 0) ** 2);
}
const hardmax = (scores: number[]) => scores.map((_, at) => (at === scores.indexOf(Math.max(...scores)) ? 1 : 0));
const NORMALISERS: Record<string, (scores: number[]) =>
  number[]> = { softmax, "entmax 1.5": entmax15, sparsemax, hardmax };

// Scores of one query (2 numbers) against keys of the plane.
const KEYS: [string, number, number][] = [["cat", 1.6, 0.5], ["dog", 1.3, 1.0], ["sat", -0.4, 1.5], ["the", 0.3, -0.2],
  ["mat", 0.9, -1.4], ["on", -1.3, -0.6], ["ran", -1.0, 1.1]];
const SCORES: Record<string, [string, (q: number[], k: number[]) => number]> = {
  dot: ["q · k", (q, k) => q[0] * k[0] + q[1] * k[1]],
  "scaled dot": ["q · k / √D, so that scores keep their variance as D grows (D = 2 here)",
    (q, k) => (q[0] * k[0] + q[1] * k[1]) / Math.SQRT2],
  additive: ["v · tanh(W q + U k), Bahdanau; here W = U = 1, v = (1, 1)",
    (q, k) => Math.tanh(q[0] + k[0]) + Math.tanh(q[1] + k[1])],
  bilinear: ["q W k, Luong's general; here W rotates by 90°: keys to the left of q score highest",
    (q, k) => -q[1] * k[0] + q[0] * k[1]],
  cosine: ["c cos(q, k), c = 4: only the directions matter",
    (q, k) => (4 * (q[0] * k[0] + q[1] * k[1])) / (Math.hypot(...q) * Math.hypot(...k) || 1)],
};

export function learnView(context: Context): Panel {
  const [tools, body] = [h("div", { class: "tools" }), h("div", {})];
  const element = h("div", { class: "learn" }, tools, body);
  const lengths = { positions: 64, width: 32, base: 10000 };
  const query = { angle: 25, size: 1.6, temperature: 1, normaliser: "softmax", score: "scaled dot" };

  const figure = (title: string, said: string, drawing: Element) => {
    return h("figure", {},
      h("figcaption", {}, title, saving(() => title, () => drawing, () => context.root)),
      h("p", { class: "hint" }, said), h("div", { class: "scroll" }, drawing));
  };
  const style = { background: "transparent", fontSize: "12px", fontFamily: "inherit" };
  const width = () => Math.min(620, Math.max(280, context.root.clientWidth - 40));

  // Positions: sin and cos of position / base^(2m / D).
  function positions() {
    const room = h("div", { class: "charts" });
    const draw = () => {
      const wave = (position: number, channel: number) => {
        const angle = position / lengths.base ** ((channel - (channel % 2)) / lengths.width);
        return channel % 2 ? Math.cos(angle) : Math.sin(angle); };
      const cells = Array.from({ length: lengths.positions * lengths.width },
        (_, at) => ({ position: Math.floor(at / lengths.width), channel: at % lengths.width,
        value: wave(Math.floor(at / lengths.width), at % lengths.width) }));
      const chart = Plot.plot({ width: width(), height: 340, style,
        x: { label: "channel", ticks: lengths.width > 16 ? Array.from({ length: lengths.width / 4 }, (_, at) => at * 4)
        : undefined }, y: { label: "position", ticks: Array.from({ length: Math.ceil(lengths.positions / 8) },
        (_, at) => at * 8) }, color: { type: "linear", domain: [-1, 0, 1],
        range: [context.colours.get("--less"), context.colours.get("--none"), context.colours.get("--more")] },
        marks: [Plot.cell(cells, { x: "channel", y: "position", fill: "value" })] });
      const heat = document.createElement("div");
      heat.append(chart.legend("color", { marginLeft: 14, marginRight: 14 })!, chart);  // room for the minus of "−1"
      const channels = [0, 1, 4, 8, 12].filter((channel) => channel < lengths.width);
      const points = channels.flatMap((channel) => Array.from({ length: lengths.positions * 4 },
        (_, at) => ({ channel: `channel ${channel}`, position: at / 4, value: wave(at / 4, channel) })));
      const waves = Plot.plot({ width: width(), height: 240, style, y: { label: "value" }, x: { label: "position" },
        color: { domain: channels.map((channel) => `channel ${channel}`), range: SERIES, legend: true },
        marks: [Plot.line(points, { x: "position", y: "value", stroke: "channel" })] });
      const alike = Array.from({ length: 2 * lengths.positions - 1 },
        (_, at) => ({ offset: at - lengths.positions + 1,
        product: Array.from({ length: lengths.width / 2 },
        (_, m) => Math.cos((at - lengths.positions + 1) / lengths.base ** ((2 * m) / lengths.width))).reduce((a, b) =>
        a + b, 0) }));
      const product = Plot.plot({ width: width(), height: 200, style, x: { label: "offset j − i" },
        y: { label: "p_i · p_j" }, marks: [Plot.line(alike, { x: "offset", y: "product", stroke: SERIES[2] }),
        Plot.ruleY([0])] });
      room.replaceChildren(figure("Sinusoidal positions",
        "Each row is added to the vector of one token: sines in even channels, cosines in odd channels.", heat),
        figure("The same values as curves",
        "Low channels have short periods, high channels long periods. Together they identify a position, as the hands of a clock show a time.",
        waves), figure("Their dot products",
        "The dot product of two positions depends only on their distance. RoPE uses this inside the score.", product));
    };
    const sliders = h("div", { class: "tools" }, slider("Positions", lengths.positions, [16, 128, 8],
      (value) => { lengths.positions = value; draw(); }),
      slider("Width", lengths.width, [8, 64, 4], (value) => { lengths.width = value; draw(); }),
      choice("Base", String(lengths.base), [["100", "100"], ["10000", "10 000"], ["500000", "500 000"]],
      (value) => { lengths.base = Number(value); draw(); }));
    draw();
    return [sliders, room];
  }

  function masks() {
    const room = h("div", { class: "panels" });
    const draw = () => room.replaceChildren(...MASKS.map(([name, said, , make]) => {
      const allowed = make();
      const cell = 6;
      const drawing = s("svg", { width: N * cell + 1, height: N * cell + 1,
        viewBox: `0 0 ${N * cell + 1} ${N * cell + 1}`, role: "img", "aria-label": `${name}: ${said}` });
      let count = 0;
      for (let i = 0; i < N; i++)
        for (let j = 0; j < N; j++) {
          if (allowed(i, j)) count++;
          drawing.append(s("rect", { x: j * cell + 0.5, y: i * cell + 0.5, width: cell - 1, height: cell - 1,
            fill: allowed(i, j) ? "var(--more)" : "var(--none)" }));
        }
      return h("figure", { class: "mask" }, h("figcaption", {}, h("code", {}, name)), drawing,
        h("p", { class: "hint" }, `${said} ${Math.round((100 * count) / N / N)} % of all pairs.`));
    }));
    const sliders = h("div", { class: "tools" }, slider("w", window_, [1, 14, 1],
      (value) => { window_ = value; draw(); }), slider("d", gap, [1, 6, 1], (value) => { gap = value; draw(); }),
      slider("b", block, [2, 14, 1], (value) => { block = value; draw(); }),
      slider("p", prefix, [0, 20, 1], (value) => { prefix = value; draw(); }));
    draw();
    return [h("p", { class: "hint" },
      "A row per query, a column per key; a filled cell may attend. Masks compose with &, | and ~, as in Regard."), sliders, room];
  }

  function scores() {
    const room = h("div", { class: "charts" });
    const draw = () => {
      const q = [query.size * Math.cos((query.angle * Math.PI) / 180),
        query.size * Math.sin((query.angle * Math.PI) / 180)];
      const [formula, score] = SCORES[query.score];
      const raw = KEYS.map(([, x, y]) => score(q, [x, y]));
      const weights = NORMALISERS[query.normaliser](raw.map((value) => value / query.temperature));
      const rows = KEYS.map(([token, x, y], at) => ({ token, x, y, score: raw[at], weight: weights[at] }));
      const entropy = -weights.reduce((total, weight) => total + (weight > 0 ? weight * Math.log(weight) : 0), 0);
      const plane = Plot.plot({ width: Math.min(width(), 400), height: 360, style,
        x: { domain: [-2.5, 2.5], label: null }, y: { domain: [-2.2, 2.2], label: null },
        marks: [Plot.ruleX([0], { strokeOpacity: 0.2 }), Plot.ruleY([0], { strokeOpacity: 0.2 }),
        Plot.link(rows, { x1: 0, y1: 0, x2: "x", y2: "y", stroke: SERIES[0],
        strokeWidth: (d: any) => 0.5 + 7 * d.weight, strokeOpacity: 0.5 }),
        Plot.arrow([q], { x1: 0, y1: 0, x2: (d: any) => d[0], y2: (d: any) => d[1],
        stroke: context.colours.get("--accent"), strokeWidth: 2.5 }),
        Plot.dot(rows, { x: "x", y: "y", fill: SERIES[0], r: 4 }),
        Plot.text(rows, { x: "x", y: "y", text: "token", dy: -10 })] });
      const bars = (key: "score" | "weight", colour: string, domain?: number[]) =>
        Plot.plot({ width: Math.min(width(), 400), height: 180, style, marginLeft: 44,
        x: { label: null, domain: KEYS.map(([token]) => token) }, y: { label: key, grid: true, domain },
        marks: [Plot.barY(rows, { x: "token", y: key, fill: colour, tip: true }), Plot.ruleY([0])] });
      room.replaceChildren(figure("A query and its keys",
        `${query.score}: ${formula}. The arrow is the query. A thicker line is a larger weight.`, plane),
        h("div", {}, figure("Scores", "How well the query matches each key.",
        bars("score", SERIES[1])),
        figure("Weights",
        `${query.normaliser} of the scores over ${query.temperature}; entropy ${entropy.toFixed(2)} nats.`,
        bars("weight", SERIES[0], [0, 1]))));
    };
    const sliders = h("div", { class: "tools" }, choice("Score", query.score,
      Object.keys(SCORES).map((name) => [name, name]), (value) => { query.score = value; draw(); }),
      choice("Normaliser", query.normaliser, Object.keys(NORMALISERS).map((name) => [name, name]),
      (value) => { query.normaliser = value; draw(); }),
      slider("Temperature", query.temperature, [0.1, 4, 0.1], (value) => { query.temperature = value; draw(); }),
      slider("Angle of q", query.angle, [-180, 180, 5], (value) => { query.angle = value; draw(); }),
      slider("Length of q", query.size, [0.2, 3, 0.1], (value) => { query.size = value; draw(); }));
    draw();
    return [sliders, room];
  }

  return {
    element,
    update(before) {
      const { learn } = context.state;
      if (before?.view === "learn" && before.learn === learn) return;
      tools.replaceChildren(segments("Lesson", learn,
        [["positions", "Positions"], ["masks", "Masks"], ["scores", "Scores and temperature"]],
        (value) => context.set({ learn: value })));
      body.replaceChildren(...(learn === "masks" ? masks() : learn === "scores" ? scores() : positions()));
    },
  };
}
