// The interface between the view of a head and the two ways to show its words: words with arcs, and lines.
import type { Head } from "./head_sets";

export interface Mode {
  draw(): void;
  moved?(): boolean; // true: only the chosen words changed, and the mode showed that
  preview(head: Head | null): void; // show one head alone
  point(query: number | null, key?: number): void; // what the map below is pointed at
  key(event: KeyboardEvent): boolean;
  close(): void;
}
