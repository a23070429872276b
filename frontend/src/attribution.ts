// Why a model predicts a token: the weights times their gradients as maps, and the test of their faithfulness.
import { curvesOfRun } from "./charts_of_head";
import type { Context } from "./context";
import type { Text } from "./data";
import { choice, fill, h } from "./dom";
import { viewOf } from "./registry";
import { relevancePicture } from "./relevance";
import { sentenceOf } from "./typed";

const WIDE = 460; // pixels of a chart

export interface Why {
  element: HTMLElement;
  draw(): void;
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
  const [said, found] = [h("p", { class: "notice", role: "status", hidden: true }), h("div", {})];
  const element = h("section", { class: "what-if why", "aria-label": "Why" }, form, said, found);
  let asking: AbortController | null = null;
  let shown: Text | null = null;
  let drawnIn = ""; // the colors

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
      context.set({ text: number });
    } catch (error) {
      tell(asking.signal.aborted ? "Stopped." : (error as Error).message);
    } finally {
      [asking, go.disabled] = [null, false];
    }
  }

  function results({ attribution, charts }: Text): (HTMLElement | false)[] {
    const { of, method, sentence, test, relevance } = attribution!;
    const whole = source.titles.indexOf(of);
    const { state } = context;
    return [
      h("h2", {}, "What made the prediction"),
      h("p", { class: "effect-said" }, sentence),
      relevance ? relevancePicture(context, relevance) : false,
      h(
        "p",
        { class: "hint" },
        `${
          method === "weight-gradient"
            ? "In the views below a number is a weight times its gradient: how much the " +
              "score of the token would fall without this weight, to first order."
            : `In the views below a number is that of the method ${method}.`
        } Blue: the weight raises the score. Orange: it lowers it. Small maps and statistics show shares of the size.`,
      ),
      whole >= 0 &&
        h(
          "p",
          { class: "asked" },
          h(
            "button",
            { type: "button", onclick: () => context.set({ text: whole }) },
            "Show the weights",
          ),
          h(
            "button",
            {
              type: "button",
              onclick: () =>
                context.set({ view: "compare", text: whole, other: state.text, otherQuery: -1 }),
            },
            "Beside the weights",
          ),
        ),
      ...test.map((line) => h("p", { class: "hint" }, line)),
      charts.length > 0 &&
        h(
          "details",
          { class: "curves" },
          h("summary", {}, "Curves of faithfulness"),
          h(
            "div",
            { class: "charts" },
            ...curvesOfRun(context, Math.min(WIDE, context.root.clientWidth)).map(
              (plan) => plan.draw().element,
            ),
          ),
        ),
    ];
  }

  function draw() {
    const { text, state } = context;
    const offered =
      canAsk &&
      text.queries === null &&
      !text.picture &&
      !text.generation &&
      !text.effect &&
      !text.attribution;
    element.hidden = !viewOf(state.view).hasQuestions || !(offered || text.attribution);
    form.hidden = !offered;
    const look = `${context.colors.css[9]}${text.title}`;
    if (element.hidden || (shown === text && drawnIn === look)) return;
    [shown, drawnIn] = [text, look];
    tell("");
    fill(found, ...(text.attribution ? results(text) : []));
  }
  return {
    element,
    draw,
    close() {
      asking?.abort();
    },
  };
}
