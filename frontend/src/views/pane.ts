import { clamp, el, sharp } from "../dom";
import type { Chosen, Side } from "../state";
import { direction, pieces } from "../tokens";

const BLOCK = 200; // tokens of one block: what is far from the window is one plain text, without an element per token

const MOST_FILLED = 12;

export interface Shade { weight: number; colour: string; parts?: { colour: string; weight: number }[] }
export interface Spot { x: number; y: number; width: number; height: number; where: "inside" | "above" | "below" }

/** What the text view needs of a pane: a text, or a picture in patches. */
export interface Words {
  readonly element: HTMLElement; readonly side: Side; readonly tokens: string[]; readonly isColumn: boolean; readonly scroller: HTMLElement;
  remove(): void; scrollTo(at: number): void; shade(shades: Map<number, Shade>, stripColour: string): void; mark(at: number | null): void;
  spot(at: number, frame: DOMRect): Spot | null; drawStrip(line: string): void;
}

/** A text whose tokens can be pointed at. It holds elements only for what is near the window, so 100 000 tokens scroll. */
export class Pane implements Words {
  readonly element: HTMLElement;
  private readonly blocks: HTMLElement[] = [];
  private readonly filled = new Set<number>();
  private readonly near = new Set<number>();
  private readonly observer: IntersectionObserver;
  private shades = new Map<number, Shade>();
  private shaded: HTMLElement[] = [];
  private marked: number | null = null;
  private readonly piece: ReturnType<typeof pieces>;
  private readonly strip: HTMLCanvasElement | null = null;
  private stripColour = "";

  constructor(
    readonly side: Side, readonly tokens: string[], readonly isColumn: boolean, labelled: string,
    private readonly act: { hover: (chosen: Chosen | null) => void; choose: (chosen: Chosen) => void; moved: () => void; key: (event: KeyboardEvent) => void },
    private readonly generated: number | null = null,
  ) {
    this.piece = pieces(tokens);
    const size = tokens.length <= 40 ? "large" : tokens.length <= 400 ? "medium" : "small";
    const holder = el("div", { class: "tokens", dir: direction(tokens) });
    const scroller = el("div", { class: "scroller", tabindex: 0, role: "group", "aria-label": labelled }, holder);
    this.element = el("div", { class: `pane ${size}${isColumn ? " column" : ""} ${side}` }, scroller);
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const number = Number((entry.target as HTMLElement).dataset.block);
        if (!entry.isIntersecting) this.near.delete(number);
        else this.near.add(number);
      }
      for (const number of this.near) this.fill(number, true);
      this.empty();
      this.act.moved();
    }, { root: scroller, rootMargin: "400px" });
    for (let start = 0; start < tokens.length; start += BLOCK) {
      const block = el("div", { class: "block", "data-block": start / BLOCK });
      this.blocks.push(block);
      if (start === 0) this.fill(0, true);
      else this.write(start / BLOCK);
      holder.append(block);
      if (tokens.length > BLOCK) this.observer.observe(block);
    }
    if (tokens.length > 3 * BLOCK && !isColumn) {
      this.strip = el("canvas", { class: "strip", "aria-hidden": "true", click: (event: MouseEvent) => {
        const box = this.strip!.getBoundingClientRect();
        this.scrollTo(Math.floor(((event.clientY - box.top) / box.height) * tokens.length));
      } });
      this.element.append(this.strip);
    }
    scroller.addEventListener("scroll", () => this.act.moved(), { passive: true });
    holder.addEventListener("pointerover", (event) => {
      if (event.pointerType === "touch") return;
      const at = this.under(event);
      if (at !== null) this.act.hover({ side, at });
    });
    scroller.addEventListener("pointerleave", () => this.act.hover(null));
    holder.addEventListener("click", (event) => {
      const at = this.under(event);
      if (at !== null) this.act.choose({ side, at });
    });
    scroller.addEventListener("keydown", (event) => this.act.key(event));
  }

  get scroller(): HTMLElement { return this.element.firstElementChild as HTMLElement; }

  remove(): void { this.observer.disconnect(); }

  private under(event: Event): number | null {
    const token = (event.target as Element).closest<HTMLElement>(".t");
    return token ? Number(token.dataset.at) : null;
  }

  /** One plain text in place of the tokens: it takes the same room, and the browser's search finds it. */
  private write(number: number): void {
    let text = "";
    for (let at = number * BLOCK; at < Math.min(this.tokens.length, (number + 1) * BLOCK); at++) {
      const { text: shown, space, breaks } = this.piece(at);
      text += this.isColumn ? `${shown}\n` : (space && at % BLOCK ? " " : "") + shown + (breaks ? "\n" : "");
    }
    this.blocks[number]!.textContent = text;
  }

  private fill(number: number, wanted: boolean): void {
    if (wanted === this.filled.has(number)) return;
    if (!wanted) {
      this.filled.delete(number);
      this.write(number);
      return;
    }
    this.filled.add(number);
    const parts = document.createDocumentFragment();
    for (let at = number * BLOCK; at < Math.min(this.tokens.length, (number + 1) * BLOCK); at++) {
      const { text, space, breaks } = this.piece(at);
      const token = el("span", { class: this.generated !== null && at >= this.generated ? "t generated" : "t", "data-at": at }, text);
      if (!this.isColumn && space && at % BLOCK) parts.append(" ");
      parts.append(token);
      if (breaks && !this.isColumn) parts.append(el("br"));
      const shade = this.shades.get(at);
      if (shade) this.paint(token, shade);
      if (at === this.marked) token.classList.add("chosen");
    }
    this.blocks[number]!.replaceChildren(parts);
  }

  /** Take the elements away from what was left long ago: the oldest first, and only when there are many. */
  private empty(): void {
    for (const number of this.filled) {
      if (this.filled.size <= MOST_FILLED) return;
      if (!this.near.has(number)) this.fill(number, false);
    }
  }

  private token(at: number): HTMLElement | null {
    const number = Math.floor(at / BLOCK);
    if (!this.filled.has(number)) return null;
    return this.blocks[number]!.querySelector<HTMLElement>(`[data-at="${at}"]`);
  }

  /** Colour tokens by weight; what is not named loses its colour. */
  shade(shades: Map<number, Shade>, stripColour: string): void {
    for (const token of this.shaded) token.style.background = "";
    this.shaded = [];
    this.shades = shades;
    this.stripColour = stripColour;
    for (const number of this.filled) {
      const from = number * BLOCK, to = Math.min(this.tokens.length, from + BLOCK);
      if (shades.size > to - from) {
        for (let at = from; at < to; at++) this.paintAt(at);
      } else for (const at of shades.keys()) if (at >= from && at < to) this.paintAt(at);
    }
  }

  private paintAt(at: number): void {
    const shade = this.shades.get(at), token = shade && this.token(at);
    if (shade && token) this.paint(token, shade);
  }

  private paint(token: HTMLElement, { weight, colour, parts }: Shade): void {
    // square roots: weights spread over orders of magnitude, and small ones should still be seen
    const ground = `color-mix(in srgb, ${colour} calc(var(--most) * ${clamp(Math.sqrt(weight), 0, 1).toFixed(3)}), transparent)`;
    let layers = "";
    if (parts && parts.length > 1) {
      const total = parts.reduce((sum, part) => sum + part.weight, 0) || 1;
      let from = 0;
      const stops = parts.filter((part) => part.weight > 0).map((part) => {
        const to = from + (100 * part.weight) / total;
        const stop = `${part.colour} ${from.toFixed(1)}% ${to.toFixed(1)}%`;
        from = to;
        return stop;
      });
      const width = clamp(25 + 75 * Math.sqrt(weight), 0, 100);
      if (stops.length) layers = `linear-gradient(to right, ${stops.length > 1 ? stops.join(", ") : `${stops[0]}, transparent`}) left bottom / ${width.toFixed(0)}% 4px no-repeat, `;
    }
    token.style.background = layers + ground;
    this.shaded.push(token);
  }

  mark(at: number | null): void {
    if (this.marked !== null) this.token(this.marked)?.classList.remove("chosen");
    this.marked = at;
    if (at !== null) this.token(at)?.classList.add("chosen");
  }

  /** Bring a token into the window; its block is filled first. */
  scrollTo(at: number, behaviour: ScrollBehavior = "auto"): void {
    const number = Math.floor(clamp(at, 0, this.tokens.length - 1) / BLOCK);
    this.fill(number, true);
    const token = this.token(at), window = this.scroller;
    if (!token) return;
    const box = token.getBoundingClientRect(), frame = window.getBoundingClientRect();
    if (box.top >= frame.top + 8 && box.bottom <= frame.bottom - 8) return;
    window.scrollTo({ top: window.scrollTop + box.top - frame.top - frame.height / 2, behavior: behaviour });
  }

  /** Where a token stands relative to `frame`; outside the window, at its edge. */
  spot(at: number, frame: DOMRect): Spot | null {
    const window = this.scroller.getBoundingClientRect();
    const token = this.token(at);
    if (token) {
      const box = token.getClientRects()[0] ?? token.getBoundingClientRect();
      const middle = box.top + box.height / 2;
      const where = middle < window.top ? "above" : middle > window.bottom ? "below" : "inside";
      return {
        x: box.left - frame.left, width: box.width, height: box.height, where,
        y: where === "inside" ? box.top - frame.top : where === "above" ? window.top - frame.top - box.height : window.bottom - frame.top,
      };
    }
    const near = [...this.filled].sort((a, b) => a - b);
    if (!near.length) return null;
    const above = at < near[0]! * BLOCK;
    return {
      x: window.left - frame.left + window.width * (0.3 + 0.4 * ((at % BLOCK) / BLOCK)), width: 0, height: 0,
      y: above ? window.top - frame.top : window.bottom - frame.top, where: above ? "above" : "below",
    };
  }

  /** The whole text as one thin strip: where the weights lie, and where the window is. */
  drawStrip(line: string): void {
    if (!this.strip) return;
    const height = this.element.clientHeight;
    const context = sharp(this.strip, 14, height);
    if (!context) return;
    const { scrollTop, clientHeight, scrollHeight } = this.scroller;
    context.fillStyle = line;
    context.fillRect(0, (scrollTop / scrollHeight) * height, 14, Math.max(3, (clientHeight / scrollHeight) * height));
    context.fillStyle = this.stripColour;
    for (const [at, { weight }] of this.shades) {
      context.globalAlpha = clamp(Math.sqrt(weight), 0.08, 1);
      context.fillRect(2, (at / this.tokens.length) * height - 1, 10, 2);
    }
    context.globalAlpha = 1;
    if (this.marked !== null) {
      context.fillStyle = "currentcolor";
      context.fillRect(0, (this.marked / this.tokens.length) * height - 1.5, 14, 3);
    }
  }
}
