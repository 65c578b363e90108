import { css, type Palette } from "../colours";
import { chip, el, fill, line, quoted, statistics } from "../dom";
import type { Shown, State, Store } from "../state";
import { label, percent } from "../tokens";
import * as W from "../words";
import { type Cell, mapCanvas, pictureOf } from "./map";
import { labelText, STATS, statText } from "./overview";
import type { Stat } from "../data";

/** What a cell of a map says: one weight where it is known, else the mean of the cell. */
export function cellText(store: Store, layer: Store["layer"], heads: number[], cell: Cell): string {
  const known = heads.map((head) => layer.weight(head, cell.query, cell.key));
  if (known.every((weight) => weight !== null)) return percent(known.reduce((sum, weight) => sum + weight!, 0) / heads.length);
  const map = layer.map(heads[0]!);
  if (!map) return store.say(W.cell_below);
  const within = (at: number, size: number, count: number) => Math.ceil(((at + 1) * count) / size) - 1;
  const row = within(cell.query, layer.queries, map.rows), column = within(cell.key, layer.keys, map.columns);
  const mean = heads.reduce((sum, head) => sum + layer.map(head)!.weight(row, column), 0) / heads.length;
  const span = (at: number, size: number, count: number) => Math.floor(((at + 1) * size) / count) - Math.floor((at * size) / count);
  const pairs = span(row, layer.queries, map.rows) * span(column, layer.keys, map.columns);
  return `${store.say(W.cell_below)}; ${store.say(W.cell_mean, { n: pairs, value: percent(mean) })}`;
}

/** What the colours say. They go with square roots, and along the scale numbers go evenly: what is in its middle is half. */
export function scale(shades: Palette["heat"], least: string, most: string, sides = 1): HTMLElement {
  const colours = el("i", {});
  const stops = [...Array(18).keys()].map((n) => {
    const root = sides * (n / 17 - 1) + 1; // 0 to 1, or −1 to 1 on two sides of nothing
    return `${css(shades[n * 15]!)} ${(100 * (root * Math.abs(root) + sides - 1)) / sides}%`;
  });
  colours.style.background = `linear-gradient(to right, ${stops.join()})`;
  return el("p", { class: "scale" }, least, colours, most);
}

/** One head's map with its tokens along both sides, from the whole to single weights. */
export function headView(store: Store): Shown {
  const { say } = store, panel = el("div", { class: "panel" }), bar = el("div", { class: "bar" });
  const status = el("p", { class: "exactness", role: "status" });
  let shown = "", stood = "";
  const map = mapCanvas({
    says, choose: (cell) => store.set({ chosen: { side: "query", at: cell.query + store.layer.header.first }, hovered: null }),
    tell: (how, top) => {
      fill(status, how === "wait" ? say(W.exact_wait) : how === "exact" ? say(W.exact_exact) : how);
      if (top) drawPanel(top);
    },
  });
  const element = el("div", { class: "head-view" }, bar, el("div", { class: "split" }, map.element, panel));

  function update(changed: Set<keyof State>): void {
    const { state, layer } = store;
    const { detail } = store, head = state.heads.length === 1 ? state.heads[0]! : null;
    const place = JSON.stringify([state.recording, state.scene, layer.queries, layer.keys]);
    const key = JSON.stringify([place, state.layer, state.heads, state.language, store.colours.isDark]);
    if (key !== shown || changed.has("theme")) {
      const { picture, top } = pictureOf(layer, store.heads, store.colours);
      map.show({
        layer, picture, top, head, colours: store.colours, strips: [say(W.strip_entropy), say(W.strip_mass)], keep: place === stood,
        labelled: head === null ? store.title : say(W.map_of, { layer: layer.index, head: layer.heads[head]! }),
        ask: detail && head !== null ? (asked) => detail(layer.index, layer.heads[head]!, asked) : null,
      });
      shown = key;
      stood = place;
      drawBar();
      drawPanel(top);
    }
    const chosen = store.state.chosen;
    map.mark(chosen ? { query: store.asQuery(chosen), key: -1 } : null);
  }

  function drawBar(): void {
    const button = (name: string, text: string, act: () => void) => chip(text, act, null, { "aria-label": name, title: name });
    fill(bar, el("div", { class: "chips" }, button(say(W.zoom_in), "+", () => map.zoom(0.6)), button(say(W.zoom_out), "−", () => map.zoom(1 / 0.6)), button(say(W.zoom_reset), say(W.zoom_reset), map.reset)),
      el("p", { class: "help" }, say(W.head_help)), status);
  }

  function drawPanel(top: number): void {
    const { layer, state } = store, heads = store.heads;
    const one = state.heads.length === 1;
    const mean = (name: Stat) => {
      const values = heads.map((head) => layer.header.rows[head]![name]).filter((value) => value !== null);
      return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
    };
    const rows = STATS.map((name) => [name, mean(name)] as const).filter(([, value]) => value !== null);
    fill(panel,
      el("h2", {}, store.title),
      el("p", { class: "who" }, one ? labelText(store, layer.header.rows[heads[0]!]!.label) : ""),
      statistics([], rows.map(([name, value]) => line(say(W.STATS[name]), name === "entropy" ? say(W.nats, { value: statText(name, value) }) : statText(name, value)))),
      layer.header.map ? scale(store.colours.heat, `${say(W.weight)} 0 %`, percent(top)) : el("p", { class: "empty" }, say(W.no_map)),
      el("p", { class: "note" }, ...quoted(say(layer.isExact ? W.exact_note : store.detail ? one ? W.zoom_exact : W.zoom_one : W.zoom_stored, { k: layer.header.top?.k ?? 0 }))));
  }

  function says(cell: Cell): (Node | string)[] {
    const { layer } = store, exact = map.exact(cell);
    return [el("bdi", {}, label(layer.queryToken(cell.query))), el("span", { class: "place" }, ` ${cell.query + layer.header.first}`), " → ",
      el("bdi", {}, label(layer.keyToken(cell.key))), el("span", { class: "place" }, ` ${cell.key}`), el("br"),
      el("b", {}, exact === null ? cellText(store, layer, store.heads, cell) : percent(exact))];
  }

  return { element, update };
}
