// Multi-head attention with plain numbers, one step after the other: small enough to be read, and to be run in the page.

export type Matrix = number[][];
/** A layer whose numbers come from elsewhere: a worked example's, or those of a trained model. */
export interface Given {
  x: Matrix; out: Matrix; ids?: number[]; outBias?: number[];
  weights?: { q: Matrix; k: Matrix; v: Matrix }; // or what they make of x:
  projected?: { q: Matrix; k: Matrix; v: Matrix };
}
export interface Settings {
  words: string[]; cross: string[]; // cross: the words that are looked at, where they are others
  heads: number; width: number; seed: number; scale: boolean; positions: boolean;
  mask: "none" | "causal" | "window" | "both"; window: number;
  given?: Given;
}
export interface Steps {
  ids: number[]; embeddings: Matrix; positions: Matrix; x: Matrix;
  keyWords: string[]; keyIds: number[]; keyEmbeddings: Matrix; keyPositions: Matrix; memory: Matrix; // the same again, unless the attention is cross
  weights: { q: Matrix; k: Matrix; v: Matrix } | null; out: Matrix; q: Matrix; k: Matrix; v: Matrix;
  qHeads: Matrix[]; kHeads: Matrix[]; vHeads: Matrix[]; raw: Matrix[]; scores: Matrix[]; allowed: boolean[][];
  logits: Matrix[]; attention: Matrix[]; heads: Matrix[]; concat: Matrix; output: Matrix; residual: Matrix; normed: Matrix;
}

export function multiply(a: Matrix, b: Matrix): Matrix {
  const columns = b[0]!.length;
  return a.map((row) => {
    const found = new Array<number>(columns).fill(0);
    row.forEach((value, at) => { const other = b[at]!; for (let column = 0; column < columns; column++) found[column]! += value * other[column]!; });
    return found;
  });
}
export function transpose(a: Matrix): Matrix { return a[0]!.map((_, column) => a.map((row) => row[column]!)); }
export function add(a: Matrix, b: Matrix): Matrix { return a.map((row, i) => row.map((value, j) => value + b[i]![j]!)); }

/** Shares that add up to 1; a row with nothing permitted gets zeros. */
export function softmax(row: number[]): number[] {
  const most = Math.max(...row);
  if (most === -Infinity) return row.map(() => 0);
  const powers = row.map((value) => Math.exp(value - most)), sum = powers.reduce((total, value) => total + value, 0);
  return powers.map((value) => value / sum);
}

export function layerNorm(row: number[], epsilon = 1e-5): number[] {
  const mean = row.reduce((sum, value) => sum + value, 0) / row.length;
  const variance = row.reduce((sum, value) => sum + (value - mean) ** 2, 0) / row.length;
  return row.map((value) => (value - mean) / Math.sqrt(variance + epsilon));
}

export function sinusoids(length: number, width: number): Matrix {
  return Array.from({ length }, (_, at) => Array.from({ length: width }, (_, column) => {
    const angle = at * 10_000 ** ((-2 * Math.floor(column / 2)) / width);
    return column % 2 ? Math.cos(angle) : Math.sin(angle);
  }));
}

/** Normal numbers that depend on the seed alone (mulberry32, Box and Muller). */
export function normals(seed: number): () => number {
  let state = seed >>> 0;
  const uniform = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
  return () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
}

export function hash(text: string, seed: number): number {
  let found = (2166136261 ^ seed) >>> 0;
  for (const letter of text) found = Math.imul(found ^ letter.codePointAt(0)!, 16777619) >>> 0;
  return found;
}

/** Words, signs, and Chinese characters one by one. */
export function wordsOf(text: string, most: number): string[] {
  return (text.match(/[\u3040-\u30ff\u3400-\u9fff]|[\p{L}\p{N}\p{M}_]+|[^\s\p{L}\p{N}]/gu) ?? []).slice(0, most);
}

export function steps(given: Settings): Steps {
  const { words, heads, width, seed } = given, isCross = given.cross.length > 0, keyWords = isCross ? given.cross : words, depth = width / heads;
  const vocabulary = new Map<string, number>();
  const number = (word: string) => {
    const name = word.toLowerCase();
    if (!vocabulary.has(name)) vocabulary.set(name, vocabulary.size);
    return vocabulary.get(name)!;
  };
  const embed = (texts: string[]) => {
    const ids = given.given?.ids ?? texts.map(number);
    const embeddings = given.given ? given.given.x : texts.map((word) => { const draw = normals(hash(word.toLowerCase(), seed)); return Array.from({ length: width }, draw); });
    const positions = given.positions && !given.given ? sinusoids(texts.length, width) : embeddings.map((row) => row.map(() => 0));
    return { ids, embeddings, positions, x: given.given ? given.given.x : add(embeddings, positions) };
  };
  const own = embed(words), other = isCross ? embed(keyWords) : own, { x } = own, memory = other.x;
  const draw = normals(seed + 1), drawn = () => Array.from({ length: width }, () => Array.from({ length: width }, () => draw() / Math.sqrt(width)));
  const weights = given.given ? given.given.weights ?? null : { q: drawn(), k: drawn(), v: drawn() }, out = given.given ? given.given.out : drawn();
  const { q, k, v } = weights ? { q: multiply(x, weights.q), k: multiply(memory, weights.k), v: multiply(memory, weights.v) } : given.given!.projected!;
  const split = (a: Matrix) => Array.from({ length: heads }, (_, head) => a.map((row) => row.slice(head * depth, (head + 1) * depth)));
  const qHeads = split(q), kHeads = split(k), vHeads = split(v);
  const raw = qHeads.map((one, head) => multiply(one, transpose(kHeads[head]!)));
  const factor = given.scale ? 1 / Math.sqrt(depth) : 1;
  const scores = raw.map((one) => one.map((row) => row.map((value) => value * factor)));
  const past = given.mask === "causal" || given.mask === "both", near = given.mask === "window" || given.mask === "both";
  const allowed = words.map((_, i) => keyWords.map((_, j) => isCross || ((!past || j <= i) && (!near || Math.abs(i - j) <= given.window))));
  const rest = attend(scores, allowed, vHeads), concat = words.map((_, i) => rest.heads.flatMap((one) => one[i]!));
  const bias = given.given?.outBias, output = multiply(concat, out).map((row) => (bias ? row.map((value, at) => value + bias[at]!) : row)), residual = add(x, output);
  return {
    ...own, keyWords, keyIds: other.ids, keyEmbeddings: other.embeddings, keyPositions: other.positions, memory, weights, out,
    q, k, v, qHeads, kHeads, vHeads, raw, scores, allowed, ...rest, concat, output, residual, normed: residual.map((row) => layerNorm(row)),
  };
}

/** From scores to what each head gives, under a mask. */
export function attend(scores: Matrix[], allowed: boolean[][], values: Matrix[]): { logits: Matrix[]; attention: Matrix[]; heads: Matrix[] } {
  const logits = scores.map((one) => one.map((row, i) => row.map((value, j) => (allowed[i]![j] ? value : -Infinity))));
  const attention = logits.map((one) => one.map(softmax));
  return { logits, attention, heads: attention.map((one, head) => multiply(one, values[head]!)) };
}

/** How sharp attention is: the mean of each query's largest weight. */
export function sharpness(attention: Matrix[]): number {
  const most = attention.flatMap((one) => one.map((row) => Math.max(...row)));
  return most.reduce((sum, value) => sum + value, 0) / most.length;
}
