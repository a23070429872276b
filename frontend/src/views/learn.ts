// The view Learn: small experiments with positions, masks, scores and temperature.
import type { Context, Panel } from "../context";
import { h, segments } from "../dom";
import { maskLesson } from "../learn_masks";
import { positions } from "../learn_positions";
import { scores } from "../learn_scores";
import type { Lesson } from "../lesson";
import type { View } from "../registry";

const LESSONS: Record<string, [string, string, Lesson]> = {
  positions: ["Positions", "How a model knows the order of the words", positions],
  masks: ["Masks", "Which words a word may attend to", maskLesson],
  scores: ["Scores and temperature", "How scores become weights", scores],
};

export const view: View = { place: 6, make: learnView, hasNoHead: true };

function learnView(context: Context): Panel {
  const [title, tools, body] = [h("h1", {}), h("div", { class: "tools" }), h("div", {})];
  const element = h("div", { class: "learn" }, title, tools, body);
  return {
    element,
    update(before) {
      const { learn, scale } = context.state;
      if (before?.view === "learn" && before.learn === learn && before.scale === scale) return;
      const [, question, lesson] = LESSONS[learn] ?? LESSONS.positions;
      title.textContent = question;
      tools.replaceChildren(
        segments(
          "Lesson",
          LESSONS[learn] ? learn : "positions",
          Object.entries(LESSONS).map(([key, [label]]) => [key, label]),
          (value) => context.set({ learn: value }),
        ),
      );
      body.replaceChildren(...lesson(context));
    },
  };
}
