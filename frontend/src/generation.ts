// A generation as one text with a slider over its steps: which token a step wrote, and the row of weights that it read.
import type { Context } from "./context";
import { fill, h, spaced, strong, visible } from "./dom";
import { within } from "./steps";

export function generationSteps(context: Context) {
  const slider = h("input", {
    type: "range",
    min: 1,
    step: 1,
    "aria-label": "Step of the generation",
    oninput: () => go(Number(slider.value)),
  });
  const [count, said] = [
    h("output", { class: "number" }),
    h("p", { class: "step-said", "aria-live": "polite" }),
  ];
  const output = h("p", { class: "generated", dir: "auto" });
  const element = h(
    "section",
    { class: "generation", "aria-label": "Steps of the generation" },
    h("label", { class: "step-row" }, h("b", {}, "Step"), slider, count),
    said,
    output,
  );
  let shown: unknown = null;

  const parts = () => context.text.generation!;
  // Step n wrote token prompt + n - 1, and the row of the token before predicted it.
  const go = (step: number) => context.set({ query: parts().prompt + step - 2, key: -1 }, true);

  function drawOutput() {
    const { prompt, labels } = parts();
    fill(
      output,
      h("span", { class: "hint" }, "It wrote: "),
      ...spaced(labels, [prompt, labels.length], (at) =>
        h(
          "span",
          {
            class: "written-token",
            dir: "auto",
            title: `step ${at - prompt + 1}`,
            onclick: () => go(at - prompt + 1),
          },
          visible(labels[at]),
        ),
      ),
    );
  }

  function draw() {
    const { text, state } = context;
    element.hidden = !text.generation;
    if (element.hidden) return;
    const { prompt, labels } = parts();
    const steps = labels.length - prompt;
    if (shown !== text) {
      shown = text;
      slider.max = String(steps);
      drawOutput();
    }
    const step = state.query - prompt + 2;
    slider.value = String(within(step, steps + 1) || 1);
    count.textContent = step < 1 ? `prompt, ${steps} steps` : `${step} of ${steps}`;
    fill(
      said,
      ...(step < 1
        ? ["The chosen word is in the prompt. Move the slider to a step."]
        : [
            "The model had read up to ",
            strong(visible(labels[state.query])),
            " and wrote ",
            strong(visible(labels[state.query + 1])),
            ". Below is what it attended to in this step; the left and right arrow keys go to other steps.",
          ]),
    );
    [...output.querySelectorAll(".written-token")].forEach((token, at) => {
      token.classList.toggle("chosen", at === step - 1);
      token.classList.toggle("later", at > step - 1);
    });
  }
  return { element, draw };
}
