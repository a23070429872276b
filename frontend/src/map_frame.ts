// Where the map lies on its canvas: its sizes in pixels, the zoom, and the cells that are seen.
import { select } from "d3-selection";
import { zoom as zooming, zoomIdentity, type ZoomTransform } from "d3-zoom";
import { isPhone, type Context } from "./context";
import { queriesOf, sizeOf } from "./data";
import { TILE } from "./source";
import { wordNames } from "./word_names";

export const [DEEPEST, LABEL] = [72, 13]; // pixels per weight: the most, and for a label

// While a story plays, its bar lies over the end of the window.
const storyBar = ({ root }: Context) =>
  root.querySelector<HTMLElement>(":scope > .story:not([hidden])")?.offsetHeight ?? 0;

export class MapFrame {
  width = 0; // of the canvas
  height = 0;
  left = 0; // of the labels beside the map, and of those below it
  bottom = 0;
  transform: ZoomTransform = zoomIdentity;
  whole = 1; // pixels per weight when the whole map is visible
  private bar = 0;
  private timer = 0;
  private behavior = zooming<HTMLCanvasElement, unknown>();

  constructor(
    private context: Context,
    private canvas: HTMLCanvasElement,
    private box: HTMLElement,
    moved: () => void,
  ) {
    this.behavior.on("zoom", (event) => {
      this.transform = event.transform;
      moved();
      if (event.sourceEvent) this.remember();
    });
    // the wheel alone scrolls the page; a pinch on a touchpad comes as the wheel with Ctrl
    this.behavior.filter(({ type, ctrlKey, metaKey, button }: WheelEvent) =>
      type === "wheel" ? ctrlKey || metaKey : !ctrlKey && !button,
    );
    select(canvas).call(this.behavior);
  }

  // The numbers of queries and of keys.
  counts() {
    return sizeOf(this.context.text);
  }
  // Pixels of the map without its labels.
  plot() {
    return { width: this.width - this.left, height: this.height - this.bottom };
  }
  toX(j: number) {
    return this.transform.x + j * this.transform.k;
  }
  toY(i: number) {
    return this.transform.y + i * this.transform.k;
  }

  // The level of the cells that are drawn at a zoom.
  levelOf(k = this.transform.k) {
    return Math.max(
      this.context.source.finest(this.context.state.text),
      Math.ceil(Math.log2(1 / k) - 0.01),
      0,
    );
  }
  isPooled() {
    return this.levelOf(this.whole / 1.5) > 0;
  } // at some zoom
  isWider() {
    return Math.abs(this.box.clientWidth - this.width) > 1;
  } // or narrower
  hasOtherBar() {
    return this.bar !== storyBar(this.context);
  }

  measure() {
    const { canvas, box } = this;
    const [I, J] = this.counts();
    const gutter = this.gutter();
    const width = Math.max(box.clientWidth, 200);
    const square = (width - gutter) * Math.min(1, I / J);
    const height = Math.round(
      Math.max(
        200,
        Math.min(
          this.room(),
          I * DEEPEST + gutter,
          (I < J ? Math.max(square, 160) : width - gutter) + gutter,
        ),
      ),
    );
    [this.width, this.height, this.left, this.bottom] = [width, height, gutter, gutter];
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = box.style.height = `${height}px`;
    this.whole = Math.min(this.plot().width / J, this.plot().height / I, DEEPEST);
    this.behavior
      .extent([
        [gutter, 0],
        [width, this.plot().height],
      ])
      .scaleExtent([this.whole / 1.5, Math.max(DEEPEST, this.whole)])
      .translateExtent([
        [-J * 0.5, -I * 0.5],
        [J * 1.5, I * 1.5],
      ]);
  }

  // Pixels for the labels of a side.
  private gutter(): number {
    const [I, J] = this.counts();
    const { text } = this.context;
    const names = [text.tokens, queriesOf(text)].flatMap((tokens) =>
      wordNames(tokens).slice(0, 3000),
    );
    const longest = Math.max(...names.map((name) => [...name].length));
    const numbered =
      Math.max(I, J) * LABEL > this.box.clientWidth
        ? Math.min(longest, 9) + 1 + String(J).length
        : 0;
    return Math.max(78, Math.min(124, 24 + Math.max(Math.min(longest, 14), numbered) * 6.3));
  }

  // Pixels that the window has for the height of the map.
  private room(): number {
    const { root } = this.context;
    this.bar = storyBar(this.context);
    const top = isPhone(root)
      ? root.querySelector(".scale")!.getBoundingClientRect().top
      : -window.scrollY;
    const above = this.box.getBoundingClientRect().top - top; // a story scrolls a phone to the scale
    const free = this.bar
      ? window.innerHeight - above - this.bar - 8
      : Math.max(0.55 * window.innerHeight, window.innerHeight - above - 8);
    return Math.max(320, Math.min(window.innerHeight * 0.78, 900, free));
  }

  // Move to the position in the address.
  go() {
    const { state } = this.context;
    const [I, J] = this.counts();
    const { width, height } = this.plot();
    const isWhole = state.x < 0;
    const k = isWhole ? this.whole : Math.max(this.whole / 1.5, Math.min(DEEPEST, 2 ** state.zoom));
    // No more than the map: what is beyond its edge would be empty.
    const start = (at: number, size: number, all: number) =>
      isWhole ? 0 : Math.min(0, Math.max(size - all * k, size / 2 - at * k));
    const to = zoomIdentity
      .translate(this.left + start(state.x, width, J), start(state.y, height, I))
      .scale(k);
    select(this.canvas).call(this.behavior.transform, to);
  }

  // The token in the middle of the map, and the zoom, as the address has them.
  private center() {
    const [{ width, height }, { x, y, k }] = [this.plot(), this.transform];
    return { x: (this.left + width / 2 - x) / k, y: (height / 2 - y) / k, zoom: Math.log2(k) };
  }
  isThere() {
    const [{ state }, here] = [this.context, this.center()];
    return (
      state.x >= 0 &&
      Math.abs(here.x - state.x) + Math.abs(here.y - state.y) <= 0.01 &&
      Math.abs(here.zoom - state.zoom) <= 0.001
    );
  }
  // Write the position into the address once the map rests.
  private remember() {
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => {
      const { x, y, zoom } = this.center();
      this.context.set({ x: Math.max(0, x), y: Math.max(0, y), zoom }, true);
    }, 250);
  }

  // Zoom around the chosen pair if it is seen, else around the middle.
  zoomBy(factor: number) {
    const { query, key } = this.context.state;
    const { width, height } = this.plot();
    const [x, y] = [this.toX(key), this.toY(query)];
    const inside = key >= 0 && x > this.left && x < this.width && y > 0 && y < height;
    select(this.canvas).call(
      this.behavior.scaleBy,
      factor,
      inside ? [this.toX(key + 0.5), this.toY(query + 0.5)] : [this.left + width / 2, height / 2],
    );
    this.remember();
  }

  // The cells that are seen: first row and the one after the last, first column and the one after the last.
  seen() {
    const [I, J] = this.counts();
    const [{ width, height }, { x, y, k }] = [this.plot(), this.transform];
    return [
      Math.max(0, Math.floor(-y / k)),
      Math.min(I, Math.ceil((height - y) / k)),
      Math.max(0, Math.floor((this.left - x) / k)),
      Math.min(J, Math.ceil((this.left + width - x) / k)),
    ];
  }

  // The tiles of a level that are seen: first and last row, first and last column.
  seenTiles(level: number) {
    const [I, J] = this.counts();
    const [{ width, height }, { x, y, k }] = [this.plot(), this.transform];
    const step = TILE * 2 ** level;
    const ends = (from: number, to: number, n: number) => [
      Math.max(0, Math.floor(from / step)),
      Math.min(Math.ceil(n / step) - 1, Math.floor(to / step)),
    ];
    return [
      ...ends(-y / k, (height - y) / k, I),
      ...ends((this.left - x) / k, (this.left + width - x) / k, J),
    ];
  }

  // Whether a cell is not seen as a whole.
  isOutside(i: number, j: number): boolean {
    const [x, y, k, { width, height }] = [this.toX(j), this.toY(i), this.transform.k, this.plot()];
    return x < this.left || y < 0 || x + k > this.left + width || y + k > height;
  }

  // The query and the key under the pointer.
  pairUnder(event: MouseEvent): [number, number] | null {
    const bounds = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - bounds.left, event.clientY - bounds.top];
    const [i, j] = [
      Math.floor((y - this.transform.y) / this.transform.k),
      Math.floor((x - this.transform.x) / this.transform.k),
    ];
    const [I, J] = this.counts();
    const inside = x > this.left && y < this.height - this.bottom;
    return inside && i >= 0 && j >= 0 && i < I && j < J ? [i, j] : null;
  }
}
