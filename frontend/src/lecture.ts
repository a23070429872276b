// The entry of a lecture: a file with one lecture, which needs neither maps nor a network.
import { Colors, scaleOf } from "./color";
import type { Context } from "./context";
import { h } from "./dom";
import { stepLecture } from "./lecture_steps";
import { maskLesson } from "./learn_masks";
import { positions } from "./learn_positions";
import { LESSON_KEYS, scores } from "./learn_scores";
import type { Lesson } from "./lesson";

const LECTURES: Record<string, [string, Lesson]> = {
  steps: ["One query, step by step", stepLecture],
  scores: ["How scores become weights", scores],
  masks: ["Which words a word may attend to", maskLesson],
  positions: ["How a model knows the order of the words", positions],
};

const root = document.getElementById("regard")!;
const { lecture } = JSON.parse(document.getElementById("regard-data")!.textContent!);
const [title, make] = LECTURES[lecture];
document.title = `${title} · Regard`;

function draw() {
  const colors = new Colors(root);
  colors.scale = scaleOf("linear", LESSON_KEYS);
  const context = { root, colors } as unknown as Context; // a lesson uses only these two
  root.replaceChildren(h("main", { class: "learn view" }, h("h1", {}, title), ...make(context)));
}
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
