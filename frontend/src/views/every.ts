import type { Layer, Look } from "../data";
import { el, fill, reveal } from "../dom";
import type { Store } from "../state";
import { label, percent } from "../tokens";
import * as W from "../words";

/** Layers × heads: the token that each head looks at most, from the word that is chosen. */
export function everyHead(store: Store): { element: HTMLElement; update(query: number): void } {
  const element = el("section", { class: "every" });
  const title = el("h2", {});
  let cells: { layer: Layer; at: number; head: number; button: HTMLButtonElement }[] = [];
  let built = "";
  let revealed = "";

  function update(query: number): void {
    const key = JSON.stringify([store.state.recording, store.state.scene, store.layer.header.query_text, store.layer.header.kind]);
    if (key !== built) {
      built = key;
      build();
    }
    // without a word the grid stays, empty: a layout that changed under the pointer would make it miss
    const [before, after] = store.say(W.every, { word: "\u0000" }).split("\u0000");
    if (query < 0) fill(title, store.say(W.every_none));
    else fill(title, before ?? "", el("bdi", {}, label(store.layer.queryToken(query))), after ?? "");
    const place = query + store.layer.header.first;
    for (const { layer, at, head, button } of cells) {
      const own = place - layer.header.first;
      const best: Look | undefined = query >= 0 && own >= 0 && own < layer.queries ? layer.out([head], own)[0] : undefined;
      button.textContent = best ? label(layer.keyToken(best.at), 12) : "·";
      const rests = best?.at === 0 && !layer.isCross; // on the first token, as a head does that has nothing to look for
      button.style.background = best && !rests ? `color-mix(in srgb, var(--accent) calc(var(--most) * ${Math.sqrt(best.weight).toFixed(3)}), var(--card))` : "";
      button.classList.toggle("resting", rests);
      const says = `${store.say(W.layer_head, { layer: layer.index, head: layer.heads[head]! })}: ${best ? `${label(layer.keyToken(best.at))} ${percent(best.weight)}` : "–"}`;
      button.title = says;
      button.setAttribute("aria-label", says);
      button.setAttribute("aria-pressed", String(at === store.state.layer && store.state.heads.includes(head)));
    }
    const chosen = key + store.state.layer + store.state.heads;
    if (chosen !== revealed) reveal(element.lastElementChild);
    revealed = chosen;
  }

  function build(): void {
    const layers = store.scene.layers.map((layer, at) => ({ layer, at })).filter(({ layer }) => layer.header.query_text === store.layer.header.query_text && layer.header.kind === store.layer.header.kind);
    const most = Math.max(...layers.map(({ layer }) => layer.heads.length));
    const grid = el("div", { class: "every-grid" });
    grid.style.gridTemplateColumns = `max-content repeat(${most}, minmax(3.1rem, 1fr))`;
    grid.append(el("span", { class: "name corner" }), ...Array.from({ length: most }, (_, head) => el("span", { class: "name top" }, String(layers[0]!.layer.heads[head] ?? head))));
    cells = [];
    for (const { layer, at } of layers) {
      grid.append(el("span", { class: "name" }, String(layer.index)));
      for (let head = 0; head < most; head++) {
        if (head >= layer.heads.length) { grid.append(el("span", {})); continue; }
        const button = el("button", { click: () => store.set({ layer: at, heads: [head] }) });
        cells.push({ layer, at, head, button });
        grid.append(button);
      }
    }
    fill(element, title, grid);
  }

  return { element, update };
}
