import { heatmap } from "../colours";
import type { HeadNumbers, Layer, Rule, Stat } from "../data";
import { el, fill } from "../dom";
import type { State, Store } from "../state";
import { percent } from "../tokens";
import type { Word } from "../words";

export const STATS: Stat[] = ["entropy", "spread", "max_weight", "first", "previous", "next", "same", "near", "distance", "duplicate", "induction"];

/** A statistic as it is printed. */
export function statText(name: Stat, value: number | null): string {
  if (value === null) return "–";
  if (name === "entropy") return value.toFixed(2);
  if (name === "distance") return value.toFixed(1);
  return percent(value);
}

/** Every head of every layer as a small map, with what it does. */
export class Overview {
  readonly element = el("div", { class: "overview" });
  private shown = "";

  constructor(private readonly store: Store) {}

  update(_: Set<keyof State>): void {
    const { store } = this, { state } = store;
    const key = JSON.stringify([state.recording, state.scene, state.sort, state.descending, state.filter, state.language, store.colours.isDark]);
    if (key !== this.shown) {
      this.shown = key;
      fill(this.element, this.controls(), this.grid(), this.rules());
    }
    for (const cell of this.element.querySelectorAll<HTMLElement>(".cell")) {
      const [layer, head] = cell.dataset.place!.split(",").map(Number);
      const isChosen = layer === state.layer && (state.heads.length === 0 || state.heads.includes(head!));
      cell.setAttribute("aria-current", String(isChosen && state.heads.length > 0));
    }
  }

  private controls(): HTMLElement {
    const { store } = this, { state } = store;
    const recorded = STATS.filter((name) => store.scene.layers.some((layer) => layer.header.rows.some((row) => row[name] !== null)));
    const sort = el("select", { "aria-label": store.say("sort"), change: (event: Event) => store.set({ sort: (event.target as HTMLSelectElement).value as State["sort"] }) },
      el("option", { value: "layer", selected: state.sort === "layer" }, store.say("by_layer")),
      ...recorded.map((name) => el("option", { value: name, selected: state.sort === name }, store.say(`stat_${name}`))));
    const counts = new Map<string, number>();
    for (const layer of store.scene.layers) for (const row of layer.header.rows) counts.set(row.label, (counts.get(row.label) ?? 0) + 1);
    const all = [...counts.values()].reduce((sum, n) => sum + n, 0);
    const chip = (value: string, name: string, count: number) => el("button", {
      class: "chip wide", "aria-pressed": String(state.filter === value), click: () => store.set({ filter: value }),
    }, `${name} `, el("span", { class: "count" }, String(count)));
    const labels = [...store.data.header.rules.map((rule) => rule.label), ""].filter((name) => counts.has(name));
    return el("div", { class: "bar" },
      el("p", { class: "help" }, store.say("overview_help")),
      el("div", { class: "chips", role: "group", "aria-label": store.say("filter") }, chip("*", store.say("all_heads"), all), ...labels.map((name) => chip(name, labelText(store, name), counts.get(name)!))),
      el("label", { class: "field" }, `${store.say("sort")} `, sort),
      state.sort === "layer" ? null : el("button", { class: "chip wide", click: () => store.set({ descending: !state.descending }) }, store.say(state.descending ? "descending" : "ascending")));
  }

  private grid(): HTMLElement {
    const { store } = this, { state } = store;
    const fits = (row: HeadNumbers) => state.filter === "*" || row.label === state.filter;
    if (state.sort === "layer") {
      const rows = store.scene.layers.map((layer, at) => {
        const cells = layer.heads.map((_, head) => (fits(layer.header.rows[head]!) ? this.cell(layer, at, head) : null)).filter((cell) => cell !== null);
        const row = el("div", { class: "cells" }, ...cells);
        row.style.setProperty("--columns", String(Math.ceil(layer.heads.length / Math.ceil(layer.heads.length / 12)))); // lines of equal length
        return cells.length ? el("div", { class: "layer-row" }, el("h2", { title: layer.header.path }, store.say("layer_n", { n: layer.index })), row) : null;
      });
      return el("div", { class: "grid" }, ...rows);
    }
    const stat = state.sort, sign = state.descending ? -1 : 1;
    const all = store.scene.layers.flatMap((layer, at) => layer.heads.map((_, head) => ({ layer, at, head, row: layer.header.rows[head]! }))).filter(({ row }) => fits(row));
    all.sort((a, b) => a.row[stat] === null ? 1 : b.row[stat] === null ? -1 : sign * (a.row[stat]! - b.row[stat]!));
    return el("div", { class: "grid flat" }, el("div", { class: "cells" }, ...all.map(({ layer, at, head }) => this.cell(layer, at, head, stat))));
  }

  private cell(layer: Layer, at: number, head: number, stat?: Stat): HTMLElement {
    const { store } = this, row = layer.header.rows[head]!, map = layer.map(head);
    const name = store.say("layer_head", { layer: layer.index, head: layer.heads[head]! });
    const numbers = (["entropy", "first", "max_weight"] as Stat[]).map((one) => `${store.say(`stat_${one}`)} ${statText(one, row[one])}`).join(", ");
    const picture = map ? heatmap(map.values(), map.rows, map.columns, map.top || 1, store.colours.heat) : el("canvas", {});
    if (map && layer.isExact) redraw(picture, layer, head, store);
    picture.setAttribute("aria-hidden", "true");
    return el("button", {
      class: "cell", "data-place": `${at},${head}`, title: `${name}: ${numbers}`,
      "aria-label": `${name}: ${labelText(store, row.label)}, ${numbers}`, click: () => store.set({ layer: at, heads: [head], view: "head" }),
    }, picture, el("span", { class: "caption" }, el("b", {}, stat ? `${layer.index}·${layer.heads[head]}` : String(layer.heads[head])),
      el("span", { class: "tag" }, stat ? statText(stat, row[stat]) : row.label ? labelText(store, row.label) : "")));
  }

  private rules(): HTMLElement {
    const { store } = this, { local, rules } = store.data.header;
    const line = (rule: Rule) => el("li", {}, el("b", {}, labelText(store, rule.label)), `: ${store.say(`rule_${rule.label}` as Word, { least: `${Math.round(rule.least * 100)} %`, near: local.near, keys: local.keys })}`);
    return el("details", { class: "rules" }, el("summary", {}, store.say("thresholds")), el("ul", {}, ...rules.map(line)), el("p", { class: "note" }, store.say("rules_note")));
  }
}

/** Exact maps have no largest value of their own in the file: the strongest colour is the head's largest weight. */
function redraw(canvas: HTMLCanvasElement, layer: Layer, head: number, store: Store): void {
  const map = layer.map(head)!, values = map.values();
  const top = values.reduce((most, value) => Math.max(most, value), 0);
  canvas.getContext("2d")!.drawImage(heatmap(values, map.rows, map.columns, top, store.colours.heat), 0, 0);
}

export function labelText(store: Store, name: string): string {
  return store.say(name ? (`label_${name}` as Word) : "label_none");
}
