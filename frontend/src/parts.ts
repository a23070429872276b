// Sentences that Python made, in parts: tokens and names of heads are set apart.
import type { Part } from "./data";
import { h, strong, visible } from "./dom";

export const sentence = (parts: Part[]): (string | HTMLElement)[] =>
  parts.map(([text, kind]) =>
    kind === "token"
      ? h("b", { class: "token", dir: "auto" }, visible(text))
      : kind === "head"
        ? strong(text.replace(/ (?=\d+$)/, "\u00a0")) // "head 1" stays on one line
        : text,
  );
