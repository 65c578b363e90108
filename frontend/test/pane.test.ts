import assert from "node:assert/strict";
import { test } from "node:test";
import { blockStarts } from "../src/views/pane";

test("a long text is cut after lines, else after sentences, else evenly, and a short one not at all", () => {
  const words = (length: number, ends: Record<number, string> = {}) => Array.from({ length }, (_, at) => ends[at] ?? "word");
  assert.deepEqual(blockStarts(words(300)), [0]);
  assert.deepEqual(blockStarts(words(700)), [0, 200, 400]);
  assert.deepEqual(blockStarts(words(450, { 120: ".", 230: "?", 240: "word" })), [0, 231]);
  assert.deepEqual(blockStarts(words(450, { 120: "\n", 230: "?" })), [0, 121, 231]);
  assert.deepEqual(blockStarts([]), [0]);
});
