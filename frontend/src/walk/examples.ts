// The worked examples E1 to E10: the numbers and words of `regard walk E1` … `regard walk E10`, computed here.
import EXAMPLES from "../../../src/regard/_walk/examples.json";
import { attend, type Matrix, multiply, normals, type Settings, softmax, steps, transpose, wordsOf } from "./compute";
import { allowedPanel, counted, FORMULAS, largest, type Panel, type Say, type Section, sectionsOf } from "./sections";
import * as T from "./words";
import type { Two } from "../words";

type Words = Record<string, string | number>;
type Told = (name: keyof typeof EXAMPLES, values?: Words) => string;
export interface Example {
  options: (keyof Settings)[]; // what may be switched: all other numbers are the example's own
  start: Partial<Settings>;
  apply?: (settings: Settings) => Settings;
  tell: (settings: Settings, told: Told, say: Say) => { intro: string[]; sections: Section[] };
}

export const SENTENCE = "The cat sat on the mat.";
const CAT = wordsOf(SENTENCE, 99), DOG = wordsOf("The dog ran to the door.", 99), LONGER = wordsOf("The cat sat on the old red mat.", 99);
const E1_X = [[1, 0, 1, 0], [0, 1, 0, 1]], E2_X = [[1, 0.5, -1, 2], [-0.5, 1, 0.3, -2]];
const E2_Q = [[0.1, 0.4, -0.3, 0.2], [-0.2, 0.3, 1.1, 0.6], [1, -0.5, -0.4, 0.8], [0.5, 0.2, 0.7, -0.1]]; // both heads, side by side
const E2_OUT = [[0.5, -0.2, 1.1, 0.3], [0.1, 0.8, -0.4, 0.6], [-0.3, 0.7, 0.2, 1], [0.9, -0.5, 0.3, -0.8]];
const E9_X = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9], [0.5, 0.2, 0.4]];

const plainly: Partial<Settings> = { words: CAT, cross: [], given: undefined, heads: 2, width: 8, seed: 0, scale: true, positions: true, mask: "none", window: 1 };
const identity = (size: number): Matrix => counted(size).map((_, i) => counted(size).map((_, j) => Number(i === j)));
const xs = (count: number) => counted(count).map((_, at) => `x${at + 1}`);
const drawn = (draw: () => number, rows: number, columns: number): Matrix => Array.from({ length: rows }, () => Array.from({ length: columns }, draw));
const mean = (values: number[]) => values.reduce((sum, value) => sum + value, 0) / values.length;
const variance = (values: number[]) => { const middle = mean(values); return mean(values.map((value) => (value - middle) ** 2)); };
const entropy = (row: number[]) => row.reduce((sum, value) => (value > 0 ? sum - value * Math.log(value) : sum), 0);
const scaled = (a: Matrix, by: number): Matrix => a.map((row) => row.map((value) => value / by));
const apart = (a: Matrix, b: Matrix) => largest(a.map((row, i) => row.map((value, j) => value - b[i]![j]!)));
const panel = (name: string, values: Matrix, kind: Panel["kind"] = "signed", rows = counted(values.length), columns = counted(values[0]!.length), top?: number): Panel => ({ name, values, rows, columns, kind, top });

function step(name: string, title: string, says: string, formula: string, shape: string, panels: Panel[]): Section {
  return { name, title, says, formula, shape, panels, worked: "" };
}
/** The lines under a small run of an experiment: its seed, and where the whole of it is. */
function closing(name: string, settings: Settings, told: Told): string[] {
  return [told("seed", { seed: settings.seed }), told("lab", { name })];
}

const e1: Example = {
  options: ["scale", "mask"],
  start: { words: xs(2), heads: 1, width: 4, scale: false, given: { x: E1_X, weights: { q: identity(4), k: identity(4), v: identity(4) }, out: identity(4) } },
  tell: (settings, told, say) => {
    const original: Settings = { ...settings, mask: "none" }, raw = steps({ ...original, scale: false }), soft = steps({ ...original, scale: true });
    return { intro: [told("E1.intro", { small: Math.min(...raw.attention[0]!.flat()).toFixed(4) })], sections: [...sectionsOf(settings, say),
      step("with_scaling", told("E1.scaled.title"), told("E1.scaled.says"), "softmax(S / √4),  Y = A V", "[1, 2, 2]", [
        panel(say(T.layer.head, { head: 0 }), soft.attention[0]!, "weight", settings.words, settings.words), panel("Y", soft.output, "signed", settings.words)])] };
  },
};
const e2: Example = {
  options: ["scale", "mask"], start: { words: xs(2), heads: 2, width: 4, given: { x: E2_X, weights: { q: E2_Q, k: E2_Q, v: E2_Q }, out: E2_OUT } },
  tell: (settings, told, say) => ({ intro: [told("E2.intro")], sections: sectionsOf(settings, say) }),
};
const e3: Example = {
  options: ["seed"], start: {},
  tell: (settings, told) => {
    const draw = normals(settings.seed), d = 64, n = 7, q = drawn(draw, n, d), k = drawn(draw, n, d), raw = multiply(q, transpose(k)), soft = scaled(raw, Math.sqrt(d)), top = largest(raw);
    const rows = counted(n, "q"), columns = counted(n, "k"), widths = [4, 16, 64, 256, 1024], pairs = 1000;
    const measured = widths.map((width) => {
      const a = drawn(draw, pairs, width), b = drawn(draw, pairs, width), products = a.map((row, at) => row.reduce((sum, value, i) => sum + value * b[at]![i]!, 0));
      return [variance(products), variance(products.map((value) => value / Math.sqrt(width)))];
    });
    return { intro: [...closing("E3", settings, told), told("other_draw")], sections: [
      step("draw", told("E3.draw.title"), told("E3.draw.says", { head_dim: d }), "", `2 × [${n}, ${d}]`, [panel("Q", q, "signed", rows), panel("K", k, "signed", columns)]),
      step("raw_scores", told("E3.raw.title"), told("E3.raw.says", { head_dim: d, count: n * n, variance: variance(raw.flat()).toFixed(2) }), "S = Q Kᵀ", `[${n}, ${d}] · [${d}, ${n}] → [${n}, ${n}]`, [panel("S", raw, "signed", rows, columns, top)]),
      step("scores", told("E3.scaled.title"), told("E3.scaled.says", { head_dim: d, variance: variance(soft.flat()).toFixed(3) }), `S / √${d}`, `[${n}, ${n}] → [${n}, ${n}]`, [panel(`S / √${d}`, soft, "signed", rows, columns, top)]),
      step("widths", told("E3.table.title"), told("E3.table.says", { pairs }), "Var(q · k) = d_k,  Var(q · k / √d_k) = 1", "", [panel("", transpose(measured), "plain", [told("raw"), told("scaled")], widths.map((width) => `d_k = ${width}`))]),
    ] };
  },
};
const e4: Example = {
  options: ["seed"], start: {},
  tell: (settings, told) => {
    const draw = normals(settings.seed), d = 512, queries = 512, keys = 64, shown = 12, q = drawn(draw, queries, d), k = drawn(draw, keys, d), raw = multiply(q, transpose(k));
    const scores = [raw, scaled(raw, Math.sqrt(d))], weights = scores.map((one) => one.map(softmax)), names = [told("raw"), told("scaled")], top = largest(raw.slice(0, shown));
    const table = weights.map((one) => [mean(one.map((row) => Math.max(...row))), mean(one.map(entropy)), mean(one.flat().map((value) => value * (1 - value)))]);
    const few = (one: Matrix, at: number, kind: Panel["kind"], most?: number) => panel(names[at]!, one.slice(0, shown), kind, counted(shown, "q"), counted(keys, "k"), most);
    return { intro: [...closing("E4", settings, told), told("other_draw")], sections: [
      step("scores", told("E4.scores.title"), told("E4.scores.says", { queries, keys, head_dim: d, shown }), "S = Q Kᵀ,  S / √d_k", `[${queries}, ${d}] · [${d}, ${keys}] → [${queries}, ${keys}]`, scores.map((one, at) => few(one, at, "signed", top))),
      step("weights", told("E4.weights.title"), told("E4.weights.says"), "A = softmax(S)", `[${queries}, ${keys}] → [${queries}, ${keys}]`, weights.map((one, at) => few(one, at, "weight"))),
      step("means", told("E4.table.title"), told("E4.table.says", { queries, keys, most: Math.log(keys).toFixed(2) }), "", "", [panel("", table, "plain", names, [told("E4.largest"), told("E4.entropy"), told("E4.gradient")])]),
    ] };
  },
};
const e5: Example = {
  options: ["seed", "heads", "width"], start: { mask: "causal" },
  tell: (settings, told, say) => {
    const right = steps({ ...settings, mask: "causal" }), length = CAT.length, allowed = CAT.map((_, i) => CAT.map((_, j) => j > i)), wrong = { ...right, allowed, ...attend(right.scores, allowed, right.vHeads) };
    const shape = `[${settings.heads}, ${length}, ${length}]`, head = (at: number) => say(T.layer.head, { head: at });
    const both = (found: typeof wrong, kind: "logits" | "attention") => found[kind].map((one, at) => panel(head(at), one, kind === "logits" ? "signed" : "weight", CAT, CAT, kind === "logits" ? largest(right.raw[at]!) : undefined));
    const links = (found: typeof wrong) => ({ attention: found.attention, rows: CAT, columns: CAT });
    return { intro: [told("E5.intro"), ...closing("E5", settings, told)], sections: [
      step("mask", say(T.layer["mask.title"]), say(T.layer["mask.causal"]), "j ≤ i", shape, [allowedPanel(right, CAT), ...both(right, "logits")]),
      { ...step("weights", say(T.layer["weights.title"]), say(T.layer["weights.says"]), FORMULAS.weights!, shape, both(right, "attention")), links: links(right) },
      step("inverted_mask", told("E5.inverted.title"), told("E5.inverted.says"), "triu(k=1)", shape, [allowedPanel(wrong, CAT), ...both(wrong, "logits")]),
      { ...step("inverted_weights", told("E5.wrong.title"), told("E5.wrong.says", { even: (1 / length).toFixed(4) }), "", shape, both(wrong, "attention")), links: links(wrong) },
    ] };
  },
};
const e7: Example = {
  options: ["seed"], start: { heads: 1 },
  tell: (settings, told) => {
    const [first, second, longer] = [CAT, DOG, LONGER].map((words) => steps({ ...settings, words }).attention[0]!) as [Matrix, Matrix, Matrix], n = CAT.length, long = LONGER.length;
    const table = drawn(normals(settings.seed), n, n).map(softmax), names = [told("E7.first"), told("E7.second")] as const, formula = "A = softmax(Q Kᵀ / √d_k)";
    return { intro: [told("E7.intro"), ...closing("E7", settings, told)], sections: [
      step("fixed", told("E7.fixed.title"), told("E7.fixed.says", { same: apart(table, table) }), "A = table", `[${n}, ${n}]`, [panel(names[0], table, "weight", CAT, CAT), panel(names[1], table, "weight", DOG, DOG)]),
      step("attention", told("E7.attention.title"), told("E7.attention.says", { other: apart(first, second).toFixed(3) }), formula, `[${n}, ${n}]`, [panel(names[0], first, "weight", CAT, CAT), panel(names[1], second, "weight", DOG, DOG)]),
      step("length", told("E7.length.title"), told("E7.length.says", { long, short: n, missing: long - n }), formula, `[${long}, ${long}]`, [panel(LONGER.join(" ").replace(" .", "."), longer, "weight", LONGER, LONGER)]),
    ] };
  },
};
const e8: Example = {
  options: ["seed"], start: {},
  tell: (settings, told, say) => {
    const { attention } = steps(settings), n = CAT.length, blurred = attention[0]!.map((row, i) => row.map((_, j) => mean(attention.map((one) => one[i]![j]!))));
    const each = mean(attention.flatMap((one) => one.map(entropy))), both = mean(blurred.map(entropy));
    return { intro: [told("E8.intro"), ...closing("E8", settings, told)], sections: [
      { ...step("weights", told("E8.many.title"), told("E8.many.says", { each: each.toFixed(3) }), FORMULAS.weights!, `[2, ${n}, ${n}]`, attention.map((one, at) => panel(say(T.layer.head, { head: at }), one, "weight", CAT, CAT))), links: { attention, rows: CAT, columns: CAT } },
      step("mean", told("E8.mean.title"), told("E8.mean.says", { mean: both.toFixed(3) }), "H((A0 + A1) / 2) ≥ (H(A0) + H(A1)) / 2", `[2, ${n}, ${n}] → [${n}, ${n}]`, [panel(told("E8.panel"), blurred, "weight", CAT, CAT)]),
    ] };
  },
};
const e9: Example = {
  options: ["seed", "scale", "mask"], start: { words: xs(4), heads: 1, width: 3 },
  apply: (settings) => { const draw = normals(settings.seed); return { ...settings, given: { x: E9_X, weights: { q: drawn(draw, 3, 3), k: drawn(draw, 3, 3), v: drawn(draw, 3, 3) }, out: identity(3) } }; },
  tell: (settings, told, say) => ({ intro: [told("E9.intro", { seed: settings.seed })], sections: sectionsOf(settings, say) }),
};
const e10: Example = {
  options: ["seed", "heads", "width"], start: {},
  tell: (settings, told) => {
    const { width } = settings, found = steps(settings), each = width * width, heads = [1, 2, 4, 8, 16].filter((count) => width % count === 0), widths = [...new Set([8, 64, 512, width])].sort((a, b) => a - b);
    const matrices: [string, Matrix][] = [["W^Q", found.weights!.q], ["W^K", found.weights!.k], ["W^V", found.weights!.v], ["W^O", found.out]], total = matrices.reduce((sum, [, one]) => sum + one.flat().length, 0);
    return { intro: closing("E10", settings, told), sections: [
      step("matrices", told("E10.matrices.title"), told("E10.matrices.says", { width, each, total }), `4 · ${width}² = ${4 * width ** 2}`, `4 × [${width}, ${width}]`, matrices.map(([name, one]) => panel(name, one))),
      step("heads", told("E10.heads.title"), told("E10.heads.says"), "", "", [panel("", [heads.map((count) => width / count), heads.map(() => total)], "plain", [told("E10.width_of_head"), told("E10.count")], heads.map((count) => told("E10.head_count", { heads: count })))]),
      step("widths", told("E10.widths.title"), told("E10.widths.says"), "4 · d_model²", "", [panel("", [widths.map((one) => 4 * one * one), widths.map((one) => 4 * one)], "plain", [told("E10.count"), told("E10.linear")], widths.map((one) => `d_model = ${one}`))]),
    ] };
  },
};

export const BY_NAME: Record<string, Example> = { E1: e1, E2: e2, E3: e3, E4: e4, E5: e5, E7: e7, E8: e8, E9: e9, E10: e10 };
export const NAMES = ["E1", "E2", "E3", "E4", "E5", "E6", "E7", "E8", "E9", "E10"];

export function started(name: string): Settings {
  return { ...plainly, ...BY_NAME[name]?.start } as Settings;
}

export function exampleTitle(name: string): Two { return EXAMPLES[`${name}.title` as keyof typeof EXAMPLES] as unknown as Two; }

/** What an example shows; E6 is the sentence itself, and so the walk as it stands. */
export function tellExample(name: string, settings: Settings, say: Say): { intro: string[]; sections: Section[] } {
  const example = BY_NAME[name]!, told: Told = (key, values = {}) => say(EXAMPLES[key] as unknown as Two, values);
  return example.tell(example.apply ? example.apply(settings) : settings, told, say);
}
