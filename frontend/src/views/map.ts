import { css, headColour, heatmap, type Palette } from "../colours";
import type { Layer } from "../data";
import { clamp, el, sharp } from "../dom";
import type { Rectangle } from "../state";
import { label } from "../tokens";

export interface Cell { query: number; key: number }
export interface Span { row: number; rows: number; column: number; columns: number } // in tokens, may be fractions

/** A map with its axes that can be moved and zoomed, from the whole to single weights. */
export class MapCanvas {
  readonly element: HTMLElement;
  private readonly canvas = el("canvas", { tabindex: 0, role: "img" });
  private span: Span = { row: 0, rows: 1, column: 0, columns: 1 };
  private layer!: Layer;
  private picture: HTMLCanvasElement | null = null;
  private top = 1;
  private colours!: Palette;
  private marked: { query: number; key: number } | null = null;
  private pointed: Cell | null = null;
  private frame = 0;
  private strips: { entropy: Float32Array | null; mass: Float32Array | null } = { entropy: null, mass: null };
  private exactHead: number | null = null;
  private readonly pointers = new Map<number, { x: number; y: number }>();
  private moved = false;
  twin: MapCanvas[] = [];
  /** What the strips along the sides are: of each query, and of each key. */
  stripNames: [string, string] = ["", ""];
  private rectangle: { place: Rectangle; values: Float32Array; picture: HTMLCanvasElement } | null = null;
  private asked = 0;
  /** Where exact weights can be had, this asks for those in view once the view has come to rest. */
  ask: ((place: Rectangle) => Promise<Float32Array>) | null = null;
  /** Says how that goes: "wait", "exact", "" where nothing was asked for, or why it failed. */
  tell: (how: string, top?: number) => void = () => undefined;

  constructor(private readonly act: { point: (cell: Cell | null, x: number, y: number) => void; choose: (cell: Cell) => void }) {
    this.element = el("div", { class: "map" }, this.canvas);
    new ResizeObserver(() => this.later()).observe(this.element);
    this.canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(Math.exp(clamp(event.deltaY, -80, 80) * 0.006), event.offsetX, event.offsetY);
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.down(event));
    this.canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"] as const) this.canvas.addEventListener(name, (event) => this.up(event));
    this.canvas.addEventListener("pointerleave", () => this.point(null, 0, 0));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  /** Show values on a grid of rows × columns that covers the layer's queries × keys. */
  show(layer: Layer, picture: HTMLCanvasElement | null, top: number, colours: Palette, labelled: string, exactHead: number | null, keep = false): void {
    if (!keep || this.layer?.queries !== layer.queries || this.layer.keys !== layer.keys) {
      this.span = { row: 0, rows: layer.queries, column: 0, columns: layer.keys };
    }
    this.layer = layer;
    this.picture = picture;
    this.top = top;
    this.colours = colours;
    this.exactHead = exactHead;
    this.rectangle = null;
    this.wonder();
    this.strips = exactHead === null ? { entropy: null, mass: null } : { entropy: layer.strip("entropy", exactHead), mass: layer.strip("mass", exactHead) };
    this.canvas.setAttribute("aria-label", labelled);
    this.later();
  }

  mark(marked: { query: number; key: number } | null): void { this.marked = marked; this.later(); }

  private get box() {
    const width = this.element.clientWidth, height = this.element.clientHeight;
    const gutter = width < 420 ? 62 : 104, head = width < 420 ? 56 : 84;
    const strip = 26; // also where there are no strips: maps side by side have one size
    const wide = Math.max(20, width - gutter - strip - 12), high = Math.max(20, height - head - strip); // 12: the strip's name
    // cells are squares where queries and keys are as many
    const scale = Math.min(wide / this.layer.keys, high / this.layer.queries);
    const square = this.layer.keys / this.layer.queries < 4 && this.layer.queries / this.layer.keys < 4;
    const w = square ? this.layer.keys * scale : wide, h = square ? this.layer.queries * scale : high;
    return { left: gutter, top: head, width: Math.min(wide, w), height: Math.min(high, h) };
  }

  reset(): void { this.settle({ row: 0, rows: this.layer.queries, column: 0, columns: this.layer.keys }); }

  zoom(factor: number, x?: number, y?: number): void {
    const box = this.box, { span, layer } = this;
    const px = clamp(((x ?? box.left + box.width / 2) - box.left) / box.width, 0, 1);
    const py = clamp(((y ?? box.top + box.height / 2) - box.top) / box.height, 0, 1);
    const least = Math.min(4, layer.queries, layer.keys);
    const rows = clamp(span.rows * factor, least, layer.queries), columns = clamp(span.columns * factor, least, layer.keys);
    this.settle({ row: span.row + (span.rows - rows) * py, rows, column: span.column + (span.columns - columns) * px, columns });
  }

  private settle(span: Span, tell = true): void {
    const { layer } = this;
    this.span = { ...span, row: clamp(span.row, 0, layer.queries - span.rows), column: clamp(span.column, 0, layer.keys - span.columns) };
    this.later();
    this.wonder();
    if (tell) for (const twin of this.twin) if (twin.layer?.queries === layer.queries && twin.layer.keys === layer.keys) twin.settle(this.span, false);
  }

  private wonder(): void {
    const turn = ++this.asked;
    this.tell("");
    if (!this.ask || this.exactHead === null || this.layer.isExact) return;
    setTimeout(async () => {
      if (turn !== this.asked || !this.ask) return;
      const row = Math.floor(this.span.row), column = Math.floor(this.span.column);
      const place = { row, column, rows: Math.min(this.layer.queries, Math.ceil(this.span.row + this.span.rows)) - row, columns: Math.min(this.layer.keys, Math.ceil(this.span.column + this.span.columns)) - column };
      if (place.rows * place.columns > 1048576) return;
      this.tell("wait");
      const values = await this.ask(place).catch((error: Error) => error.message);
      if (turn !== this.asked) return;
      if (typeof values === "string") return this.tell(values);
      const top = values.reduce((most, one) => Math.max(most, one), this.top); // single weights are larger than means
      this.tell("exact", top);
      this.rectangle = { place, values, picture: heatmap(values, place.rows, place.columns, top, this.colours.heat) };
      this.later();
    }, 250);
  }

  /** The exact weight of a pair that a server has given; null where it has not. */
  exact(cell: Cell): number | null {
    if (!this.rectangle) return null;
    const { place, values } = this.rectangle, row = cell.query - place.row, column = cell.key - place.column;
    return row >= 0 && row < place.rows && column >= 0 && column < place.columns ? values[row * place.columns + column]! : null;
  }

  private cellAt(x: number, y: number): Cell | null {
    const box = this.box;
    if (x < box.left || y < box.top || x >= box.left + box.width || y >= box.top + box.height) return null;
    const query = Math.floor(this.span.row + ((y - box.top) / box.height) * this.span.rows);
    const key = Math.floor(this.span.column + ((x - box.left) / box.width) * this.span.columns);
    return { query: clamp(query, 0, this.layer.queries - 1), key: clamp(key, 0, this.layer.keys - 1) };
  }

  private point(cell: Cell | null, x: number, y: number): void {
    this.pointed = cell;
    this.act.point(cell, x, y);
    this.later();
  }

  private down(event: PointerEvent): void {
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    this.moved = false;
  }

  private move(event: PointerEvent): void {
    const before = this.pointers.get(event.pointerId);
    if (!before) return this.point(this.cellAt(event.offsetX, event.offsetY), event.offsetX, event.offsetY);
    const now = { x: event.offsetX, y: event.offsetY };
    const other = [...this.pointers].find(([id]) => id !== event.pointerId)?.[1];
    if (other) {
      const far = (p: { x: number; y: number }) => Math.hypot(p.x - other.x, p.y - other.y) || 1;
      this.zoom(far(before) / far(now), (now.x + other.x) / 2, (now.y + other.y) / 2);
      this.moved = true;
    } else if (this.moved || Math.hypot(now.x - before.x, now.y - before.y) > 3) {
      const box = this.box;
      this.moved = true;
      this.settle({ ...this.span, row: this.span.row - ((now.y - before.y) / box.height) * this.span.rows, column: this.span.column - ((now.x - before.x) / box.width) * this.span.columns });
    } else return;
    this.pointers.set(event.pointerId, now);
  }

  private up(event: PointerEvent): void {
    this.pointers.delete(event.pointerId);
    const cell = this.cellAt(event.offsetX, event.offsetY);
    if (!this.moved && cell && event.type === "pointerup") {
      this.point(cell, event.offsetX, event.offsetY);
      this.act.choose(cell);
    }
  }

  private key(event: KeyboardEvent): void {
    const cell = this.pointed ?? this.marked ?? { query: 0, key: 0 };
    const steps: Record<string, [number, number]> = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const step = steps[event.key];
    if (step) {
      const next = { query: clamp(cell.query + step[0], 0, this.layer.queries - 1), key: clamp(cell.key + step[1], 0, this.layer.keys - 1) };
      const { span } = this;
      let { row, column } = span;
      if (next.query < row) row = next.query;
      if (next.query + 1 > row + span.rows) row = next.query + 1 - span.rows;
      if (next.key < column) column = next.key;
      if (next.key + 1 > column + span.columns) column = next.key + 1 - span.columns;
      this.settle({ ...span, row, column });
      const box = this.box;
      this.point(next, box.left + ((next.key + 0.5 - this.span.column) / span.columns) * box.width, box.top + ((next.query + 0.5 - this.span.row) / span.rows) * box.height);
    } else if (event.key === "+" || event.key === "=") this.zoom(0.6);
    else if (event.key === "-") this.zoom(1 / 0.6);
    else if (event.key === "0") this.reset();
    else if (event.key === "Enter") this.act.choose(cell);
    else return;
    event.preventDefault();
  }

  later(): void {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => { this.frame = 0; if (this.layer) this.draw(); });
  }

  private draw(): void {
    const width = this.element.clientWidth, height = this.element.clientHeight;
    const context = sharp(this.canvas, width, height);
    if (!context) return;
    const { span, layer, colours } = this, box = this.box;
    context.fillStyle = css(colours.heat[0]!);
    context.fillRect(box.left, box.top, box.width, box.height);
    context.save();
    context.beginPath();
    context.rect(box.left, box.top, box.width, box.height);
    context.clip();
    if (this.picture) {
      context.imageSmoothingEnabled = false;
      const sx = this.picture.width / layer.keys, sy = this.picture.height / layer.queries;
      context.drawImage(this.picture, span.column * sx, span.row * sy, span.columns * sx, span.rows * sy, box.left, box.top, box.width, box.height);
    }
    this.drawExact(context, box);
    this.drawMarks(context, box);
    context.restore();
    this.drawLabels(context, box);
    this.drawStrips(context, box);
    context.strokeStyle = colours.line;
    context.lineWidth = 1;
    context.strokeRect(box.left - 0.5, box.top - 0.5, box.width + 1, box.height + 1);
  }

  /** Where one pair is wide enough to be seen, the largest weights of each query are drawn over the coarse map. */
  private drawExact(context: CanvasRenderingContext2D, box: { left: number; top: number; width: number; height: number }): void {
    const { span, layer, colours } = this, head = this.exactHead;
    const wide = box.width / span.columns, high = box.height / span.rows;
    if (head === null || layer.isExact) return;
    if (this.rectangle) {
      const { place, picture } = this.rectangle;
      context.imageSmoothingEnabled = Math.min(wide, high) < 1; // several weights to a dot: their mean
      context.drawImage(picture, box.left + (place.column - span.column) * wide, box.top + (place.row - span.row) * high, place.columns * wide, place.rows * high);
      return;
    }
    if (Math.min(wide, high) < 3) return;
    const most = Math.max(this.top, 0.02);
    for (let query = Math.floor(span.row); query < Math.min(layer.queries, Math.ceil(span.row + span.rows)); query++) {
      layer.top(head)?.row(query, (key, weight) => {
        if (key < span.column - 1 || key > span.column + span.columns) return;
        context.fillStyle = css(colours.heat[Math.min(255, Math.round(Math.sqrt(weight / Math.max(most, weight)) * 255))]!);
        context.fillRect(box.left + (key - span.column) * wide, box.top + (query - span.row) * high, Math.max(1, wide - 0.5), Math.max(1, high - 0.5));
      });
    }
  }

  private drawMarks(context: CanvasRenderingContext2D, box: { left: number; top: number; width: number; height: number }): void {
    const { span, colours } = this;
    const wide = box.width / span.columns, high = box.height / span.rows;
    for (const [cell, colour] of [[this.marked, colours.from], [this.pointed, colours.ink]] as const) {
      if (!cell) continue;
      const x = box.left + (cell.key - span.column) * wide, y = box.top + (cell.query - span.row) * high;
      context.strokeStyle = colour;
      context.lineWidth = 1.5;
      context.globalAlpha = 0.75;
      if (cell.query >= 0) context.strokeRect(box.left + 0.5, y, box.width - 1, Math.max(2, high));
      if (cell.key >= 0) context.strokeRect(x, box.top + 0.5, Math.max(2, wide), box.height - 1);
      context.globalAlpha = 1;
    }
  }

  private drawLabels(context: CanvasRenderingContext2D, box: { left: number; top: number; width: number; height: number }): void {
    const { span, layer, colours } = this;
    const wide = box.width / span.columns, high = box.height / span.rows;
    const letters = Math.max(4, Math.floor(box.left / 8));
    context.textBaseline = "middle";
    const write = (at: number, size: number, isQuery: boolean, strong: boolean) => {
      context.font = `${strong ? "600 " : ""}12px system-ui, sans-serif`;
      context.fillStyle = strong ? colours.ink : colours.soft;
      const text = label(isQuery ? layer.queryToken(at) : layer.keyToken(at), letters);
      if (isQuery) {
        context.textAlign = "right";
        context.fillText(text, box.left - 7, box.top + (at + 0.5 - span.row) * size, box.left - 10);
      } else {
        context.save();
        context.translate(box.left + (at + 0.5 - span.column) * size, box.top - 7);
        context.rotate(-Math.PI / 3.2);
        context.textAlign = "left";
        context.fillText(text, 0, 0, box.top * 1.05);
        context.restore();
      }
    };
    for (const isQuery of [true, false]) {
      const size = isQuery ? high : wide, start = isQuery ? span.row : span.column, count = isQuery ? span.rows : span.columns;
      const step = Math.max(1, Math.ceil((isQuery ? 14 : 15) / size));
      const strong = [this.pointed, this.marked].map((cell) => (cell ? (isQuery ? cell.query : cell.key) : -1)).filter((at) => at >= 0);
      const near = (at: number) => strong.some((other) => other !== at && Math.abs(other - at) * size < 13);
      for (let at = Math.ceil(start / step) * step; at < start + count && at < (isQuery ? layer.queries : layer.keys); at += step) {
        if (at + 0.5 >= start && at + 0.5 <= start + count && !strong.includes(at) && !near(at)) write(at, size, isQuery, false);
      }
      for (const at of strong) if (at + 0.5 >= start && at + 0.5 <= start + count) write(at, size, isQuery, true);
    }
  }

  private drawStrips(context: CanvasRenderingContext2D, box: { left: number; top: number; width: number; height: number }): void {
    const { span, layer, colours } = this;
    const { entropy, mass } = this.strips;
    if (this.exactHead === null) return;
    context.fillStyle = headColour(colours, layer.heads[this.exactHead]!);
    const name = (text: string, x: number, y: number, turn: number) => {
      context.save();
      context.font = "11px system-ui, sans-serif";
      context.fillStyle = colours.soft;
      context.textAlign = turn ? "left" : "right";
      context.translate(x, y);
      context.rotate(turn);
      context.fillText(text, 0, 0);
      context.restore();
    };
    if (entropy) {
      name(this.stripNames[0], box.left + box.width + 32, box.top, Math.PI / 2); // above the strip it would meet the last key's label
      const most = entropy.reduce((top, value) => (value > top ? value : top), 1e-9);
      for (let y = 0; y < box.height; y++) {
        const value = entropy[Math.floor(((span.row + (y / box.height) * span.rows) / layer.queries) * entropy.length)]!;
        if (value >= 0) context.fillRect(box.left + box.width + 4, box.top + y, (value / most) * 20, 1.6);
      }
    }
    if (mass) {
      name(this.stripNames[1], box.left - 7, box.top + box.height + 13, 0);
      const most = mass.reduce((top, value) => (value > top ? value : top), 1e-9);
      for (let x = 0; x < box.width; x++) {
        const value = mass[Math.floor(((span.column + (x / box.width) * span.columns) / layer.keys) * mass.length)]!;
        if (value >= 0) context.fillRect(box.left + x, box.top + box.height + 4, 1.6, Math.sqrt(value / most) * 20);
      }
    }
  }
}

/** The picture of one head, or the mean of several, and its strongest value. */
export function pictureOf(layer: Layer, heads: number[], colours: Palette): { picture: HTMLCanvasElement | null; top: number; values: Float32Array | null } {
  let values: Float32Array | null = null, rows = 0, columns = 0;
  for (const head of heads) {
    const map = layer.map(head);
    if (!map) return { picture: null, top: 1, values: null };
    const own = map.values();
    rows = map.rows;
    columns = map.columns;
    values ??= new Float32Array(own.length);
    for (let at = 0; at < own.length; at++) values[at]! += own[at]! / heads.length;
  }
  if (!values) return { picture: null, top: 1, values: null };
  const top = values.reduce((most, value) => Math.max(most, value), 0);
  return { picture: heatmap(values, rows, columns, top, colours.heat), top, values };
}

/** Put what is said of a cell next to the pointer, and inside the map. */
export function placed(tip: HTMLElement, box: HTMLElement, x: number, y: number): void {
  tip.style.left = `${Math.min(x + 14, Math.max(0, box.clientWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${y + 18 + tip.offsetHeight > box.clientHeight ? Math.max(0, y - tip.offsetHeight - 10) : y + 18}px`;
}
