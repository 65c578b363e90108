import { heatmap } from "../colours";
import type { HeadNumbers, Layer, Rule, Stat } from "../data";
import { chip, el, fill, select } from "../dom";
import type { Shown, State, Store } from "../state";
import { percent } from "../tokens";
import * as W from "../words";

export const STATS = Object.keys(W.STATS) as Stat[];

/** A statistic as it is printed. */
export function statText(name: Stat, value: number | null): string {
  if (value === null) return "–";
  if (name === "entropy") return value.toFixed(2);
  if (name === "distance") return value.toFixed(1);
  return percent(value);
}

/** Every head of every layer as a small map, with what it does. */
export function overview(store: Store): Shown {
  const { say } = store;
  const element = el("div", { class: "overview" });
  let shown = "";

  function update(_: Set<keyof State>): void {
    const { state } = store;
    const key = JSON.stringify([state.recording, state.scene, state.sort, state.descending, state.filter, state.language, store.colours.isDark]);
    if (key !== shown) {
      shown = key;
      fill(element, controls(), grid(), rules());
    }
    for (const cell of element.querySelectorAll<HTMLElement>(".cell")) {
      const [layer, head] = cell.dataset.place!.split(",").map(Number);
      const isChosen = layer === state.layer && (state.heads.length === 0 || state.heads.includes(head!));
      cell.setAttribute("aria-current", String(isChosen && state.heads.length > 0));
    }
  }

  function controls(): HTMLElement {
    const { state } = store;
    const recorded = STATS.filter((name) => store.scene.layers.some((layer) => layer.header.rows.some((row) => row[name] !== null)));
    const sort = select([["layer", say(W.by_layer)], ...recorded.map((name) => [name, say(W.STATS[name])] as const)], state.sort, (value) => store.set({ sort: value as State["sort"] }), { "aria-label": say(W.sort) });
    const counts = new Map<string, number>();
    for (const layer of store.scene.layers) for (const row of layer.header.rows) counts.set(row.label, (counts.get(row.label) ?? 0) + 1);
    const all = [...counts.values()].reduce((sum, n) => sum + n, 0);
    const kind = (value: string, name: string, count: number) => {
      const made = chip(`${name} `, () => store.set({ filter: value }), state.filter === value);
      made.append(el("span", { class: "count" }, String(count)));
      return made;
    };
    const labels = [...store.data.header.rules.map((rule) => rule.label), ""].filter((name) => counts.has(name));
    return el("div", { class: "bar" },
      el("p", { class: "help" }, say(W.overview_help)),
      el("div", { class: "chips", role: "group", "aria-label": say(W.filter) }, kind("*", say(W.all_heads), all), ...labels.map((name) => kind(name, labelText(store, name), counts.get(name)!))),
      el("label", { class: "field" }, `${say(W.sort)} `, sort),
      state.sort === "layer" ? null : chip(say(state.descending ? W.descending : W.ascending), () => store.set({ descending: !state.descending })));
  }

  function grid(): HTMLElement {
    const { state } = store;
    const fits = (row: HeadNumbers) => state.filter === "*" || row.label === state.filter;
    if (state.sort === "layer") {
      const rows = store.scene.layers.map((layer, at) => {
        const cells = layer.heads.map((_, head) => (fits(layer.header.rows[head]!) ? cell(layer, at, head) : null)).filter((cell) => cell !== null);
        const row = el("div", { class: "cells" }, ...cells);
        row.style.setProperty("--columns", String(Math.ceil(layer.heads.length / Math.ceil(layer.heads.length / 12)))); // lines of equal length
        return cells.length ? el("div", { class: "layer-row" }, el("h2", { title: layer.header.path }, say(W.layer_n, { n: layer.index })), row) : null;
      });
      return el("div", { class: "grid" }, ...rows);
    }
    const stat = state.sort, sign = state.descending ? -1 : 1;
    const all = store.scene.layers.flatMap((layer, at) => layer.heads.map((_, head) => ({ layer, at, head, row: layer.header.rows[head]! }))).filter(({ row }) => fits(row));
    all.sort((a, b) => a.row[stat] === null ? 1 : b.row[stat] === null ? -1 : sign * (a.row[stat]! - b.row[stat]!));
    return el("div", { class: "grid flat" }, el("div", { class: "cells" }, ...all.map(({ layer, at, head }) => cell(layer, at, head, stat))));
  }

  function cell(layer: Layer, at: number, head: number, stat?: Stat): HTMLElement {
    const row = layer.header.rows[head]!, map = layer.map(head);
    const name = say(W.layer_head, { layer: layer.index, head: layer.heads[head]! });
    const numbers = (["entropy", "first", "max_weight"] as Stat[]).map((one) => `${say(W.STATS[one])} ${statText(one, row[one])}`).join(", ");
    const picture = map ? heatmap(map.values(), map.rows, map.columns, map.top || 1, store.colours.heat) : el("canvas", {});
    if (map && layer.isExact) redraw(picture, layer, head, store);
    picture.setAttribute("aria-hidden", "true");
    return el("button", {
      class: "cell", "data-place": `${at},${head}`, title: `${name}: ${numbers}`,
      "aria-label": `${name}: ${labelText(store, row.label)}, ${numbers}`, click: () => store.set({ layer: at, heads: [head], view: "head" }),
    }, picture, el("span", { class: "caption" }, el("b", {}, stat ? `${layer.index}·${layer.heads[head]}` : String(layer.heads[head])),
      el("span", { class: "tag" }, stat ? statText(stat, row[stat]) : row.label ? labelText(store, row.label) : "")));
  }

  function rules(): HTMLElement {
    const { local, rules } = store.data.header;
    const line = (rule: Rule) => el("li", {}, el("b", {}, labelText(store, rule.label)), `: ${say(W.RULES[rule.label]!, { least: `${Math.round(rule.least * 100)} %`, near: local.near, keys: local.keys })}`);
    return el("details", { class: "rules" }, el("summary", {}, say(W.thresholds)), el("ul", {}, ...rules.map(line)), el("p", { class: "note" }, say(W.rules_note)));
  }

  return { element, update };
}

/** Exact maps have no largest value of their own in the file: the strongest colour is the head's largest weight. */
function redraw(canvas: HTMLCanvasElement, layer: Layer, head: number, store: Store): void {
  const map = layer.map(head)!, values = map.values();
  const top = values.reduce((most, value) => Math.max(most, value), 0);
  canvas.getContext("2d")!.drawImage(heatmap(values, map.rows, map.columns, top, store.colours.heat), 0, 0);
}

export function labelText(store: Store, name: string): string {
  return store.say(W.LABELS[name]!);
}
