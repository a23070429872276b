// The input of a page with a live model: a reader changes a word of a text, or types another text.
import { counted } from "./format";
import type { Context } from "./context";
import type { Text } from "./data";
import { actionButton, choice, fill, h, joins, plain } from "./dom";
import { opening } from "./opening";
import { questions } from "./question";

const letters = (text: string) => text.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "");

// A text as a reader would type it: as it was typed, its title if that is the whole text, or its tokens.
export function sentenceOf(text: Text): string {
  if (text.written) return text.written;
  const special = new Set(text.special);
  const tokens = text.tokens.filter(
    (token, at) => !special.has(at) && !(text.queries && token === "</s>"),
  );
  if (letters(text.title) === letters(tokens.map(plain).join(""))) return text.title;
  return tokens
    .map((token, at) => (joins(token, tokens[at - 1]) ? "" : " ") + plain(token))
    .join("")
    .trim();
}

// The length of a text as the server counts it: characters, with one space between words.
const lengthOf = (text: string) => [...text.trim().split(/\s+/u).join(" ")].length;

// `done` is called with the number of a text that the model has read.
// `isBrief`: the input alone, where the words of the text are already on the page.
export function typedPanel(context: Context, done: (text: number) => void, isBrief = false) {
  const model = context.source.common.live_model!;
  const { said, tell, isAsking, stop: stopReading, ask } = questions(context);
  let shown = "";
  const input = h("input", {
    class: "typed-text",
    placeholder: `A text for ${model.name}`,
    name: "text",
    autocomplete: "off",
    spellcheck: "false",
    "aria-label": `A text for ${model.name}`,
    dir: "auto",
    oninput: () => count(),
  });
  const go = h(
    "button",
    { type: "submit", class: "main-button" },
    model.kind === "translation" ? "Translate it" : "Read it",
  );
  const stop = actionButton({ hidden: true, onclick: stopReading }, "Stop");
  let steps = "20";
  const proceed =
    model.fields.includes("generate") &&
    h(
      "span",
      { class: "continue" },
      actionButton(
        { onclick: () => void read(input.value, { generate: Number(steps) }) },
        "Let it continue",
      ),
      choice(
        "tokens",
        steps,
        ["5", "10", "20", "40", "64"].map((count): [string, string] => [count, count]),
        (value) => {
          steps = value;
        },
      ),
    );
  const [about, length] = [
    h("p", { class: "hint" }),
    h("p", { class: "hint typed-length", role: "status" }),
  ];
  const words = h("p", { class: "changeable", dir: "auto", "aria-label": "Words to change" });
  const form = h(
    "form",
    {
      onsubmit: (event: Event) => {
        event.preventDefault();
        void read(input.value);
      },
    },
    input,
    go,
    proceed,
    stop,
  );
  const element = h(
    "section",
    { class: "typed", "aria-label": "Another text" },
    !isBrief && about,
    !isBrief && words,
    form,
    length,
    said,
  );

  const count = () => {
    const size = lengthOf(input.value);
    length.textContent =
      size > model.characters ? `${counted(size)} of ${counted(model.characters)} characters` : "";
  };

  async function read(text: string, question: object = {}) {
    if (isAsking()) return;
    count();
    if (!text.trim()) return tell("The text is empty. Type at least one word.");
    if (lengthOf(text) > model.characters)
      return tell(
        `The text is too long: ${model.name} reads at most ${counted(model.characters)} characters.`,
      );
    [go.disabled, stop.hidden] = [true, false];
    await ask(text, `${model.name} reads the text …`, question, async (number) => {
      const found = await context.source.text(number);
      shown = "";
      if (found.generation) context.set({ text: number, key: -1, ...opening(found) });
      else done(number);
    });
    [go.disabled, stop.hidden] = [false, true];
  }

  // A word of the sentence; a click puts an input in its place, and Enter reads the sentence with the new word.
  function changeable(parts: string[], at: number): HTMLElement {
    const button = actionButton({ class: "quiet", title: "Change this word" }, parts[at]);
    button.addEventListener("click", () => {
      const box = h("input", {
        value: parts[at],
        size: Math.max(4, parts[at].length + 2),
        "aria-label": `In place of ${parts[at]}`,
      });
      box.addEventListener("keydown", (event) => {
        if (event.key === "Escape") {
          event.stopPropagation();
          box.replaceWith(button);
          button.focus();
        }
        if (event.key !== "Enter") return;
        input.value = parts
          .map((part, place) => (place === at ? box.value.trim() : part))
          .filter(Boolean)
          .join(" ");
        void read(input.value);
      });
      button.replaceWith(box);
      box.focus();
      box.select();
    });
    return button;
  }

  return {
    element,
    // The words of the second text if a reader typed it, otherwise those of the first.
    update(second: Text | null) {
      const isSecond = !!second?.written;
      const whole = [...sentenceOf(isSecond ? second : context.text)];
      const sentence = whole.slice(0, model.characters).join("");
      const part =
        whole.length > model.characters
          ? ` (its first ${counted(model.characters)} characters)`
          : "";
      about.textContent = `Click a word of the ${isSecond ? "second" : "first"} text${part} to change it, or type a new text of at most ${counted(model.tokens)} tokens.`;
      if (sentence === shown) return;
      shown = sentence;
      input.value = sentence;
      count();
      const parts = sentence.split(/\s+/);
      fill(words, ...parts.flatMap((_, at) => [changeable(parts, at), " "]));
    },
    close: stopReading,
  };
}
