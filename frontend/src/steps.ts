// Steps of the arrow keys, and numbers kept inside a list.

// The index nearest to `at` in a list of `size` items.
export const within = (at: number, size: number): number => Math.max(0, Math.min(size - 1, at));

const ARROWS: Record<string, [number, number]> = {
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
};

// Rows down and columns right; undefined: not an arrow key.
export const arrowOf = (key: string): [number, number] | undefined => ARROWS[key];

// The step of an arrow key in a list that is laid out in rows of `width` items.
export function stepOf(key: string, width: number): number | undefined {
  const arrow = arrowOf(key);
  return arrow && arrow[0] * width + arrow[1];
}
