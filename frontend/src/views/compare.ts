import { differences, heatmap } from "../colours";
import type { Layer, Stat } from "../data";
import { el, fill } from "../dom";
import type { Pick, State, Store } from "../state";
import { label, percent } from "../tokens";
import { type Cell, MapCanvas, pictureOf, placed } from "./map";
import { cellText, scale } from "./head";
import { labelText, statText } from "./overview";

const STATS: Stat[] = ["entropy", "max_weight", "first", "previous", "same", "near", "distance", "induction"];

/** Values on a common grid, so that two maps can be subtracted: each cell takes what lies at its middle. */
export function resample(values: Float32Array, rows: number, columns: number, toRows: number, toColumns: number): Float32Array {
  if (rows === toRows && columns === toColumns) return values;
  const found = new Float32Array(toRows * toColumns);
  for (let row = 0; row < toRows; row++) for (let column = 0; column < toColumns; column++) {
    found[row * toColumns + column] = values[Math.floor(((row + 0.5) * rows) / toRows) * columns + Math.floor(((column + 0.5) * columns) / toColumns)]!;
  }
  return found;
}

/** Half the sum of absolute differences, averaged over the rows: 0 for equal heads, 1 for heads that share nothing. */
export function apart(a: Float32Array, b: Float32Array, rows: number, keysPerCell: number): number {
  let sum = 0;
  for (let at = 0; at < a.length; at++) sum += Math.abs(a[at]! - b[at]!);
  return (sum * keysPerCell) / (2 * rows);
}

/** Two heads, of one recording or of two, side by side and as a difference. */
export class CompareView {
  readonly element = el("div", { class: "compare-view" });
  private readonly bar = el("div", { class: "bar" });
  private readonly below = el("div", { class: "below" });
  private readonly maps: { a: MapCanvas; b: MapCanvas; d: MapCanvas };
  private readonly tips: Record<"a" | "b" | "d", HTMLElement>;
  private readonly titles = { a: el("h2", {}), b: el("h2", {}), d: el("h2", {}) };
  private readonly scales = { a: el("div", {}), b: el("div", {}), d: el("div", {}) };
  private shown = "";

  constructor(private readonly store: Store) {
    this.tips = { a: tip(), b: tip(), d: tip() };
    const make = (name: "a" | "b" | "d") => new MapCanvas({
      point: (cell, x, y) => this.point(name, cell, x, y),
      choose: (cell) => {
        // the other text may be the longer one
        if (cell.query < store.layer.queries) store.set({ chosen: { side: "query", at: cell.query + store.layer.header.first } });
      },
    });
    this.maps = { a: make("a"), b: make("b"), d: make("d") };
    const all = Object.values(this.maps);
    for (const map of all) map.twin = all.filter((other) => other !== map);
    for (const name of ["a", "b", "d"] as const) this.maps[name].element.append(this.tips[name]);
    fill(this.element, this.bar, el("div", { class: "three" }, ...(["a", "b", "d"] as const).map((name) => el("section", {}, this.titles[name], this.maps[name].element, this.scales[name]))), this.below);
  }

  private get a(): Pick {
    const { state } = this.store;
    return { recording: state.recording, scene: state.scene, layer: state.layer, head: state.heads[0] ?? 0 };
  }

  private get b(): Pick {
    if (this.store.state.against) return this.store.state.against;
    const { a, store } = this;
    if (store.data.recordings.length > 1) {
      const recording = a.recording === 0 ? 1 : 0;
      return this.fitted({ ...a, recording, scene: Math.min(a.scene, store.data.recordings[recording]!.scenes.length - 1) });
    }
    return { ...a, head: (a.head + 1) % store.layer.heads.length };
  }

  /** The same layer and head where they are there, else the last that are. */
  private fitted(pick: Pick): Pick {
    const { layers } = this.store.data.recordings[pick.recording]!.scenes[pick.scene]!, layer = Math.min(pick.layer, layers.length - 1);
    return { ...pick, layer, head: Math.min(pick.head, layers[layer]!.heads.length - 1) };
  }

  private layerOf(pick: Pick): Layer { return this.store.data.recordings[pick.recording]!.scenes[pick.scene]!.layers[pick.layer]!; }

  update(_: Set<keyof State>): void {
    const { store, a, b } = this;
    const key = JSON.stringify([a, b, store.state.language, store.colours.isDark]);
    if (key === this.shown) return;
    this.shown = key;
    this.drawBar();
    for (const map of Object.values(this.maps)) map.stripNames = [store.say("strip_entropy"), store.say("strip_mass")];
    const la = this.layerOf(a), lb = this.layerOf(b);
    const pa = pictureOf(la, [a.head], store.colours), pb = pictureOf(lb, [b.head], store.colours);
    const top = Math.max(pa.top, pb.top); // one scale for both, or they could not be compared
    const ma = la.map(a.head), mb = lb.map(b.head);
    this.maps.a.show(la, pa.values && ma ? heatmap(pa.values, ma.rows, ma.columns, top, store.colours.heat) : null, top, store.colours, `A: ${this.name(a)}`, a.head, true);
    this.maps.b.show(lb, pb.values && mb ? heatmap(pb.values, mb.rows, mb.columns, top, store.colours.heat) : null, top, store.colours, `B: ${this.name(b)}`, b.head, true);
    for (const name of ["a", "b"] as const) fill(this.scales[name], scale(store.colours.heat, `${store.say("weight")} 0 %`, percent(top)));
    let difference: HTMLCanvasElement | null = null, most = 0;
    if (pa.values && pb.values && ma && mb) {
      const other = resample(pb.values, mb.rows, mb.columns, ma.rows, ma.columns);
      const values = pa.values.map((value, at) => value - other[at]!);
      most = values.reduce((largest, value) => Math.max(largest, Math.abs(value)), 0);
      difference = differences(values, ma.rows, ma.columns, Math.max(1e-9, most), store.colours.difference);
    }
    // stretched to the largest difference, which may be next to nothing: the numbers say so
    const [minus, plus] = most < 1e-4 ? ["", ""] : ["−", "+"];
    fill(this.scales.d, most ? scale(store.colours.difference, minus + percent(most), plus + percent(most), 2) : null);
    this.maps.d.show(la, difference, top, store.colours, store.say("difference"), null, true);
    fill(this.titles.a, "A  ", el("span", {}, this.name(a)));
    fill(this.titles.b, "B  ", el("span", {}, this.name(b)));
    for (const title of Object.values(this.titles)) title.title = title.textContent ?? "";
    fill(this.titles.d, `${store.say("difference")}  `, el("span", {}, store.say("difference_help")));
    const different = la.queries !== lb.queries || la.keys !== lb.keys;
    fill(this.below, different ? el("p", { class: "note" }, store.say("compare_sizes")) : null, el("div", { class: "tables" }, this.numbers(la, a, lb, b), this.most()));
  }

  private name(pick: Pick): string {
    const layer = this.layerOf(pick);
    const own = this.store.say("layer_head", { layer: layer.index, head: layer.heads[pick.head]! });
    return this.store.data.recordings.length > 1 ? `${own} · ${this.store.data.recordings[pick.recording]!.title}` : own;
  }

  private drawBar(): void {
    const { store } = this;
    const choose = (name: string, pick: Pick, set: (pick: Pick) => void) => {
      const { recordings } = store.data;
      const scenes = recordings.flatMap((recording, r) => recording.scenes.map((scene, s) => ({ recording, r, scene, s })));
      const list = (word: "recording" | "layer" | "heads", options: [string, string][], value: string, change: (value: string) => void) => options.length < 2 ? null
        : el("select", { "aria-label": `${name} ${store.say(word)}`, change: (event: Event) => change((event.target as HTMLSelectElement).value) },
          ...options.map(([key, text]) => el("option", { value: key, selected: key === value }, text)));
      const layers = recordings[pick.recording]!.scenes[pick.scene]!.layers;
      return el("div", { class: "field" }, el("b", {}, name),
        list("recording", scenes.map(({ recording, r, scene, s }) => [`${r},${s}`, `${recording.title}${recording.scenes.length > 1 ? ` ${scene.item + 1}` : ""}`]), `${pick.recording},${pick.scene}`, (value) => {
          const [recording, scene] = value.split(",").map(Number);
          set(this.fitted({ ...pick, recording: recording!, scene: scene! }));
        }),
        list("layer", layers.map((layer, at) => [String(at), store.say("layer_n", { n: layer.index })]), String(pick.layer), (value) => set(this.fitted({ ...pick, layer: Number(value) }))),
        list("heads", layers[pick.layer]!.heads.map((head, at) => [String(at), store.say("head_n", { n: head })]), String(pick.head), (value) => set({ ...pick, head: Number(value) })));
    };
    const { a, b } = this;
    fill(this.bar, choose("A", a, (pick) => store.set({ recording: pick.recording, scene: pick.scene, layer: pick.layer, heads: [pick.head], against: b })),
      choose("B", b, (pick) => store.set({ against: pick })), el("p", { class: "help" }, store.say("compare_help")));
  }

  private numbers(la: Layer, a: Pick, lb: Layer, b: Pick): HTMLElement {
    const { store } = this, ra = la.header.rows[a.head]!, rb = lb.header.rows[b.head]!;
    const change = (name: Stat) => {
      const [one, other] = [ra[name], rb[name]];
      if (one === null || other === null) return "–";
      const by = one - other, plain = name === "entropy" || name === "distance";
      const size = plain ? Math.abs(by).toFixed(2) : (Math.abs(by) * 100).toFixed(1);
      return `${Number(size) === 0 ? "" : by > 0 ? "+" : "−"}${size}${plain ? "" : " %"}`;
    };
    return el("table", { class: "stats" }, el("thead", {}, el("tr", {}, el("td", {}), el("th", { scope: "col" }, "A"), el("th", { scope: "col" }, "B"), el("th", { scope: "col" }, "A − B"))),
      el("tbody", {}, el("tr", {}, el("td", {}), el("td", {}, labelText(store, ra.label)), el("td", {}, labelText(store, rb.label)), el("td", {})),
        ...STATS.filter((name) => ra[name] !== null || rb[name] !== null).map((name) => el("tr", {}, el("th", { scope: "row" }, store.say(`stat_${name}`)), el("td", {}, statText(name, ra[name])), el("td", {}, statText(name, rb[name])), el("td", {}, change(name))))));
  }

  /** With two recordings of the same shape: the heads whose maps differ most. */
  private most(): HTMLElement | null {
    const { store, a, b } = this;
    if (a.recording === b.recording && a.scene === b.scene) return null;
    const left = store.data.recordings[a.recording]!.scenes[a.scene]!.layers, right = store.data.recordings[b.recording]!.scenes[b.scene]!.layers;
    const found: { layer: number; head: number; by: number }[] = [];
    left.forEach((layer, at) => {
      const other = right[at];
      if (!other || other.queries !== layer.queries || other.keys !== layer.keys) return;
      layer.heads.forEach((_, head) => {
        const one = layer.map(head), two = head < other.heads.length ? other.map(head) : null;
        if (one && two && one.rows === two.rows && one.columns === two.columns) found.push({ layer: at, head, by: apart(one.values(), two.values(), one.rows, layer.keys / one.columns) });
      });
    });
    if (!found.length) return null;
    found.sort((x, y) => y.by - x.by);
    return el("section", {}, el("h2", {}, store.say("most_changed")), el("ol", { class: "looks pairs" }, ...found.slice(0, 10).map(({ layer, head, by }) => el("li", { "data-weight": by }, el("button", {
      click: () => store.set({ layer, heads: [head], against: { ...b, layer, head } }),
    }, el("span", {}, store.say("layer_head", { layer: left[layer]!.index, head: left[layer]!.heads[head]! })), el("span", { class: "amount" }, percent(by)))))));
  }

  private point(name: "a" | "b" | "d", cell: Cell | null, x: number, y: number): void {
    const tipped = this.tips[name];
    tipped.hidden = !cell;
    if (!cell) return;
    const { store, a, b } = this, pick = name === "b" ? b : a, layer = this.layerOf(pick);
    const says = name === "d" ? `A ${cellText(store, layer, [a.head], cell)} · B ${cell.query < this.layerOf(b).queries && cell.key < this.layerOf(b).keys ? cellText(store, this.layerOf(b), [b.head], cell) : "–"}` : cellText(store, layer, [pick.head], cell);
    fill(tipped, el("bdi", {}, label(layer.queryToken(cell.query))), " → ", el("bdi", {}, label(layer.keyToken(cell.key))), el("br", {}), el("b", {}, says));
    placed(tipped, this.maps[name].element, x, y);
  }
}

function tip(): HTMLElement {
  const made = el("div", { class: "tip", role: "status" });
  made.hidden = true;
  return made;
}
