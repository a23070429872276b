// Why a model predicts a token: the weights times their gradients as maps, and the test of their faithfulness.
import { changeDetector } from "./changes";
import { curvesOfRun } from "./charts_of_head";
import type { Context } from "./context";
import { isPlain, type Text } from "./data";
import { choice, fill, h, hint } from "./dom";
import { questions } from "./question";
import { relevancePicture } from "./relevance";
import { sentenceOf } from "./typed";

const WIDE = 460; // pixels of a chart

export function attributionPanel(context: Context) {
  const model = context.source.common.live_model;
  const canAsk = model?.fields.includes("attribute") ?? false;
  const token = h("input", {
    name: "target",
    size: 14,
    autocomplete: "off",
    spellcheck: "false",
    dir: "auto",
    placeholder: "its prediction",
    "aria-label": "The token to explain; empty: the prediction of the model",
  });
  let method = model?.methods?.[0] ?? "";
  const methods = choice(
    "Method",
    method,
    (model?.methods ?? []).map((name) => [name, name]),
    (name) => {
      method = name;
    },
  );
  const go = h("button", { type: "submit" }, "Find the weights");
  const form = h(
    "form",
    {
      class: "asked",
      onsubmit: (event: Event) => {
        event.preventDefault();
        void ask();
      },
    },
    h("b", {}, "Why this next token?"),
    token,
    methods,
    go,
  );
  const asked = questions(context);
  const found = h("div", { class: "why" });
  const element = h("section", { class: "asked-of", "aria-label": "Why" }, form, asked.said);
  const isNew = changeDetector();

  async function ask() {
    go.disabled = true;
    const attribute = { method, target: token.value || null };
    const waiting = `${model!.name} computes gradients and removes tokens. This takes some seconds …`;
    await asked.ask(sentenceOf(context.text), waiting, { attribute }, (other) =>
      context.set({ other, otherQuery: -1 }),
    );
    go.disabled = false;
  }

  function results(answer: Text): (HTMLElement | false)[] {
    const { attribution, charts } = answer;
    const { method, sentence, test, relevance } = attribution!;
    return [
      h("h2", {}, "What made the prediction"),
      h("p", { class: "effect-said" }, sentence),
      relevance ? relevancePicture(answer, context.colors, relevance) : false,
      hint(
        `${
          method === "weight-gradient"
            ? "In its words and maps a number is a weight times its gradient: how much the " +
              "score of the token would fall without this weight, to first order."
            : `In its words and maps a number is that of the method ${method}.`
        } Blue: the weight raises the score. Orange: it lowers it. Small maps and statistics show shares of the size.`,
      ),
      ...test.map((line) => hint(line)),
      charts.length > 0 &&
        h(
          "details",
          { class: "curves" },
          h("summary", {}, "Curves of faithfulness"),
          h(
            "div",
            { class: "charts" },
            ...curvesOfRun(
              { ...context, text: answer },
              Math.min(WIDE, context.root.clientWidth),
            ).map((plan) => plan.draw().element),
          ),
        ),
    ];
  }

  function draw(answer: Text | null) {
    element.hidden = !canAsk || !isPlain(context.text);
    if (!isNew(answer?.title, context.colors.theme)) return;
    asked.tell("");
    fill(found, ...(answer?.attribution ? results(answer) : []));
  }
  return {
    element,
    found,
    draw,
    close: asked.stop,
  };
}
