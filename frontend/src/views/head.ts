import { css, type Palette } from "../colours";
import { el, fill } from "../dom";
import type { State, Store } from "../state";
import { label, percent } from "../tokens";
import { type Cell, MapCanvas, pictureOf, placed } from "./map";
import { labelText, STATS, statText } from "./overview";
import type { Stat } from "../data";

/** What a cell of a map says: one weight where it is known, else the mean of the cell. */
export function cellText(store: Store, layer: Store["layer"], heads: number[], cell: Cell): string {
  const known = heads.map((head) => layer.weight(head, cell.query, cell.key));
  if (known.every((weight) => weight !== null)) return percent(known.reduce((sum, weight) => sum + weight!, 0) / heads.length);
  const map = layer.map(heads[0]!);
  if (!map) return store.say("cell_below");
  const within = (at: number, size: number, count: number) => Math.ceil(((at + 1) * count) / size) - 1;
  const row = within(cell.query, layer.queries, map.rows), column = within(cell.key, layer.keys, map.columns);
  const mean = heads.reduce((sum, head) => sum + layer.map(head)!.weight(row, column), 0) / heads.length;
  const span = (at: number, size: number, count: number) => Math.floor(((at + 1) * size) / count) - Math.floor((at * size) / count);
  const pairs = span(row, layer.queries, map.rows) * span(column, layer.keys, map.columns);
  return `${store.say("cell_below")}; ${store.say("cell_mean", { n: pairs, value: percent(mean) })}`;
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
export class HeadView {
  readonly element: HTMLElement;
  private readonly map: MapCanvas;
  private readonly tip = el("div", { class: "tip", role: "status" });
  private readonly panel = el("div", { class: "panel" });
  private readonly bar = el("div", { class: "bar" });
  private readonly status = el("p", { class: "exactness", role: "status" });
  private shown = "";
  private placed = "";

  constructor(private readonly store: Store) {
    this.map = new MapCanvas({
      point: (cell, x, y) => this.point(cell, x, y),
      choose: (cell) => store.set({ chosen: { side: "query", at: cell.query + store.layer.header.first }, hovered: null }),
    });
    this.tip.hidden = true;
    this.map.element.append(this.tip);
    this.map.tell = (how, top) => {
      fill(this.status, how === "wait" || how === "exact" ? store.say(`exact_${how}`) : how);
      if (top) this.drawPanel(top);
    };
    this.element = el("div", { class: "head-view" }, this.bar, el("div", { class: "split" }, this.map.element, this.panel));
  }

  update(changed: Set<keyof State>): void {
    const { store } = this, { state, layer } = store;
    const { detail } = store;
    this.map.ask = detail && state.heads.length === 1 ? (asked) => detail(layer.index, layer.heads[state.heads[0]!]!, asked) : null;
    this.map.stripNames = [store.say("strip_entropy"), store.say("strip_mass")];
    const place = JSON.stringify([state.recording, state.scene, layer.queries, layer.keys]);
    const key = JSON.stringify([place, state.layer, state.heads, state.language, store.colours.isDark]);
    if (key !== this.shown || changed.has("theme")) {
      const { picture, top } = pictureOf(layer, store.heads, store.colours);
      const title = state.heads.length === 1 ? store.say("map_of", { layer: layer.index, head: layer.heads[state.heads[0]!]! }) : store.say("layer_mean", { layer: layer.index, n: store.heads.length });
      this.map.show(layer, picture, top, store.colours, title, state.heads.length === 1 ? state.heads[0]! : null, place === this.placed);
      this.shown = key;
      this.placed = place;
      this.drawBar();
      this.drawPanel(top);
    }
    const chosen = store.state.chosen;
    this.map.mark(chosen ? { query: store.asQuery(chosen), key: -1 } : null);
  }

  private drawBar(): void {
    const { store } = this;
    const button = (name: "zoom_in" | "zoom_out" | "zoom_reset", text: string, act: () => void) =>
      el("button", { class: "chip wide", "aria-label": store.say(name), title: store.say(name), click: act }, text);
    fill(this.bar, el("div", { class: "chips" }, button("zoom_in", "+", () => this.map.zoom(0.6)), button("zoom_out", "−", () => this.map.zoom(1 / 0.6)), button("zoom_reset", store.say("zoom_reset"), () => this.map.reset())),
      el("p", { class: "help" }, store.say("head_help")), this.status);
  }

  private drawPanel(top: number): void {
    const { store } = this, { layer, state } = store, heads = store.heads;
    const one = state.heads.length === 1;
    const mean = (name: Stat) => {
      const values = heads.map((head) => layer.header.rows[head]![name]).filter((value) => value !== null);
      return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
    };
    const rows = STATS.map((name) => [name, mean(name)] as const).filter(([, value]) => value !== null);
    fill(this.panel,
      el("h2", {}, one ? store.say("layer_head", { layer: layer.index, head: layer.heads[heads[0]!]! }) : store.say("layer_mean", { layer: layer.index, n: heads.length })),
      el("p", { class: "who" }, one ? labelText(store, layer.header.rows[heads[0]!]!.label) : ""),
      el("table", { class: "stats" }, el("tbody", {}, ...rows.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, store.say(`stat_${name}`)), el("td", {}, name === "entropy" ? store.say("nats", { value: statText(name, value) }) : statText(name, value)))))),
      layer.header.map ? scale(store.colours.heat, `${store.say("weight")} 0 %`, percent(top)) : el("p", { class: "empty" }, store.say("no_map")),
      el("p", { class: "note" }, store.say(layer.isExact ? "exact_note" : store.detail ? one ? "zoom_exact" : "zoom_one" : "zoom_stored", { k: layer.header.top?.k ?? 0 })));
  }

  private point(cell: Cell | null, x: number, y: number): void {
    const { store } = this, { layer } = store;
    this.tip.hidden = !cell;
    if (!cell) return;
    fill(this.tip, el("bdi", {}, label(layer.queryToken(cell.query))), el("span", { class: "place" }, ` ${cell.query + layer.header.first}`), " → ",
      el("bdi", {}, label(layer.keyToken(cell.key))), el("span", { class: "place" }, ` ${cell.key}`), el("br", {}), el("b", {}, this.map.exact(cell) === null ? cellText(store, layer, store.heads, cell) : percent(this.map.exact(cell)!)));
    placed(this.tip, this.map.element, x, y);
  }
}
