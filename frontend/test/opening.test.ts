import assert from "node:assert/strict";
import { test } from "node:test";
import type { Layer } from "../src/data";
import { clearest, opening } from "../src/opening";
import { dataOf, layerOf } from "./packed";

/** All weight of each query on the first token, except that one query looks at one key. */
function looking(length: number, query: number, key: number, weight = 0.75): number[][] {
  return Array.from({ length }, (_, at) => Array.from({ length }, (_, to) => (at !== query ? Number(to === 0) : to === key ? weight : to === 0 ? 1 - weight : 0)));
}

const SENTENCE = ["[CLS]", "the", "cat", "sat", "because", "it", "was", "tired", "[SEP]"];
const plain = looking(9, 0, 0, 1);
const opened = (texts: string[][], weights: number[][][][], extra = {}, labels: string[][] = []) =>
  opening(dataOf(texts, (body) => weights.map((layer, at) => layerOf(body, layer, { labels: labels[at] })), extra));

test("the page opens where one word looks clearly at another", () => {
  assert.deepEqual(opened([SENTENCE], [[plain, plain], [plain, looking(9, 5, 2)]]), { layer: 1, heads: [1], at: 5 });
});

test("a head that rests on the first token is passed over, as are signs, neighbours and the same word again", () => {
  assert.deepEqual(opened([SENTENCE], [[looking(9, 5, 2), looking(9, 6, 2, 0.5)]], {}, [["first", ""]]), { layer: 0, heads: [1], at: 6 });
  for (const [query, key] of [[5, 8], [8, 2], [5, 4]] as const) assert.equal(opened([SENTENCE], [[looking(9, query, key)]]).at, null);
  assert.equal(opened([["[CLS]", "it", "a", "b", "c", "it", "d", "e", "f"]], [[looking(9, 5, 1)]]).at, null);
});

test("the first word of a text is where heads rest, and no place to begin", () => {
  const words = ["Paris", ...SENTENCE.slice(1)];
  assert.equal(opened([words], [[looking(9, 5, 0)]]).at, null);
  assert.equal(opened([words], [[looking(9, 5, 0), looking(9, 6, 2, 0.5)]]).at, 6);
});

test("one Chinese character is a word, and one Latin letter is none", () => {
  assert.equal(opened([["[CLS]", ..."猫坐在垫子上因为"]], [[looking(9, 5, 1)]]).at, 5);
  assert.equal(opened([["[CLS]", ..."abcdefgh"]], [[looking(9, 5, 1)]]).at, null);
  assert.equal(opened([["▁", "▁बिल्ली", "▁a", "▁b", "▁c", "▁मेज़", "▁d", "▁e", "▁f"]], [[looking(9, 5, 1)]]).at, 5);
});

test("tokens without texts are places to begin, and so is a text longer than is searched in full", () => {
  const numbered = Array.from({ length: 9 }, (_, at) => `[${at}]`);
  assert.equal(opened([numbered], [[looking(9, 5, 2)]]).at, 5);
  const layer = { header: { kind: "self", first: 0, rows: [{ label: "" }] }, queries: 9000, heads: [0], queryToken: (at: number) => `[${at}]`, keyToken: (at: number) => `[${at}]` };
  const top = () => ({ row: (query: number, add: (key: number, weight: number) => void) => { if (query % 3 === 0 && query) add(1, 0.75); } });
  const found = clearest([{ ...layer, top } as unknown as Layer])!;
  assert.equal(found.at % 3, 0);
  assert.ok(found.at > 2);
});

test("what was asked for is opened, by its own numbers", () => {
  assert.deepEqual(opened([SENTENCE], [[plain, plain], [plain, looking(9, 5, 2)]], { open: { layer: 0, head: 1 } }), { layer: 0, heads: [1], at: 5 });
  assert.deepEqual(opened([SENTENCE], [[plain], [plain]], { open: { layer: 1 } }), { layer: 1, heads: [], at: null });
});

test("a picture opens at its summary in the last layer, or in its middle", () => {
  const picture = { png: "", rows: 3, columns: 3, first: 0 };
  assert.deepEqual(opened([SENTENCE], [[plain], [plain]], { picture }), { layer: 1, heads: [], at: 4 });
  assert.deepEqual(opened([SENTENCE], [[plain], [plain]], { picture: { ...picture, rows: 2, columns: 4, first: 1 } }), { layer: 1, heads: [], at: 0 });
});
