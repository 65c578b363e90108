// What the walk and the cost view compute.
import assert from "node:assert/strict";
import { test } from "node:test";
import { bill, binary, PRESETS, si } from "../src/cost";
import { attend, layerNorm, normals, type Settings, softmax, steps, wordsOf } from "../src/walk/compute";

const near = (found: number, expected: number, by = 1e-12) => assert.ok(Math.abs(found - expected) <= by, `${found} is not ${expected}`);
const sum = (row: number[]) => row.reduce((total, value) => total + value, 0);

test("softmax gives shares of any scores, and zeros where nothing is permitted", () => {
  const found = softmax([2.3, 9.1, 0.5]);
  [0.00111, 0.9987, 0.00018].forEach((share, at) => near(found[at]!, share, 5e-6));
  near(sum(softmax([1e308, 1e308])), 1);
  assert.deepEqual(softmax([-Infinity, -Infinity]), [0, 0]);
  const { attention, heads } = attend([[[5, 7], [1, 1]]], [[false, false], [true, false]], [[[3], [4]]]);
  assert.deepEqual(attention, [[[0, 0], [1, 0]]]);
  assert.deepEqual(heads, [[[0], [3]]]);
});

const SETTINGS: Settings = { words: ["a", "b", "a", "c", "d"], cross: [], heads: 2, width: 8, seed: 0, scale: true, positions: true, mask: "none", window: 1 };

test("a walk has the shapes and the mask that it says", () => {
  const kept = { none: 25, causal: 15, window: 13, both: 9 };
  for (const [mask, pairs] of Object.entries(kept)) {
    const found = steps({ ...SETTINGS, mask: mask as Settings["mask"] });
    assert.equal(found.allowed.flat().filter(Boolean).length, pairs);
    found.attention.forEach((head) => head.forEach((row, i) => {
      near(sum(row), 1);
      row.forEach((weight, j) => assert.equal(weight > 0, found.allowed[i]![j]));
    }));
    assert.deepEqual([found.attention.length, found.concat[0]!.length, found.output.length], [2, 8, 5]);
  }
  const cross = steps({ ...SETTINGS, cross: ["x", "y"], mask: "causal" });
  assert.deepEqual(cross.attention.map((head) => [head.length, head[0]!.length]), [[5, 2], [5, 2]]);
});

test("without positions the same word looks the same way twice", () => {
  const [with_, without] = [true, false].map((positions) => steps({ ...SETTINGS, positions }).attention[0]!);
  assert.deepEqual(without![0], without![2]);
  assert.notDeepEqual(with_![0], with_![2]);
});

test("scaling divides by the root of a head's width, and LayerNorm has mean 0 and variance 1", () => {
  const found = steps(SETTINGS);
  near(found.scores[1]![3]![2]!, found.raw[1]![3]![2]! / 2);
  const row = layerNorm([1, 2, 4, 9], 0);
  near(sum(row), 0);
  near(sum(row.map((value) => value ** 2)) / 4, 1);
});

test("a seed draws the same numbers again", () => {
  const [one, again, other] = [3, 3, 4].map((seed) => { const draw = normals(seed); return [draw(), draw(), draw()]; });
  assert.deepEqual(one, again);
  assert.notDeepEqual(one, other);
});

test("a sentence is cut into words, signs and characters", () => {
  assert.deepEqual(wordsOf("The cat's 2 mats!", 9), ["The", "cat", "'", "s", "2", "mats", "!"]);
  assert.deepEqual(wordsOf("猫坐在 mat 上。", 4), ["猫", "坐", "在", "mat"]);
  assert.deepEqual(wordsOf("  ", 4), []);
});

test("a named model has its parameters, and its cache grows with the key heads", () => {
  const run = { length: 1024, batch: 1, bytes: 2 };
  assert.equal(bill(PRESETS["gpt2"]!, run).allParameters, 124_439_808);
  assert.equal(bill(PRESETS["llama-3-8b"]!, run).allParameters, 8_030_261_248);
  assert.equal(bill(PRESETS["llama-2-7b"]!, run).cachePerToken, 4 * bill(PRESETS["llama-3-8b"]!, run).cachePerToken);
  assert.equal(bill(PRESETS["gpt2"]!, { ...run, length: 2048 }).forward.attention, 4 * bill(PRESETS["gpt2"]!, run).forward.attention);
});

test("numbers get the unit that fits", () => {
  assert.deepEqual([si(0, "FLOP"), si(999, ""), si(1.5e13, "FLOP"), binary(1023), binary(1536), binary(2 ** 50)], ["0 FLOP", "999 ", "15 TFLOP", "1023 B", "1.5 KiB", "1 PiB"]);
});
