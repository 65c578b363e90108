import assert from "node:assert/strict";
import { test } from "node:test";
import { direction, label, percent, pieces, shorten, visible } from "../src/tokens";
import { apart, resample } from "../src/views/compare";
import { DIFFERENCE_DARK, DIFFERENCE_LIGHT, HEAT_DARK, HEAT_LIGHT, table } from "../src/colours";
import { WORDS as COST } from "../src/views/cost";
import * as WALK from "../src/walk/words";
import * as PAGE from "../src/words";
import { say, type Two } from "../src/words";

function written(tokens: string[]): string {
  const piece = pieces(tokens);
  return tokens.map((_, at) => (piece(at).space ? " " : "") + piece(at).text).join("");
}

test("control characters are shown and nothing turns the line around", () => {
  assert.equal(visible("a\nb\tc\0"), "a↵b⇥c␀");
  assert.equal(visible("\u202eevil\u2066\u200f"), "\ufffdevil\ufffd\ufffd");
  assert.equal(visible("\ud800"), "\ufffd");
  assert.equal(visible("naïve 中文 👩"), "naïve 中文 👩");
});

test("word pieces are joined to words, and punctuation stands next to them", () => {
  assert.equal(written(["[CLS]", "un", "##believ", "##able", ",", "cat", "."]), "[CLS] unbelievable, cat.");
});

test("tokens that carry their spaces keep them", () => {
  assert.equal(written(["The", " cat", " s", "at", "."]), "The cat sat.");
  assert.equal(written(["▁The", "▁cat", "s"]), " The cats");
});

test("Chinese characters have no spaces between them", () => {
  assert.equal(written(["猫", "坐", "在", "垫", "子", "上"]), "猫坐在垫子上");
});

test("a huge token is cut without looking at all of it", () => {
  assert.equal([...shorten("x".repeat(10_000_000))].length, 48);
  assert.equal(shorten("👩".repeat(60)).endsWith("…"), true);
  assert.equal(label("   "), "␣␣␣");
  assert.equal(label(""), "∅");
  assert.equal(label("▁cat"), "cat"); // the mark of a space is not a letter of the word
  assert.equal(label("Ġcat"), "cat");
  assert.equal(label("▁"), "▁");
});

test("the direction is that of most letters", () => {
  assert.equal(direction(["مرحبا", "بالعالم", "ok"]), "rtl");
  assert.equal(direction(["hello", "שלום", "world"]), "ltr");
});

test("shares keep three digits", () => {
  assert.deepEqual([1, 0.1234, 0.01234, 0.00001, 0].map(percent), ["100.0 %", "12.3 %", "1.23 %", "< 0.01 %", "0 %"]);
});

test("maps on one grid are subtracted cell by cell", () => {
  const a = Float32Array.of(1, 0, 0, 1), b = Float32Array.of(0, 1, 1, 0);
  assert.equal(apart(a, a, 2, 1), 0);
  assert.equal(apart(a, b, 2, 1), 1);
  assert.deepEqual([...resample(a, 2, 2, 4, 4)], [1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 1, 1]);
});

test("colours run from one end to the other", () => {
  const colours = table([[0, 0, 0], [255, 255, 255]]);
  assert.equal(colours[0]! >>> 0, 0xff000000);
  assert.equal(colours[255]! >>> 0, 0xffffffff);
});

test("every text is there in both languages, with the same names", () => {
  const pairs = (given: unknown): Two[] => {
    if (Array.isArray(given) && given.length === 2 && given.every((one) => typeof one === "string")) return [given as unknown as Two];
    return given !== null && typeof given === "object" ? Object.values(given).flatMap(pairs) : [];
  };
  const found = [PAGE, WALK, COST].map(pairs);
  assert.ok(found.every((some) => some.length > 20));
  for (const texts of found.flat()) {
    const [english, chinese] = texts.map((text) => [...text.matchAll(/\{(\w+)\}/g)].map((name) => name[1]).sort().join());
    assert.equal(english, chinese, texts[0]);
    assert.ok(say("zh", texts).length > 0 || !english!.length && !texts[0].trim());
  }
});

test("more weight is further from the paper in lightness, so colours are read without their hue", () => {
  const light = (pixel: number) => [pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255].reduce((sum, part, at) => sum + [0.2126, 0.7152, 0.0722][at]! * (part / 255) ** 2.2, 0);
  const rises = (lights: number[]) => lights.every((value, at) => at === 0 || value > lights[at - 1]!);
  const every = (stops: Parameters<typeof table>[0], from: number, to: number) => Array.from({ length: 16 }, (_, at) => light(table(stops)[Math.round(from + ((to - from) * at) / 15)]!));
  assert.ok(rises(every(HEAT_DARK, 0, 255)) && rises(every(HEAT_LIGHT, 255, 0)));
  for (const end of [0, 255]) assert.ok(rises(every(DIFFERENCE_DARK, 128, end)) && rises(every(DIFFERENCE_LIGHT, end, 128)));
});

test("parts of characters of a script without spaces stand without spaces", () => {
  const piece = pieces(["猫₁", "猫₂", "坐₁", "a"]);
  assert.deepEqual([0, 1, 2, 3].map((at) => piece(at).space), [false, false, false, true]);
});

test("a label tells a new line and a tab from spaces", () => {
  assert.deepEqual(["\n", "\n\n", "\t", " ", "      ", " \n", ""].map((token) => label(token)), ["↵", "↵↵", "⇥", "␣", "␣␣␣␣", "␣↵", "∅"]);
});
