import { bill, binary, type Config, type Part, PRESETS, type Run, si } from "../cost";
import { chip, el, fill, line, sharp, statistics } from "../dom";
import type { Shown, Teller } from "../state";
import type { Two } from "../words";

export const WORDS = {
  title: ["What a model costs", "一个模型要花多少"], intro: ["Move a slider, and the bill is made again: parameters, arithmetic of one forward pass, and memory.", "移动滑块，账单立刻重算：参数、一次前向计算的运算量和内存。"],
  preset: ["Model", "模型"], layers: ["Layers", "层数"], heads: ["Heads", "头数"], headDim: ["Width of a head", "每头宽度"], kvHeads: ["Key and value heads", "键值头数"], ff: ["Feed-forward width", "前馈宽度"],
  length: ["Tokens", "词元数"], batch: ["Texts at once", "批大小"], bytes: ["Bytes of a number", "每个数的字节"],
  part: ["part", "部分"], parameters: ["parameters", "参数"], forward: ["forward pass", "前向"], all: ["in all", "合计"],
  embeddings: ["embeddings", "词嵌入"], norms: ["norms", "归一化"], projections: ["attention projections", "注意力投影"], attention: ["attention", "注意力"], feedForward: ["feed-forward", "前馈"], head: ["output layer", "输出层"],
  weights: ["Parameters in memory", "参数占用的内存"], cache: ["KV cache (keys and values)", "键值缓存"], per_token: ["KV cache of one token", "每个词元的键值缓存"], map: ["Attention weights, if all were stored", "若存下所有注意力权重"], kept: ["Forward pass under a causal mask", "前向（因果掩码）"],
  flops: ["FLOP of one forward pass, by length", "一次前向的运算量（随长度）"], memory: ["Bytes, by length", "内存（随长度）"],
} as const satisfies Record<string, Two>;
const PARTS: Part[] = ["projections", "attention", "feedForward", "head"];

/** The cost model with sliders, and its plots. */
export function costView(teller: Teller): Shown {
  const side = el("div", { class: "side" }), body = el("div", { class: "steps", tabindex: 0, role: "group" }), element = el("div", { class: "cost-view" }, side, body);
  let config: Config = { ...PRESETS["llama-3-8b"]! }, run: Run = { length: 8192, batch: 1, bytes: 2 }, preset = "llama-3-8b", shown = "";
  const say = (word: keyof typeof WORDS) => teller.say(WORDS[word]);
  new ResizeObserver(draw).observe(body);

  function update(): void {
    const key = JSON.stringify([teller.state.language, teller.colours.isDark]);
    body.setAttribute("aria-label", say("title"));
    if (key !== shown) { shown = key; drawSide(); }
    draw();
  }

  function drawSide(): void {
    const slider = (name: keyof typeof WORDS, least: number, most: number, step: number, read: () => number, write: (value: number) => void, isPower = false) => {
      const show = () => read().toLocaleString("en"), output = el("output", {}, show());
      const input = el("input", { type: "range", min: least, max: most, step, "aria-label": say(name), "data-slider": name, input: () => {
        write(isPower ? Math.round(2 ** Number(input.value)) : Number(input.value));
        input.setAttribute("aria-valuetext", output.textContent = show());
        preset = "";
        draw();
      } });
      input.value = String(isPower ? Math.log2(read()) : read());
      return el("div", { class: "control slider" }, el("span", {}, say(name)), output, input);
    };
    // no more than there are heads
    const drawKvHeads = () => slider("kvHeads", 0, Math.log2(config.heads), 1, () => config.kvHeads, (value) => { config.kvHeads = Math.min(value, config.heads); }, true);
    let kvHeads = drawKvHeads();
    fill(side, el("h2", {}, say("title")), el("p", { class: "help" }, say("intro")),
      el("div", { class: "chips", role: "group", "aria-label": say("preset") }, ...Object.keys(PRESETS).map((name) => chip(name, () => { config = { ...PRESETS[name]! }; preset = name; drawSide(); draw(); }, null, { "data-preset": name }))),
      slider("length", 4, 20, 0.25, () => run.length, (value) => { run.length = value; }, true),
      slider("batch", 0, 8, 1, () => run.batch, (value) => { run.batch = value; }, true),
      slider("layers", 1, 128, 1, () => config.layers, (value) => { config.layers = value; }),
      slider("heads", 0, 7, 1, () => config.heads, (value) => { config.heads = value; config.kvHeads = Math.min(config.kvHeads, config.heads); kvHeads.replaceWith(kvHeads = drawKvHeads()); }, true),
      kvHeads,
      slider("headDim", 32, 256, 16, () => config.headDim, (value) => { config.headDim = value; }),
      slider("ff", 256, 65536, 256, () => config.ff, (value) => { config.ff = value; }),
      slider("bytes", 1, 4, 1, () => run.bytes, (value) => { run.bytes = value; }));
  }

  function draw(): void {
    const found = bill(config, run);
    for (const one of side.querySelectorAll<HTMLElement>("[data-preset]")) one.setAttribute("aria-pressed", String(one.dataset.preset === preset));
    const cell = (name: string, value: number, text: string) => el("td", { "data-cost": name, "data-v": value }, value ? text : "–");
    const row = (name: Part) => line(say(name), cell(`parameters.${name}`, found.parameters[name], si(found.parameters[name], "")), cell(`forward.${name}`, found.forward[name], si(found.forward[name], "FLOP")));
    const bytes = (word: keyof typeof WORDS, name: string, value: number) => line(say(word), cell(name, value, binary(value)));
    const total = line(say("all"), cell("parameters", found.allParameters, si(found.allParameters, "")), cell("forward", found.allForward, si(found.allForward, "FLOP")));
    total.className = "total";
    const [flops, memory] = (["flops", "memory"] as const).map((name) => el("canvas", { role: "img", "aria-label": say(name) })) as [HTMLCanvasElement, HTMLCanvasElement];
    fill(body,
      el("section", { class: "step" }, el("div", { class: "tables" },
        statistics([say("parameters"), say("forward")], [...(["embeddings", "norms", ...PARTS] as Part[]).map(row), total]),
        statistics([], [line(say("kept"), cell("kept", found.kept, si(found.kept, "FLOP"))), bytes("weights", "weights", found.weightBytes), bytes("cache", "cache", found.cacheBytes), bytes("per_token", "token", found.cachePerToken), bytes("map", "map", found.mapBytes)]))),
      el("section", { class: "step" }, el("h2", {}, say("flops")), flops), el("section", { class: "step" }, el("h2", {}, say("memory")), memory));
    const at = (length: number) => bill(config, { ...run, length });
    plot(flops, PARTS.map((name) => ({ name: say(name), value: (length) => at(length).forward[name] })), (value) => si(value, "FLOP"));
    plot(memory, [{ name: say("weights"), value: () => found.weightBytes }, { name: say("cache"), value: (length) => at(length).cacheBytes }, { name: say("map"), value: (length) => at(length).mapBytes }], binary);
  }

  /** Lines over the length, both axes in powers; each line has its name at its end. */
  function plot(canvas: HTMLCanvasElement, lines: { name: string; value: (length: number) => number }[], show: (value: number) => string): void {
    const wide = Math.max(280, body.clientWidth - 48), high = 230, left = 88, right = 16, top = 30, bottom = 26;
    const context = sharp(canvas, wide, high);
    if (!context) return;
    const { colours } = teller, first = 4, last = 20;
    const values = lines.flatMap((line) => [line.value(2 ** first), line.value(2 ** last)]).filter((value) => value > 0);
    const low = Math.floor(Math.log10(Math.min(...values))), up = Math.ceil(Math.log10(Math.max(...values)));
    const x = (length: number) => left + ((Math.log2(length) - first) / (last - first)) * (wide - left - right);
    const y = (value: number) => top + (1 - (Math.log10(value) - low) / (up - low || 1)) * (high - top - bottom);
    context.font = "12px system-ui, sans-serif";
    context.lineWidth = 1;
    // round numbers of the unit: powers of 1000, or of 1024 for bytes
    const unit = show === binary ? 1024 : 1000, from = Math.ceil((low * Math.LN10) / Math.log(unit)), to = Math.floor((up * Math.LN10) / Math.log(unit));
    for (let power = from; power <= to; power += Math.max(1, Math.ceil((to - from) / 5))) {
      const value = unit ** power;
      context.strokeStyle = colours.line;
      context.beginPath(); context.moveTo(left, y(value)); context.lineTo(wide - right, y(value)); context.stroke();
      context.fillStyle = colours.soft; context.textAlign = "right"; context.textBaseline = "middle";
      context.fillText(show(value), left - 8, y(value));
    }
    context.textAlign = "center"; context.textBaseline = "top";
    for (let power = first; power <= last; power += 4) context.fillText((2 ** power).toLocaleString("en"), Math.min(x(2 ** power), wide - 34), high - bottom + 8);
    context.strokeStyle = colours.ink; context.setLineDash([3, 4]);
    context.beginPath(); context.moveTo(x(run.length), top); context.lineTo(x(run.length), high - bottom); context.stroke();
    context.setLineDash([]);
    let name = left;
    lines.forEach((line, at) => {
      context.strokeStyle = context.fillStyle = colours.heads[at]!;
      context.lineWidth = 2;
      context.beginPath();
      for (let power = first; power <= last; power += 0.5) context.lineTo(x(2 ** power), y(Math.max(10 ** low, line.value(2 ** power))));
      context.stroke();
      context.fillRect(name, 9, 12, 4);
      context.fillStyle = colours.ink; context.textAlign = "left"; context.textBaseline = "middle";
      context.fillText(line.name, name + 17, 11);
      name += context.measureText(line.name).width + 40;
    });
  }

  return { element, update };
}
