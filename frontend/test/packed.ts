// Small recordings in the bytes that the page reads, as src/regard/_page/_pack.py writes them.
import { Data, type HeadNumbers, type LayerHeader, type Picture } from "../src/data";

export interface Given { queries?: number; keys?: number; first?: number; kind?: "self" | "cross"; sight?: LayerHeader["sight"]; heads?: number[]; labels?: string[]; queryText?: number; keyText?: number }

/** Arrays end to end, each at a multiple of 8. */
class Body {
  private readonly parts: number[] = [];
  add(bytes: number[]): [number, number] {
    const place: [number, number] = [this.parts.length, bytes.length];
    this.parts.push(...bytes, ...new Array<number>((8 - (bytes.length % 8)) % 8).fill(0));
    return place;
  }
  get bytes() { return this.parts; }
}

const words = (values: number[]) => values.flatMap((value) => [value & 255, (value >> 8) & 255]);

/** A layer whose every weight is given, [head][query][key]: as an exact map, and as each query's largest. */
export function layerOf(body: Body, weights: number[][][], given: Given & { exact?: boolean; relative?: boolean; bits?: 8 | 16; k?: number }): LayerHeader {
  const queries = weights[0]!.length, keys = weights[0]![0]!.length, k = given.k ?? 3, first = given.first ?? 0;
  const largest = weights.map((head) => head.map((row) => [...row.keys()].filter((key) => row[key]! > 0).sort((a, b) => row[b]! - row[a]! || a - b).slice(0, k)));
  const places = largest.flatMap((head) => head.flatMap((row, query) => row.map((key) => (given.relative ? query + first - key : key) & 0xffff)));
  const amounts = largest.flatMap((head, h) => head.flatMap((row, query) => row.map((key) => weights[h]![query]![key]!)));
  const codes = given.bits === 8 ? amounts.map((weight) => Math.round(Math.sqrt(weight) * 255)) : amounts.map((weight) => Math.round(weight * 65535));
  const empty: HeadNumbers = { entropy: null, spread: null, max_weight: null, first: null, previous: null, next: null, same: null, near: null, distance: null, duplicate: null, induction: null, label: "" };
  return {
    layer: 0, path: "encoder.layer.0", kind: given.kind ?? "self", sight: given.sight ?? "self", heads: given.heads ?? weights.map((_, head) => head),
    query_text: given.queryText ?? 0, key_text: given.keyText ?? 0, first, generated: null, queries, keys,
    rows: weights.map((_, head) => ({ ...empty, label: given.labels?.[head] ?? "" })),
    top: {
      count: body.add(largest.flatMap((head) => head.map((row) => row.length))), relative: weights.map(() => (given.relative ? 1 : 0)),
      keys: [body.add(places.map((place) => place & 255)), body.add(places.map((place) => place >> 8))],
      weights: given.bits === 8 ? [body.add(codes)] : [body.add(codes.map((code) => code & 255)), body.add(codes.map((code) => code >> 8))],
      k, floor: 0, largest: true, sizes: largest.map((head) => head.flat().length),
    },
    map: given.exact ? { rows: queries, columns: keys, exact: true, bits: 16, tops: weights.map(() => 1), at: body.add(words(weights.flat(2).map((weight) => Math.round(weight * 65535)))) } : null,
    entropy: { count: 2, top: 3, at: body.add(words(weights.flatMap(() => [32767, 65535]))) }, mass: null,
  };
}

export function dataOf(texts: string[][], make: (body: Body) => LayerHeader[], extra: { open?: object; picture?: Picture } = {}): Data {
  const body = new Body(), layers = make(body).map((layer, at) => ({ ...layer, layer: at }));
  const header = { version: 1, texts, rules: [], local: { keys: 32, near: 7 }, recordings: [{ title: "a model", notes: [], all_scenes: 1, scenes: [{ run: 0, item: 0, layers }] }], ...extra };
  let text = new TextEncoder().encode(JSON.stringify(header));
  text = new Uint8Array([...text, ...new Array<number>((8 - (text.length % 8)) % 8).fill(32)]);
  const start = new DataView(new ArrayBuffer(8));
  start.setUint32(0, 0x52474431);
  start.setUint32(4, text.length, true);
  return new Data(new Uint8Array([...new Uint8Array(start.buffer), ...text, ...body.bytes]));
}
