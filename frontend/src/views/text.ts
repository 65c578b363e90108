import { headColour } from "../colours";
import type { Look } from "../data";
import { chip, clamp, el, fill, quoted, sharp } from "../dom";
import type { Chosen, Shown, State, Store } from "../state";
import { joined, label, percent } from "../tokens";
import * as W from "../words";
import { everyHead } from "./every";
import { type Shade, textPane, type Words } from "./pane";
import { picturePane } from "./picture";

const LINES = 48; // lines from one word
const LISTED = 12;
const MOST_SHADED = 4000;

/** The sentence: point at a word, see what it looks at and who looks at it. */
export function textView(store: Store): Shown {
  const { say } = store;
  const stage = el("div", { class: "stage" });
  const lines = el("canvas", { class: "lines", "aria-hidden": "true" });
  const panel = el("div", { class: "panel" });
  const live = el("p", { class: "hidden", "aria-live": "polite" });
  const bar = el("div", { class: "bar" });
  const every = everyHead(store);
  const element = el("div", { class: "text-view" }, bar, el("div", { class: "split" }, el("div", { class: "left" }, stage, every.element), panel), live);
  let panes: Words[] = [];
  let built = "";
  let frame = 0;
  let found: { out: Look[]; in: Look[] } = { out: [], in: [] };

  new ResizeObserver(later).observe(stage);

  function update(changed: Set<keyof State>): void {
    const key = JSON.stringify([store.state.recording, store.layer.header.query_text, store.layer.header.key_text, store.layer.isCross, store.inColumns, store.state.language]);
    if (key !== built) {
      built = key;
      build();
    }
    drawBar();
    look();
    if (changed.has("chosen") || changed.has("layer") || changed.has("heads") || changed.has("direction")) announce();
  }

  function build(): void {
    for (const pane of panes) pane.remove();
    const act = {
      hover: (hovered: Chosen | null) => store.set({ hovered }),
      choose: (chosen: Chosen) => {
        const same = store.state.chosen?.side === chosen.side && store.state.chosen.at === chosen.at;
        store.set({ chosen: same ? null : chosen, hovered: null });
      },
      moved: later, key: pressed,
    };
    const { layer } = store, columns = store.inColumns, two = layer.isCross || columns;
    const { picture } = store.data.header, pictured = picture && isPicture() && !columns;
    panes = pictured ? [picturePane(layer.keyText, picture, say(W.patches), act)] : [textPane("query", layer.isCross ? layer.queryText : layer.keyText, columns, say(W.text_label), act, layer.header.generated)];
    if (two) panes.push(textPane("key", layer.keyText, columns, say(W.source_label), act, layer.isCross ? null : layer.header.generated));
    const long = Math.max(layer.queryText.length, layer.keyText.length) > (columns ? 24 : 200) || pictured;
    stage.className = `stage${two ? " two" : ""}${columns ? " columns" : ""}${long ? " tall" : ""}${pictured ? " pictured" : ""}`;
    fill(stage, ...panes.map((pane) => pane.element), lines);
    const { chosen } = store.state;
    if (chosen) paneOf(chosen.side).scrollTo(chosen.at);
  }

  /** Whether the layer attends to the picture that was given. */
  function isPicture(): boolean {
    const { picture } = store.data.header, { layer } = store;
    return !!picture && !layer.isCross && layer.keyText.length === picture.first + picture.rows * picture.columns;
  }

  function drawBar(): void {
    const pictured = isPicture();
    const choice = (name: "out" | "in" | "both", word: W.Two) => chip(say(word), () => store.set({ direction: name }), store.state.direction === name);
    const layout = (columns: boolean) => chip(say(columns ? W.columns : pictured ? W.pictured : W.flowing), () => store.set({ columns }), store.inColumns === columns);
    const key = JSON.stringify([store.state.direction, panes.length, store.inColumns, store.state.language, pictured]);
    if (bar.dataset.key === key) return;
    bar.dataset.key = key;
    fill(bar,
      panes.length === 2 ? null : el("div", { class: "chips", role: "group", "aria-label": say(W.direction) }, choice("out", W.out), choice("in", W.incoming), choice("both", W.both)),
      el("div", { class: "chips", role: "group", "aria-label": say(W.layout) }, layout(false), layout(true)),
      el("p", { class: "help" }, say(panes.length === 2 ? W.columns_help : pictured ? W.patch_help : W.text_help)));
  }

  function paneOf(side: "query" | "key"): Words {
    return panes.find((pane) => pane.side === side) ?? panes[0]!;
  }

  /** What is shown of a token. Where two texts stand side by side, the left one looks and the right one is looked at. */
  function wants({ side }: Chosen): { out: boolean; in: boolean } {
    const { direction } = store.state;
    return panes.length === 2 ? { out: side === "query", in: side === "key" } : { out: direction !== "in", in: direction !== "out" };
  }

  /** Look up the weights of the current word, shade the text and list them. Nothing is rebuilt. */
  function look(): void {
    const { layer, colours } = store;
    const current = store.current, heads = store.heads;
    const query = current ? store.asQuery(current) : -1, key = current ? store.asKey(current) : -1;
    const wanted = current ? wants(current) : { out: false, in: false };
    found = { out: wanted.out && query >= 0 ? layer.out(heads, query) : [], in: wanted.in && key >= 0 ? layer.incoming(heads, key) : [] };
    const shades = { query: new Map<number, Shade>(), key: new Map<number, Shade>() };
    const first = layer.header.first;
    if (current) {
      for (const look of found.out.slice(0, MOST_SHADED)) shades[paneOf("key").side].set(look.at, shadeOf(look, heads, false));
      for (const look of found.in.slice(0, MOST_SHADED)) {
        const side = paneOf("query").side, at = look.at + first;
        const before = shades[side].get(at);
        if (!before || before.weight < look.weight) shades[side].set(at, shadeOf(look, heads, true));
      }
    } else received(heads, shades[paneOf("key").side]);
    for (const pane of panes) {
      pane.shade(shades[pane.side], pane.side === "query" && current && panes.length === 2 ? colours.from : colour());
      pane.mark(current && paneOf(current.side) === pane ? current.at : null);
    }
    drawPanel(current, query);
    every.update(query);
    later();
  }

  function colour(): string {
    return store.state.heads.length === 1 ? headColour(store.colours, store.layer.heads[store.state.heads[0]!]!) : store.colours.accent;
  }

  function shadeOf(look: Look, heads: number[], isIncoming: boolean): Shade {
    const several = store.state.heads.length > 1;
    if (!several) return { weight: look.weight, colour: isIncoming && store.state.direction === "both" ? store.colours.from : colour() };
    return { weight: look.weight, colour: store.colours.accent, parts: heads.map((head, slot) => ({ colour: headColour(store.colours, store.layer.heads[head]!), weight: look.byHead[slot]! })) };
  }

  /** Where nothing is chosen, the shade says how much each token receives. */
  function received(heads: number[], shades: Map<number, Shade>): void {
    const { layer } = store;
    const mass = massOf(heads);
    if (!mass) return;
    const most = Math.max(...mass, 1e-9), own = colour();
    const span = layer.keys / mass.length;
    for (let at = 0; at < layer.keys; at++) {
      const weight = mass[Math.min(mass.length - 1, Math.floor(at / span))]! / most;
      if (weight > 0.01) shades.set(at, { weight: weight * 0.7, colour: own });
    }
  }

  function massOf(heads: number[]): Float32Array | null {
    const { layer } = store;
    let total: Float32Array | null = null;
    for (const head of heads) {
      const strip = layer.strip("mass", head);
      if (!strip) return null;
      total ??= new Float32Array(strip.length);
      for (let at = 0; at < strip.length; at++) total[at]! += strip[at]! || 0;
    }
    return total;
  }

  function drawPanel(current: Chosen | null, query: number): void {
    const { layer } = store, heads = store.heads;
    const who = el("p", { class: "who" }, store.title);
    if (!current) return fill(panel, el("h2", {}, say(W.received)), who, mostReceived(heads), note());
    const token = current.side === "query" || !layer.isCross ? (layer.isCross ? layer.queryText : layer.keyText)[current.at]! : layer.keyText[current.at]!;
    const parts: (Node | null)[] = [
      el("h2", {}, el("bdi", { class: "word" }, label(token)), el("span", { class: "place" }, ` ${current.at}`)),
      who,
    ];
    const wanted = wants(current);
    if (wanted.out) parts.push(el("h3", {}, say(W.looks_at)), query < 0 ? el("p", { class: "empty" }, say(W.not_a_query)) : list(found.out, heads, true));
    if (wanted.in) parts.push(el("h3", {}, say(W.looked_at_by)), list(found.in, heads, false));
    parts.push(note());
    fill(panel, ...parts);
  }

  function list(looks: Look[], heads: number[], isOut: boolean): HTMLElement {
    const { layer } = store;
    if (!looks.length) return el("p", { class: "empty" }, say(isOut ? W.nothing_out : W.nothing_in));
    const top = looks[0]!.weight;
    const listed = looks.length === LISTED + 1 ? looks.length : LISTED; // the last one takes no more room than saying that there is one
    const rows = looks.slice(0, listed).map((look) => {
      const at = isOut ? look.at : look.at + layer.header.first;
      const token = isOut ? layer.keyToken(look.at) : layer.queryToken(look.at);
      const chosen: Chosen = { side: isOut && (layer.isCross || panes.length === 2) ? "key" : "query", at };
      return row(token, at, look.weight, top, chosen, store.state.heads.length > 1
        ? heads.map((head, slot) => ({ colour: headColour(store.colours, layer.heads[head]!), weight: look.byHead[slot]! / heads.length }))
        : [{ colour: !isOut && store.state.direction === "both" ? store.colours.from : colour(), weight: look.weight }]);
    });
    const rest = looks.length - listed;
    const more = rest > 0 ? [el("li", { class: "rest" }, say(W.and_more, { n: rest }))] : [];
    return el("ol", { class: isOut ? "looks out" : "looks in" }, ...rows, ...more);
  }

  function row(token: string, at: number, weight: number, top: number, chosen: Chosen | null, parts: { colour: string; weight: number }[], place = String(at)): HTMLElement {
    const bar = el("span", { class: "bar-of" }, ...parts.filter((part) => part.weight > 0).map((part) => {
      const piece = el("i", {});
      piece.style.width = `${(100 * part.weight) / (top || 1)}%`;
      piece.style.background = part.colour;
      return piece;
    }));
    const content = [el("bdi", {}, label(token)), el("span", { class: "place" }, place), bar, el("span", { class: "amount" }, percent(weight))];
    return el("li", { "data-at": at, "data-weight": weight }, chosen
      ? el("button", { click: () => { store.set({ chosen, hovered: null }); paneOf(chosen.side).scrollTo(chosen.at); } }, ...content)
      : el("div", { class: "plain" }, ...content));
  }

  function mostReceived(heads: number[]): HTMLElement | null {
    const { layer } = store;
    const mass = massOf(heads);
    if (!mass) return null;
    const total = mass.reduce((sum, value) => sum + value, 0) || 1;
    const order = [...mass.keys()].sort((a, b) => mass[b]! - mass[a]!).slice(0, LISTED);
    const runs = mass.length < layer.keys; // of a long text the file holds sums over neighbours, which are no single token's
    const edge = (at: number) => Math.floor((at * layer.keys) / mass.length);
    return el("div", {}, el("p", { class: "help" }, say(W.received_help), runs ? ` ${say(W.received_runs, { n: Math.round(layer.keys / mass.length) })}` : ""), el("h3", {}, say(W.most_received)),
      el("ol", { class: runs ? "looks runs" : "looks" }, ...order.map((at) => {
        const start = edge(at), end = edge(at + 1), many = end - start > 1;
        return row(many ? joined(layer.keyText, start, end) : layer.keyToken(start), start, mass[at]! / total, mass[order[0]!]! / total,
          { side: layer.isCross || panes.length === 2 ? "key" : "query", at: start }, [{ colour: colour(), weight: mass[at]! / total }], many ? `${start}–${end - 1}` : undefined);
      })));
  }

  function note(): HTMLElement {
    const { layer, recording } = store, top = layer.header.top;
    const notes: string[] = /^\[0\]$/.test(layer.keyText[0] ?? "") ? [say(W.no_words)] : [], isPart = !layer.isExact && top && top.floor > 0;
    if (layer.isExact) notes.push(say(W.exact_note));
    else if (isPart) notes.push(say(top.largest ? W.floor_note : W.floor_note_all, { k: top.k, floor: percent(top.floor) }));
    else if (top) notes.push(say(W.top_note, { k: top.k }));
    if (top && !layer.isExact) notes.push(say(top.weights.length > 1 ? W.exact_top : W.rounded_top));
    if (top && !layer.isExact && store.heads.length > 1) notes.push(say(W.mean_note));
    if (isPart) notes.push(say(W.serve_note));
    if (recording.allScenes > recording.scenes.length) notes.push(say(W.scenes_left, { n: recording.allScenes - recording.scenes.length }));
    notes.push(...recording.notes);
    return el("p", { class: "note" }, ...quoted(notes.join(" ")));
  }

  function announce(): void {
    const { layer } = store, chosen = store.state.chosen;
    if (!chosen) return;
    const { out } = wants(chosen), text = layer.isCross && chosen.side === "query" ? layer.queryText : layer.keyText;
    const list = found[out ? "out" : "in"].slice(0, 3).map(({ at, weight }) => `${label(out ? layer.keyToken(at) : layer.queryToken(at))} ${percent(weight)}`);
    live.textContent = list.length ? `${label(text[chosen.at] ?? "")} ${say(out ? W.looks_at : W.looked_at_by)} ${list.join(", ")}` : "";
  }

  function pressed(event: KeyboardEvent): void {
    const { state } = store;
    const side = state.chosen?.side ?? "query", pane = paneOf(side);
    const rtl = pane.scroller.firstElementChild!.getAttribute("dir") === "rtl" && !pane.isColumn;
    const sideways = rtl ? -1 : 1;
    const vertical = pane.isColumn;
    const steps: Record<string, number> = vertical ? { ArrowDown: 1, ArrowUp: -1 } : { ArrowRight: sideways, ArrowLeft: -sideways };
    if (pane.across) Object.assign(steps, { ArrowDown: pane.across, ArrowUp: -pane.across });
    if (event.key in steps && !event.altKey && !event.ctrlKey && !event.metaKey) {
      const at = clamp((state.chosen?.at ?? -1) + steps[event.key]!, 0, pane.tokens.length - 1);
      store.set({ chosen: { side, at }, hovered: null });
      pane.scrollTo(at);
    } else if (event.key === "Escape") store.set({ chosen: null, hovered: null });
    else if (!vertical && (event.key === "ArrowUp" || event.key === "ArrowDown")) {
      store.set({ layer: clamp(state.layer + (event.key === "ArrowUp" ? 1 : -1), 0, store.scene.layers.length - 1) });
    } else return;
    event.preventDefault();
  }

  function later(): void {
    if (frame) return;
    frame = requestAnimationFrame(() => {
      frame = 0;
      drawLines();
      for (const pane of panes) pane.drawStrip(store.colours.line);
    });
  }

  function drawLines(): void {
    const { layer } = store;
    const box = stage.getBoundingClientRect();
    const context = sharp(lines, box.width, box.height);
    const current = store.current;
    if (!context || !current) return;
    context.lineCap = "round";
    const both = store.state.direction === "both";
    const draw = (looks: Look[], isOut: boolean) => {
      const heads = store.heads, several = store.state.heads.length > 1;
      let outside = 0;
      for (const look of looks.slice(0, LINES)) {
        if (look.weight < 0.004) break;
        const at = isOut ? look.at : look.at + layer.header.first;
        const source = paneOf(current.side).spot(current.at, box);
        const target = paneOf(isOut ? "key" : "query").spot(at, box);
        if (!source || !target || source.where !== "inside") continue;
        if (target.where !== "inside" && ++outside > 6) continue;
        const from = isOut ? source : target, to = isOut ? target : source;
        const strands = several ? heads.map((head, slot) => ({ weight: look.byHead[slot]!, colour: headColour(store.colours, layer.heads[head]!) })).filter((s) => s.weight >= 0.01)
          : [{ weight: look.weight, colour: isOut || !both ? colour() : store.colours.from }];
        strands.forEach((strand, slot) => {
          context.strokeStyle = strand.colour;
          context.globalAlpha = clamp(0.18 + 0.72 * Math.sqrt(strand.weight), 0, 0.92) * (target.where === "inside" ? 1 : 0.5);
          context.lineWidth = 0.8 + 4.2 * Math.sqrt(strand.weight);
          context.setLineDash(isOut || panes.length === 2 ? [] : [context.lineWidth * 1.2, context.lineWidth * 1.8]);
          curve(context, from, to, panes.length === 2 ? 0 : box.width, (slot - (strands.length - 1) / 2) * 3);
        });
      }
      context.globalAlpha = 1;
    };
    draw(found.in, false);
    draw(found.out, true);
  }

  return { element, update };
}

interface Box { x: number; y: number; width: number; height: number }

/** A line between two tokens: an arc above one line of text of some width, a slope between lines, a thread between two texts. */
function curve(context: CanvasRenderingContext2D, from: Box, to: Box, wide: number, shift: number): void {
  const middle = (box: Box) => box.x + box.width / 2;
  context.beginPath();
  if (!wide) {
    const right = to.x > from.x;
    const x0 = right ? from.x + from.width : from.x, x1 = right ? to.x : to.x + to.width;
    const y0 = from.y + from.height / 2 + shift, y1 = to.y + to.height / 2 + shift, bend = (x1 - x0) / 2;
    context.moveTo(x0, y0);
    context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
  } else if (Math.abs(from.y - to.y) < 4) {
    const x0 = middle(from), x1 = middle(to), y = from.y + 3;
    if (x0 === x1) { // itself
      context.moveTo(x0 - 7, y);
      context.bezierCurveTo(x0 - 16 + shift, y - 24, x0 + 16 + shift, y - 24, x0 + 7, y);
    } else {
      const rise = (0.25 + (0.9 * Math.abs(x1 - x0)) / wide) * from.height + shift; // longer arcs are higher, so none hides another
      context.moveTo(x0, y);
      context.bezierCurveTo(x0 + (x1 - x0) * 0.12, y - rise * 1.3, x1 - (x1 - x0) * 0.12, y - rise * 1.3, x1, y);
    }
  } else {
    const down = to.y > from.y;
    const x0 = middle(from) + shift, x1 = middle(to) + shift;
    const y0 = down ? from.y + from.height - 2 : from.y + 2, y1 = down ? to.y + 2 : to.y + to.height - 2;
    const bend = (y1 - y0) * 0.5;
    context.moveTo(x0, y0);
    context.bezierCurveTo(x0, y0 + bend, x1, y1 - bend, x1, y1);
  }
  context.stroke();
}
