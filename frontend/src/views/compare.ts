import { differences, heatmap } from "../colours";
import type { HeadMap, Layer, Stat } from "../data";
import { el, fill, line, select, statistics } from "../dom";
import type { Place, Shown, State, Store } from "../state";
import { label, percent } from "../tokens";
import * as W from "../words";
import { type Cell, mapCanvas, pictureOf } from "./map";
import { cellText, scale } from "./head";
import { labelText, STATS, statText } from "./overview";

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

/** A difference as it is printed: with its sign, unless nothing is left of it. */
export function signed(by: number, digits: number): string {
  const size = Math.abs(by).toFixed(digits);
  return `${Number(size) === 0 ? "" : by > 0 ? "+" : "−"}${size}`;
}

/** Two heads, of one recording or of two, side by side and as a difference. */
export function compareView(store: Store): Shown {
  const { say } = store, bar = el("div", { class: "bar" }), below = el("div", { class: "below" });
  const parts = (["A", "B", "D"] as const).map((name) => ({
    title: el("h2", {}), scale: el("div", {}), map: mapCanvas({
      says: (cell) => says(name, cell),
      choose: (cell) => {
        // the other text may be the longer one
        if (cell.query < store.layer.queries) store.set({ chosen: { side: "query", at: cell.query + store.layer.header.first } });
      },
    }),
  }));
  for (const { map } of parts) map.twins = parts.map((part) => part.map).filter((other) => other !== map);
  const element = el("div", { class: "compare-view" }, bar, el("div", { class: "three" }, ...parts.map(({ title, map, scale }) => el("section", {}, title, map.element, scale))), below);
  let shown = "";

  function sides(): [Place, Place] {
    const { state, data } = store, { recording, scene, layer } = state, a = { recording, scene, layer, head: state.heads[0] ?? 0 };
    if (state.against) return [a, state.against];
    if (data.recordings.length < 2) return [a, { ...a, head: (a.head + 1) % store.layer.heads.length }];
    const other = recording === 0 ? 1 : 0;
    return [a, fitted({ ...a, recording: other, scene: Math.min(scene, data.recordings[other]!.scenes.length - 1) })];
  }

  /** The same layer and head where they are there, else the last that are. */
  function fitted(pick: Place): Place {
    const { layers } = store.data.recordings[pick.recording]!.scenes[pick.scene]!, layer = Math.min(pick.layer, layers.length - 1);
    return { ...pick, layer, head: Math.min(pick.head, layers[layer]!.heads.length - 1) };
  }

  function layerOf(pick: Place): Layer { return store.data.recordings[pick.recording]!.scenes[pick.scene]!.layers[pick.layer]!; }

  function update(_: Set<keyof State>): void {
    const [a, b] = sides(), { colours } = store, key = JSON.stringify([a, b, store.state.language, colours.isDark]);
    if (key === shown) return;
    shown = key;
    drawBar(a, b);
    const [la, lb] = [layerOf(a), layerOf(b)], pa = pictureOf(la, [a.head], colours), pb = pictureOf(lb, [b.head], colours);
    const top = Math.max(pa.top, pb.top); // one scale for both, or they could not be compared
    const ma = la.map(a.head), mb = lb.map(b.head);
    const common = { top, colours, strips: [say(W.strip_entropy), say(W.strip_mass)] as const, keep: true };
    const show = (at: number, name: string, layer: Layer, picture: HTMLCanvasElement | null, head: number | null, about: string, ...scaled: (Node | null)[]) => {
      const part = parts[at]!;
      part.map.show({ ...common, layer, picture, head, labelled: `${name}: ${about}` });
      fill(part.title, `${name}  `, el("span", {}, about));
      part.title.title = part.title.textContent!;
      fill(part.scale, ...scaled);
    };
    const own = (at: number, name: string, pick: Place, layer: Layer, values: Float32Array | null, map: HeadMap | null) =>
      show(at, name, layer, values && map ? heatmap(values, map.rows, map.columns, top, colours.heat) : null, pick.head, nameOf(pick), scale(colours.heat, `${say(W.weight)} 0 %`, percent(top)));
    own(0, "A", a, la, pa.values, ma);
    own(1, "B", b, lb, pb.values, mb);
    let difference: HTMLCanvasElement | null = null, most = 0;
    if (pa.values && pb.values && ma && mb) {
      const other = resample(pb.values, mb.rows, mb.columns, ma.rows, ma.columns);
      const values = pa.values.map((value, at) => value - other[at]!);
      most = values.reduce((largest, value) => Math.max(largest, Math.abs(value)), 0);
      difference = differences(values, ma.rows, ma.columns, Math.max(1e-9, most), colours.difference);
    }
    // stretched to the largest difference, which may be next to nothing: the numbers say so
    const points = (by: number) => say(W.points, { n: most < 1e-4 ? "< 0.01" : signed(by * 100, most < 0.0995 ? 2 : 1) });
    show(2, say(W.difference), la, difference, null, say(W.difference_help), most ? scale(colours.difference, points(-most), points(most), 2) : null);
    const different = la.queries !== lb.queries || la.keys !== lb.keys;
    fill(below, different ? el("p", { class: "note" }, say(W.compare_sizes)) : null, el("div", { class: "tables" }, numbers(la, a, lb, b), mostChanged(a, b)));
  }

  function nameOf(pick: Place): string {
    const layer = layerOf(pick);
    const own = say(W.layer_head, { layer: layer.index, head: layer.heads[pick.head]! });
    return store.data.recordings.length > 1 ? `${own} · ${store.data.recordings[pick.recording]!.title}` : own;
  }

  function drawBar(a: Place, b: Place): void {
    const { recordings } = store.data;
    const scenes = recordings.flatMap((recording, r) => recording.scenes.map((scene, s) => [`${r},${s}`, `${recording.title}${recording.scenes.length > 1 ? ` ${scene.item + 1}` : ""}`] as const));
    const choose = (name: string, pick: Place, set: (pick: Place) => void) => {
      const list = (word: W.Two, options: (readonly [string, string])[], value: string | number, change: (value: string) => void) => options.length < 2 ? null : select(options, String(value), change, { "aria-label": `${name} ${say(word)}` });
      const layers = recordings[pick.recording]!.scenes[pick.scene]!.layers;
      return el("div", { class: "field" }, el("b", {}, name),
        list(W.recording, scenes, `${pick.recording},${pick.scene}`, (value) => {
          const [recording, scene] = value.split(",").map(Number);
          set(fitted({ ...pick, recording: recording!, scene: scene! }));
        }),
        list(W.layer, layers.map((layer, at) => [String(at), say(W.layer_n, { n: layer.index })]), pick.layer, (value) => set(fitted({ ...pick, layer: Number(value) }))),
        list(W.heads, layers[pick.layer]!.heads.map((head, at) => [String(at), say(W.head_n, { n: head })]), pick.head, (value) => set({ ...pick, head: Number(value) })));
    };
    fill(bar, choose("A", a, ({ head, ...pick }) => store.set({ ...pick, heads: [head], against: b })), choose("B", b, (pick) => store.set({ against: pick })), el("p", { class: "help" }, say(W.compare_help)));
  }

  function numbers(la: Layer, a: Place, lb: Layer, b: Place): HTMLElement {
    const ra = la.header.rows[a.head]!, rb = lb.header.rows[b.head]!;
    const change = (name: Stat) => {
      const [one, other] = [ra[name], rb[name]];
      if (one === null || other === null) return "–";
      const isPlain = name === "entropy" || name === "distance", by = signed(isPlain ? one - other : (one - other) * 100, isPlain ? 2 : 1);
      return isPlain ? by : say(W.points, { n: by });
    };
    return statistics(["A", "B", "A − B"], [line(say(W.name), labelText(store, ra.label), labelText(store, rb.label), ""),
      ...STATS.filter((name) => ra[name] !== null || rb[name] !== null).map((name) => line(say(W.STATS[name]), statText(name, ra[name]), statText(name, rb[name]), change(name)))]);
  }

  /** With two recordings of the same shape: the heads whose maps differ most. */
  function mostChanged(a: Place, b: Place): HTMLElement | null {
    if (a.recording === b.recording && a.scene === b.scene) return null;
    const layersOf = (pick: Place) => store.data.recordings[pick.recording]!.scenes[pick.scene]!.layers, left = layersOf(a), right = layersOf(b);
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
    return el("section", {}, el("h2", {}, say(W.most_changed)), el("ol", { class: "looks pairs" }, ...found.slice(0, 10).map(({ layer, head, by }) => el("li", { "data-weight": by }, el("button", {
      click: () => store.set({ layer, heads: [head], against: { ...b, layer, head } }),
    }, el("span", {}, say(W.layer_head, { layer: left[layer]!.index, head: left[layer]!.heads[head]! })), el("span", { class: "amount" }, percent(by)))))));
  }

  function says(name: "A" | "B" | "D", cell: Cell): (Node | string)[] {
    const [a, b] = sides(), pick = name === "B" ? b : a, layer = layerOf(pick), other = layerOf(b), text = cellText(store, layer, [pick.head], cell);
    return [el("bdi", {}, label(layer.queryToken(cell.query))), " → ", el("bdi", {}, label(layer.keyToken(cell.key))), el("br"),
      el("b", {}, name === "D" ? `A ${text} · B ${cell.query < other.queries && cell.key < other.keys ? cellText(store, other, [b.head], cell) : "–"}` : text)];
  }

  return { element, update };
}
