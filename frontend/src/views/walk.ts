import { headColour } from "../colours";
import { el, fill, sharp } from "../dom";
import type { State, Teller } from "../state";
import { label } from "../tokens";
import { type Matrix, type Settings, sharpness, steps, type Steps, wordsOf } from "../walk/compute";
import { EXAMPLES, EXERCISES, STEPS, TEXT } from "../walk/words";

const MOST = 12; // tokens: more would not fit as numbers

/** Multi-head attention with real numbers, from the words to LayerNorm, computed here and at once. */
export class WalkView {
  readonly element = el("div", { class: "walk-view" });
  private settings: Settings;
  private text: string;
  private readonly body = el("div", { class: "steps", tabindex: 0, role: "group" });
  private readonly side = el("div", { class: "side" });
  private shown = "";
  private pointed: number | null = null;

  constructor(private readonly store: Teller, text: string) {
    this.text = text;
    this.settings = { words: wordsOf(text, MOST), heads: 2, width: 8, seed: 0, scale: true, positions: true, mask: "none", window: 1 };
    fill(this.element, this.side, this.body);
  }

  private say(two: readonly [string, string], values: Record<string, string | number> = {}): string {
    return two[this.store.state.language === "zh" ? 1 : 0].replace(/\{(\w+)\}/g, (_, name: string) => String(values[name] ?? ""));
  }

  update(_: Set<keyof State>): void {
    const key = JSON.stringify([this.settings, this.store.state.language, this.store.colours.isDark]);
    if (key === this.shown) return;
    const full = JSON.stringify([this.store.state.language]) !== this.side.dataset.key;
    this.shown = key;
    this.body.setAttribute("aria-label", this.say(TEXT.title));
    if (full) this.drawSide();
    this.drawSwitches();
    this.drawSteps();
  }

  private change(change: Partial<Settings>): void {
    const next = { ...this.settings, ...change };
    if (next.width % next.heads) next.heads = 1;
    this.settings = next;
    this.update(new Set());
  }

  private drawSide(): void {
    this.side.dataset.key = JSON.stringify([this.store.state.language]);
    const input = el("input", { type: "text", id: "walk-text", maxlength: 200, "aria-label": this.say(TEXT.sentence), input: (event: Event) => {
      this.text = (event.target as HTMLInputElement).value;
      const words = wordsOf(this.text, MOST);
      if (words.length) this.change({ words });
    } });
    input.value = this.text;
    fill(this.side, el("h2", {}, this.say(TEXT.title)), el("p", { class: "help" }, this.say(TEXT.intro)),
      el("label", { class: "control" }, el("span", {}, this.say(TEXT.sentence)), input), el("div", { class: "switches" }),
      el("p", { class: "note" }, this.say(TEXT.legend)),
      el("h3", {}, this.say(TEXT.examples)), el("div", { class: "chips" }, ...EXAMPLES.map((example) => el("button", { type: "button", class: "chip wide", click: () => {
        this.text = example.text;
        input.value = example.text;
        this.change({ words: wordsOf(example.text, MOST), ...(example.change as Partial<Settings>) });
      } }, this.say(example.name)))),
      el("h3", {}, this.say(TEXT.exercises)), ...EXERCISES.map((exercise, at) => el("div", { class: "exercise" }, el("p", {}, this.say(exercise.asks)),
        el("button", { type: "button", class: "chip wide", click: () => this.change(exercise.change as Partial<Settings>) }, this.say(TEXT.attempt)),
        el("details", { toggle: () => this.answers() }, el("summary", {}, this.say(TEXT.answer)), el("p", { "data-answer": at }, "")))));
  }

  private drawSwitches(): void {
    const { settings } = this;
    const choice = <K extends keyof Settings>(name: string, key: K, options: [Settings[K], string][]) => el("div", { class: "control", role: "group", "aria-label": name }, el("span", {}, name),
      el("div", { class: "chips" }, ...options.map(([value, text]) => el("button", { type: "button", class: "chip", "data-switch": `${key}:${value}`, "aria-pressed": String(settings[key] === value), click: () => this.change({ [key]: value } as Partial<Settings>) }, text))));
    const yes = this.store.state.language === "zh" ? ["是", "否"] : ["yes", "no"];
    const focus = (this.element.getRootNode() as Document | ShadowRoot).activeElement?.getAttribute("data-switch");
    fill(this.side.querySelector(".switches")!,
      choice(this.say(TEXT.heads), "heads", [1, 2, 4].filter((n) => settings.width % n === 0).map((n) => [n, String(n)])),
      choice(this.say(TEXT.width), "width", [4, 8, 16].map((n) => [n, String(n)])),
      choice(this.say(TEXT.mask), "mask", [["none", this.say(TEXT.none)], ["causal", this.say(TEXT.causal)], ["window", this.say(TEXT.window)]]),
      choice(this.say(TEXT.scale), "scale", [[true, yes[0]!], [false, yes[1]!]]),
      choice(this.say(TEXT.positions), "positions", [[true, yes[0]!], [false, yes[1]!]]),
      choice(this.say(TEXT.seed), "seed", [0, 1, 2].map((n) => [n, String(n)])));
    if (focus) this.side.querySelector<HTMLElement>(`[data-switch="${focus}"]`)?.focus();
    this.answers();
  }

  /** Fill the open answers with numbers of the page as it stands, after the change that the exercise asks for. */
  private answers(): void {
    EXERCISES.forEach((exercise, at) => {
      const place = this.side.querySelector(`[data-answer="${at}"]`);
      if (!place || !(place.parentElement as HTMLDetailsElement).open) return;
      const given: Settings = { ...this.settings, ...(exercise.change as Partial<Settings>) };
      if (given.width % given.heads) given.heads = 1;
      const found = steps(given), names = given.words.map((word) => word.toLowerCase());
      const twin = names.findIndex((name, i) => names.indexOf(name) < i), other = twin < 0 ? -1 : names.indexOf(names[twin]!);
      const twins = twin < 0 ? NaN : Math.max(...found.attention.flatMap((one) => one[twin]!.map((value, j) => Math.abs(value - one[other]![j]!))));
      place.textContent = this.say(exercise.answer, {
        first: found.attention[0]![0]![0]!.toFixed(2), sharp: sharpness(found.attention).toFixed(2), soft: sharpness(steps({ ...given, scale: true }).attention).toFixed(2),
        twins: Number.isNaN(twins) ? "–" : twins.toFixed(4), rows: given.words.length, width: given.width, parameters: 4 * given.width ** 2,
        kept: found.allowed.flat().filter(Boolean).length, pairs: given.words.length ** 2,
      });
    });
  }

  private drawSteps(): void {
    const { settings } = this, { words, heads, width } = settings, found = steps(settings), L = words.length, d = width / heads;
    const dims = Array.from({ length: width }, (_, at) => String(at)), small = Array.from({ length: d }, (_, at) => String(at));
    const head = (at: number) => this.say(TEXT.head, { n: at });
    const each = (values: Matrix[], columns: string[], kind: Kind, names: (at: number) => string = head) => values.map((one, at) => this.matrix(names(at), one, words, columns, kind));
    const i = Math.min(1, L - 1), j = found.attention[0]![i]!.indexOf(Math.max(...found.attention[0]![i]!));
    const fixed = (value: number) => (value === -Infinity ? "−∞" : value.toFixed(3).replace("-", "−"));
    const product = (a: number[], b: number[]) => `${a.slice(0, 4).map((value, at) => `${fixed(value)}·${fixed(b[at]!)}`).join(" + ")}${a.length > 4 ? " + …" : ""} = ${fixed(a.reduce((sum, value, at) => sum + value * b[at]!, 0))}`;
    const pair = `${head(0)}, ${label(words[i]!)} → ${label(words[j]!)}`;
    const root = Math.sqrt(d);
    const logits = found.logits[0]![i]!, finite = logits.filter((value) => value > -Infinity);
    const sections: [string, string, Node[], string][] = [
      ["tokens", `[${L}]`, [this.matrix("", [words.map((_, at) => at), found.ids], [this.say(TEXT.position), this.say(TEXT.number)], words, "plain")], ""],
      ["embeddings", `[${L}] → [${L}, ${width}]`, [this.matrix("E", found.embeddings, words, dims, "signed")], ""],
      ["positions", `[${L}, ${width}] + [${L}, ${width}]`, [this.matrix("P", found.positions, words, dims, "signed"), this.matrix("X = E + P", found.x, words, dims, "signed")], ""],
      ["projections", `[${L}, ${width}] · [${width}, ${width}] → [${L}, ${width}]`, [this.matrix("Q", found.q, words, dims, "signed"), this.matrix("K", found.k, words, dims, "signed"), this.matrix("V", found.v, words, dims, "signed"),
        el("details", { class: "matrices" }, el("summary", {}, "W^Q, W^K, W^V"), el("div", { class: "panels" }, ...(["q", "k", "v"] as const).map((name) => this.matrix(`W^${name.toUpperCase()}`, found.weights[name], dims, dims, "signed"))))],
        `Q[${label(words[i]!)}, 0] = ${product(found.x[i]!, found.weights.q.map((row) => row[0]!))}`],
      ["split", `[${L}, ${width}] → [${heads}, ${L}, ${d}]`, heads > 1 ? [...each(found.qHeads, small, "signed", (at) => `Q, ${head(at)}`), ...each(found.kHeads, small, "signed", (at) => `K, ${head(at)}`)] : [], ""],
      ["raw", `[${heads}, ${L}, ${d}] · [${heads}, ${d}, ${L}] → [${heads}, ${L}, ${L}]`, each(found.raw, words, "signed"), `${pair}: ${product(found.qHeads[0]![i]!, found.kHeads[0]![j]!)}`],
      ["scores", `[${heads}, ${L}, ${L}]`, settings.scale ? each(found.scores, words, "signed") : [], settings.scale ? `${pair}: ${fixed(found.raw[0]![i]![j]!)} / ${root.toFixed(3)} = ${fixed(found.scores[0]![i]![j]!)}` : "× 1"],
      ["mask", `[${heads}, ${L}, ${L}]`, settings.mask === "none" ? [] : each(found.logits, words, "signed"), ""],
      ["attention", `[${heads}, ${L}, ${L}]`, [...each(found.attention, words, "weight"), this.lines(found)], `${pair}: exp(${fixed(logits[j]!)}) / (${finite.slice(0, 4).map((value) => `exp(${fixed(value)})`).join(" + ")}${finite.length > 4 ? " + …" : ""}) = ${fixed(found.attention[0]![i]![j]!)}`],
      ["heads", `[${heads}, ${L}, ${L}] · [${heads}, ${L}, ${d}] → [${heads}, ${L}, ${d}]`, each(found.heads, small, "signed"), `H₀[${label(words[i]!)}, 0] = ${product(found.attention[0]![i]!, found.vHeads[0]!.map((row) => row[0]!))}`],
      ["concat", `[${heads}, ${L}, ${d}] → [${L}, ${width}]`, [this.matrix("C", found.concat, words, dims, "signed")], ""],
      ["output", `[${L}, ${width}] · [${width}, ${width}] → [${L}, ${width}]`, [this.matrix("Y", found.output, words, dims, "signed"), el("details", { class: "matrices" }, el("summary", {}, "W^O"), this.matrix("W^O", found.weights.out, dims, dims, "signed"))], ""],
      ["residual", `[${L}, ${width}] + [${L}, ${width}]`, [this.matrix("R = X + Y", found.residual, words, dims, "signed")], ""],
      ["normed", `[${L}, ${width}]`, [this.matrix("N", found.normed, words, dims, "signed")], ""],
    ];
    const top = this.body.scrollTop;
    fill(this.body, ...sections.map(([name, shape, panels, worked], at) => {
      const told = STEPS[name]!;
      return el("section", { class: "step", "data-step": name },
        el("h2", {}, el("span", { class: "index" }, String(at + 1)), ` ${this.say(told.title)}`, el("code", { class: "shape" }, shape)),
        told.formula ? el("p", { class: "formula" }, told.formula) : null, el("p", {}, this.say(told.says)),
        panels.length ? el("div", { class: "panels" }, ...panels) : null,
        worked ? el("p", { class: "worked" }, el("b", {}, `${this.say(TEXT.by_hand)}  `), worked) : null);
    }));
    this.body.scrollTop = top;
  }

  private matrix(name: string, values: Matrix, rows: string[], columns: string[], kind: Kind): HTMLElement {
    const most = kind === "weight" ? 1 : Math.max(1e-9, ...values.flat().filter(Number.isFinite).map(Math.abs));
    const cell = (value: number) => {
      const made = el("td", { "data-v": value, title: kind === "plain" ? null : String(value) }, value === -Infinity ? "−∞" : kind === "plain" ? String(value) : value.toFixed(2).replace("-", "−"));
      if (kind !== "plain" && Number.isFinite(value) && value !== 0) {
        const share = Math.abs(value) / most, name = kind === "weight" ? "share" : value > 0 ? "positive" : "negative";
        made.style.background = `color-mix(in srgb, var(--${name}) ${Math.round(share * 100)}%, transparent)`;
      }
      return made;
    };
    return el("figure", { "data-matrix": name }, el("figcaption", {}, name), el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": name || "matrix" }, el("table", {},
      el("thead", {}, el("tr", {}, el("td", {}), ...columns.map((column) => el("th", { scope: "col" }, el("bdi", {}, label(column, 10)))))),
      el("tbody", {}, ...values.map((row, at) => el("tr", {}, el("th", { scope: "row" }, el("bdi", {}, label(rows[at] ?? "", 12))), ...row.map(cell)))))));
  }

  /** Lines from who looks to who is looked at, one colour for each head. */
  private lines(found: Steps): HTMLElement {
    const { words } = this.settings, step = 26, high = words.length * step + 8, wide = 330;
    const canvas = el("canvas", { "aria-hidden": "true" });
    const draw = () => {
      const context = sharp(canvas, wide, high);
      if (!context) return;
      const { colours } = this.store;
      context.font = "14px system-ui, sans-serif";
      context.textBaseline = "middle";
      words.forEach((word, at) => {
        context.fillStyle = this.pointed === null || this.pointed === at ? colours.ink : colours.soft;
        context.textAlign = "right";
        context.fillText(label(word, 10), 92, at * step + step / 2 + 4);
        context.fillStyle = colours.ink;
        context.textAlign = "left";
        context.fillText(label(word, 10), wide - 92, at * step + step / 2 + 4);
      });
      found.attention.forEach((one, head) => {
        context.strokeStyle = headColour(colours, head);
        one.forEach((row, i) => row.forEach((weight, j) => {
          if (weight < 0.01 || (this.pointed !== null && this.pointed !== i)) return;
          context.globalAlpha = 0.15 + 0.8 * weight;
          context.lineWidth = 0.6 + 3.4 * weight;
          const y0 = i * step + step / 2 + 4 + head * 2, y1 = j * step + step / 2 + 4 + head * 2;
          context.beginPath();
          context.moveTo(98, y0);
          context.bezierCurveTo(150, y0, wide - 150, y1, wide - 98, y1);
          context.stroke();
        }));
      });
      context.globalAlpha = 1;
    };
    canvas.addEventListener("pointermove", (event) => {
      const at = Math.floor((event.offsetY - 4) / step);
      this.pointed = at >= 0 && at < words.length ? at : null;
      draw();
    });
    canvas.addEventListener("pointerleave", () => { this.pointed = null; draw(); });
    draw();
    return el("figure", {}, el("figcaption", {}, ""), canvas);
  }
}

type Kind = "signed" | "weight" | "plain";
