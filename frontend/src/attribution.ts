// Why a model predicts a token: the weights times their gradients as maps, and the test of their faithfulness.
import { changeDetector } from "./changes";
import { curvesOfRun } from "./charts_of_head";
import type { Context } from "./context";
import { isPlain, type Text } from "./data";
import { choice, fill, h, hint } from "./dom";
import { relevancePicture } from "./relevance";
import { sentenceOf } from "./typed";

const WIDE = 460; // pixels of a chart

export interface Why {
  element: HTMLElement;
  found: HTMLElement;
  draw(answer: Text | null): void;
  close(): void;
}

export function attributionPanel(context: Context): Why {
  const { source } = context;
  const model = source.common.live_model;
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
  const [said, found] = [
    h("p", { class: "notice", role: "status", hidden: true }),
    h("div", { class: "why" }),
  ];
  const element = h("section", { class: "asked-of", "aria-label": "Why" }, form, said);
  let asking: AbortController | null = null;
  const isNew = changeDetector();

  function tell(message: string) {
    said.hidden = !message;
    said.textContent = message;
  }

  async function ask() {
    if (asking) return;
    asking = new AbortController();
    go.disabled = true;
    tell(`${model!.name} computes gradients and removes tokens. This takes some seconds …`);
    try {
      const attribute = { method, target: token.value || null };
      const number = await source.read!(sentenceOf(context.text), asking.signal, { attribute });
      tell("");
      context.set({ other: number, otherQuery: -1 });
    } catch (error) {
      tell(asking.signal.aborted ? "Stopped." : (error as Error).message);
    } finally {
      [asking, go.disabled] = [null, false];
    }
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
    if (!isNew(answer?.title, context.colors.css[9])) return;
    tell("");
    fill(found, ...(answer?.attribution ? results(answer) : []));
  }
  return {
    element,
    found,
    draw,
    close() {
      asking?.abort();
    },
  };
}
