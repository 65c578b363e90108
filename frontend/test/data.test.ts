import assert from "node:assert/strict";
import { test } from "node:test";
import { Data, inflate, matrixFrom } from "../src/data";
import { dataOf, layerOf } from "./packed";

const WORDS = ["The", "cat", "sat", "down", "."];
// causal, two heads, five tokens; powers of two, which both codes keep
const WEIGHTS = [
  [[1, 0, 0, 0, 0], [0.25, 0.75, 0, 0, 0], [0.5, 0.25, 0.25, 0, 0], [0, 0, 1, 0, 0], [0.0625, 0.125, 0.25, 0.5, 0.0625]],
  [[1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0.25, 0.25, 0.25, 0.25, 0], [0.5, 0, 0, 0, 0.5]],
];
const near = (found: number, expected: number, by = 2e-5) => assert.ok(Math.abs(found - expected) <= by, `${found} is not ${expected}`);
const layerFrom = (given: Parameters<typeof layerOf>[2]) => dataOf([WORDS], (body) => [layerOf(body, WEIGHTS, { sight: "causal", ...given })]).recordings[0]!.scenes[0]!.layers[0]!;

for (const given of [{ exact: true }, { k: 5 }, { k: 5, relative: true }, { k: 5, bits: 8 as const }]) {
  const by = given.bits === 8 ? 0.004 : 2e-5; // half a step of the code
  test(`weights come out as they went in: ${JSON.stringify(given)}`, () => {
    const layer = layerFrom(given);
    for (const head of [0, 1]) for (let at = 0; at < 5; at++) {
      const row = WEIGHTS[head]![at]!, column = WEIGHTS[head]!.map((one) => one[at]!);
      for (const [found, expected] of [[layer.out([head], at), row], [layer.incoming([head], at), column]] as const) {
        const order = [...expected.keys()].filter((one) => expected[one]! > 0).sort((a, b) => expected[b]! - expected[a]! || a - b);
        assert.deepEqual(found.map((look) => look.at), order);
        found.forEach((look) => near(look.weight, expected[look.at]!, by));
      }
    }
  });
}

test("several heads give their mean, and each its own share", () => {
  const [first] = layerFrom({ exact: true }).out([0, 1], 4);
  assert.equal(first!.at, 0);
  near(first!.weight, (0.0625 + 0.5) / 2);
  near(first!.byHead[0]!, 0.0625);
  near(first!.byHead[1]!, 0.5);
});

test("a weight that is not in the file is not known, unless the mask forbids it", () => {
  const layer = layerFrom({ k: 2 });
  near(layer.weight(0, 4, 3)!, 0.5);
  assert.equal(layer.weight(0, 4, 0), null); // its two largest are elsewhere
  assert.equal(layer.weight(0, 1, 3), 0); // later than the query
  near(layerFrom({ exact: true }).weight(0, 4, 0)!, 0.0625);
});

test("what is outside the text looks at nothing", () => {
  const layer = layerFrom({ exact: true });
  for (const at of [-1, 5]) assert.deepEqual([layer.out([0], at), layer.incoming([0], at)], [[], []]);
});

test("queries after a cache stand behind it, and their distances count from there", () => {
  const late = WEIGHTS.map((head) => head.slice(3));
  const layer = dataOf([WORDS], (body) => [layerOf(body, late, { first: 3, relative: true, k: 5 })]).recordings[0]!.scenes[0]!.layers[0]!;
  assert.equal(layer.queryToken(0), "down");
  assert.deepEqual(layer.out([0], 0).map((look) => look.at), [2]);
  assert.deepEqual(layer.incoming([0], 2).map((look) => look.at), [0, 1]);
});

test("a strip has its scale, and what is missing is not a number", () => {
  const strip = layerFrom({}).strip("entropy", 1)!;
  near(strip[0]!, 1.5, 1e-4);
  assert.ok(Number.isNaN(strip[1]));
  assert.equal(layerFrom({}).strip("mass", 0), null);
});

test("other bytes are refused, and what is deflated is read", async () => {
  assert.throws(() => new Data(new Uint8Array(16)), /not a recording/);
  const packed = new Response(new Blob(["attention"]).stream().pipeThrough(new CompressionStream("deflate-raw")));
  assert.equal(new TextDecoder().decode(await inflate(new Uint8Array(await packed.arrayBuffer()))), "attention");
});

test("a matrix in JSON is read from its bytes, and nothing else is", () => {
  const f4 = Buffer.from(Float32Array.of(1, 2, 3, 4, 5, 6).buffer).toString("base64");
  assert.deepEqual(matrixFrom({ f4, columns: 3 }), [[1, 2, 3], [4, 5, 6]]);
  for (const other of [null, "x", 3, { columns: 2 }]) assert.equal(matrixFrom(other), other);
});
