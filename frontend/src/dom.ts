// Builds elements without parsing HTML: texts of models and users only become text nodes.

import { exact, shown } from "./format";

type Child = Node | string | number | null | undefined | false;
type Attributes = Record<
  string,
  string | number | boolean | null | undefined | ((event: never) => void)
>;

function build<T extends Element>(element: T, attributes: Attributes, children: Child[]): T {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function")
      element.addEventListener(name.slice(2), value as EventListener);
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children)
    if (child !== null && child !== undefined && child !== false)
      element.append(child as Node | string);
  return element;
}

export const h = <K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] => build(document.createElement(tag), attributes, children);

// Replace the children of an element; false and null are skipped.
export const fill = (element: Element, ...children: Child[]): void => {
  element.replaceChildren();
  build(element, {}, children);
};

export const s = <K extends keyof SVGElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): SVGElementTagNameMap[K] =>
  build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

export const actionButton = (attributes: Attributes, ...children: Child[]): HTMLButtonElement =>
  h("button", { type: "button", ...attributes }, ...children);
export const hint = (...children: Child[]): HTMLParagraphElement =>
  h("p", { class: "hint" }, ...children);
// What a click on a link does, unless it opens a new tab or window.
export const inPlace = (go: () => void) => (event: MouseEvent) => {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  go();
};

export function choice(
  label: string,
  value: string,
  options: [string, string][],
  chosen: (value: string) => void,
): HTMLLabelElement {
  const select = h(
    "select",
    { "aria-label": label, onchange: () => chosen(select.value) },
    ...options.map(([name, said]) => h("option", { value: name, selected: name === value }, said)),
  );
  return labelled(label, select);
}

// A button whose face is a sign, such as "‹".
export const signButton = (
  sign: string,
  label: string,
  onclick: () => void,
  title = label,
): HTMLButtonElement => actionButton({ title, "aria-label": label, onclick }, sign);

// A group of buttons; one of them is pressed. Tab reaches the pressed one, and arrows press the others.
export function segments(
  label: string,
  value: string,
  options: [string, string][],
  chosen: (value: string) => void,
): HTMLElement {
  const buttons = options.map(([name, said]) =>
    actionButton(
      {
        "aria-pressed": String(name === value),
        tabindex: name === value || !options.some(([each]) => each === value) ? 0 : -1,
        onclick: () => chosen(name),
      },
      said,
    ),
  );
  const moved = (event: KeyboardEvent) => {
    const step = ({ ArrowLeft: -1, ArrowRight: 1 } as Record<string, number>)[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const root = buttons[0].getRootNode() as Document;
    const at = buttons.indexOf(event.target as HTMLButtonElement);
    chosen(options[(at + step + options.length) % options.length][0]);
    root
      .querySelector<HTMLElement>(
        `[role=group][aria-label="${CSS.escape(label)}"] [aria-pressed=true]`,
      )
      ?.focus(); // drawn anew
  };
  return h(
    "div",
    { class: "segments", role: "group", "aria-label": label, onkeydown: moved },
    ...buttons,
  );
}

// A number in a sentence: it does not break into two lines.
export const numberOf = (value: number) => h("span", { class: "number" }, shown(value));
// The weight of a chosen link; its tooltip has all digits.
export const weightOutput = (value: number | null) =>
  h(
    "output",
    { class: "weight", title: value === null ? null : exact(value) },
    value === null ? "…" : shown(value),
  );

// Words with their weights: "tired 0.715, [CLS] 0.128".
export const weighed = (tokens: string[], weights: ArrayLike<number>, listed: number[]) =>
  listed.flatMap((at, n) => [n ? ", " : "", strong(visible(tokens[at])), ` ${shown(weights[at])}`]);

// A control with its name.
export const labelled = (name: string, control: Node): HTMLLabelElement =>
  h("label", { class: "choice" }, h("span", {}, name), control);

export const table = (look: string, heads: string[], rows: HTMLElement[]): HTMLTableElement =>
  h(
    "table",
    { class: look },
    h("thead", {}, h("tr", {}, ...heads.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, ...rows),
  );

export const strong = (text: string | number) => h("b", { dir: "auto" }, text);

// A token without "##", which marks the continuation of a word.
export const plain = (token: string) => token.replace(/^##(?=.)/u, "");

// Every token is visible: whitespace as signs with counts, as in src/regard/hf/token_labels.py, and names of characters
// that cannot be seen. A space before a word is no sign, because most tokenizers write one before every word.
const SIGNS: Record<string, string> = { "\n": "↵", "\r": "␍", "\t": "⇥", " ": "␣", "▁": "␣" };
const NAMES: Record<string, string> = {
  "\u200b": "ZWSP",
  "\u200c": "ZWNJ",
  "\u200d": "ZWJ",
  "\ufeff": "BOM",
  "\u200e": "LRM",
  "\u200f": "RLM",
  "\u00ad": "SHY",
};
function signs(run: string): string {
  const [one] = run;
  const [count, sign] = [[...run].length, SIGNS[one]];
  if (sign) return count > 1 ? `${sign}×${count}` : sign;
  return Array(count)
    .fill(NAMES[one] ?? `U+${one.codePointAt(0)!.toString(16)}`)
    .join(" ");
}
const runs = (text: string) => text.match(/(.)\1*/gsu) ?? [];
export const visible = (token: string): string => {
  if (!token) return "∅";
  if (/^[\s▁]+$/u.test(token)) return runs(token).map(signs).join("");
  if (/^[\s\p{Cf}▁]+$/u.test(token)) return runs(token).map(signs).join(" ");
  return plain(token).replace(/[\n\r\t]+/g, (blank) => runs(blank).map(signs).join(""));
};
export const cut = (text: string, size: number) =>
  [...text].length > size ? `${[...text].slice(0, size - 1).join("")}…` : text;

// Whether there is no space between a token and the token before it.
export const joins = (token: string, before: string | undefined) =>
  before === undefined || /^##|^[.,;:!?)\]’”'%]+$/.test(token) || /^['’(“‘[]$/.test(before);

// The words of a range of tokens, with a space between those that are apart.
export const spaced = (
  tokens: string[],
  [first, last]: [number, number],
  word: (at: number) => Node,
): (Node | string)[] =>
  Array.from({ length: last - first }, (_, n) => first + n).flatMap((at) => [
    at === first || joins(tokens[at], tokens[at - 1]) ? "" : " ",
    word(at),
  ]);

/** The chart that Observable Plot drew: before it, the same figure holds legends. */
export function chartOf(drawing: Element): SVGSVGElement {
  return (
    drawing.tagName === "svg" ? drawing : [...drawing.querySelectorAll("svg")].at(-1)
  ) as SVGSVGElement;
}
