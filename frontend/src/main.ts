import { palette } from "./colours";
import { Data, fromBase64, inflate, matrixFrom } from "./data";
import { el, fill, reveal } from "./dom";
import { opening } from "./opening";
import { joined } from "./tokens";
import { pickers } from "./pickers";
import { type State, Store, type View } from "./state";
import style from "./style.css";
import { HeadView } from "./views/head";
import { Overview } from "./views/overview";
import { TextView } from "./views/text";
import { CompareView } from "./views/compare";
import { CostView } from "./views/cost";
import { type Begin, WalkView } from "./views/walk";
import type { Detail } from "./state";
import { learn } from "./learn";
import { home as serverHome } from "./serve";
import { say } from "./words";

/** What a server adds: a way back, exact detail, and a memory of language and theme. */
export type Kept = Pick<State, "language" | "theme">;
export interface Around { back?: (kept: Kept) => void; detail?: Detail; language?: State["language"]; theme?: State["theme"] }

interface Shown { element: HTMLElement; update(changed: Set<keyof State>): void }

/** Put the page into an element. `home` is where it stands: a file of its own, or a cell of a notebook. */
export async function mount(target: HTMLElement, packed: Uint8Array, home: "file" | "cell" = "file", around: Around = {}): Promise<void> {
  dress(target);
  const data = new Data(await inflate(packed));
  const page = el("div", { class: `regard ${home}` });
  if (!data.recordings.some((recording) => recording.scenes.length)) {
    fill(page, el("p", { class: "empty" }, say(data.header.open?.lang === "zh" ? "zh" : "en", "empty")));
    target.replaceChildren(page);
    return;
  }
  const begin = opening(data), open = data.header.open ?? {};
  const store = new Store(data, {
    view: (open.view as View) ?? "text", recording: 0, scene: 0, layer: begin.layer, heads: begin.heads, several: false,
    chosen: begin.at === null ? null : { side: "query", at: begin.at }, hovered: null, direction: "out", columns: null,
    sort: "layer", descending: true, filter: "*", against: null,
    language: around.language ?? (open.lang === "zh" ? "zh" : "en"), theme: around.theme ?? (open.theme as State["theme"]) ?? "auto",
  });
  target.replaceChildren(page);
  store.detail = (data.header.detail && around.detail) || null;
  run(store, page, around.back);
}

/** Give the page its style, once, wherever it stands. */
function dress(target: HTMLElement): void {
  const root = target.getRootNode();
  const scope = root instanceof ShadowRoot ? root : document;
  if (dressed.has(scope)) return;
  dressed.add(scope);
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(style);
  scope.adoptedStyleSheets = [...scope.adoptedStyleSheets, sheet];
}
const dressed = new WeakSet<Document | ShadowRoot>();

function run(store: Store, page: HTMLElement, back: Around["back"]): void {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const views: Partial<Record<View, Shown>> = {};
  const make: Record<string, () => Shown> = {
    text: () => new TextView(store), overview: () => new Overview(store), head: () => new HeadView(store), compare: () => new CompareView(store),
    walk: () => new WalkView(store, { text: spoken(store) }), cost: () => new CostView(store),
  };
  const header = el("header", {}), tabs = el("div", { class: "tabs", role: "tablist" }), main = el("main", {});
  const picks = pickers(store);
  fill(page, header, tabs, picks.element, main);
  let written = "";

  function paint(): void {
    const isDark = store.state.theme === "dark" || (store.state.theme === "auto" && dark.matches);
    page.dataset.theme = isDark ? "dark" : "light";
    store.colours = palette(page, isDark);
  }

  function head(): void {
    const key = JSON.stringify([store.state.view, store.state.language, store.state.recording, store.state.theme]);
    if (key === written) return;
    written = key;
    const { scene, state } = store;
    const tokens = Math.max(...scene.layers.map((layer) => layer.keyText.length));
    page.lang = state.language === "zh" ? "zh-CN" : "en";
    fill(header,
      back ? el("button", { class: "chip wide", click: () => back(store.state) }, `‹ ${store.say("back")}`) : null,
      el("div", { class: "title" }, el("h1", {}, el("bdi", {}, store.recording.title)), el("p", {}, store.say("sizes", {
        layers: scene.layers.length, heads: scene.layers.reduce((sum, layer) => sum + layer.heads.length, 0), tokens,
      }).replace(/(?<!\S)1 (layer|head|token)s/g, "1 $1"))),
      el("div", { class: "tools" },
        el("button", { class: "chip wide", lang: state.language === "zh" ? "en" : "zh-CN", click: () => store.set({ language: state.language === "zh" ? "en" : "zh" }) }, store.say("language")),
        el("button", { class: "chip", "aria-label": store.say("theme"), title: store.say("theme"), click: () => store.set({ theme: page.dataset.theme === "dark" ? "light" : "dark" }) }, page.dataset.theme === "dark" ? "☀" : "☾")));
    const focused = (page.getRootNode() as Document | ShadowRoot).activeElement?.getAttribute("data-view");
    tabs.setAttribute("aria-label", store.say("views"));
    fill(tabs, ...(Object.keys(make) as View[]).map((name) => el("button", {
      role: "tab", "data-view": name, "aria-selected": String(name === state.view), tabindex: name === state.view ? 0 : -1,
      click: () => store.set({ view: name, hovered: null }),
      keydown: (event: KeyboardEvent) => {
        const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
        if (!step) return;
        const all = Object.keys(make) as View[];
        store.set({ view: all[(all.indexOf(name) + step + all.length) % all.length]! });
        tabs.querySelector<HTMLElement>('[aria-selected="true"]')?.focus();
      },
    }, store.say(name as "text"))));
    if (focused) tabs.querySelector<HTMLElement>(`[data-view="${focused}"]`)?.focus();
    reveal(tabs);
  }

  function update(changed: Set<keyof State>): void {
    if (changed.has("theme")) paint();
    head();
    picks.element.hidden = store.state.view !== "text" && store.state.view !== "head";
    if (!picks.element.hidden) picks.update();
    const view = (views[store.state.view] ??= make[store.state.view]!());
    if (main.firstElementChild !== view.element) main.replaceChildren(view.element);
    view.update(changed);
  }

  const everything = new Set<keyof State>(["view", "layer", "heads", "chosen", "theme", "language"]);
  dark.addEventListener("change", () => update(everything));
  store.listen(update);
  update(everything);
  performance.mark("regard-shown");
  prepare(store);
}

/** The text as one would say it: what a walk begins with. */
function spoken(store: Store): string {
  const text = joined(store.layer.keyText, 0, 14).replace(/\[(CLS|SEP|PAD)\]|<[^>]{0,20}>/g, " ").trim();
  return /\p{L}/u.test(text) ? text : "The cat sat on the mat.";
}

/** Index every head while nothing else happens, so that the first click finds it done. */
function prepare(store: Store): void {
  const idle = window.requestIdleCallback ?? ((act: () => void) => setTimeout(act, 30));
  const waiting = store.scene.layers.flatMap((layer) => layer.isExact ? [] : layer.heads.map((_, head) => () => layer.top(head)));
  const some = () => {
    const until = performance.now() + 6;
    while (waiting.length && performance.now() < until) waiting.shift()!();
    if (waiting.length) idle(some);
  };
  idle(some);
}

/** What anywidget calls with a notebook's cell. */
function render({ model, el: cell }: { model: { get(name: string): unknown }; el: HTMLElement }): void {
  const shadow = cell.attachShadow({ mode: "open" }), place = el("div", {});
  // notebooks listen to single keys, and do not see that a field inside the shadow root has the focus: "dd" would delete the cell
  cell.dataset.lmSuppressShortcuts = "true";
  place.addEventListener("keydown", (event) => event.stopPropagation());
  shadow.append(place);
  const given = model.get("data") as DataView;
  // the notebook's own theme, where it says which: JupyterLab and VS Code do
  const { body } = document, isDark = body.dataset.jpThemeLight === "false" || body.classList.contains("vscode-dark");
  const theme = isDark ? "dark" : body.dataset.jpThemeLight || body.classList.contains("vscode-light") ? "light" : "auto";
  mount(place, new Uint8Array(given.buffer, given.byteOffset, given.byteLength), "cell", { theme }).catch((error: Error) => { place.textContent = String(error.message); });
}

export default { render };

const server = typeof document === "undefined" ? null : document.getElementById("regard-server");
if (server) {
  dress(server);
  serverHome(server, (packed, around) => mount(server, packed, "file", around), (view, around) => learn(server, {}, view, around));
}

// A walk in a file of its own: no recording, only what it begins with.
const walked = typeof document === "undefined" ? null : document.getElementById("regard-walk");
if (walked) {
  const target = document.getElementById("regard")!;
  dress(target);
  inflate(fromBase64(walked.textContent ?? "")).then((bytes) => {
    const begin = JSON.parse(new TextDecoder().decode(bytes), (_, value) => matrixFrom(value)) as Begin;
    learn(target, begin, "walk", { language: begin.lang === "zh" ? "zh" : "en" });
  }).catch((error: Error) => target.prepend(el("p", { class: "failed" }, say("en", "failed", { why: error.message }))));
}

// In a file of its own the data stand next to this script.
const held = typeof document === "undefined" ? null : document.getElementById("regard-data");
const place = held && document.getElementById("regard");
if (held && place) {
  mount(place, fromBase64(held.textContent ?? ""), place.dataset.home === "cell" ? "cell" : "file").catch((error: Error) => {
    place.prepend(el("p", { class: "failed" }, say("en", "failed", { why: error.message })));
  });
}
