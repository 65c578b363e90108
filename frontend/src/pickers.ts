import { chip, el, refill, reveal, select } from "./dom";
import { headColour } from "./colours";
import type { Layer } from "./data";
import type { Shown, Store } from "./state";
import * as W from "./words";

/** Rows of buttons for the text, the layer and the heads; shared by the views that show one layer. */
export function pickers(store: Store): Shown {
  const element = el("div", { class: "pickers" });
  let shown = "";

  function update(): void {
    const { state } = store;
    element.hidden = state.view !== "text" && state.view !== "head";
    const key = JSON.stringify([state.recording, state.scene, state.layer, state.heads, state.several, state.language, store.colours.isDark]);
    if (element.hidden || key === shown) return;
    shown = key;
    refill(element, "data-pick", scenes(store), layers(store), heads(store), about(store));
    reveal(...element.querySelectorAll(".chips"));
  }
  return { element, update };
}

function scenes(store: Store): HTMLElement | null {
  const { recordings } = store.data;
  const choices = recordings.flatMap((recording, r) => recording.scenes.map((scene, s) => ({ recording, scene, r, s })));
  if (choices.length < 2) return null;
  const runs = new Set(store.recording.scenes.map((scene) => scene.run)).size > 1;
  const options = choices.map(({ recording, scene, r, s }) => [`${r},${s}`,
    (recordings.length > 1 ? `${recording.title}: ` : "") + store.say(runs ? W.item_run : W.item, { n: scene.item + 1, run: scene.run + 1 })] as const);
  return el("div", { class: "picker" }, el("span", { class: "name" }, store.say(W.choose_item)), select(options, `${store.state.recording},${store.state.scene}`, (value) => {
    const [recording, scene] = value.split(",").map(Number) as [number, number];
    store.set({ recording, scene, layer: Math.min(store.state.layer, recordings[recording]!.scenes[scene]!.layers.length - 1) });
  }, { "aria-label": store.say(W.choose_item), "data-pick": "scene" }));
}

/** What a group of layers is called where a model has several: by their kind, and where the path says so, their place. */
function kindOf(layer: Layer): W.Two {
  return W.KINDS[layer.isCross ? "cross" : /(?:^|\.)(encoder|decoder)/.exec(layer.header.path)?.[1] ?? "self"]!;
}

function layers(store: Store): HTMLElement {
  const all = store.scene.layers;
  const mixed = new Set(all.map((layer) => `${layer.header.kind}${layer.header.query_text}`)).size > 1;
  let before = "";
  const buttons = all.flatMap((layer, at) => {
    const group = mixed ? `${layer.header.kind}${layer.header.query_text}` : "";
    const title = group !== before ? [el("span", { class: "group" }, store.say(kindOf(layer)))] : [];
    before = group;
    return [...title, chip(String(layer.index), () => store.set({ layer: at }), at === store.state.layer,
      { class: "chip", "data-pick": `layer${at}`, "aria-label": store.say(W.layer_n, { n: layer.index }), title: layer.header.path })];
  });
  return el("div", { class: "picker", role: "group", "aria-label": store.say(W.layer) },
    el("span", { class: "name" }, store.say(W.layer)), el("div", { class: "chips" }, ...buttons));
}

function heads(store: Store): HTMLElement {
  const { layer, state } = store;
  const choose = (head: number, add: boolean) => {
    if (!add) return store.set({ heads: state.heads.length === 1 && state.heads[0] === head ? [] : [head] });
    const has = state.heads.includes(head);
    store.set({ heads: has ? state.heads.filter((one) => one !== head) : [...state.heads, head].sort((a, b) => a - b) });
  };
  const buttons = layer.heads.map((name, head) => {
    const button = chip(String(name), (event) => choose(head, state.several || event.shiftKey || event.ctrlKey || event.metaKey), state.heads.includes(head),
      { class: "chip head", "data-pick": `head${head}`, "aria-label": store.say(W.head_n, { n: name }) });
    button.style.setProperty("--own", headColour(store.colours, name));
    return button;
  });
  return el("div", { class: "picker", role: "group", "aria-label": store.say(W.heads) },
    el("span", { class: "name" }, store.say(W.heads)),
    el("div", { class: "chips" },
      chip(store.say(W.mean), () => store.set({ heads: [] }), !state.heads.length, { "data-pick": "mean" }),
      ...buttons,
      chip(`+ ${store.say(W.several)}`, () => store.set({ several: !state.several }), state.several, { class: "chip wide quiet", "data-pick": "several", title: store.say(W.several_help) })));
}

function about(store: Store): HTMLElement {
  const { layer, state } = store;
  const parts = [layer.header.path, store.say(W.SIGHTS[layer.header.sight])];
  if (state.heads.length === 1) {
    const label = layer.header.rows[state.heads[0]!]!.label;
    if (label) parts.push(`${store.say(W.head_n, { n: layer.heads[state.heads[0]!]! })}: ${store.say(W.LABELS[label]!)}`);
  }
  if (layer.header.generated !== null) parts.push(store.say(W.generated));
  return el("p", { class: "about" }, parts.join(" · "));
}
