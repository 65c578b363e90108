import { Data, fromBase64, inflate, matrixFrom } from "./data";
import { el, fill } from "./dom";
import { learn } from "./learn";
import { opening } from "./opening";
import { pickers } from "./pickers";
import { home as serverHome } from "./serve";
import { shell } from "./shell";
import { type Detail, type State, Store, type View } from "./state";
import style from "./style.css";
import { joined } from "./tokens";
import { compareView } from "./views/compare";
import { costView } from "./views/cost";
import { headView } from "./views/head";
import { overview } from "./views/overview";
import { textView } from "./views/text";
import { type Begin, walkView } from "./views/walk";
import * as W from "./words";

/** What a server adds: a way back, exact detail, and a memory of language and theme. */
export type Kept = Pick<State, "language" | "theme">;
export interface Around { back?: (kept: Kept) => void; detail?: Detail; language?: State["language"]; theme?: State["theme"] }

/** Put the page into an element. `home` is where it stands: a file of its own, or a cell of a notebook. */
export async function mount(target: HTMLElement, packed: Uint8Array, home: "file" | "cell" = "file", around: Around = {}): Promise<void> {
  dress(target);
  const data = new Data(await inflate(packed));
  const page = el("div", { class: `regard ${home}` });
  if (!data.recordings.some((recording) => recording.scenes.length)) {
    fill(page, el("p", { class: "empty" }, W.say(data.header.open?.lang === "zh" ? "zh" : "en", W.empty)));
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
  const title = () => {
    const { scene, recording } = store;
    return el("div", { class: "title" }, el("h1", {}, el("bdi", {}, recording.title)), el("p", {}, store.say(W.sizes, {
      layers: scene.layers.length, heads: scene.layers.reduce((sum, layer) => sum + layer.heads.length, 0), tokens: Math.max(...scene.layers.map((layer) => layer.keyText.length)),
    }).replace(/(?<!\S)1 (layer|head|token)s/g, "1 $1")));
  };
  const update = shell(store, page, {
    text: () => textView(store), overview: () => overview(store), head: () => headView(store), compare: () => compareView(store),
    walk: () => walkView(store, { text: spoken(store) }), cost: () => costView(store),
  }, title, back ? () => back(store.state) : null, pickers(store));
  store.listen(update);
  update(new Set<keyof State>(["view", "layer", "heads", "chosen", "theme", "language"]));
  performance.mark("regard-shown");
  prepare(store);
}

/** The text as one would say it: what a walk begins with. */
function spoken(store: Store): string {
  const text = joined(store.layer.keyText, 0, 14).replace(/\[(CLS|SEP|PAD|UNK)\]|<[^>]{0,20}>/g, " ").trim();
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
  }).catch((error: Error) => target.prepend(el("p", { class: "failed" }, W.say("en", W.failed, { why: error.message }))));
}

// In a file of its own the data stand next to this script.
const held = typeof document === "undefined" ? null : document.getElementById("regard-data");
const place = held && document.getElementById("regard");
if (held && place) {
  mount(place, fromBase64(held.textContent ?? ""), place.dataset.home === "cell" ? "cell" : "file").catch((error: Error) => {
    place.prepend(el("p", { class: "failed" }, W.say("en", W.failed, { why: error.message })));
  });
}
