// A drawn map of weights or of differences, with words on its sides.
import { cellGrid } from "./cell_grid";
import { pictureOf } from "./color";
import { s } from "./dom";
import { inCell } from "./format";
import type { Range } from "./source";
import { cutName } from "./word_names";

export interface Grid {
  values: Float32Array;
  rows: Range;
  cols: Range;
  level: number;
} // cells of 2^level squared weights
const [AS_CELLS, LABELLED, GREATEST] = [4096, 64, 28]; // cells as vectors, words with labels, pixels of a cell

interface Look {
  width: number;
  color(value: number): string;
  label: string; // for screen readers
  kind?: string; // its class
  onCell?(pair: [number, number] | null, click: boolean): void; // told of the pair under the pointer
  title?(row: number, col: number): string; // of a cell, counted from the first one
  beside?: [string[], string[]]; // the names of the map beside it, for which there is as much room
  sizes?: [number, number]; // the least and the greatest pixels of a cell
}

// Draws the cells: vectors if they are few, otherwise one picture.
function cellsOf({ values }: Grid, cols: number, cell: number, { color, title }: Look): SVGElement {
  const rows = values.length / cols;
  if (values.length <= AS_CELLS)
    return s(
      "g",
      { "shape-rendering": "crispEdges" },
      cellGrid({
        rows,
        cols,
        wide: cell,
        tall: cell,
        color: (row, col) => color(values[row * cols + col]),
        said: (row, col) => inCell(values[row * cols + col]),
        title,
      }),
    );
  return s("image", {
    width: cols * cell,
    height: rows * cell,
    href: pictureOf(values, rows, cols, color).toDataURL(),
    preserveAspectRatio: "none",
    style: "image-rendering:pixelated",
  });
}

export interface Panel {
  figure: SVGSVGElement;
  cells: SVGGElement; // what is over them is drawn from their corner
  cell: number; // pixels
  mark(pair: [number, number]): void;
}

// `names` are the words of the rows and of the columns.
export function panelOf(grid: Grid, names: [string[], string[]], look: Look): Panel {
  const { rows, cols, level } = grid;
  const { width, label, kind = "pin-map", onCell, beside = names, sizes = [0, GREATEST] } = look;
  const [height_, width_] = [rows, cols].map(([first, last]) =>
    Math.ceil((last - first) / 2 ** level),
  );
  const labeled = level === 0 && Math.max(height_, width_) <= LABELLED;
  const lengths = (way: number, range: Range) =>
    [names, beside].flatMap((both) => both[way].slice(...range).map((name) => [...name].length));
  const [left, top] = [rows, cols].map((range, way) =>
    labeled ? Math.min(96, 12 + 6.4 * Math.max(...lengths(way, range))) : 16,
  );
  const cell = Math.max(sizes[0], Math.min(sizes[1], (width - left - 2) / width_));
  const size = { width: left + width_ * cell + 2, height: top + height_ * cell + 2 };
  const figure = s("svg", {
    ...size,
    viewBox: `0 0 ${size.width} ${size.height}`,
    role: "img",
    "aria-label": label,
    class: kind,
  });
  const body = s(
    "g",
    { transform: `translate(${left},${top})` },
    cellsOf(grid, width_, cell, look),
  );
  const cross = s("g", {
    fill: "none",
    stroke: "var(--accent)",
    "stroke-width": 1.5,
    "pointer-events": "none",
  });
  figure.append(body, cross);
  const word = (said: string, x: number, y: number, more: Record<string, string | number>) =>
    figure.append(
      s(
        "text",
        { x: 0, y: 0, transform: `translate(${x},${y})`, fill: "currentColor", ...more },
        said,
      ),
    );
  const turned = (x: number, y: number) => `translate(${x},${y}) rotate(-90)`;
  if (labeled) {
    const every = Math.ceil(8 / cell); // names that would overlap are left out
    const letters = {
      "font-size": Math.min(12, Math.max(7, cell - 1)),
      "dominant-baseline": "central",
    };
    for (let i = rows[0]; i < rows[1]; i += every)
      word(cutName(names[0][i], 13), left - 4, top + (i - rows[0] + 0.5) * cell, {
        ...letters,
        "text-anchor": "end",
      });
    for (let j = cols[0]; j < cols[1]; j += every)
      word(cutName(names[1][j], 13), 0, 0, {
        ...letters,
        transform: turned(left + (j - cols[0] + 0.5) * cell, top - 4),
      });
  } else {
    word("is attended to →", left, 11, { "font-size": 11 });
    word("← attends", 0, 0, {
      "font-size": 11,
      transform: turned(11, top),
      "text-anchor": "end",
    });
  }
  const pairAt = (event: PointerEvent | MouseEvent): [number, number] | null => {
    const bounds = figure.getBoundingClientRect();
    const scale = size.width / bounds.width;
    const [x, y] = [
      (event.clientX - bounds.left) * scale - left,
      (event.clientY - bounds.top) * scale - top,
    ];
    const [i, j] = [
      rows[0] + Math.floor(y / cell) * 2 ** level,
      cols[0] + Math.floor(x / cell) * 2 ** level,
    ];
    return x >= 0 && y >= 0 && i < rows[1] && j < cols[1] ? [i, j] : null;
  };
  if (onCell) {
    figure.addEventListener("pointermove", (event) => onCell(pairAt(event), false));
    figure.addEventListener("pointerleave", () => onCell(null, false));
    figure.addEventListener("click", (event) => onCell(pairAt(event), true));
  }
  return {
    figure,
    cells: body,
    cell,
    mark([i, j]) {
      const inside = (at: number, [first, last]: Range) => at >= first && at < last;
      const bar = (x: number, y: number, width: number, height: number) =>
        s("rect", {
          x: left + x * cell,
          y: top + y * cell,
          width: width * cell,
          height: height * cell,
        });
      const place = (at: number, [first]: Range) => Math.floor((at - first) / 2 ** level);
      cross.replaceChildren(
        ...(inside(i, rows) ? [bar(0, place(i, rows), width_, 1)] : []),
        ...(inside(j, cols) ? [bar(place(j, cols), 0, 1, height_)] : []),
      );
    },
  };
}
