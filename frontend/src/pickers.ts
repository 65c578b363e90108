import { el, fill, reveal } from "./dom";
import { headColour } from "./colours";
import type { Layer } from "./data";
import type { Store } from "./state";
import type { Word } from "./words";

/** Rows of buttons for the text, the layer and the heads; shared by the views that show one layer. */
export function pickers(store: Store): { element: HTMLElement; update: () => void } {
  const element = el("div", { class: "pickers" });
  let shown = "";

  function update(): void {
    const { state } = store;
    const key = JSON.stringify([state.recording, state.scene, state.layer, state.heads, state.several, state.language, store.colours.isDark]);
    if (key === shown) return;
    const focus = (element.getRootNode() as Document | ShadowRoot).activeElement?.getAttribute("data-pick");
    shown = key;
    fill(element, scenes(store), layers(store), heads(store), about(store));
    if (focus) element.querySelector<HTMLElement>(`[data-pick="${focus}"]`)?.focus();
    reveal(...element.querySelectorAll(".chips"));
  }
  return { element, update };
}

function scenes(store: Store): HTMLElement | null {
  const { recordings } = store.data;
  const choices = recordings.flatMap((recording, r) => recording.scenes.map((scene, s) => ({ recording, scene, r, s })));
  if (choices.length < 2) return null;
  const runs = new Set(store.recording.scenes.map((scene) => scene.run)).size > 1;
  const select = el("select", {
    "aria-label": store.say("choose_item"), "data-pick": "scene",
    change: (event: Event) => {
      const [recording, scene] = (event.target as HTMLSelectElement).value.split(",").map(Number);
      store.set({ recording: recording!, scene: scene!, layer: Math.min(store.state.layer, recordings[recording!]!.scenes[scene!]!.layers.length - 1) });
    },
  }, ...choices.map(({ recording, scene, r, s }) => el("option", { value: `${r},${s}`, selected: r === store.state.recording && s === store.state.scene },
    (recordings.length > 1 ? `${recording.title}: ` : "") + (runs ? store.say("item_run", { n: scene.item + 1, run: scene.run + 1 }) : store.say("item", { n: scene.item + 1 })))));
  return el("div", { class: "picker" }, el("span", { class: "name" }, store.say("choose_item")), select);
}

/** What a group of layers is called where a model has several: by their kind, and where the path says so, their place. */
function kindOf(layer: Layer): Word {
  if (layer.isCross) return "kind_cross";
  const place = /(?:^|\.)(encoder|decoder)/.exec(layer.header.path)?.[1] ?? "self";
  return `kind_${place}` as Word;
}

function layers(store: Store): HTMLElement {
  const all = store.scene.layers;
  const mixed = new Set(all.map((layer) => `${layer.header.kind}${layer.header.query_text}`)).size > 1;
  let before = "";
  const buttons = all.flatMap((layer, at) => {
    const group = mixed ? `${layer.header.kind}${layer.header.query_text}` : "";
    const title = group !== before ? [el("span", { class: "group" }, store.say(kindOf(layer)))] : [];
    before = group;
    return [...title, el("button", {
      class: "chip", "data-pick": `layer${at}`, "aria-pressed": String(at === store.state.layer),
      "aria-label": store.say("layer_n", { n: layer.index }), title: layer.header.path, click: () => store.set({ layer: at }),
    }, String(layer.index))];
  });
  return el("div", { class: "picker", role: "group", "aria-label": store.say("layer") },
    el("span", { class: "name" }, store.say("layer")), el("div", { class: "chips" }, ...buttons));
}

function heads(store: Store): HTMLElement {
  const { layer, state } = store;
  const choose = (head: number, add: boolean) => {
    if (!add) return store.set({ heads: state.heads.length === 1 && state.heads[0] === head ? [] : [head] });
    const has = state.heads.includes(head);
    store.set({ heads: has ? state.heads.filter((one) => one !== head) : [...state.heads, head].sort((a, b) => a - b) });
  };
  const buttons = layer.heads.map((name, head) => {
    const button = el("button", {
      class: "chip head", "data-pick": `head${head}`, "aria-pressed": String(state.heads.includes(head)),
      "aria-label": store.say("head_n", { n: name }),
      click: (event: MouseEvent) => choose(head, state.several || event.shiftKey || event.ctrlKey || event.metaKey),
    }, String(name));
    button.style.setProperty("--own", headColour(store.colours, name));
    return button;
  });
  return el("div", { class: "picker", role: "group", "aria-label": store.say("heads") },
    el("span", { class: "name" }, store.say("heads")),
    el("div", { class: "chips" },
      el("button", { class: "chip wide", "data-pick": "mean", "aria-pressed": String(!state.heads.length), click: () => store.set({ heads: [] }) }, store.say("mean")),
      ...buttons,
      el("button", { class: "chip wide quiet", "data-pick": "several", "aria-pressed": String(state.several), title: store.say("several_help"), click: () => store.set({ several: !state.several }) }, `+ ${store.say("several")}`)));
}

function about(store: Store): HTMLElement {
  const { layer, state } = store;
  const sight = ({ self: "sight_self", causal: "sight_causal", cross: "sight_cross" } as const)[layer.header.sight];
  const parts = [layer.header.path, store.say(sight)];
  if (state.heads.length === 1) {
    const label = layer.header.rows[state.heads[0]!]!.label;
    if (label) parts.push(`${store.say("head_n", { n: layer.heads[state.heads[0]!]! })}: ${store.say(`label_${label}` as "label_first")}`);
  }
  if (layer.header.generated !== null) parts.push(store.say("generated"));
  return el("p", { class: "about" }, parts.join(" · "));
}
