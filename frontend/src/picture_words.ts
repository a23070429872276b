// The tokens that are not patches: the class token, registers, words.
import type { Context } from "./context";
import { fill, h, hint, visible } from "./dom";
import { seconds, shown } from "./format";
import { byLayer, listedHeads, meanLine } from "./head_sets";
import type { Pointing } from "./picture_stage";
import type { PictureTokens } from "./picture_tokens";

const [WORDS, TIMED] = [600, 80]; // words beside an image, words with a time

export function pictureWords(context: Context, tokens: PictureTokens, pointing: Pointing) {
  const element = h("div", { class: "beside-picture" });

  function build() {
    const { text } = context;
    const said = hint(hintOf());
    if (!tokens.isCrossed)
      return fill(element, said, chips(text.tokens, true, "Tokens that are not patches"));
    const keys = chips(text.tokens, false, "Other tokens");
    keys?.classList.add("keys");
    fill(element, said, chips(text.queries!, true, "Words"), keys);
  }

  // Runs of patches are one chip; null: there are only patches.
  function chips(names: string[], isFocus: boolean, label: string): HTMLElement | null {
    const box = h("div", { class: "chips", role: "group", "aria-label": label });
    const arePatches = !tokens.isCrossed || names === context.text.tokens;
    let patches = 0;
    const endPatches = () => {
      if (patches && !tokens.isCrossed) box.append(imageChip());
    };
    names.forEach((name, at) => {
      if (arePatches && tokens.patchOf.has(at)) {
        patches++;
        return;
      }
      endPatches();
      if (!tokens.isCrossed) patches = 0;
      if (box.childElementCount < WORDS) box.append(wordChip(name, at, isFocus));
    });
    if (box.childElementCount) endPatches();
    return box.childElementCount ? box : null;
  }
  const imageChip = () =>
    h("span", { class: "chip-word image" }, "▦ image ", h("b", { class: "sum" }));

  function wordChip(name: string, at: number, isFocus: boolean): HTMLElement {
    const look = { class: "chip-word", dir: "auto", title: `${name} · ${at}`, "data-at": at };
    if (!isFocus) return h("span", look, visible(name));
    const chip = h(
      "button",
      {
        ...look,
        type: "button",
        onclick: () => pointing.choose(at),
        onpointerenter: () => pointing.over(at),
        onpointerleave: () => pointing.leave(),
      },
      visible(name),
    );
    if (tokens.isCrossed && context.text.picture?.seconds) void tellTime(chip, at);
    return chip;
  }

  // Under a word of a transcript: the center of its weight, in seconds.
  async function tellTime(chip: HTMLElement, at: number) {
    if (at >= TIMED) return;
    const values = await meanLine(context, byLayer(listedHeads(context)), at);
    chip.append(h("span", { class: "when" }, seconds(tokens.center(values))));
  }

  const hintOf = () =>
    tokens.isCrossed
      ? `Choose a word to see what it attends to. Click the ${tokens.isSound ? "spectrogram" : "picture"} to see which words attend to it.`
      : tokens.isSound
        ? "Point at a moment to see its map. A click holds it; then pointing reads single weights. Esc lets go."
        : "Point at a patch or a token to see its map. A click holds it; then pointing reads single weights. Esc lets go.";

  function color(values: Float32Array, chosen: number) {
    const onPatches = shown(tokens.shareOfPatches(values));
    element.querySelectorAll(".sum").forEach((sum) => {
      sum.textContent = onPatches;
    });
    for (const chip of element.querySelectorAll<HTMLElement>(".chip-word[data-at]")) {
      const token = Number(chip.dataset.at);
      const isKey = chip.parentElement!.classList.contains("keys");
      const hasWeight = !tokens.isCrossed || (tokens.isTurned ? !isKey : isKey);
      const weight = hasWeight ? values[token] : 0;
      chip.style.background = weight ? context.colors.weight(weight) : "";
      chip.style.color = weight ? context.colors.textOn(weight) : "";
      const isChosen = !isKey && !tokens.choosesKeys && token === chosen;
      chip.toggleAttribute("data-chosen", isChosen);
      if (chip.tagName === "BUTTON") chip.setAttribute("aria-pressed", String(isChosen));
    }
  }

  return { element, build, color };
}
