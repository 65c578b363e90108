import type { Data, Layer, Scene, Stat } from "./data";
import { type Palette } from "./colours";
import * as W from "./words";

export type View = "text" | "overview" | "head" | "compare" | "walk" | "cost";
export type Side = "query" | "key";
export interface Chosen { side: Side; at: number } // a place in the layer's query text or key text
export interface Place { recording: number; scene: number; layer: number; head: number }

export interface State {
  view: View; recording: number; scene: number; layer: number;
  heads: number[]; // indices among the layer's heads; none means the mean of all
  several: boolean;
  chosen: Chosen | null; hovered: Chosen | null;
  direction: "out" | "in" | "both"; columns: boolean | null; // null: as suits the layer
  sort: Stat | "layer"; descending: boolean; filter: string;
  against: Place | null;
  language: W.Language; theme: "auto" | "light" | "dark";
}

export interface Rectangle { row: number; rows: number; column: number; columns: number }
export type Detail = (layer: number, head: number, place: Rectangle) => Promise<Float32Array>;

/** All that the views without a recording need. */
export interface Teller { state: Pick<State, "view" | "language" | "theme" | "recording" | "scene">; colours: Palette; say: W.Say; set(change: Partial<Teller["state"]>): void }
export interface Shown { element: HTMLElement; update(changed: Set<keyof State>): void }

/** What is chosen in one view is chosen in all: they share this, and are told of every change. */
export class Store implements Teller {
  readonly #listeners = new Set<(changed: Set<keyof State>) => void>();
  colours!: Palette;
  detail: Detail | null = null; // exact weights of a rectangle, where a server can compute them

  constructor(readonly data: Data, public state: State) {}

  get recording() { return this.data.recordings[this.state.recording]!; }
  get scene(): Scene { return this.recording.scenes[this.state.scene]!; }
  get layer(): Layer { return this.scene.layers[this.state.layer]!; }
  /** The heads that are shown, by index: all of them when none is chosen. */
  get heads(): number[] {
    return this.state.heads.length ? this.state.heads : this.layer.heads.map((_, index) => index);
  }
  /** Whether tokens stand one under the other; two texts do, unless that was changed, so that no line crosses a word. */
  get inColumns(): boolean { return this.state.columns ?? this.layer.isCross; }
  /** What is shown, in words: one head of a layer, or the mean of some. */
  get title(): string {
    const { layer, heads, state } = this;
    return state.heads.length === 1 ? this.say(W.layer_head, { layer: layer.index, head: layer.heads[heads[0]!]! }) : this.say(W.layer_mean, { layer: layer.index, n: heads.length });
  }
  /** What is looked at now: the word under the pointer, else the one that was clicked. */
  get current(): Chosen | null { return this.state.hovered ?? this.state.chosen; }

  readonly say: W.Say = (two, values) => W.say(this.state.language, two, values);

  set(change: Partial<State>): void {
    const changed = new Set<keyof State>();
    const next = { ...this.state, ...change };
    if (change.view) next.hovered = null;
    for (const name of Object.keys(change) as (keyof State)[]) {
      if (JSON.stringify(next[name]) !== JSON.stringify(this.state[name])) changed.add(name);
    }
    if (!changed.size) return;
    const before = this.#layerOf(this.state), after = this.#layerOf(next);
    if (after && before !== after) {
      next.heads = next.heads.filter((head) => head < after.heads.length);
      if (!before || after.queryText !== before.queryText || after.keyText !== before.keyText) {
        const fits = next.chosen && next.chosen.at < (next.chosen.side === "query" ? after.queryText : after.keyText).length;
        if (!fits || after.isCross !== before?.isCross) next.chosen = null;
        next.hovered = null;
        changed.add("chosen").add("hovered");
      }
      changed.add("heads");
    }
    this.state = next;
    for (const listener of [...this.#listeners]) listener(changed);
  }

  listen(listener: (changed: Set<keyof State>) => void): () => void {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  #layerOf(state: State): Layer | undefined {
    return this.data.recordings[state.recording]?.scenes[state.scene]?.layers[state.layer];
  }

  /** The index of a place of the text among the layer's queries, and among its keys; -1 where it is neither. */
  asQuery(chosen: Chosen): number {
    const layer = this.layer;
    if (layer.isCross && chosen.side === "key") return -1;
    const query = chosen.at - layer.header.first;
    return query >= 0 && query < layer.queries ? query : -1;
  }
  asKey(chosen: Chosen): number {
    const layer = this.layer;
    if (layer.isCross && chosen.side === "query") return -1;
    return chosen.at >= 0 && chosen.at < layer.keys ? chosen.at : -1;
  }
}
