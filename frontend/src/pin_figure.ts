// One panel of the pins view: a map of weights or of differences, with words on its sides.
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
const [AS_CELLS, LABELLED, GREATEST] = [1200, 64, 28]; // cells as vectors, words with labels, pixels of a cell

// Draws the cells: vectors if they are few, otherwise one picture.
function cellsOf(
  { values }: Grid,
  cols: number,
  cell: number,
  color: (value: number) => string,
): SVGElement {
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
  mark(pair: [number, number]): void;
}

// `names` are the words of the rows and of the columns; `onCell` is told of the pair under the pointer; `beside` are the
// names of the map beside it, for which there is as much room.
export function panelOf(
  grid: Grid,
  names: [string[], string[]],
  width: number,
  color: (value: number) => string,
  label: string,
  onCell: (pair: [number, number] | null, click: boolean) => void,
  beside = names,
): Panel {
  const { rows, cols, level } = grid;
  const [height_, width_] = [rows, cols].map(([first, last]) =>
    Math.ceil((last - first) / 2 ** level),
  );
  const labeled = level === 0 && Math.max(height_, width_) <= LABELLED;
  const lengths = (way: number, range: Range) =>
    [names, beside].flatMap((both) => both[way].slice(...range).map((name) => [...name].length));
  const [left, top] = [rows, cols].map((range, way) =>
    labeled ? Math.min(84, 12 + 6 * Math.max(...lengths(way, range))) : 16,
  );
  const cell = Math.min(GREATEST, (width - left - 2) / width_);
  const size = { width: left + width_ * cell + 2, height: top + height_ * cell + 2 };
  const figure = s("svg", {
    ...size,
    viewBox: `0 0 ${size.width} ${size.height}`,
    role: "img",
    "aria-label": label,
    class: "pin-map",
  });
  const body = s(
    "g",
    { transform: `translate(${left},${top})` },
    cellsOf(grid, width_, cell, color),
  );
  const cross = s("g", {
    fill: "none",
    stroke: "var(--accent)",
    "stroke-width": 1.5,
    "pointer-events": "none",
  });
  figure.append(body, cross);
  const font = Math.min(11, Math.max(7, cell - 1));
  const word = (name: string, x: number, y: number, turned: boolean) =>
    s(
      "text",
      {
        x: 0,
        y: 0,
        "font-size": font,
        transform: `translate(${x},${y})${turned ? " rotate(-90)" : ""}`,
        "text-anchor": turned ? "start" : "end",
        "dominant-baseline": "central",
        fill: "currentColor",
      },
      cutName(name, 13),
    );
  if (labeled) {
    const every = Math.ceil(8 / cell); // names that would overlap are left out
    for (let i = rows[0]; i < rows[1]; i += every)
      figure.append(word(names[0][i], left - 4, top + (i - rows[0] + 0.5) * cell, false));
    for (let j = cols[0]; j < cols[1]; j += every)
      figure.append(word(names[1][j], left + (j - cols[0] + 0.5) * cell, top - 4, true));
  } else
    figure.append(
      s("text", { x: left, y: 11, "font-size": 11, fill: "currentColor" }, "is attended to →"),
      s(
        "text",
        {
          x: 0,
          y: 0,
          transform: `translate(11,${top}) rotate(-90)`,
          "text-anchor": "end",
          "font-size": 11,
          fill: "currentColor",
        },
        "← attends",
      ),
    );
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
  figure.addEventListener("pointermove", (event) => onCell(pairAt(event), false));
  figure.addEventListener("pointerleave", () => onCell(null, false));
  figure.addEventListener("click", (event) => onCell(pairAt(event), true));
  return {
    figure,
    mark([i, j]) {
      const inside = (at: number, [first, last]: Range) => at >= first && at < last;
      cross.replaceChildren(
        ...(inside(i, rows)
          ? [
              s("rect", {
                x: left,
                y: top + Math.floor((i - rows[0]) / 2 ** level) * cell,
                width: width_ * cell,
                height: cell,
              }),
            ]
          : []),
        ...(inside(j, cols)
          ? [
              s("rect", {
                x: left + Math.floor((j - cols[0]) / 2 ** level) * cell,
                y: top,
                width: cell,
                height: height_ * cell,
              }),
            ]
          : []),
      );
    },
  };
}
