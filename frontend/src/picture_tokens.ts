// The tokens of a text with pictures: which are patches, and whose weights are shown.
import type { Context } from "./context";
import { queriesOf, type PicturePanel } from "./data";
import { placeOf } from "./patches";
import { within } from "./steps";

export class PictureTokens {
  held = false; // a click holds a token, so that pointing reads single weights
  preview: number | null = null; // the token under the pointer
  readonly patchOf = new Map<number, [number, number]>(); // token -> panel, patch

  constructor(private context: Context) {}

  get panels(): PicturePanel[] {
    return this.context.text.picture?.panels ?? [];
  }
  get isSound() {
    return this.context.text.picture?.kind === "sound";
  }
  get isCrossed() {
    return this.context.text.queries !== null;
  }
  // Whether the column of a token (what attends to it) is shown, and not its row (what it attends to).
  get isTurned() {
    return this.context.state.side === "in";
  }
  // Whether keys are chosen: in cross-attention, the patches.
  get choosesKeys() {
    return this.isCrossed && this.isTurned;
  }
  // Whether the patches can be chosen in this direction: in cross-attention they are keys only.
  get choosesPatches() {
    return !this.isCrossed || this.isTurned;
  }
  get chosen() {
    return this.choosesKeys ? Math.max(0, this.context.state.key) : this.context.state.query;
  }
  get shown() {
    return this.preview ?? this.chosen;
  }
  get names() {
    return this.isTurned ? this.context.text.tokens : queriesOf(this.context.text);
  }

  read() {
    this.patchOf.clear();
    this.panels.forEach((panel, at) => {
      for (let patch = 0; patch < panel.rows * panel.columns; patch++)
        this.patchOf.set(placeOf(panel, patch), [at, patch]);
    });
  }

  move(token: number, quiet = false) {
    this.context.set(this.choosesKeys ? { key: token } : { query: token }, quiet);
  }
  // Hold a token, or let it go if it is held.
  hold(token: number) {
    this.held = !(
      this.held && token === (this.choosesKeys ? this.context.state.key : this.context.state.query)
    );
    this.preview = null;
    this.move(token);
  }

  // The patch beside a patch; from another token, the first patch.
  neighbor([down, right]: [number, number]): number {
    const found = this.patchOf.get(this.shown);
    if (!found) return placeOf(this.panels[0], 0);
    const panel = this.panels[found[0]];
    const row = within(Math.floor(found[1] / panel.columns) + down, panel.rows);
    return placeOf(
      panel,
      row * panel.columns + within((found[1] % panel.columns) + right, panel.columns),
    );
  }

  // The largest weight on a patch, which has the full color; of words if only words are shown.
  largest(values: Float32Array, ofPatches: boolean): number {
    let most = 0;
    for (let at = 0; at < values.length; at++)
      if (!ofPatches || this.patchOf.has(at)) most = Math.max(most, values[at]);
    return most || 1;
  }

  shareOfPatches(values: Float32Array): number {
    let share = 0;
    for (const token of this.patchOf.keys()) share += values[token] ?? 0;
    return share;
  }

  // The center of the weight of a row under a spectrogram, in seconds.
  center(values: Float32Array): number {
    const total = values.reduce((sum, weight) => sum + weight, 0);
    const at =
      values.reduce((sum, weight, frame) => sum + weight * (frame + 0.5), 0) / (total || 1);
    return at * this.context.text.picture!.seconds!;
  }
}
