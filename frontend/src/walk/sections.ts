// The steps of one layer as what is shown of them: words, formulas, shapes, matrices, and one number of each by hand.
import { label } from "../tokens";
import { type Matrix, type Settings, steps as compute, type Steps } from "./compute";
import * as T from "./words";
import type { Two } from "../words";

export type Kind = "signed" | "weight" | "mask" | "plain";
/** `top` gets the strongest colour (its own largest number by default); panels of one `folded` name are folded away under it. */
export interface Panel { name: string; values: Matrix; rows: string[]; columns: string[]; kind: Kind; top?: number; folded?: string }
export interface Links { attention: Matrix[]; rows: string[]; columns: string[] }
export interface Section { name: string; title: string; says: string; formula: string; shape: string; panels: Panel[]; links?: Links; worked: string }
export type Say = (two: Two, values?: Record<string, string | number>) => string;

export const counted = (length: number, letter = "") => Array.from({ length }, (_, at) => `${letter}${at}`);
export const largest = (values: Matrix) => values.reduce((most, row) => row.reduce((found, value) => (Number.isFinite(value) ? Math.max(found, Math.abs(value)) : found), most), 0);

/** A number as it is written in a line: three digits after the point, a true minus. */
export function fixed(value: number): string { return value === -Infinity ? "−∞" : value.toFixed(3).replace("-", "−"); }

function product(a: number[], b: number[], bias = 0): string {
  const sum = a.reduce((total, value, at) => total + value * b[at]!, bias);
  return `${a.slice(0, 4).map((value, at) => `${fixed(value)}·${fixed(b[at]!)}`).join(" + ")}${a.length > 4 ? " + …" : ""}${bias ? ` + ${fixed(bias)}` : ""} = ${fixed(sum)}`;
}

/** Formulas that are the same in every language. */
export const FORMULAS: { [name in Name]?: string } = {
  embeddings: "E = table[number]", projections: "Q = X W^Q,  K = X W^K,  V = X W^V", split: "d_k = d_model / h", raw_scores: "S = Q Kᵀ", scores: "S / √d_k",
  weights: "A[i, j] = exp(S[i, j]) / Σ_k exp(S[i, k])", heads: "H = A V", concat: "C = Concat(H₀, H₁, …)", output: "Y = C W^O",
};
type Name = "tokens" | "input" | "embeddings" | "positions" | "projections" | "split" | "raw_scores" | "scores" | "mask" | "weights" | "heads" | "concat" | "output";

/** Every step, from the words to LayerNorm. */
export function sectionsOf(settings: Settings, say: Say): Section[] {
  const found = compute(settings), { words, heads, width, given } = settings, { keyWords } = found;
  const L = words.length, S = keyWords.length, d = width / heads, dims = counted(width), small = counted(d), isCross = settings.cross.length > 0;
  const i = Math.min(1, L - 1), j = found.attention[0]![i]!.indexOf(Math.max(...found.attention[0]![i]!));
  const head = (at: number) => say(T.layer.head, { head: at });
  const pair = `${head(0)}, ${label(words[i]!)} → ${label(keyWords[j]!)}`;
  const signed = (name: string, values: Matrix, rows = words, columns = dims): Panel => ({ name, values, rows, columns, kind: "signed" });
  // raw, scaled and masked scores of a head share their colours: the eye sees what each step does to them
  const each = (values: Matrix[], kind: Kind): Panel[] => values.map((one, at) => ({ name: head(at), values: one, rows: words, columns: keyWords, kind, top: kind === "signed" ? largest(found.raw[at]!) : undefined }));
  const logits = found.logits[0]![i]!, finite = logits.filter((value) => value > -Infinity);
  const root = Number.isInteger(Math.sqrt(d)) ? Math.sqrt(d) : Math.sqrt(d).toFixed(3);
  const told = (...keys: (keyof typeof T.layer)[]) => keys.map((key) => say(T.layer[key], { heads, head_dim: d, root, window: settings.window })).join(say(T.between));
  const section = (name: Name, shape: string, panels: Panel[], worked = "", says = told(`${name}.says` as "tokens.says"), formula = FORMULAS[name] ?? ""): Section =>
    ({ name, title: told(`${name}.title`), says, formula, shape, panels, worked });
  const ids = (texts: string[], numbers: number[]): Panel => ({ name: "", values: [texts.map((_, at) => at), numbers], rows: [told("position"), told("number")], columns: texts, kind: "plain" });
  const both = <T>(own: T, other: T): T[] => (isCross ? [own, other] : [own]);

  const before = given
    ? [...(given.ids ? [section("tokens", `[${L}]`, [ids(words, found.ids)], "", told("tokens.model"))] : []), section("input", `[${L}, ${width}]`, [signed("X", found.x)], "", say(given.ids ? T.input_model : T.input))]
    : [
        section("tokens", both(`[${L}]`, `[${S}]`).join(", "), both(ids(words, found.ids), ids(keyWords, found.keyIds))),
        section("embeddings", both(`[${L}] → [${L}, ${width}]`, `[${S}] → [${S}, ${width}]`).join(", "), both(signed(isCross ? "E (X)" : "E", found.embeddings), signed("E (M)", found.keyEmbeddings, keyWords))),
        section("positions", `[${L}, ${width}] + [${L}, ${width}]`, both([signed("P", found.positions), signed("X = E + P", found.x)], [signed("P", found.keyPositions, keyWords), signed("M = E + P", found.memory, keyWords)]).flat(), "", told("positions.says"), told("positions.formula")),
      ];
  const matrices: Panel[] = found.weights && width <= 16
    ? (["q", "k", "v"] as const).map((name) => ({ ...signed(`W^${name.toUpperCase()}`, found.weights![name], counted(found.weights![name].length)), folded: "W^Q, W^K, W^V" })) : [];
  return [
    ...before,
    section("projections", `[${L}, ${width}] · [${width}, ${width}] → [${L}, ${width}]`, [signed("Q", found.q), signed("K", found.k, keyWords), signed("V", found.v, keyWords), ...matrices],
      found.weights ? `Q[${label(words[i]!)}, 0] = ${product(found.x[i]!, found.weights.q.map((row) => row[0]!))}` : "", isCross ? told("projections.says", "projections.cross") : told("projections.says")),
    section("split", `[${L}, ${width}] → [${heads}, ${L}, ${d}]`, heads > 1 ? found.qHeads.flatMap((_, at) => [signed(`Q, ${head(at)}`, found.qHeads[at]!, words, small), signed(`K, ${head(at)}`, found.kHeads[at]!, keyWords, small), signed(`V, ${head(at)}`, found.vHeads[at]!, keyWords, small)]) : [], "", told(heads > 1 ? "split.says" : "split.one")),
    section("raw_scores", `[${heads}, ${L}, ${d}] · [${heads}, ${d}, ${S}] → [${heads}, ${L}, ${S}]`, each(found.raw, "signed"), `${pair}: ${product(found.qHeads[0]![i]!, found.kHeads[0]![j]!)}`, told("raw_scores.says", "rows_and_columns")),
    section("scores", `[${heads}, ${L}, ${S}]`, settings.scale ? each(found.scores, "signed") : [], settings.scale ? `${pair}: ${fixed(found.raw[0]![i]![j]!)} / ${Math.sqrt(d).toFixed(3)} = ${fixed(found.scores[0]![i]![j]!)}` : "", told(settings.scale ? "scores.says" : "scores.off")),
    section("mask", `[${heads}, ${L}, ${S}]`, settings.mask === "none" || isCross ? [] : [allowedPanel(found, words), ...each(found.logits, "signed")], "", told(`mask.${isCross ? "none" : settings.mask}`), told("mask.formula")),
    { ...section("weights", `[${heads}, ${L}, ${S}]`, each(found.attention, "weight"), `${pair}: exp(${fixed(logits[j]!)}) / (${finite.slice(0, 4).map((value) => `exp(${fixed(value)})`).join(" + ")}${finite.length > 4 ? " + …" : ""}) = ${fixed(found.attention[0]![i]![j]!)}`, told("weights.says") + say(T.between) + say(T.follow)), links: { attention: found.attention, rows: words, columns: keyWords } },
    section("heads", `[${heads}, ${L}, ${S}] · [${heads}, ${S}, ${d}] → [${heads}, ${L}, ${d}]`, found.heads.map((one, at) => signed(head(at), one, words, small)), `H₀[${label(words[i]!)}, 0] = ${product(found.attention[0]![i]!, found.vHeads[0]!.map((row) => row[0]!))}`),
    section("concat", `[${heads}, ${L}, ${d}] → [${L}, ${width}]`, heads > 1 ? [signed("C", found.concat)] : [], "", told(heads > 1 ? "concat.says" : "concat.one")),
    section("output", `[${L}, ${width}] · [${width}, ${width}] → [${L}, ${width}]`, [signed("Y", found.output), ...(width <= 16 ? [{ ...signed("W^O", found.out, dims), folded: "W^O" }] : [])],
      `Y[${label(words[i]!)}, 0] = ${product(found.concat[i]!, found.out.map((row) => row[0]!), given?.outBias?.[0])}`),
    { name: "residual", title: say(T.residual), says: say(T.residual_says), formula: "R = X + Y", shape: `[${L}, ${width}] + [${L}, ${width}]`, panels: [signed("R = X + Y", found.residual)], worked: "" },
    { name: "normed", title: say(T.normed), says: say(T.normed_says), formula: "N = (R − mean) / √(variance + ε)", shape: `[${L}, ${width}]`, panels: [signed("N", found.normed)], worked: "" },
  ];
}

export function allowedPanel(found: Pick<Steps, "allowed" | "keyWords">, words: string[], name = "M"): Panel {
  return { name, values: found.allowed.map((row) => row.map(Number)), rows: words, columns: found.keyWords, kind: "mask" };
}
