import { css, headColour, heatmap, type Palette } from "../colours";
import type { Layer } from "../data";
import { clamp, el, fill, sharp } from "../dom";
import type { Rectangle } from "../state";
import { label } from "../tokens";

export interface Cell { query: number; key: number }
/** What a map shows: values on a grid of rows × columns that covers the layer's queries × keys. */
export interface Showing {
  layer: Layer; picture: HTMLCanvasElement | null; top: number; colours: Palette; labelled: string; head: number | null; strips: readonly [string, string];
  keep: boolean; // stay where the last map was looked at
  ask?: ((place: Rectangle) => Promise<Float32Array>) | null; // gives exact weights, where there is somebody to ask
}
interface Box { left: number; top: number; width: number; height: number }
export interface MapCanvas {
  element: HTMLElement; twins: MapCanvas[]; show(what: Showing): void; mark(marked: Cell | null): void; reset(): void; zoom(factor: number): void;
  settle(span: Rectangle, sizes?: string): void; exact(cell: Cell): number | null;
}

/**
 * A map with its axes that can be moved and zoomed, from the whole to single weights. `says` gives what is shown of the cell
 * under the pointer. Where exact weights can be had, those in view are asked for once the view has come to rest; `tell` hears
 * how that goes: "wait", "exact", "" where nothing was asked for, or why it failed.
 */
export function mapCanvas(act: { says: (cell: Cell) => (Node | string)[]; choose: (cell: Cell) => void; tell?: (how: string, top?: number) => void }): MapCanvas {
  const canvas = el("canvas", { tabindex: 0, role: "img", pointerdown: down, pointermove: move, pointerup: up, pointercancel: up, pointerleave: () => point(null), keydown: key });
  const tip = el("div", { class: "tip", role: "status", hidden: true }), element = el("div", { class: "map" }, canvas, tip);
  const pointers = new Map<number, { x: number; y: number }>(), tell = act.tell ?? (() => undefined);
  let span: Rectangle = { row: 0, rows: 1, column: 0, columns: 1 }; // in tokens, may be fractions
  let what: Showing | null = null, layer: Layer, colours: Palette, exactHead: number | null = null;
  let marked: Cell | null = null, pointed: Cell | null = null, frame = 0, moved = false, asked = 0;
  let strips: { entropy: Float32Array | null; mass: Float32Array | null } = { entropy: null, mass: null };
  let rectangle: { place: Rectangle; values: Float32Array; picture: HTMLCanvasElement } | null = null;

  new ResizeObserver(later).observe(element);
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(Math.exp(clamp(event.deltaY, -80, 80) * 0.006), event.offsetX, event.offsetY);
  }, { passive: false });

  const whole = (of: Layer): Rectangle => ({ row: 0, rows: of.queries, column: 0, columns: of.keys });
  const sizes = () => `${layer?.queries},${layer?.keys}`;

  function show(given: Showing): void {
    const before = sizes();
    ({ layer, colours, head: exactHead } = what = given);
    if (!given.keep || before !== sizes()) span = whole(layer);
    rectangle = null;
    wonder();
    strips = exactHead === null ? { entropy: null, mass: null } : { entropy: layer.strip("entropy", exactHead), mass: layer.strip("mass", exactHead) };
    canvas.setAttribute("aria-label", given.labelled);
    later();
  }

  function mark(given: Cell | null): void { marked = given; later(); }

  function boxOf(): Box {
    const width = element.clientWidth, height = element.clientHeight;
    const gutter = width < 420 ? 62 : 104, head = width < 420 ? 56 : 84;
    const strip = 26; // also where there are no strips: maps side by side have one size
    const wide = Math.max(20, width - gutter - strip - 12), high = Math.max(20, height - head - strip); // 12: the strip's name
    // cells are squares where queries and keys are as many
    const scale = Math.min(wide / layer.keys, high / layer.queries);
    const square = layer.keys / layer.queries < 4 && layer.queries / layer.keys < 4;
    const w = square ? layer.keys * scale : wide, h = square ? layer.queries * scale : high;
    return { left: gutter, top: head, width: Math.min(wide, w), height: Math.min(high, h) };
  }

  function reset(): void { settle(whole(layer)); }

  function zoom(factor: number, x?: number, y?: number): void {
    const box = boxOf();
    const px = clamp(((x ?? box.left + box.width / 2) - box.left) / box.width, 0, 1);
    const py = clamp(((y ?? box.top + box.height / 2) - box.top) / box.height, 0, 1);
    const least = Math.min(4, layer.queries, layer.keys);
    const rows = clamp(span.rows * factor, least, layer.queries), columns = clamp(span.columns * factor, least, layer.keys);
    settle({ row: span.row + (span.rows - rows) * py, rows, column: span.column + (span.columns - columns) * px, columns });
  }

  /** Move to a part of the map; those that stand next to it follow where they have its `only` sizes. */
  function settle(wanted: Rectangle, only?: string): void {
    if (only && only !== sizes()) return;
    span = { ...wanted, row: clamp(wanted.row, 0, layer.queries - wanted.rows), column: clamp(wanted.column, 0, layer.keys - wanted.columns) };
    later();
    wonder();
    if (!only) for (const twin of made.twins) twin.settle(span, sizes());
  }

  function wonder(): void {
    const turn = ++asked, ask = what?.ask;
    tell("");
    if (!ask || exactHead === null || layer.isExact) return;
    setTimeout(async () => {
      if (turn !== asked) return;
      const row = Math.floor(span.row), column = Math.floor(span.column);
      const place = { row, column, rows: Math.min(layer.queries, Math.ceil(span.row + span.rows)) - row, columns: Math.min(layer.keys, Math.ceil(span.column + span.columns)) - column };
      if (place.rows * place.columns > 1048576) return;
      tell("wait");
      const values = await ask(place).catch((error: Error) => error.message);
      if (turn !== asked) return;
      if (typeof values === "string") return tell(values);
      const top = values.reduce((most, one) => Math.max(most, one), what!.top); // single weights are larger than means
      tell("exact", top);
      rectangle = { place, values, picture: heatmap(values, place.rows, place.columns, top, colours.heat) };
      later();
    }, 250);
  }

  /** The exact weight of a pair that a server has given; null where it has not. */
  function exact(cell: Cell): number | null {
    if (!rectangle) return null;
    const { place, values } = rectangle, row = cell.query - place.row, column = cell.key - place.column;
    return row >= 0 && row < place.rows && column >= 0 && column < place.columns ? values[row * place.columns + column]! : null;
  }

  function cellAt(x: number, y: number): Cell | null {
    const box = boxOf();
    if (x < box.left || y < box.top || x >= box.left + box.width || y >= box.top + box.height) return null;
    const query = Math.floor(span.row + ((y - box.top) / box.height) * span.rows);
    const key = Math.floor(span.column + ((x - box.left) / box.width) * span.columns);
    return { query: clamp(query, 0, layer.queries - 1), key: clamp(key, 0, layer.keys - 1) };
  }

  /** Say what is in a cell, next to the pointer and inside the map. */
  function point(cell: Cell | null, x = 0, y = 0): void {
    pointed = cell;
    tip.hidden = !cell;
    later();
    if (!cell) return;
    fill(tip, ...act.says(cell));
    tip.style.left = `${Math.min(x + 14, Math.max(0, element.clientWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${y + 18 + tip.offsetHeight > element.clientHeight ? Math.max(0, y - tip.offsetHeight - 10) : y + 18}px`;
  }

  function down(event: PointerEvent): void {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    moved = false;
  }

  function move(event: PointerEvent): void {
    const before = pointers.get(event.pointerId);
    if (!before) return point(cellAt(event.offsetX, event.offsetY), event.offsetX, event.offsetY);
    const now = { x: event.offsetX, y: event.offsetY };
    const other = [...pointers].find(([id]) => id !== event.pointerId)?.[1];
    if (other) {
      const far = (p: { x: number; y: number }) => Math.hypot(p.x - other.x, p.y - other.y) || 1;
      zoom(far(before) / far(now), (now.x + other.x) / 2, (now.y + other.y) / 2);
      moved = true;
    } else if (moved || Math.hypot(now.x - before.x, now.y - before.y) > 3) {
      const box = boxOf();
      moved = true;
      settle({ ...span, row: span.row - ((now.y - before.y) / box.height) * span.rows, column: span.column - ((now.x - before.x) / box.width) * span.columns });
    } else return;
    pointers.set(event.pointerId, now);
  }

  function up(event: PointerEvent): void {
    pointers.delete(event.pointerId);
    const cell = cellAt(event.offsetX, event.offsetY);
    if (!moved && cell && event.type === "pointerup") {
      point(cell, event.offsetX, event.offsetY);
      act.choose(cell);
    }
  }

  function key(event: KeyboardEvent): void {
    const cell = pointed ?? marked ?? { query: 0, key: 0 };
    const steps: Record<string, [number, number]> = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const step = steps[event.key];
    if (step) {
      const next = { query: clamp(cell.query + step[0], 0, layer.queries - 1), key: clamp(cell.key + step[1], 0, layer.keys - 1) };
      let { row, column } = span;
      if (next.query < row) row = next.query;
      if (next.query + 1 > row + span.rows) row = next.query + 1 - span.rows;
      if (next.key < column) column = next.key;
      if (next.key + 1 > column + span.columns) column = next.key + 1 - span.columns;
      settle({ ...span, row, column });
      const box = boxOf();
      point(next, box.left + ((next.key + 0.5 - span.column) / span.columns) * box.width, box.top + ((next.query + 0.5 - span.row) / span.rows) * box.height);
    } else if (event.key === "+" || event.key === "=") zoom(0.6);
    else if (event.key === "-") zoom(1 / 0.6);
    else if (event.key === "0") reset();
    else if (event.key === "Enter") act.choose(cell);
    else return;
    event.preventDefault();
  }

  function later(): void {
    if (frame) return;
    frame = requestAnimationFrame(() => { frame = 0; if (what) draw(what); });
  }

  function draw({ picture }: Showing): void {
    const width = element.clientWidth, height = element.clientHeight;
    const context = sharp(canvas, width, height);
    if (!context) return;
    const box = boxOf();
    context.fillStyle = css(colours.heat[0]!);
    context.fillRect(box.left, box.top, box.width, box.height);
    context.save();
    context.beginPath();
    context.rect(box.left, box.top, box.width, box.height);
    context.clip();
    if (picture) {
      context.imageSmoothingEnabled = false;
      const sx = picture.width / layer.keys, sy = picture.height / layer.queries;
      context.drawImage(picture, span.column * sx, span.row * sy, span.columns * sx, span.rows * sy, box.left, box.top, box.width, box.height);
    }
    drawExact(context, box);
    drawMarks(context, box);
    context.restore();
    drawLabels(context, box);
    drawStrips(context, box);
    context.strokeStyle = colours.line;
    context.lineWidth = 1;
    context.strokeRect(box.left - 0.5, box.top - 0.5, box.width + 1, box.height + 1);
  }

  /** Where one pair is wide enough to be seen, the largest weights of each query are drawn over the coarse map. */
  function drawExact(context: CanvasRenderingContext2D, box: Box): void {
    const head = exactHead;
    const wide = box.width / span.columns, high = box.height / span.rows;
    if (head === null || layer.isExact) return;
    if (rectangle) {
      const { place, picture } = rectangle;
      context.imageSmoothingEnabled = Math.min(wide, high) < 1; // several weights to a dot: their mean
      context.drawImage(picture, box.left + (place.column - span.column) * wide, box.top + (place.row - span.row) * high, place.columns * wide, place.rows * high);
      return;
    }
    if (Math.min(wide, high) < 3) return;
    const most = Math.max(what!.top, 0.02);
    for (let query = Math.floor(span.row); query < Math.min(layer.queries, Math.ceil(span.row + span.rows)); query++) {
      layer.top(head)?.row(query, (key, weight) => {
        if (key < span.column - 1 || key > span.column + span.columns) return;
        context.fillStyle = css(colours.heat[Math.min(255, Math.round(Math.sqrt(weight / Math.max(most, weight)) * 255))]!);
        context.fillRect(box.left + (key - span.column) * wide, box.top + (query - span.row) * high, Math.max(1, wide - 0.5), Math.max(1, high - 0.5));
      });
    }
  }

  function drawMarks(context: CanvasRenderingContext2D, box: Box): void {
    const wide = box.width / span.columns, high = box.height / span.rows;
    for (const [cell, colour] of [[marked, colours.from], [pointed, colours.ink]] as const) {
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

  function drawLabels(context: CanvasRenderingContext2D, box: Box): void {
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
      const strong = [pointed, marked].map((cell) => (cell ? (isQuery ? cell.query : cell.key) : -1)).filter((at) => at >= 0);
      const near = (at: number) => strong.some((other) => other !== at && Math.abs(other - at) * size < 13);
      for (let at = Math.ceil(start / step) * step; at < start + count && at < (isQuery ? layer.queries : layer.keys); at += step) {
        if (at + 0.5 >= start && at + 0.5 <= start + count && !strong.includes(at) && !near(at)) write(at, size, isQuery, false);
      }
      for (const at of strong) if (at + 0.5 >= start && at + 0.5 <= start + count) write(at, size, isQuery, true);
    }
  }

  function drawStrips(context: CanvasRenderingContext2D, box: Box): void {
    const { entropy, mass } = strips;
    if (exactHead === null) return;
    context.fillStyle = headColour(colours, layer.heads[exactHead]!);
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
      name(what!.strips[0], box.left + box.width + 32, box.top, Math.PI / 2); // above the strip it would meet the last key's label
      const most = entropy.reduce((top, value) => (value > top ? value : top), 1e-9);
      for (let y = 0; y < box.height; y++) {
        const value = entropy[Math.floor(((span.row + (y / box.height) * span.rows) / layer.queries) * entropy.length)]!;
        if (value >= 0) context.fillRect(box.left + box.width + 4, box.top + y, (value / most) * 20, 1.6);
      }
    }
    if (mass) {
      name(what!.strips[1], box.left - 7, box.top + box.height + 13, 0);
      const most = mass.reduce((top, value) => (value > top ? value : top), 1e-9);
      for (let x = 0; x < box.width; x++) {
        const value = mass[Math.floor(((span.column + (x / box.width) * span.columns) / layer.keys) * mass.length)]!;
        if (value >= 0) context.fillRect(box.left + x, box.top + box.height + 4, 1.6, Math.sqrt(value / most) * 20);
      }
    }
  }

  const made: MapCanvas = { element, twins: [], show, mark, reset, zoom, settle, exact };
  return made;
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
