// The scrubber of the overview: what the word of the first sentence attends to, layer by layer, as the mean of the heads.
import { strongest, type Context } from "./context";
import { layerName, queriesOf } from "./data";
import { actionButton, fill, h, strong, visible, weighed } from "./dom";
import { plural } from "./format";
import { meanLine } from "./head_sets";

const [PACE, NAMED] = [900, 3]; // milliseconds of a layer while it plays; words in the sentence

export interface Depth {
  element: HTMLElement;
  weights: Float32Array | null; // of the chosen layer; null: the links of the sentence
  layer(): string; // "Layer 2, mean of 12 heads"
  draw(query: number): void;
  close(): void;
}

// `changed`: the weights are those of another layer.
export function depthBar(context: Context, changed: () => void): Depth {
  const slider = h("input", {
    type: "range",
    min: -1,
    "aria-label": "Layer of the arcs",
    oninput: () => choose(Number(slider.value)),
  });
  const play = actionButton({ onclick: () => toggle() });
  const said = h("p", { class: "hint depth-said", role: "status" });
  const element = h("div", { class: "depth" }, play, slider, said);
  let [turn, timer, query, drawn] = [0, 0, 0, ""];

  const last = () => context.text.layers.length - 1;
  const choose = (depth: number) => context.set({ depth }, true);
  const next = () => choose(context.state.depth >= last() ? -1 : context.state.depth + 1);

  function stop() {
    clearInterval(timer);
    timer = 0;
    play.textContent = "▶ Play";
    play.setAttribute("aria-label", "Play the layers");
  }
  // Where motion is not wanted, a press goes one layer on.
  function toggle() {
    if (timer) return stop();
    next();
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    play.textContent = "❚❚ Stop";
    play.setAttribute("aria-label", "Stop");
    timer = setInterval(() => (context.state.depth < last() ? next() : stop()), PACE);
  }

  const layerSaid = () => {
    const layer = context.text.layers[context.state.depth];
    return `${layerName(layer).replace(/^l/, "L")}, mean of ${plural(layer.heads.length, "head")}`;
  };
  function tell() {
    const { text } = context;
    const { weights } = bar;
    const word = visible(queriesOf(text)[query]);
    const links = weights ? strongest(weights, NAMED) : [];
    fill(
      said,
      ...(weights
        ? [
            `${layerSaid()}: `,
            strong(word),
            links.length ? " → " : "",
            ...weighed(text.tokens, weights, links),
          ]
        : ["The same word in every layer: drag, or play."]),
    );
    slider.setAttribute("aria-valuetext", said.textContent ?? "");
  }

  const bar: Depth = {
    element,
    weights: null,
    layer: layerSaid,
    draw(at) {
      const { state, text } = context;
      const wanted = [state.text, text.title, state.depth, at].join();
      if (wanted === drawn) return;
      [drawn, query] = [wanted, at];
      const mine = ++turn;
      slider.max = String(last());
      slider.value = String(state.depth);
      const show = (weights: Float32Array | null) => {
        if (mine !== turn) return;
        bar.weights = weights;
        tell();
        changed();
      };
      if (state.depth < 0) return show(null);
      const heads = [...text.layers[state.depth].heads.keys()];
      void meanLine(context, new Map([[state.depth, heads]]), at).then(show);
    },
    close() {
      turn++;
      stop();
    },
  };
  stop();
  return bar;
}
