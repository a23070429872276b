// The cells of a drawn matrix. Few cells are a rectangle each, with its title. Many cells are one path for each color,
// and only the cell under the pointer has a title: a page of thousands of elements would answer keys too late.
import { textOver } from "./color";
import { s } from "./dom";

const [FEW, NUMBERED] = [400, 24]; // cells with an element each; pixels of a cell with a number, as on the map

export interface CellGrid {
  rows: number;
  cols: number;
  wide: number; // pixels of a cell, with its gap
  tall: number;
  gap?: [number, number]; // pixels between cells, across and down
  color(row: number, col: number): string | null; // null: no cell
  title?(row: number, col: number): string;
  said?(row: number, col: number): string; // in the cell, where it has room
  chosen?(row: number, col: number): void; // by a click
}

export function cellGrid(grid: CellGrid): SVGGElement {
  const group = s(
    "g",
    { class: "cells" },
    ...(grid.rows * grid.cols <= FEW ? rectangles(grid) : paths(grid)),
    ...(grid.said && Math.min(grid.wide, grid.tall) >= NUMBERED ? numbersIn(grid) : []),
  );
  const { chosen } = grid;
  if (chosen)
    group.addEventListener("click", (event) => {
      const at = cellUnder(grid, group, event);
      if (at) chosen(...at);
    });
  if (grid.title && grid.rows * grid.cols > FEW) group.prepend(titleOfPointer(grid, group));
  return group;
}

const placesOf = ({ rows, cols }: CellGrid) =>
  Array.from({ length: rows * cols }, (_, at) => [Math.floor(at / cols), at % cols]);

function numbersIn(grid: CellGrid): SVGElement[] {
  const { wide, tall, color, said } = grid;
  return placesOf(grid).map(([row, col]) => {
    const number = said!(row, col);
    return s(
      "text",
      {
        x: (col + 0.5) * wide,
        y: (row + 0.5) * tall,
        "font-size": wide / Math.max(2.4, 0.75 * number.length),
        "text-anchor": "middle",
        "dominant-baseline": "central",
        "pointer-events": "none",
        fill: textOver(color(row, col)!),
      },
      number,
    );
  });
}

function rectangles(grid: CellGrid): SVGElement[] {
  const { wide, tall, gap = [0, 0], color, title } = grid;
  return placesOf(grid).flatMap(([row, col]) => {
    const fill = color(row, col);
    if (fill === null) return [];
    const box = { x: col * wide, y: row * tall, width: wide - gap[0], height: tall - gap[1] };
    return [s("rect", { ...box, fill }, title && s("title", {}, title(row, col)))];
  });
}

function paths({ rows, cols, wide, tall, gap = [0, 0], color }: CellGrid): SVGElement[] {
  const found = new Map<string, string[]>();
  const box = `h${short(wide - gap[0])}v${short(tall - gap[1])}h${short(gap[0] - wide)}z`;
  for (let row = 0; row < rows; row++)
    for (let col = 0; col < cols; col++) {
      const fill = color(row, col);
      if (fill === null) continue;
      const path = found.get(fill) ?? [];
      if (!path.length) found.set(fill, path);
      path.push(`M${short(col * wide)} ${short(row * tall)}${box}`);
    }
  return [...found].map(([fill, path]) => s("path", { d: path.join(""), fill }));
}
const short = (pixels: number) => +pixels.toFixed(2);

function titleOfPointer(grid: CellGrid, group: SVGGElement): SVGTitleElement {
  const title = s("title", {});
  group.addEventListener("pointermove", (event) => {
    const at = cellUnder(grid, group, event);
    title.textContent = at ? grid.title!(...at) : "";
  });
  return title;
}

function cellUnder(
  { rows, cols, wide, tall, color }: CellGrid,
  group: SVGGElement,
  event: MouseEvent,
): [number, number] | null {
  const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(
    group.getScreenCTM()!.inverse(),
  );
  const [row, col] = [Math.floor(point.y / tall), Math.floor(point.x / wide)];
  return row >= 0 && col >= 0 && row < rows && col < cols && color(row, col) !== null
    ? [row, col]
    : null;
}
