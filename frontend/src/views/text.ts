import { headColour } from "../colours";
import type { Look } from "../data";
import { clamp, el, fill, sharp } from "../dom";
import type { Chosen, State, Store } from "../state";
import { joined, label, percent } from "../tokens";
import { EveryHead } from "./every";
import { Pane, type Shade, type Words } from "./pane";
import { PicturePane } from "./picture";

const LINES = 48; // lines from one word
const LISTED = 12;
const MOST_SHADED = 4000;

/** The sentence: point at a word, see what it looks at and who looks at it. */
export class TextView {
  readonly element: HTMLElement;
  private readonly stage = el("div", { class: "stage" });
  private readonly lines = el("canvas", { class: "lines", "aria-hidden": "true" });
  private readonly panel = el("div", { class: "panel" });
  private readonly live = el("p", { class: "hidden", "aria-live": "polite" });
  private readonly bar = el("div", { class: "bar" });
  private readonly every: EveryHead;
  private panes: Words[] = [];
  private built = "";
  private frame = 0;
  private found: { out: Look[]; in: Look[] } = { out: [], in: [] };

  constructor(private readonly store: Store) {
    this.every = new EveryHead(store);
    this.element = el("div", { class: "text-view" }, this.bar, el("div", { class: "split" }, el("div", { class: "left" }, this.stage, this.every.element), this.panel), this.live);
    new ResizeObserver(() => this.later()).observe(this.stage);
  }

  update(changed: Set<keyof State>): void {
    const { store } = this;
    const key = JSON.stringify([store.state.recording, store.layer.header.query_text, store.layer.header.key_text, store.layer.isCross, store.inColumns, store.state.language]);
    if (key !== this.built) {
      this.built = key;
      this.build();
    }
    this.drawBar();
    this.look();
    if (changed.has("chosen") || changed.has("layer") || changed.has("heads") || changed.has("direction")) this.announce();
  }

  private build(): void {
    const { store } = this;
    for (const pane of this.panes) pane.remove();
    const act = {
      hover: (hovered: Chosen | null) => store.set({ hovered }),
      choose: (chosen: Chosen) => {
        const same = store.state.chosen?.side === chosen.side && store.state.chosen.at === chosen.at;
        store.set({ chosen: same ? null : chosen, hovered: null });
      },
      moved: () => this.later(),
      key: (event: KeyboardEvent) => this.key(event),
    };
    const { layer } = store, columns = store.inColumns, two = layer.isCross || columns;
    const { picture } = store.data.header, isPicture = picture && this.isPicture && !columns;
    this.panes = isPicture ? [new PicturePane(layer.keyText, picture, store.say("patches"), act)] : [new Pane("query", layer.isCross ? layer.queryText : layer.keyText, columns, store.say("text_label"), act, layer.header.generated)];
    if (two) this.panes.push(new Pane("key", layer.keyText, columns, store.say("source_label"), act, layer.isCross ? null : layer.header.generated));
    const long = Math.max(layer.queryText.length, layer.keyText.length) > (columns ? 24 : 60) || isPicture;
    this.stage.className = `stage${two ? " two" : ""}${columns ? " columns" : ""}${long ? " tall" : ""}${isPicture ? " pictured" : ""}`;
    fill(this.stage, ...this.panes.map((pane) => pane.element), this.lines);
    const { chosen } = store.state;
    if (chosen) this.pane(chosen.side).scrollTo(chosen.at);
  }

  /** Whether the layer attends to the picture that was given. */
  private get isPicture(): boolean {
    const { picture } = this.store.data.header, { layer } = this.store;
    return !!picture && !layer.isCross && layer.keyText.length === picture.first + picture.rows * picture.columns;
  }

  private drawBar(): void {
    const { store, isPicture } = this;
    const choice = (name: "out" | "in" | "both") => el("button", {
      class: "chip wide", "aria-pressed": String(store.state.direction === name), click: () => store.set({ direction: name }),
    }, store.say(name));
    const layout = (columns: boolean) => el("button", {
      class: "chip wide", "aria-pressed": String(store.inColumns === columns), click: () => store.set({ columns }),
    }, store.say(columns ? "columns" : isPicture ? "pictured" : "flowing"));
    const key = JSON.stringify([store.state.direction, this.panes.length, store.inColumns, store.state.language, isPicture]);
    if (this.bar.dataset.key === key) return;
    this.bar.dataset.key = key;
    fill(this.bar,
      this.panes.length === 2 ? null : el("div", { class: "chips", role: "group", "aria-label": store.say("direction") }, choice("out"), choice("in"), choice("both")),
      el("div", { class: "chips", role: "group", "aria-label": store.say("layout") }, layout(false), layout(true)),
      el("p", { class: "help" }, store.say(this.panes.length === 2 ? "columns_help" : isPicture ? "patch_help" : "text_help")));
  }

  private pane(side: "query" | "key"): Words {
    return this.panes.find((pane) => pane.side === side) ?? this.panes[0]!;
  }

  /** What is shown of a token. Where two texts stand side by side, the left one looks and the right one is looked at. */
  private wants({ side }: Chosen): { out: boolean; in: boolean } {
    const { direction } = this.store.state;
    return this.panes.length === 2 ? { out: side === "query", in: side === "key" } : { out: direction !== "in", in: direction !== "out" };
  }

  /** Look up the weights of the current word, shade the text and list them. Nothing is rebuilt. */
  private look(): void {
    const { store } = this, { layer, colours } = store;
    const current = store.current, heads = store.heads;
    const query = current ? store.asQuery(current) : -1, key = current ? store.asKey(current) : -1;
    const wants = current ? this.wants(current) : { out: false, in: false };
    this.found = { out: wants.out && query >= 0 ? layer.out(heads, query) : [], in: wants.in && key >= 0 ? layer.incoming(heads, key) : [] };
    const shades = { query: new Map<number, Shade>(), key: new Map<number, Shade>() };
    const first = layer.header.first;
    if (current) {
      for (const look of this.found.out.slice(0, MOST_SHADED)) shades[this.pane("key").side].set(look.at, this.shadeOf(look, heads, false));
      for (const look of this.found.in.slice(0, MOST_SHADED)) {
        const side = this.pane("query").side, at = look.at + first;
        const before = shades[side].get(at);
        if (!before || before.weight < look.weight) shades[side].set(at, this.shadeOf(look, heads, true));
      }
    } else this.received(heads, shades[this.pane("key").side]);
    for (const pane of this.panes) {
      pane.shade(shades[pane.side], pane.side === "query" && current && this.panes.length === 2 ? colours.from : this.colour());
      pane.mark(current && this.pane(current.side) === pane ? current.at : null);
    }
    this.drawPanel(current, query);
    this.every.update(query);
    this.later();
  }

  private colour(): string {
    const { store } = this;
    return store.state.heads.length === 1 ? headColour(store.colours, store.layer.heads[store.state.heads[0]!]!) : store.colours.accent;
  }

  private shadeOf(look: Look, heads: number[], isIncoming: boolean): Shade {
    const { store } = this, several = store.state.heads.length > 1;
    const colour = isIncoming && store.state.direction === "both" ? store.colours.from : this.colour();
    if (!several) return { weight: look.weight, colour };
    return { weight: look.weight, colour: store.colours.accent, parts: heads.map((head, slot) => ({ colour: headColour(store.colours, store.layer.heads[head]!), weight: look.byHead[slot]! })) };
  }

  /** Where nothing is chosen, the shade says how much each token receives. */
  private received(heads: number[], shades: Map<number, Shade>): void {
    const { layer } = this.store;
    const mass = this.mass(heads);
    if (!mass) return;
    const most = Math.max(...mass, 1e-9), colour = this.colour();
    const span = layer.keys / mass.length;
    for (let at = 0; at < layer.keys; at++) {
      const weight = mass[Math.min(mass.length - 1, Math.floor(at / span))]! / most;
      if (weight > 0.01) shades.set(at, { weight: weight * 0.7, colour });
    }
  }

  private mass(heads: number[]): Float32Array | null {
    const { layer } = this.store;
    let total: Float32Array | null = null;
    for (const head of heads) {
      const strip = layer.strip("mass", head);
      if (!strip) return null;
      total ??= new Float32Array(strip.length);
      for (let at = 0; at < strip.length; at++) total[at]! += strip[at]! || 0;
    }
    return total;
  }

  private drawPanel(current: Chosen | null, query: number): void {
    const { store } = this, { layer } = store, heads = store.heads;
    const who = store.state.heads.length === 1 ? store.say("layer_head", { layer: layer.index, head: layer.heads[heads[0]!]! })
      : store.say("layer_mean", { layer: layer.index, n: heads.length });
    if (!current) {
      fill(this.panel, el("h2", {}, store.say("received")), el("p", { class: "who" }, who), this.mostReceived(heads), this.note());
      return;
    }
    const token = current.side === "query" || !layer.isCross ? (layer.isCross ? layer.queryText : layer.keyText)[current.at]! : layer.keyText[current.at]!;
    const parts: (Node | null)[] = [
      el("h2", {}, el("bdi", { class: "word" }, label(token)), el("span", { class: "place" }, ` ${current.at}`)),
      el("p", { class: "who" }, who),
    ];
    const wants = this.wants(current);
    if (wants.out) parts.push(el("h3", {}, store.say("looks_at")), query < 0 ? el("p", { class: "empty" }, store.say("not_a_query")) : this.list(this.found.out, heads, true));
    if (wants.in) parts.push(el("h3", {}, store.say("looked_at_by")), this.list(this.found.in, heads, false));
    parts.push(this.note());
    fill(this.panel, ...parts);
  }

  private list(looks: Look[], heads: number[], isOut: boolean): HTMLElement {
    const { store } = this, { layer } = store;
    if (!looks.length) return el("p", { class: "empty" }, store.say(isOut ? "nothing_out" : "nothing_in"));
    const top = looks[0]!.weight;
    const listed = looks.length === LISTED + 1 ? looks.length : LISTED; // the last one takes no more room than saying that there is one
    const rows = looks.slice(0, listed).map((look) => {
      const at = isOut ? look.at : look.at + layer.header.first;
      const token = isOut ? layer.keyToken(look.at) : layer.queryToken(look.at);
      const chosen: Chosen = { side: isOut && (layer.isCross || this.panes.length === 2) ? "key" : "query", at };
      return this.row(token, at, look.weight, top, chosen, store.state.heads.length > 1
        ? heads.map((head, slot) => ({ colour: headColour(store.colours, layer.heads[head]!), weight: look.byHead[slot]! / heads.length }))
        : [{ colour: !isOut && store.state.direction === "both" ? store.colours.from : this.colour(), weight: look.weight }]);
    });
    const rest = looks.length - listed;
    const more = rest > 0 ? [el("li", { class: "rest" }, store.say("and_more", { n: rest }))] : [];
    return el("ol", { class: isOut ? "looks out" : "looks in" }, ...rows, ...more);
  }

  private row(token: string, at: number, weight: number, top: number, chosen: Chosen | null, parts: { colour: string; weight: number }[], place = String(at)): HTMLElement {
    const bar = el("span", { class: "bar-of" }, ...parts.filter((part) => part.weight > 0).map((part) => {
      const piece = el("i", {});
      piece.style.width = `${(100 * part.weight) / (top || 1)}%`;
      piece.style.background = part.colour;
      return piece;
    }));
    const content = [el("bdi", {}, label(token)), el("span", { class: "place" }, place), bar, el("span", { class: "amount" }, percent(weight))];
    return el("li", { "data-at": at, "data-weight": weight }, chosen
      ? el("button", { click: () => { this.store.set({ chosen, hovered: null }); this.pane(chosen.side).scrollTo(chosen.at); } }, ...content)
      : el("div", { class: "plain" }, ...content));
  }

  private mostReceived(heads: number[]): HTMLElement | null {
    const { store } = this, { layer } = store;
    const mass = this.mass(heads);
    if (!mass) return null;
    const total = mass.reduce((sum, value) => sum + value, 0) || 1;
    const order = [...mass.keys()].sort((a, b) => mass[b]! - mass[a]!).slice(0, LISTED);
    const runs = mass.length < layer.keys; // of a long text the file holds sums over neighbours, which are no single token's
    const edge = (at: number) => Math.floor((at * layer.keys) / mass.length);
    return el("div", {}, el("p", { class: "help" }, store.say("received_help"), runs ? ` ${store.say("received_runs", { n: Math.round(layer.keys / mass.length) })}` : ""), el("h3", {}, store.say("most_received")),
      el("ol", { class: runs ? "looks runs" : "looks" }, ...order.map((at) => {
        const start = edge(at), end = edge(at + 1), many = end - start > 1;
        return this.row(many ? joined(layer.keyText, start, end) : layer.keyToken(start), start, mass[at]! / total, mass[order[0]!]! / total,
          { side: layer.isCross || this.panes.length === 2 ? "key" : "query", at: start }, [{ colour: this.colour(), weight: mass[at]! / total }], many ? `${start}–${end - 1}` : undefined);
      })));
  }

  private note(): HTMLElement {
    const { store } = this, { layer, recording } = store, top = layer.header.top;
    const notes: string[] = [];
    if (layer.isExact) notes.push(store.say("exact_note"));
    else if (top && top.floor > 0) notes.push(`${store.say(top.largest ? "floor_note" : "floor_note_all", { k: top.k, floor: percent(top.floor) })} ${store.say("serve_note")}`);
    else if (top) notes.push(store.say("top_note", { k: top.k }));
    if (top && !layer.isExact) notes.push(store.say(top.weights.length > 1 ? "exact_top" : "rounded_top"));
    if (top && !layer.isExact && store.heads.length > 1) notes.push(store.say("mean_note"));
    if (recording.allScenes > recording.scenes.length) notes.push(store.say("scenes_left", { n: recording.allScenes - recording.scenes.length }));
    notes.push(...recording.notes);
    return el("p", { class: "note" }, notes.join(" "));
  }

  private announce(): void {
    const { store } = this, { layer } = store, chosen = store.state.chosen;
    if (!chosen) return;
    const { out } = this.wants(chosen), text = layer.isCross && chosen.side === "query" ? layer.queryText : layer.keyText;
    const list = this.found[out ? "out" : "in"].slice(0, 3).map(({ at, weight }) => `${label(out ? layer.keyToken(at) : layer.queryToken(at))} ${percent(weight)}`);
    this.live.textContent = list.length ? `${label(text[chosen.at] ?? "")} ${store.say(out ? "looks_at" : "looked_at_by")} ${list.join(", ")}` : "";
  }

  private key(event: KeyboardEvent): void {
    const { store } = this, { state } = store;
    const side = state.chosen?.side ?? "query", pane = this.pane(side);
    const rtl = pane.scroller.firstElementChild!.getAttribute("dir") === "rtl" && !pane.isColumn;
    const sideways = rtl ? -1 : 1;
    const vertical = pane.isColumn;
    const steps: Record<string, number> = vertical ? { ArrowDown: 1, ArrowUp: -1 } : { ArrowRight: sideways, ArrowLeft: -sideways };
    const { picture } = store.data.header;
    if (picture && pane instanceof PicturePane) Object.assign(steps, { ArrowDown: picture.columns, ArrowUp: -picture.columns });
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

  private later(): void {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.drawLines();
      for (const pane of this.panes) pane.drawStrip(this.store.colours.line);
    });
  }

  private drawLines(): void {
    const { store } = this, { layer } = store;
    const frame = this.stage.getBoundingClientRect();
    const context = sharp(this.lines, frame.width, frame.height);
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
        const source = this.pane(current.side).spot(current.at, frame);
        const target = this.pane(isOut ? "key" : "query").spot(at, frame);
        if (!source || !target || source.where !== "inside") continue;
        if (target.where !== "inside" && ++outside > 6) continue;
        const from = isOut ? source : target, to = isOut ? target : source;
        const strands = several ? heads.map((head, slot) => ({ weight: look.byHead[slot]!, colour: headColour(store.colours, layer.heads[head]!) })).filter((s) => s.weight >= 0.01)
          : [{ weight: look.weight, colour: isOut || !both ? this.colour() : store.colours.from }];
        strands.forEach((strand, slot) => {
          context.strokeStyle = strand.colour;
          context.globalAlpha = clamp(0.18 + 0.72 * Math.sqrt(strand.weight), 0, 0.92) * (target.where === "inside" ? 1 : 0.5);
          context.lineWidth = 0.8 + 4.2 * Math.sqrt(strand.weight);
          context.setLineDash(isOut || this.panes.length === 2 ? [] : [context.lineWidth * 1.2, context.lineWidth * 1.8]);
          curve(context, from, to, this.panes.length === 2 ? 0 : frame.width, (slot - (strands.length - 1) / 2) * 3);
        });
      }
      context.globalAlpha = 1;
    };
    draw(this.found.in, false);
    draw(this.found.out, true);
  }
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
