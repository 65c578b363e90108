import { clamp, el, sharp } from "../dom";
import type { Chosen, Side } from "../state";
import { direction, pieces } from "../tokens";

const BLOCK = 200; // tokens of one block, about: what is far from the window is one plain text, without an element per token

const MOST_FILLED = 12;

export interface Shade { weight: number; colour: string; parts?: { colour: string; weight: number }[] }
export interface Spot { x: number; y: number; width: number; height: number; where: "inside" | "above" | "below" }

/** What the text view needs of a pane: a text, or a picture in patches. */
export interface Words {
  element: HTMLElement; side: Side; tokens: string[]; isColumn: boolean; scroller: HTMLElement;
  across: number; // patches of a row; 0 where there are no rows
  remove(): void; scrollTo(at: number): void; shade(shades: Map<number, Shade>, stripColour: string): void; mark(at: number | null): void;
  spot(at: number, frame: DOMRect): Spot | null; drawStrip(line: string): void;
}

export interface Act { hover: (chosen: Chosen | null) => void; choose: (chosen: Chosen) => void; moved: () => void; key: (event: KeyboardEvent) => void }

/** Where a pane scrolls; it says what is pointed at and what is chosen, as `under` finds it. */
export function scrollerOf(holder: HTMLElement, side: Side, labelled: string, act: Act, over: "pointerover" | "pointermove", under: (event: MouseEvent) => number | null): HTMLElement {
  const tell = (event: MouseEvent, say: (chosen: Chosen) => void) => {
    const at = under(event);
    if (at !== null) say({ side, at });
  };
  holder.addEventListener(over, (event) => { if (event.pointerType !== "touch") tell(event, act.hover); });
  return el("div", { class: "scroller", tabindex: 0, role: "group", "aria-label": labelled, pointerleave: () => act.hover(null), keydown: act.key, click: (event: MouseEvent) => tell(event, act.choose) }, holder);
}

/** The token under the pointer. */
export function tokenUnder(event: Event): number | null {
  const token = (event.target as Element).closest<HTMLElement>(".t");
  return token ? Number(token.dataset.at) : null;
}

const evenStarts = (tokens: string[]) => Array.from({ length: Math.max(1, Math.ceil(tokens.length / BLOCK)) }, (_, number) => number * BLOCK);

/** Where blocks begin: after a line, or else a sentence, that ends near, so that none breaks a line of text in two. */
export function blockStarts(tokens: string[]): number[] {
  const starts = [0];
  for (let start = 0; tokens.length - start > 1.5 * BLOCK;) {
    const near = tokens.slice(start + BLOCK / 2, start + 1.5 * BLOCK);
    const end = [/\n/, /[.!?。！？]$/].map((ends) => near.findLastIndex((token) => ends.test(token))).find((at) => at >= 0);
    starts.push(start += BLOCK / 2 + (end ?? BLOCK / 2 - 1) + 1);
  }
  return starts;
}

/** A text whose tokens can be pointed at. It holds elements only for what is near the window, so 100 000 tokens scroll. */
export function textPane(side: Side, tokens: string[], isColumn: boolean, labelled: string, act: Act, generated: number | null = null): Words {
  const blocks: HTMLElement[] = [], filled = new Set<number>(), near = new Set<number>(), piece = pieces(tokens);
  const starts = [...(isColumn ? evenStarts(tokens) : blockStarts(tokens)), tokens.length], blockOf = new Uint32Array(tokens.length);
  let shades = new Map<number, Shade>(), shaded: HTMLElement[] = [], marked: number | null = null, strip: HTMLCanvasElement | null = null, stripColour = "";
  const size = tokens.length <= 40 ? "large" : tokens.length <= 400 ? "medium" : "small";
  const holder = el("div", { class: "tokens", dir: direction(tokens) });
  const scroller = scrollerOf(holder, side, labelled, act, "pointerover", tokenUnder);
  const element = el("div", { class: `pane ${size}${isColumn ? " column" : ""} ${side}` }, scroller);
  scroller.addEventListener("scroll", act.moved, { passive: true });
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const number = Number((entry.target as HTMLElement).dataset.block);
      if (!entry.isIntersecting) near.delete(number);
      else near.add(number);
    }
    for (const number of near) show(number, true);
    empty();
    act.moved();
  }, { root: scroller, rootMargin: "400px" });
  starts.slice(0, -1).forEach((start, number) => {
    const block = el("div", { class: "block", "data-block": number });
    blocks.push(block);
    blockOf.fill(number, start, starts[number + 1]);
    if (number) write(number);
    else show(0, true);
    holder.append(block);
    if (starts.length > 2) observer.observe(block);
  });
  if (tokens.length > 3 * BLOCK && !isColumn) {
    strip = el("canvas", { class: "strip", "aria-hidden": "true", click: (event: MouseEvent) => {
      const box = strip!.getBoundingClientRect();
      scrollTo(Math.floor(((event.clientY - box.top) / box.height) * tokens.length));
    } });
    element.append(strip);
  }

  /** One plain text in place of the tokens: it takes the same room, and the browser's search finds it. */
  function write(number: number): void {
    let text = "";
    for (let at = starts[number]!; at < starts[number + 1]!; at++) {
      const { text: shown, space, breaks } = piece(at);
      text += isColumn ? `${shown}\n` : (space && at > starts[number]! ? " " : "") + shown + (breaks ? "\n" : "");
    }
    blocks[number]!.textContent = text;
  }

  function show(number: number, wanted: boolean): void {
    if (wanted === filled.has(number)) return;
    if (!wanted) {
      filled.delete(number);
      write(number);
      return;
    }
    filled.add(number);
    const parts = document.createDocumentFragment();
    for (let at = starts[number]!; at < starts[number + 1]!; at++) {
      const { text, space, breaks } = piece(at);
      const token = el("span", { class: generated !== null && at >= generated ? "t generated" : "t", "data-at": at }, text);
      if (!isColumn && space && at > starts[number]!) parts.append(" ");
      parts.append(token);
      if (breaks && !isColumn) parts.append(el("br"));
      const shade = shades.get(at);
      if (shade) paint(token, shade);
      if (at === marked) token.classList.add("chosen");
    }
    blocks[number]!.replaceChildren(parts);
  }

  /** Take the elements away from what was left long ago: the oldest first, and only when there are many. */
  function empty(): void {
    for (const number of filled) {
      if (filled.size <= MOST_FILLED) return;
      if (!near.has(number)) show(number, false);
    }
  }

  function tokenAt(at: number): HTMLElement | null {
    const number = blockOf[at]!;
    if (!filled.has(number)) return null;
    return blocks[number]!.querySelector<HTMLElement>(`[data-at="${at}"]`);
  }

  /** Colour tokens by weight; what is not named loses its colour. */
  function shade(given: Map<number, Shade>, colour: string): void {
    for (const token of shaded) token.style.background = "";
    shaded = [];
    shades = given;
    stripColour = colour;
    for (const number of filled) {
      const from = starts[number]!, to = starts[number + 1]!;
      if (shades.size > to - from) {
        for (let at = from; at < to; at++) paintAt(at);
      } else for (const at of shades.keys()) if (at >= from && at < to) paintAt(at);
    }
  }

  function paintAt(at: number): void {
    const shade = shades.get(at), token = shade && tokenAt(at);
    if (shade && token) paint(token, shade);
  }

  function paint(token: HTMLElement, { weight, colour, parts }: Shade): void {
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
    shaded.push(token);
  }

  function mark(at: number | null): void {
    if (marked !== null) tokenAt(marked)?.classList.remove("chosen");
    marked = at;
    if (at !== null) tokenAt(at)?.classList.add("chosen");
  }

  /** Bring a token into the window; its block is filled first. */
  function scrollTo(at: number): void {
    const number = blockOf[clamp(at, 0, tokens.length - 1)]!;
    show(number, true);
    const token = tokenAt(at);
    if (!token) return;
    const box = token.getBoundingClientRect(), frame = scroller.getBoundingClientRect();
    if (box.top >= frame.top + 8 && box.bottom <= frame.bottom - 8) return;
    scroller.scrollTo({ top: scroller.scrollTop + box.top - frame.top - frame.height / 2 });
  }

  /** Where a token stands relative to `frame`; outside the window, at its edge. */
  function spot(at: number, frame: DOMRect): Spot | null {
    const window = scroller.getBoundingClientRect();
    const token = tokenAt(at);
    if (token) {
      const box = token.getClientRects()[0] ?? token.getBoundingClientRect();
      const middle = box.top + box.height / 2;
      const where = middle < window.top ? "above" : middle > window.bottom ? "below" : "inside";
      return {
        x: box.left - frame.left, width: box.width, height: box.height, where,
        y: where === "inside" ? box.top - frame.top : where === "above" ? window.top - frame.top - box.height : window.bottom - frame.top,
      };
    }
    if (!filled.size) return null;
    const above = blockOf[at]! < Math.min(...filled);
    return {
      x: window.left - frame.left + window.width * (0.3 + 0.4 * ((at % BLOCK) / BLOCK)), width: 0, height: 0,
      y: above ? window.top - frame.top : window.bottom - frame.top, where: above ? "above" : "below",
    };
  }

  /** The whole text as one thin strip: where the weights lie, and where the window is. */
  function drawStrip(line: string): void {
    if (!strip) return;
    const height = element.clientHeight;
    const context = sharp(strip, 14, height);
    if (!context) return;
    const { scrollTop, clientHeight, scrollHeight } = scroller;
    context.fillStyle = line;
    context.fillRect(0, (scrollTop / scrollHeight) * height, 14, Math.max(3, (clientHeight / scrollHeight) * height));
    context.fillStyle = stripColour;
    for (const [at, { weight }] of shades) {
      context.globalAlpha = clamp(Math.sqrt(weight), 0.08, 1);
      context.fillRect(2, (at / tokens.length) * height - 1, 10, 2);
    }
    context.globalAlpha = 1;
    if (marked !== null) {
      context.fillStyle = "currentcolor";
      context.fillRect(0, (marked / tokens.length) * height - 1.5, 14, 3);
    }
  }

  return { element, side, tokens, isColumn, scroller, across: 0, remove: () => observer.disconnect(), scrollTo, shade, mark, spot, drawStrip };
}
