import assert from "node:assert/strict";
import { test } from "node:test";
import { type State, Store } from "../src/state";
import { dataOf, layerOf } from "./packed";

const TEXTS = [["The", "cat", "sat"], ["Die", "Katze", "sass", "da"]];
const flat = (heads: number, queries: number, keys: number) => Array.from({ length: heads }, () => Array.from({ length: queries }, () => new Array<number>(keys).fill(1 / keys)));

/** Self attention with three heads, the same with two, and cross attention. */
function made(change: Partial<State> = {}): Store {
  const data = dataOf(TEXTS, (body) => [
    layerOf(body, flat(3, 3, 3), {}), layerOf(body, flat(2, 2, 3), { first: 1 }), layerOf(body, flat(2, 3, 4), { kind: "cross", sight: "cross", keyText: 1 }),
  ]);
  return new Store(data, {
    view: "text", recording: 0, scene: 0, layer: 0, heads: [2], several: false, chosen: { side: "query", at: 1 }, hovered: null, direction: "out",
    columns: null, sort: "layer", descending: true, filter: "*", against: null, language: "en", theme: "auto", ...change,
  });
}

test("views are told what changed, and nothing where nothing did", () => {
  const store = made(), told: string[][] = [];
  const stop = store.listen((changed) => told.push([...changed].sort()));
  store.set({ heads: [2] });
  store.set({ chosen: { side: "query", at: 1 } });
  assert.deepEqual(told, []);
  store.set({ hovered: { side: "query", at: 0 } });
  assert.deepEqual(told, [["hovered"]]);
  assert.deepEqual(store.current, { side: "query", at: 0 });
  stop();
  store.set({ hovered: null });
  assert.equal(told.length, 1);
  assert.deepEqual(store.current, { side: "query", at: 1 });
});

test("a layer with fewer heads drops those it does not have, and keeps the word", () => {
  const store = made();
  store.set({ layer: 1 });
  assert.deepEqual(store.state.heads, []);
  assert.deepEqual(store.heads, [0, 1]); // none chosen: the mean of all
  assert.deepEqual(store.state.chosen, { side: "query", at: 1 });
});

test("cross attention begins without a word, in columns until that is changed", () => {
  const store = made();
  assert.equal(store.inColumns, false);
  store.set({ layer: 2 });
  assert.equal(store.state.chosen, null);
  assert.equal(store.inColumns, true);
  store.set({ columns: false });
  assert.equal(store.inColumns, false);
});

test("a place of the text is a query, a key, both or neither", () => {
  const store = made({ layer: 1 }); // its first query is the second token
  assert.deepEqual([0, 1, 2].map((at) => [store.asQuery({ side: "query", at }), store.asKey({ side: "query", at })]), [[-1, 0], [0, 1], [1, 2]]);
  store.set({ layer: 2 });
  assert.deepEqual([store.asQuery({ side: "query", at: 2 }), store.asKey({ side: "query", at: 2 })], [2, -1]);
  assert.deepEqual([store.asQuery({ side: "key", at: 3 }), store.asKey({ side: "key", at: 3 })], [-1, 3]);
});
