import { bill, binary, type Config, type Part, PRESETS, type Run, si } from "../cost";
import { el, fill, sharp } from "../dom";
import type { State, Teller } from "../state";

type Two = readonly [string, string];
const WORDS = {
  title: ["What a model costs", "一个模型要花多少"], intro: ["Move a slider, and the bill is made again: parameters, arithmetic of one forward pass, and memory.", "移动滑块，账单立刻重算：参数、一次前向计算的运算量和内存。"],
  preset: ["Model", "模型"], layers: ["Layers", "层数"], heads: ["Heads", "头数"], headDim: ["Width of a head", "每头宽度"], kvHeads: ["Key and value heads", "键值头数"], ff: ["Feed-forward width", "前馈宽度"],
  length: ["Tokens", "词元数"], batch: ["Texts at once", "批大小"], bytes: ["Bytes of a number", "每个数的字节"],
  part: ["part", "部分"], parameters: ["parameters", "参数"], forward: ["forward", "前向"], all: ["in all", "合计"],
  embeddings: ["embeddings", "词嵌入"], norms: ["norms", "归一化"], projections: ["attention projections", "注意力投影"], attention: ["attention", "注意力"], feedForward: ["feed-forward", "前馈"], head: ["head", "输出层"],
  weights: ["Weights", "权重"], cache: ["Cache of keys and values", "键值缓存"], per_token: ["of that, for one token", "其中每个词元"], map: ["All attention weights, if stored", "若存下所有注意力权重"], kept: ["Forward under a causal mask", "前向（因果掩码）"],
  flops: ["FLOP of one forward pass, by length", "一次前向的运算量（随长度）"], memory: ["Bytes, by length", "内存（随长度）"],
} as const satisfies Record<string, Two>;
const PARTS: Part[] = ["projections", "attention", "feedForward", "head"];

/** The cost model with sliders, and its plots. */
export class CostView {
  readonly element = el("div", { class: "cost-view" });
  private readonly side = el("div", { class: "side" });
  private readonly body = el("div", { class: "steps", tabindex: 0, role: "group" });
  private config: Config = { ...PRESETS["llama-3-8b"]! };
  private run: Run = { length: 8192, batch: 1, bytes: 2 };
  private name = "llama-3-8b";
  private shown = "";

  constructor(private readonly store: Teller) { fill(this.element, this.side, this.body); new ResizeObserver(() => this.draw()).observe(this.body); }

  private say(word: keyof typeof WORDS): string { return WORDS[word][this.store.state.language === "zh" ? 1 : 0]; }

  update(_: Set<keyof State>): void {
    const key = JSON.stringify([this.store.state.language, this.store.colours.isDark]);
    this.body.setAttribute("aria-label", this.say("title"));
    if (key !== this.shown) { this.shown = key; this.drawSide(); }
    this.draw();
  }

  private drawSide(): void {
    const slider = (name: keyof typeof WORDS, least: number, most: number, step: number, read: () => number, write: (value: number) => void, show: (value: number) => string = String) => {
      const output = el("output", {}, show(read()));
      const input = el("input", { type: "range", min: least, max: most, step, "aria-label": this.say(name), "data-slider": name, input: () => { write(Number(input.value)); output.textContent = show(read()); input.setAttribute("aria-valuetext", show(read())); this.name = ""; this.draw(); } });
      input.value = String(name === "length" || name === "heads" || name === "kvHeads" || name === "batch" ? Math.log2(read()) : read());
      return el("div", { class: "control slider" }, el("span", {}, this.say(name)), output, input);
    };
    const { config, run } = this;
    // no more than there are heads
    const drawKvHeads = () => slider("kvHeads", 0, Math.log2(config.heads), 1, () => config.kvHeads, (value) => { config.kvHeads = Math.min(2 ** value, config.heads); });
    let kvHeads = drawKvHeads();
    fill(this.side, el("h2", {}, this.say("title")), el("p", { class: "help" }, this.say("intro")),
      el("div", { class: "chips", role: "group", "aria-label": this.say("preset") }, ...Object.keys(PRESETS).map((name) => el("button", { class: "chip wide", "data-preset": name, click: () => { this.config = { ...PRESETS[name]! }; this.name = name; this.drawSide(); this.draw(); } }, name))),
      slider("length", 4, 20, 0.25, () => run.length, (value) => { run.length = Math.round(2 ** value); }, (value) => value.toLocaleString("en")),
      slider("batch", 0, 8, 1, () => run.batch, (value) => { run.batch = 2 ** value; }),
      slider("layers", 1, 128, 1, () => config.layers, (value) => { config.layers = value; }),
      slider("heads", 0, 7, 1, () => config.heads, (value) => { config.heads = 2 ** value; config.kvHeads = Math.min(config.kvHeads, config.heads); kvHeads.replaceWith(kvHeads = drawKvHeads()); }),
      kvHeads,
      slider("headDim", 32, 256, 16, () => config.headDim, (value) => { config.headDim = value; }),
      slider("ff", 256, 65536, 256, () => config.ff, (value) => { config.ff = value; }, (value) => value.toLocaleString("en")),
      slider("bytes", 1, 4, 1, () => run.bytes, (value) => { run.bytes = value; }));
  }

  private draw(): void {
    const found = bill(this.config, this.run);
    for (const chip of this.side.querySelectorAll<HTMLElement>("[data-preset]")) chip.setAttribute("aria-pressed", String(chip.dataset.preset === this.name));
    const row = (name: Part) => el("tr", {}, el("th", { scope: "row" }, this.say(name)), el("td", { "data-cost": `parameters.${name}`, "data-v": found.parameters[name] }, found.parameters[name] ? si(found.parameters[name], "") : "–"), el("td", { "data-cost": `forward.${name}`, "data-v": found.forward[name] }, found.forward[name] ? si(found.forward[name], "FLOP") : "–"));
    const line = (word: keyof typeof WORDS, name: string, value: number, text: string) => el("tr", {}, el("th", { scope: "row" }, this.say(word)), el("td", { "data-cost": name, "data-v": value }, text));
    const flops = el("canvas", { role: "img", "aria-label": this.say("flops") }), memory = el("canvas", { role: "img", "aria-label": this.say("memory") });
    fill(this.body,
      el("section", { class: "step" }, el("div", { class: "tables" },
        el("table", { class: "stats" }, el("thead", {}, el("tr", {}, el("td", {}), el("th", { scope: "col" }, this.say("parameters")), el("th", { scope: "col" }, this.say("forward")))),
          el("tbody", {}, ...(["embeddings", "norms", "projections", "attention", "feedForward", "head"] as Part[]).map(row),
            el("tr", { class: "total" }, el("th", { scope: "row" }, this.say("all")), el("td", { "data-cost": "parameters", "data-v": found.allParameters }, si(found.allParameters, "")), el("td", { "data-cost": "forward", "data-v": found.allForward }, si(found.allForward, "FLOP"))))),
        el("table", { class: "stats" }, el("tbody", {}, line("kept", "kept", found.kept, si(found.kept, "FLOP")), line("weights", "weights", found.weightBytes, binary(found.weightBytes)), line("cache", "cache", found.cacheBytes, binary(found.cacheBytes)), line("per_token", "token", found.cachePerToken, binary(found.cachePerToken)), line("map", "map", found.mapBytes, binary(found.mapBytes)))))),
      el("section", { class: "step" }, el("h2", {}, this.say("flops")), flops), el("section", { class: "step" }, el("h2", {}, this.say("memory")), memory));
    const at = (length: number) => bill(this.config, { ...this.run, length });
    this.plot(flops, PARTS.map((name) => ({ name: this.say(name), value: (length) => at(length).forward[name] })), (value) => si(value, "FLOP"));
    this.plot(memory, [{ name: this.say("weights"), value: () => found.weightBytes }, { name: this.say("cache"), value: (length) => at(length).cacheBytes }, { name: this.say("map"), value: (length) => at(length).mapBytes }], binary);
  }

  /** Lines over the length, both axes in powers; each line has its name at its end. */
  private plot(canvas: HTMLCanvasElement, lines: { name: string; value: (length: number) => number }[], show: (value: number) => string): void {
    const wide = Math.max(280, this.body.clientWidth - 48), high = 230, left = 88, right = 16, top = 30, bottom = 26;
    const context = sharp(canvas, wide, high);
    if (!context) return;
    const { colours } = this.store, first = 4, last = 20;
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
    context.beginPath(); context.moveTo(x(this.run.length), top); context.lineTo(x(this.run.length), high - bottom); context.stroke();
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
}
