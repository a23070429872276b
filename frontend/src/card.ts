// The card of the overview: its first sentence, its words with their arcs, and all heads, as one picture to send.
import { arcOf, isDrawn, type Arc } from "./arcs";
import type { Context } from "./context";
import { everyHead, mostHeads, sizesOf } from "./data";
import { cut, s } from "./dom";
import { smallMap } from "./small_map";
import { colorOfTold, toldLinks } from "./told_links";

const [WIDE, TALL] = [1200, 675];
const [MARGIN, COLUMN, GAP, FOOT] = [48, 560, 44, 64]; // pixels: of the words, between them and the heads, below both
const [HEADLINE, LARGEST, LEAST] = [38, 32, 13]; // pixels of letters
const [LINE, FIRST] = [2.3, 60]; // lines of words, in letters; pixels above the first one, for its arcs
const FONT = "Georgia, 'Times New Roman', serif";

interface Word {
  of: Element;
  text: string;
  font: string;
  x: number;
  y: number; // of its base line
  width: number;
}

const pen = document.createElement("canvas").getContext("2d")!;

// The words of some boxes in lines, each with the letters that it has on the page. A line ends at a space.
function wrapped(boxes: Element[], size: number, width: number, line: number): Word[] {
  const found: Word[] = [];
  let [x, y] = [0, -line];
  for (const box of boxes) {
    [x, y] = [0, y + line];
    let unbroken = found.length; // the first part of the word that is written
    const walk = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
      const of = walk.currentNode.parentElement!;
      const { fontStyle, fontWeight } = getComputedStyle(of);
      pen.font = `${fontStyle} ${fontWeight} ${size}px ${FONT}`;
      for (const text of walk.currentNode.textContent!.match(/\s+|\S+/g) ?? []) {
        const wide = pen.measureText(text).width;
        if (!text.trim()) {
          if (x) x += wide;
          unbroken = found.length;
          continue;
        }
        found.push({ of, text, font: pen.font, x, y, width: wide });
        x += wide;
        if (x <= width || !found[unbroken].x) continue;
        const left = found[unbroken].x;
        for (const part of found.slice(unbroken)) {
          part.x -= left;
          part.y += line;
        }
        [x, y] = [x - left, y + line];
      }
    }
  }
  return found;
}

const put = ({ text, font, x, y }: Word, fill: string) =>
  s("text", { x, y, fill, style: `font:${font}` }, text);
const bottom = (words: Word[]) => Math.max(0, ...words.map(({ y }) => y));

// A phrase that tells a link is underlined in the color of its head, as on the page.
function headline(words: Word[], ink: string): SVGGElement {
  const own = (word: Word) =>
    (word.of.closest("a") as HTMLElement | null)?.style.getPropertyValue("--own");
  return s(
    "g",
    {},
    ...words.flatMap((word, at) => {
      const next = words[at + 1];
      const isOn = next && next.y === word.y && own(next) === own(word);
      const width = isOn ? next.x - word.x : word.width;
      return [
        put(word, ink),
        own(word) && s("rect", { x: word.x, y: word.y + 8, width, height: 3, fill: own(word) }),
      ];
    }),
  );
}

// The words with their colors and their arcs, as large as there is room for.
function sentence(boxes: Element[], arcs: Arc[], room: number): SVGGElement {
  let size = LARGEST;
  let words = wrapped(boxes, size, COLUMN, size * LINE);
  while (size > LEAST && bottom(words) > room - FIRST)
    words = wrapped(boxes, --size, COLUMN, size * LINE);
  const spot = (word: Word) => ({
    x: word.x + word.width / 2,
    top: FIRST + word.y - size,
    tall: size * 1.3,
    hidden: false,
    above: word.y ? size * (LINE - 1.3) : FIRST - 14,
  });
  const of = new Map(words.map((word) => [word.of, word]));
  const sheet = { width: COLUMN, height: room };
  const lines = arcs.flatMap((arc) => {
    const [from, to] = [of.get(arc.from), of.get(arc.to)];
    return from && to && isDrawn(arc)
      ? [arcOf(arc, spot(from), spot(to), sheet, { widest: 5 })]
      : [];
  });
  const marks = words.map((word) => {
    const { backgroundColor, outlineColor } = getComputedStyle(word.of);
    return s("rect", {
      x: word.x - 3,
      y: word.y - size,
      width: word.width + 6,
      height: size * 1.3,
      rx: 4,
      fill: word.of.matches("span") ? backgroundColor : "none",
      stroke: word.of.matches(".lead-query") ? outlineColor : null,
      "stroke-width": 2,
    });
  });
  const left = (room - FIRST - bottom(words)) / 2; // above and below, so that it stands in the middle
  return s(
    "g",
    { transform: `translate(0,${Math.max(0, left)})` },
    ...lines,
    s(
      "g",
      { transform: `translate(0,${FIRST})` },
      ...marks,
      ...words.map((word) => put(word, getComputedStyle(word.of).color)),
    ),
  );
}

function allHeads(context: Context, width: number, height: number): SVGGElement {
  const { text } = context;
  const told = toldLinks(text);
  const columns = mostHeads(text);
  const step = Math.min(width / columns, height / text.layers.length, 64);
  const size = step * 0.9;
  const top = (height - step * text.layers.length) / 2;
  return s(
    "g",
    { transform: `translate(0,${top})` },
    ...everyHead(text).flatMap(({ layer, head }) => {
      const place = { x: head * step, y: layer * step, width: size, height: size };
      const isTold = told.some((link) => link.layer === layer && link.head === head);
      return [
        s("image", {
          ...place,
          preserveAspectRatio: "none",
          href: smallMap(context, layer, head).toDataURL(),
          style: "image-rendering:pixelated",
        }),
        s("rect", {
          ...place,
          fill: "none",
          stroke: isTold ? colorOfTold({ layer, head }, told) : context.colors.get("--line"),
          "stroke-width": isTold ? 3 : 0.5,
        }),
      ];
    }),
  );
}

export interface Shown {
  heading: Element;
  words: Element[]; // the boxes of words
  arcs: Arc[];
  note: string; // whose arcs they are, if they are not those of the heading
}

export function card(context: Context, { heading, words, arcs, note }: Shown): SVGSVGElement {
  const { text, colors } = context;
  const [ink, soft] = [colors.get("--ink"), colors.get("--soft")];
  const title = wrapped([heading], HEADLINE, WIDE - 2 * MARGIN, HEADLINE * 1.35);
  const top = MARGIN + HEADLINE + bottom(title) + 40;
  const room = TALL - top - FOOT;
  const left = words.length ? MARGIN + COLUMN + GAP : MARGIN;
  const at = (x: number, y: number, node: SVGElement) =>
    s("g", { transform: `translate(${x},${y})` }, node);
  const foot = (x: number, anchor: string, said: string, style: string) =>
    s("text", { x, y: TALL - 26, "text-anchor": anchor, fill: soft, style }, said);
  return s(
    "svg",
    {
      xmlns: "http://www.w3.org/2000/svg",
      width: WIDE,
      height: TALL,
      viewBox: `0 0 ${WIDE} ${TALL}`,
    },
    s("rect", { width: WIDE, height: TALL, fill: colors.get("--paper") }),
    at(MARGIN, MARGIN + HEADLINE * 0.8, headline(title, ink)),
    at(MARGIN, top - 24, sentence(words, arcs, room)),
    at(left, top, allHeads(context, WIDE - MARGIN - left, room)),
    foot(
      MARGIN,
      "start",
      [text.model && cut(text.model, 50), sizesOf(text), cut(note, 60) || "attention weights"]
        .filter(Boolean)
        .join(" · "),
      "font:17px system-ui, sans-serif",
    ),
    foot(WIDE - MARGIN, "end", "Regard", `font:italic 24px ${FONT}`),
  );
}

// The size of a card in pixels of a screen.
export const CARD: [number, number] = [WIDE, TALL];
