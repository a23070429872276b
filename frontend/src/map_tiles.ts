// The tiles of a map: they are asked for, kept, and colored.
import { drawCells } from "./color";
import { place, type Context } from "./context";
import type { Pool } from "./data";
import { h } from "./dom";
import type { MapFrame } from "./map_frame";
import { TILE } from "./source";

const KEPT = 500; // tiles
export interface Tile {
  values: Float32Array;
  rows: number;
  cols: number;
  picture: HTMLCanvasElement | null;
  painted: string;
}

export class MapTiles {
  failure = ""; // why the last tile could not be loaded
  stopped = false; // by Esc or a failure, until the next move
  private waiting = new Map<string, AbortController>();
  private kept = new Map<string, Tile>();

  constructor(
    private context: Context,
    private frame: MapFrame,
    private changed: () => void,
  ) {}

  get waits() {
    return this.waiting.size;
  }
  again() {
    this.stopped = false;
    this.failure = "";
  }
  // True: there was something to stop.
  stop() {
    this.stopped = this.waiting.size > 0;
    this.close();
  }
  close() {
    for (const asked of this.waiting.values()) asked.abort();
    this.waiting.clear();
  }

  nameOf(level: number, row: number, col: number): string {
    const { text, layer, head, pool } = this.context.state;
    return [text, layer, head, level, row, col, level ? pool : ""].join();
  }

  // A tile that is there; otherwise null, and it is asked for if `ask`.
  at(level: number, row: number, col: number, ask: boolean): Tile | null {
    const name = this.nameOf(level, row, col);
    const found = this.kept.get(name);
    if (found) {
      this.kept.delete(name);
      this.kept.set(name, found);
      return found;
    }
    if (ask && !this.stopped && !this.waiting.has(name)) void this.load(name, level, row, col);
    return null;
  }

  private async load(name: string, level: number, row: number, col: number) {
    const { source, state } = this.context;
    const [I, J] = this.frame.counts();
    const stop = new AbortController();
    this.waiting.set(name, stop);
    try {
      const values = await source.tile(
        place(this.context),
        level,
        row,
        col,
        state.pool as Pool,
        stop.signal,
      );
      const [rows, cols] = [
        [I, row],
        [J, col],
      ].map(([n, at]) => Math.min(TILE, Math.ceil(n / 2 ** level) - at * TILE));
      this.kept.set(name, { values, rows, cols, picture: null, painted: "" });
      if (this.kept.size > KEPT) this.kept.delete(this.kept.keys().next().value!);
    } catch (error) {
      if (!stop.signal.aborted) {
        this.stopped = true;
        this.failure = `Weights could not be loaded: ${(error as Error).message}`;
        this.context.tell(this.failure);
      }
    }
    if (this.waiting.get(name) === stop) this.waiting.delete(name);
    if (!stop.signal.aborted) this.changed();
  }

  // Stop asking for tiles that are not wanted any more.
  only(wanted: Set<string>) {
    for (const [name, stop] of this.waiting)
      if (!wanted.has(name)) {
        stop.abort();
        this.waiting.delete(name);
      }
  }

  // The value of the cell of a level that contains a pair; null: not loaded yet.
  valueAt(level: number, i: number, j: number): number | null {
    const [row, col] = [i, j].map((n) => Math.floor(n / 2 ** level));
    const tile = this.at(level, Math.floor(row / TILE), Math.floor(col / TILE), false);
    return tile ? tile.values[(row % TILE) * tile.cols + (col % TILE)] : null;
  }

  pictureOf(tile: Tile): HTMLCanvasElement {
    const { colors } = this.context;
    const look = `${colors.scale.kind}${colors.scale.floor}${colors.theme}`;
    if (tile.picture && tile.painted === look) return tile.picture;
    tile.painted = look;
    const pixels = Uint32Array.from(tile.values, (weight) => colors.cell(weight));
    tile.picture = drawCells(tile.picture ?? h("canvas"), tile.rows, tile.cols, pixels);
    return tile.picture;
  }
}
