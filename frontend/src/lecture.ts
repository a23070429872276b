// The entry of a lecture: a file with one lecture, which needs neither maps nor a network.
import { Colors, scaleOf } from "./color";
import type { Context } from "./context";
import { h } from "./dom";
import { biasLecture } from "./lecture_biases";
import { headLecture } from "./lecture_heads";
import { lengthLecture } from "./lecture_length";
import { maskGallery } from "./lecture_masks";
import { positions } from "./lecture_positions";
import { ropeLecture } from "./lecture_rope";
import { NUM_KEYS, scores } from "./lecture_scores";
import { stepLecture } from "./lecture_steps";
import type { Lecture } from "./lecture_controls";

const LECTURES: Record<string, [string, Lecture]> = {
  steps: ["One query, step by step", stepLecture],
  scores: ["Scores and temperature", scores],
  masks: ["Masks", maskGallery],
  positions: ["Sinusoidal positions", positions],
  rope: ["RoPE: positions that rotate", ropeLecture],
  biases: ["Biases by distance", biasLecture],
  heads: ["Heads", headLecture],
  length: ["Length: what a layer costs", lengthLecture],
};

const root = document.getElementById("regard")!;
const { lecture } = JSON.parse(document.getElementById("regard-data")!.textContent!);
const [title, make] = LECTURES[lecture];
document.title = `${title} · Regard`;

function draw() {
  const colors = new Colors(root);
  colors.scale = scaleOf("linear", NUM_KEYS);
  const context = { root, colors } as unknown as Context; // a lecture uses only these two
  root.replaceChildren(h("main", { class: "lecture view" }, h("h1", {}, title), ...make(context)));
}
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
