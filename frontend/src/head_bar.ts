// The bar of the frame: which layer and head are shown, and the way to the others. Its controls stay while the text is
// the same, so that the keyboard keeps its place.
import { changeDetector } from "./changes";
import { headName, type Context } from "./context";
import { everyHead, rolesOf } from "./data";
import { headsInWords, shownMean } from "./head_sets";
import { fill, h, signButton, strong } from "./dom";
import { headChoices } from "./head_choice";
import { isWithoutHead } from "./registry";

export function headBar(context: Context) {
  const element = h("section", { class: "bar", "aria-label": "Layer and head" });
  const title = h("h1", { dir: "auto" });
  const isNew = changeDetector();

  // Go to the next head, through all layers.
  function turn(by: number) {
    const { state, text } = context;
    const all = everyHead(text);
    const here = all.findIndex(({ layer, head }) => layer === state.layer && head === state.head);
    context.set(all[(here + by + all.length) % all.length]);
    context.tell(headName(context));
  }

  function controls(): HTMLElement[] {
    const { state, text } = context;
    return [
      ...headChoices(text, state, context.set),
      h(
        "span",
        { class: "segments", role: "group", "aria-label": "Step through heads" },
        ...(
          [
            ["‹", "Previous head ([)", -1],
            ["›", "Next head (])", 1],
          ] as const
        ).map(([sign, name, by]) => {
          const button = signButton(sign, name, () => turn(by));
          button.tabIndex = -1; // for the keyboard there are the keys, and the choice of heads
          return button;
        }),
      ),
      title,
    ];
  }

  function draw() {
    const { state, text } = context;
    const isOfHead = !isWithoutHead(state);
    element.hidden = !isOfHead;
    if (!isOfHead) return fill(element);
    const { length } = text.layers[state.layer].heads;
    if (isNew(state.text, text.title, text.layers.length, length) || !element.firstChild)
      fill(element, ...controls());
    [state.layer, state.head].forEach((value, at) => {
      element.querySelectorAll("select")[at].value = String(value);
    });
    const isMean = shownMean(state);
    const roles = rolesOf(text, state.layer, state.head).join(", ");
    fill(
      title,
      strong(isMean ? headsInWords(context).replace(/^the m/, "M") : headName(context)),
      !isMean && roles && h("span", { class: "hint" }, ` ${roles}`),
    );
  }
  return { element, draw, turn };
}
