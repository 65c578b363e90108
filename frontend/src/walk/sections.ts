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

/** Every step, from the words to LayerNorm. */
export function sectionsOf(settings: Settings, say: Say): Section[] {
  const found = compute(settings), { words, heads, width, given } = settings, { keyWords } = found;
  const L = words.length, S = keyWords.length, d = width / heads, dims = counted(width), small = counted(d), isCross = settings.cross.length > 0;
  const i = Math.min(1, L - 1), j = found.attention[0]![i]!.indexOf(Math.max(...found.attention[0]![i]!));
  const head = (at: number) => say(T.head, { n: at });
  const pair = `${head(0)}, ${label(words[i]!)} → ${label(keyWords[j]!)}`;
  const signed = (name: string, values: Matrix, rows = words, columns = dims): Panel => ({ name, values, rows, columns, kind: "signed" });
  // raw, scaled and masked scores of a head share their colours: the eye sees what each step does to them
  const each = (values: Matrix[], kind: Kind): Panel[] => values.map((one, at) => ({ name: head(at), values: one, rows: words, columns: keyWords, kind, top: kind === "signed" ? largest(found.raw[at]!) : undefined }));
  const logits = found.logits[0]![i]!, finite = logits.filter((value) => value > -Infinity);
  const section = (name: string, shape: string, panels: Panel[], worked = "", says: Two = T.STEPS[name]!.says): Section => ({ name, title: say(T.STEPS[name]!.title), says: say(says), formula: T.STEPS[name]!.formula, shape, panels, worked });
  const ids = (texts: string[], numbers: number[]): Panel => ({ name: "", values: [texts.map((_, at) => at), numbers], rows: [say(T.position), say(T.number)], columns: texts, kind: "plain" });
  const both = <T>(own: T, other: T): T[] => (isCross ? [own, other] : [own]);

  const before = given
    ? [...(given.ids ? [section("tokens", `[${L}]`, [ids(words, found.ids)], "", T.tokens_given)] : []), section("input", `[${L}, ${width}]`, [signed("X", found.x)], "", given.ids ? T.input_model : T.STEPS.input!.says)]
    : [
        section("tokens", both(`[${L}]`, `[${S}]`).join(", "), both(ids(words, found.ids), ids(keyWords, found.keyIds))),
        section("embeddings", both(`[${L}] → [${L}, ${width}]`, `[${S}] → [${S}, ${width}]`).join(", "), both(signed(isCross ? "E (X)" : "E", found.embeddings), signed("E (M)", found.keyEmbeddings, keyWords))),
        section("positions", `[${L}, ${width}] + [${L}, ${width}]`, both([signed("P", found.positions), signed("X = E + P", found.x)], [signed("P", found.keyPositions, keyWords), signed("M = E + P", found.memory, keyWords)]).flat()),
      ];
  const matrices: Panel[] = found.weights && width <= 16
    ? (["q", "k", "v"] as const).map((name) => ({ ...signed(`W^${name.toUpperCase()}`, found.weights![name], counted(found.weights![name].length)), folded: "W^Q, W^K, W^V" })) : [];
  return [
    ...before,
    section("projections", `[${L}, ${width}] · [${width}, ${width}] → [${L}, ${width}]`, [signed("Q", found.q), signed("K", found.k, keyWords), signed("V", found.v, keyWords), ...matrices],
      found.weights ? `Q[${label(words[i]!)}, 0] = ${product(found.x[i]!, found.weights.q.map((row) => row[0]!))}` : ""),
    section("split", `[${L}, ${width}] → [${heads}, ${L}, ${d}]`, heads > 1 ? found.qHeads.flatMap((_, at) => [signed(`Q, ${head(at)}`, found.qHeads[at]!, words, small), signed(`K, ${head(at)}`, found.kHeads[at]!, keyWords, small), signed(`V, ${head(at)}`, found.vHeads[at]!, keyWords, small)]) : []),
    section("raw", `[${heads}, ${L}, ${d}] · [${heads}, ${d}, ${S}] → [${heads}, ${L}, ${S}]`, each(found.raw, "signed"), `${pair}: ${product(found.qHeads[0]![i]!, found.kHeads[0]![j]!)}`),
    section("scores", `[${heads}, ${L}, ${S}]`, settings.scale ? each(found.scores, "signed") : [], settings.scale ? `${pair}: ${fixed(found.raw[0]![i]![j]!)} / ${Math.sqrt(d).toFixed(3)} = ${fixed(found.scores[0]![i]![j]!)}` : "", settings.scale ? T.STEPS.scores!.says : T.unscaled),
    section("mask", `[${heads}, ${L}, ${S}]`, settings.mask === "none" || isCross ? [] : [allowedPanel(found, words), ...each(found.logits, "signed")], "", settings.mask === "none" || isCross ? T.unmasked : T.STEPS.mask!.says),
    { ...section("attention", `[${heads}, ${L}, ${S}]`, each(found.attention, "weight"), `${pair}: exp(${fixed(logits[j]!)}) / (${finite.slice(0, 4).map((value) => `exp(${fixed(value)})`).join(" + ")}${finite.length > 4 ? " + …" : ""}) = ${fixed(found.attention[0]![i]![j]!)}`), links: { attention: found.attention, rows: words, columns: keyWords } },
    section("heads", `[${heads}, ${L}, ${S}] · [${heads}, ${S}, ${d}] → [${heads}, ${L}, ${d}]`, found.heads.map((one, at) => signed(head(at), one, words, small)), `H₀[${label(words[i]!)}, 0] = ${product(found.attention[0]![i]!, found.vHeads[0]!.map((row) => row[0]!))}`),
    section("concat", `[${heads}, ${L}, ${d}] → [${L}, ${width}]`, heads > 1 ? [signed("C", found.concat)] : [], "", heads > 1 ? T.STEPS.concat!.says : T.one_head),
    section("output", `[${L}, ${width}] · [${width}, ${width}] → [${L}, ${width}]`, [signed("Y", found.output), ...(width <= 16 ? [{ ...signed("W^O", found.out, dims), folded: "W^O" }] : [])],
      `Y[${label(words[i]!)}, 0] = ${product(found.concat[i]!, found.out.map((row) => row[0]!), given?.outBias?.[0])}`),
    section("residual", `[${L}, ${width}] + [${L}, ${width}]`, [signed("R = X + Y", found.residual)]),
    section("normed", `[${L}, ${width}]`, [signed("N", found.normed)]),
  ];
}

export function allowedPanel(found: Pick<Steps, "allowed" | "keyWords">, words: string[], name = "M"): Panel {
  return { name, values: found.allowed.map((row) => row.map(Number)), rows: words, columns: found.keyWords, kind: "mask" };
}
