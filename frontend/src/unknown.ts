// A line under a text whose pieces a model does not know.
import type { Text } from "./data";
import { cut, h } from "./dom";

const NAMED = 8; // pieces in the line

export function unknownNote(text: Text): HTMLElement | null {
  const unknown = text.unknown ?? [];
  if (!unknown.length) return null;
  const listed = unknown
    .slice(0, NAMED)
    .flatMap((piece, at) => [at ? ", " : "", h("bdi", {}, cut(piece, 20))]);
  return h(
    "p",
    { class: "hint unknown" },
    unknown.length === 1
      ? "1 piece of your text is unknown to this model ("
      : `${unknown.length} pieces of your text are unknown to this model (`,
    ...listed,
    unknown.length > NAMED ? ", …)." : ").",
  );
}
