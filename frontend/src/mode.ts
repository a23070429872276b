// The interface between the text view and its modes: words, head view, model view.
import type { Context } from "./context";
import type { Head } from "./head_sets";
import type { State } from "./state";

export interface Mode {
  draw(): void;
  moved?(before: State): boolean; // true: only the chosen words changed, and the mode showed that
  preview?(head: Head | null): void; // show one head alone
  key?(event: KeyboardEvent): boolean;
  close?(): void;
}
export type MakeMode = (context: Context, body: HTMLElement) => Mode;
