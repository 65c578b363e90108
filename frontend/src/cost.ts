// What a decoder costs: the same sums as regard.cost, for sliders. FLOPs are those of matrix products, two for each
// multiplication and its addition; all pairs of query and key are counted, and next to them those that a causal mask keeps.

export interface Config {
  layers: number; heads: number; headDim: number; kvHeads: number; ff: number; vocab: number; maxTokens: number;
  family: "gpt" | "llama"; tied: boolean;
}
export interface Run { length: number; batch: number; bytes: number }
export type Part = "embeddings" | "norms" | "projections" | "attention" | "feedForward" | "head";
export interface Bill {
  width: number; parameters: Record<Part, number>; forward: Record<Part, number>; kept: number;
  allParameters: number; allForward: number; weightBytes: number; cacheBytes: number; cachePerToken: number; mapBytes: number;
}

export const PRESETS: Record<string, Config> = {
  "gpt2": { layers: 12, heads: 12, headDim: 64, kvHeads: 12, ff: 3072, vocab: 50257, maxTokens: 1024, family: "gpt", tied: true },
  "llama-2-7b": { layers: 32, heads: 32, headDim: 128, kvHeads: 32, ff: 11008, vocab: 32000, maxTokens: 4096, family: "llama", tied: false },
  "llama-3-8b": { layers: 32, heads: 32, headDim: 128, kvHeads: 8, ff: 14336, vocab: 128256, maxTokens: 8192, family: "llama", tied: false },
};

const sum = (parts: Record<Part, number>) => Object.values(parts).reduce((total, value) => total + value, 0);

export function bill(config: Config, run: Run): Bill {
  const { layers, heads, headDim, kvHeads, ff, vocab } = config, gpt = config.family === "gpt", bias = gpt ? 1 : 0;
  const width = heads * headDim, tokens = run.batch * run.length, inner = (heads + 2 * kvHeads) * headDim, ups = gpt ? 1 : 2;
  const pairs = (run.length * (run.length + 1)) / 2, lead = 2 * run.batch * heads * 2 * headDim * layers;
  const parameters: Record<Part, number> = {
    embeddings: vocab * width + (gpt ? config.maxTokens * width : 0), norms: (2 * layers + 1) * width * (gpt ? 2 : 1),
    projections: layers * ((width + bias) * inner + (width + bias) * width), attention: 0,
    feedForward: layers * (ups * (width + bias) * ff + (ff + bias) * width), head: config.tied ? 0 : width * vocab,
  };
  const forward: Record<Part, number> = {
    embeddings: 0, norms: 0, projections: layers * 2 * tokens * width * (inner + width), attention: lead * run.length ** 2,
    feedForward: layers * 2 * tokens * width * ff * (ups + 1), head: 2 * tokens * width * vocab,
  };
  const cachePerToken = layers * kvHeads * 2 * headDim * run.bytes, allParameters = sum(parameters), allForward = sum(forward);
  return {
    width, parameters, forward, kept: allForward - forward.attention + lead * pairs, allParameters, allForward, weightBytes: allParameters * run.bytes,
    cachePerToken, cacheBytes: cachePerToken * tokens, mapBytes: layers * run.batch * heads * run.length ** 2 * run.bytes,
  };
}

export function si(value: number, unit: string): string {
  const names = ["", "k", "M", "G", "T", "P", "E", "Z"];
  let at = 0;
  while (value >= 1000 && at < names.length - 1) { value /= 1000; at++; }
  return `${Number(value.toPrecision(4))} ${names[at]}${unit}`;
}

export function binary(value: number): string {
  const names = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (value >= 1024 && at < names.length - 1) { value /= 1024; at++; }
  return `${Number(value.toPrecision(4))} ${names[at]}`;
}
