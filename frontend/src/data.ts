// What the file holds, and how it is read. The Python side that writes it is src/regard/_page/_pack.py.

export type Stat =
  | "entropy" | "spread" | "max_weight" | "first" | "previous" | "next" | "same" | "near" | "distance" | "duplicate" | "induction";

export type HeadNumbers = { [name in Stat]: number | null } & { label: string };

type Place = [start: number, length: number];

interface TopHeader {
  count: Place; relative: number[]; keys: Place[]; weights: Place[]; k: number; floor: number; largest: boolean; sizes: number[];
}
interface MapHeader { rows: number; columns: number; exact: boolean; bits: number; tops: number[]; at: Place }
interface StripHeader { count: number; top: number; at: Place }

export interface LayerHeader {
  layer: number; path: string; kind: "self" | "cross"; sight: "self" | "causal" | "cross"; heads: number[];
  query_text: number; key_text: number; first: number; generated: number | null; queries: number; keys: number; rows: HeadNumbers[];
  top: TopHeader | null; map: MapHeader | null; entropy: StripHeader | null; mass: StripHeader | null;
}
interface SceneHeader { run: number; item: number; layers: LayerHeader[] }
interface RecordingHeader { title: string; notes: string[]; scenes: SceneHeader[]; all_scenes: number }

export interface Rule { label: string; statistic: Stat; least: number }
export interface Opening { layer?: number; head?: number; view?: string; lang?: string; theme?: string }
export interface Picture { png: string; rows: number; columns: number; first: number }
interface Header {
  version: number; texts: string[][]; rules: Rule[]; local: { keys: number; near: number };
  recordings: RecordingHeader[]; open?: Opening; picture?: Picture; detail?: boolean;
}

/** One weight: another token's place, the mean over the heads asked for, and each head's own share. */
export interface Look { at: number; weight: number; byHead: Float64Array }

export async function inflate(packed: Uint8Array): Promise<Uint8Array> {
  const stream = new Blob([packed as BlobPart]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

export function fromBase64(text: string): Uint8Array {
  const letters = atob(text.trim());
  const bytes = new Uint8Array(letters.length);
  for (let at = 0; at < letters.length; at++) bytes[at] = letters.charCodeAt(at);
  return bytes;
}

/** A matrix that stands in JSON as its bytes; everything else as it is. */
export function matrixFrom(value: unknown): unknown {
  const held = value as { f4?: string; f8?: string; columns: number } | null;
  if (!held || typeof held !== "object" || !(held.f4 ?? held.f8)) return value;
  const { buffer } = fromBase64((held.f4 ?? held.f8)!), all = held.f4 ? new Float32Array(buffer) : new Float64Array(buffer);
  return Array.from({ length: all.length / held.columns }, (_, row) => Array.from(all.subarray(row * held.columns, (row + 1) * held.columns)));
}

export class Data {
  readonly header: Header;
  readonly recordings: Recording[];

  constructor(bytes: Uint8Array) {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    if (view.getUint32(0, false) !== 0x52474431) throw new Error("this is not a recording that the page can read");
    const length = view.getUint32(4, true);
    this.header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length))) as Header;
    const body = bytes.subarray(8 + length);
    this.recordings = this.header.recordings.map((one) => new Recording(one, body, this.header.texts));
  }
}

export class Recording {
  readonly title: string;
  readonly notes: string[];
  readonly scenes: Scene[];
  readonly allScenes: number;

  constructor(header: RecordingHeader, body: Uint8Array, texts: string[][]) {
    this.title = header.title;
    this.notes = header.notes;
    this.allScenes = header.all_scenes;
    this.scenes = header.scenes.map((scene) => ({
      run: scene.run, item: scene.item, layers: scene.layers.map((layer) => new Layer(layer, body, texts)),
    }));
  }
}

export interface Scene { run: number; item: number; layers: Layer[] }

export class Layer {
  readonly queryText: string[];
  readonly keyText: string[];
  readonly #body: Uint8Array;
  readonly #tops: (Top | undefined)[] = [];
  readonly #maps: (HeadMap | undefined)[] = [];

  constructor(readonly header: LayerHeader, body: Uint8Array, texts: string[][]) {
    this.#body = body;
    this.queryText = texts[header.query_text]!;
    this.keyText = texts[header.key_text]!;
  }

  get index() { return this.header.layer; }
  get heads() { return this.header.heads; }
  get queries() { return this.header.queries; }
  get keys() { return this.header.keys; }
  get isCross() { return this.header.kind === "cross"; }
  /** Whether every single weight is in the file. */
  get isExact() { return this.header.map?.exact === true; }

  /** The text of a query or a key by its index in the call. */
  queryToken(query: number) { return this.queryText[query + this.header.first] ?? `[${query + this.header.first}]`; }
  keyToken(key: number) { return this.keyText[key] ?? `[${key}]`; }

  map(head: number): HeadMap | null {
    const header = this.header.map;
    if (!header) return null;
    return (this.#maps[head] ??= new HeadMap(header, head, this.#body));
  }

  top(head: number): Top | null {
    const header = this.header.top;
    if (!header) return null;
    return (this.#tops[head] ??= new Top(header, this.header, head, this.#body));
  }

  /** Entropy by query or mass by key; NaN where missing; pooled where there are more than a strip holds. */
  strip(kind: "entropy" | "mass", head: number): Float32Array | null {
    const header = this.header[kind];
    if (!header) return null;
    const coded = uint16(this.#body, header.at).subarray(head * header.count, (head + 1) * header.count);
    return Float32Array.from(coded, (code) => (code === 65535 ? NaN : (code / 65534) * header.top));
  }

  /** What a query looks at, most first. */
  out(heads: number[], query: number): Look[] {
    if (query < 0 || query >= this.queries) return [];
    return this.#gather(heads, (head, add) => {
      const exact = this.isExact ? this.map(head) : null;
      if (exact) {
        for (let key = 0; key < this.keys; key++) add(key, exact.weight(query, key));
      } else this.top(head)?.row(query, add);
    });
  }

  /** Who looks at a key, most first. */
  incoming(heads: number[], key: number): Look[] {
    if (key < 0 || key >= this.keys) return [];
    return this.#gather(heads, (head, add) => {
      const exact = this.isExact ? this.map(head) : null;
      if (exact) {
        for (let query = 0; query < this.queries; query++) add(query, exact.weight(query, key));
      } else this.top(head)?.column(key, add);
    });
  }

  /** What is stored of one weight; null where the file does not say. */
  weight(head: number, query: number, key: number): number | null {
    if (this.isExact) return this.map(head)!.weight(query, key);
    let found: number | null = null;
    this.top(head)?.row(query, (at, weight) => { if (at === key) found = weight; });
    if (found === null && this.header.sight === "causal" && key > query + this.header.first) return 0;
    return found;
  }

  #gather(heads: number[], each: (head: number, add: (at: number, weight: number) => void) => void): Look[] {
    const found = new Map<number, Look>();
    heads.forEach((head, slot) => each(head, (at, weight) => {
      if (!(weight > 0)) return;
      let look = found.get(at);
      if (!look) found.set(at, (look = { at, weight: 0, byHead: new Float64Array(heads.length) }));
      look.byHead[slot]! += weight;
      look.weight += weight / heads.length;
    }));
    return [...found.values()].sort((a, b) => b.weight - a.weight || a.at - b.at);
  }
}

/** The coarse map of one head: cell (r, c) covers queries ⌊rL/rows⌋ … and keys likewise. */
export class HeadMap {
  readonly rows: number;
  readonly columns: number;
  readonly top: number;
  readonly #cells: Uint8Array | Uint16Array;

  constructor(header: MapHeader, head: number, body: Uint8Array) {
    this.rows = header.rows;
    this.columns = header.columns;
    this.top = header.tops[head]!;
    const size = this.rows * this.columns;
    const all = header.bits === 16 ? uint16(body, header.at) : uint8(body, header.at);
    this.#cells = all.subarray(head * size, (head + 1) * size);
  }

  weight(row: number, column: number): number {
    const code = this.#cells[row * this.columns + column]!;
    return this.#cells instanceof Uint16Array ? code / 65535 : (code / 255) ** 2 * this.top;
  }

  values(): Float32Array {
    const found = new Float32Array(this.#cells.length);
    for (let at = 0; at < found.length; at++) {
      const code = this.#cells[at]!;
      found[at] = this.#cells instanceof Uint16Array ? code / 65535 : (code / 255) ** 2 * this.top;
    }
    return found;
  }
}

/** The largest weights of each query of one head. */
export class Top {
  readonly #layer: LayerHeader;
  readonly #starts: Uint32Array;
  readonly #base: number;
  readonly #relative: boolean;
  readonly #keyPlanes: Uint8Array[];
  readonly #weightPlanes: Uint8Array[];
  readonly #first: number;
  #byKey: { starts: Uint32Array; queries: Uint32Array; entries: Uint32Array } | null = null;

  constructor(header: TopHeader, layer: LayerHeader, head: number, body: Uint8Array) {
    this.#layer = layer;
    const counts = uint8(body, header.count).subarray(head * layer.queries, (head + 1) * layer.queries);
    this.#starts = new Uint32Array(layer.queries + 1);
    for (let query = 0; query < layer.queries; query++) this.#starts[query + 1] = this.#starts[query]! + counts[query]!;
    this.#base = header.sizes.slice(0, head).reduce((sum, n) => sum + n, 0);
    this.#relative = header.relative[head] === 1;
    this.#keyPlanes = header.keys.map((place) => uint8(body, place));
    this.#weightPlanes = header.weights.map((place) => uint8(body, place));
    this.#first = layer.first;
  }

  row(query: number, add: (key: number, weight: number) => void): void {
    for (let at = this.#starts[query]!; at < this.#starts[query + 1]!; at++) add(this.#key(query, at), this.#amount(at));
  }

  column(key: number, add: (query: number, weight: number) => void): void {
    const index = (this.#byKey ??= this.#invert());
    for (let at = index.starts[key]!; at < index.starts[key + 1]!; at++) add(index.queries[at]!, this.#amount(index.entries[at]!));
  }

  #key(query: number, entry: number): number {
    const at = this.#base + entry;
    let code = this.#keyPlanes[0]![at]! | (this.#keyPlanes[1]![at]! << 8);
    if (this.#keyPlanes.length === 4) code |= (this.#keyPlanes[2]![at]! << 16) | (this.#keyPlanes[3]![at]! << 24);
    else code = (code << 16) >> 16; // distances may be negative
    return this.#relative ? query + this.#first - code : code;
  }

  #amount(entry: number): number {
    const at = this.#base + entry;
    if (this.#weightPlanes.length === 1) return (this.#weightPlanes[0]![at]! / 255) ** 2;
    return (this.#weightPlanes[0]![at]! | (this.#weightPlanes[1]![at]! << 8)) / 65535;
  }

  #invert() {
    const total = this.#starts[this.#layer.queries]!;
    const starts = new Uint32Array(this.#layer.keys + 2);
    const keys = new Uint32Array(total);
    for (let query = 0, at = 0; query < this.#layer.queries; query++) {
      for (; at < this.#starts[query + 1]!; at++) starts[(keys[at] = this.#key(query, at)) + 2]!++;
    }
    for (let key = 2; key < starts.length; key++) starts[key]! += starts[key - 1]!;
    const queries = new Uint32Array(total), entries = new Uint32Array(total);
    for (let query = 0, at = 0; query < this.#layer.queries; query++) {
      for (; at < this.#starts[query + 1]!; at++) {
        const slot = starts[keys[at]! + 1]!++;
        queries[slot] = query;
        entries[slot] = at;
      }
    }
    return { starts, queries, entries };
  }
}

function uint8(body: Uint8Array, [start, length]: Place): Uint8Array {
  return body.subarray(start, start + length);
}

function uint16(body: Uint8Array, [start, length]: Place): Uint16Array {
  return new Uint16Array(body.buffer, body.byteOffset + start, length / 2);
}
