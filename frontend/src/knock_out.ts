// Knock-outs: a reader takes out a link, a head or a word, and sees what changes in the prediction.
import { strongest, type Context } from "./context";
import { isPlain, type Text } from "./data";
import { actionButton, fill, h } from "./dom";
import { effectPanel } from "./effect";
import { questions } from "./question";
import { sentenceOf } from "./typed";
import { wordNames } from "./word_names";

// What can be knocked out: its name, and the short form that the server reads.
type Offer = [string, string];

export function knockOut(context: Context) {
  const { source } = context;
  const model = source.common.live_model;
  const canAsk = model?.fields.includes("edits") ?? false;
  const [offers, removed, effect] = [
    h("div", { class: "offers" }),
    h("div", { class: "removed" }),
    h("div", {}),
  ];
  const asked = questions(context);
  const element = h(
    "section",
    { class: "asked-of", "aria-label": "Knock out" },
    offers,
    asked.said,
    removed,
  );
  let turn = 0;
  let answer: Text | null = null; // the text without what is knocked out

  // The link to the chosen key; without one, the strongest link of the chosen word to another one.
  async function link(): Promise<[number, number] | null> {
    const { state, text } = context;
    if (state.key >= 0) return [state.query, state.key];
    const row = Float32Array.from(
      (await source.rows(state.text, state.layer, state.query))[state.head],
    );
    for (const at of [...text.special, state.query]) row[at] = 0;
    const [key] = strongest(row, 1);
    return key === undefined ? null : [state.query, key];
  }

  async function listed(): Promise<Offer[]> {
    const { state, text } = context;
    const head = `L${text.layers[state.layer].number}.H${state.head}`;
    const names = wordNames(text.tokens);
    const name = (at: number) => names[at];
    const pair = await link();
    const found: Offer[] = pair
      ? [[`${head}: ${name(pair[0])} → ${name(pair[1])}`, `${head}: #${pair[0]} -> #${pair[1]}`]]
      : [];
    return [
      ...found,
      [`head ${head}`, head],
      [`“${name(state.query)}” in every head`, `*: * -> #${state.query}`],
    ];
  }

  // The link as a command takes it: words by themselves where the text has them once, else by their numbers.
  async function named(): Promise<string> {
    const { state, text } = context;
    const head = `L${text.layers[state.layer].number}.H${state.head}`;
    const name = (at: number) => {
      const token = text.tokens[at];
      const isAlone = text.tokens.indexOf(token) === text.tokens.lastIndexOf(token);
      return isAlone && /^[\p{L}\p{N}]+$/u.test(token) ? token : `#${at}`;
    };
    const pair = await link();
    return pair ? `${head}: ${name(pair[0])} -> ${name(pair[1])}` : head;
  }

  const edits = () => (answer?.effect?.edits ?? []).map(([short]) => short);

  // Ask for the text without these parts, and show it beside the whole text.
  async function ask(wanted: string[]) {
    const { text } = context;
    if (asked.isAsking()) return;
    if (!wanted.length) return context.set({ other: -1 });
    const waiting = `${model!.name} reads the text again …`;
    await asked.ask(sentenceOf(text), waiting, { edits: wanted }, async (number) => {
      const found = await source.text(number);
      if (found.tokens.join("\n") !== text.tokens.join("\n"))
        return asked.tell(
          `${model!.name} reads this text as other tokens. Open it with the model that this text was saved with.`,
        );
      context.set({ other: number, otherQuery: -1 });
      context.tell(found.effect?.sentence ?? "");
    });
  }

  // A button of the same place keeps the focus when the buttons are drawn again.
  function refill(box: HTMLElement, ...children: (Node | string | false)[]) {
    const place = [...box.querySelectorAll("button")].indexOf(
      (box.getRootNode() as Document).activeElement as HTMLButtonElement,
    );
    fill(box, ...children);
    if (place < 0) return;
    const buttons = box.querySelectorAll("button");
    (buttons[Math.min(place, buttons.length - 1)] ?? offers.querySelector("button"))?.focus();
  }

  async function drawOffers() {
    const mine = ++turn;
    const found = await listed();
    if (mine !== turn) return;
    const taken = new Set(edits());
    const button = ([name, short]: Offer) =>
      actionButton(
        {
          disabled: taken.has(short),
          dir: "auto",
          title:
            "What if the model did not see this? Its weight becomes 0, and the others of the row grow to a sum of 1.",
          onclick: () => void ask([...edits(), short]),
        },
        name,
      );
    refill(offers, h("b", {}, "Knock out"), ...found.map(button));
  }

  function drawRemoved() {
    const chips = (answer?.effect?.edits ?? []).map(([short, words]) =>
      canAsk
        ? actionButton(
            {
              class: "chip-word",
              title: "Put it back",
              "aria-label": `Put back ${words}`,
              onclick: () => void ask(edits().filter((each) => each !== short)),
            },
            `${words} ×`,
          )
        : h("span", { class: "chip-word", dir: "auto" }, words),
    );
    refill(
      removed,
      ...(chips.length ? [h("b", {}, "Knocked out"), ...chips] : []),
      chips.length > 1 && canAsk && actionButton({ onclick: () => void ask([]) }, "Put all back"),
    );
  }

  function draw(found: Text | null) {
    const { text } = context;
    const isNew = found !== answer;
    answer = found;
    offers.hidden = !canAsk || !isPlain(text);
    element.hidden = offers.hidden && !answer?.effect;
    if (!offers.hidden) void drawOffers();
    if (!isNew) return;
    asked.tell("");
    drawRemoved();
    fill(effect, answer?.effect && effectPanel(answer.effect));
  }

  // Why the key of this view does nothing here.
  function missing(): string {
    if (!model)
      return "A knock-out asks the model, and this page has no model. To ask it, run regard view --model NAME.";
    if (!canAsk)
      return `${model.name} takes no knock-outs. The links of a text model can be knocked out.`;
    if (!isPlain(context.text))
      return "This text is an answer or a translation. Choose a text as it was given to knock out its links.";
    return "All that is offered is knocked out. Choose another word or head, or put a part back.";
  }

  return {
    element,
    effect,
    draw,
    named,
    key(key: string) {
      if (key !== "k") return false;
      const offer = offers.querySelector<HTMLButtonElement>("button:not(:disabled)");
      if (offer && !offers.hidden) offer.click();
      else {
        element.hidden = false;
        asked.tell(missing());
      }
      return true;
    },
    close() {
      turn++;
      asked.stop();
    },
  };
}
