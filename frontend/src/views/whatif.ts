// The view What if: another text, a knock-out, or why a token is predicted; the answer stands beside the text.
import { attributionPanel } from "../attribution";
import { comparedTexts } from "../compare_texts";
import type { Context, Panel } from "../context";
import type { Text } from "../data";
import { h, hint } from "../dom";
import { knockOut } from "../knock_out";
import type { View } from "../registry";
import { typedPanel } from "../typed";

// A text that answers a question about another text.
const questionOf = ({ effect, attribution }: Text) => effect ?? attribution;

export const view: View = {
  name: "What if",
  place: 5,
  make: whatIfView,
  figure: "words,map",
  keys: [["k", "knock out the chosen link"]],
  isOffered: ({ text }) => !text.picture, // there is no text to type
};

function whatIfView(context: Context): Panel {
  const { source } = context;
  const typed = source.common.live_model
    ? typedPanel(context, (other) => context.set({ other, otherQuery: -1 }))
    : null;
  const [knocked, why] = [knockOut(context), attributionPanel(context)];
  const between = h("div", { class: "answer" }, knocked.effect, why.found);
  const texts = comparedTexts(context, { between, answered });
  const example = h("code", {});
  const needs = hint(
    "What if asks the model: another text, a link, head or word knocked out, or why a token is predicted. This page has no " +
      "model. To ask it, run ",
    h("code", {}, "regard view --model NAME"),
    "; to save an answer in a page, ",
    example,
    ". Compare shows two texts of this page beside each other.",
  );
  const element = h(
    "div",
    { class: "what-if" },
    typed?.element,
    needs,
    knocked.element,
    why.element,
    texts.element,
  );

  // The answer of another text is none to this one.
  function answered(answer: Text | null) {
    const { text } = context;
    const own = questionOf(text) ? text : answer;
    const of = own && questionOf(own)?.of;
    needs.hidden = Boolean(source.common.live_model ?? own);
    typed?.update(of ? null : answer);
    for (const each of [knocked, why]) each.draw(of === text.title || own === text ? own : null);
  }

  return {
    element,
    update(before) {
      const { state, text } = context;
      void knocked.named().then((name) => {
        example.textContent = `regard analyze TEXT --save DIR --knock-out "${name}"`;
      });
      const whole = source.titles.indexOf(questionOf(text)?.of ?? "");
      if (whole >= 0) context.set({ text: whole, other: state.text, otherQuery: -1 }, true);
      else texts.update(before);
    },
    key: (event) => knocked.key(event.key) || (texts.key?.(event) ?? false),
    close() {
      typed?.close();
      knocked.close();
      why.close();
      texts.close?.();
    },
  };
}
