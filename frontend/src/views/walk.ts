import { el, fill } from "../dom";
import type { State, Teller } from "../state";
import { type Settings, sharpness, steps, wordsOf } from "../walk/compute";
import { BY_NAME, exampleTitle, NAMES, SENTENCE, started, tellExample } from "../walk/examples";
import { quoted, stepElement } from "../walk/panels";
import { sectionsOf } from "../walk/sections";
import { EXERCISES, TEXT, type Two } from "../walk/words";

const MOST = 16; // tokens of a sentence that is typed here: more would not fit as numbers

/** What a walk begins with: a sentence, an example by name, or a layer with its numbers, as `regard walk --html` writes it. */
export interface Begin { text?: string; cross?: string; example?: string; settings?: Partial<Settings>; title?: Two; intro?: [string[], string[]]; lang?: string }

/** Multi-head attention with real numbers, from the words to LayerNorm, computed here and at once. */
export class WalkView {
  readonly element = el("div", { class: "walk-view" });
  private settings: Settings;
  private text: string;
  private cross: string;
  private example: string | null;
  private readonly body = el("div", { class: "steps", tabindex: 0, role: "group" });
  private readonly side = el("div", { class: "side" });
  private readonly exercises = el("div", { class: "exercises" });
  private shown = "";
  private told = ""; // what is open: the body goes back to its top where that changes

  constructor(private readonly store: Teller, private readonly begin: Begin) {
    this.text = begin.text ?? SENTENCE;
    this.cross = begin.cross ?? "";
    this.example = begin.example && BY_NAME[begin.example] ? begin.example : null;
    this.settings = { ...started(this.example ?? "E6"), ...(this.example ? {} : { words: wordsOf(this.text, MOST) }), ...begin.settings };
    fill(this.element, this.side, this.body);
  }

  private readonly say = (two: Two, values: Record<string, string | number> = {}): string =>
    two[this.store.state.language === "zh" ? 1 : 0].replace(/\{(\w+)\}/g, (_, name: string) => String(values[name] ?? ""));

  /** What the page was written with, as long as it is what is shown. */
  private get source(): Begin | null { return !this.example && this.begin.title && this.settings.given === this.begin.settings?.given ? this.begin : null; }

  update(_: Set<keyof State>): void {
    const { language } = this.store.state, key = JSON.stringify([this.settings, this.example, language, this.store.colours.isDark]);
    if (key === this.shown) return;
    this.shown = key;
    this.body.setAttribute("aria-label", this.say(TEXT.title));
    const side = JSON.stringify([language, this.example, Boolean(this.settings.given)]);
    if (side !== this.side.dataset.key) {
      const focus = this.focused("data-example");
      this.side.dataset.key = side;
      this.drawSide();
      if (focus) this.side.querySelector<HTMLElement>(`[data-example="${focus}"]`)?.focus();
    }
    this.drawSwitches();
    this.drawSteps();
  }

  private focused(name: string): string | null { return (this.element.getRootNode() as Document | ShadowRoot).activeElement?.getAttribute(name) ?? null; }

  private change(change: Partial<Settings>): void {
    const next = { ...this.settings, ...change };
    if (next.width % next.heads) next.heads = 1;
    this.settings = next;
    this.update(new Set());
  }

  private open(name: string): void {
    this.example = BY_NAME[name] ? name : null;
    if (!this.example) this.text = SENTENCE;
    this.cross = "";
    this.settings = started(name);
    this.update(new Set());
    // where everything stands in one column, the example is below the list that it was chosen from
    if (getComputedStyle(this.element).display === "flex") this.body.scrollIntoView({ block: "start" });
  }

  /** The sentence that the switches are about; an exercise that is tried in an example leaves it. */
  private sentence(): Settings { return this.example || this.settings.given ? { ...started("E6"), words: wordsOf(this.text, MOST) } : this.settings; }

  private drawSide(): void {
    const field = (id: string, name: Two, value: string, write: (text: string) => void) => {
      const input = el("input", { type: "text", id, maxlength: 400, "aria-label": this.say(name), input: () => write(input.value) });
      input.value = value;
      return el("label", { class: "control" }, el("span", {}, this.say(name)), input);
    };
    const isOwn = !this.example && !this.settings.given;
    const current = this.example ?? (isOwn && this.text === SENTENCE && !this.cross ? "E6" : "");
    fill(this.side, el("h2", {}, this.say(TEXT.title)), el("p", { class: "help" }, this.say(TEXT.intro), isOwn ? this.say(TEXT.untrained) : ""),
      ...(isOwn ? [
        field("walk-text", TEXT.sentence, this.text, (text) => { this.text = text; const words = wordsOf(text, MOST); if (words.length) this.change({ words }); }),
        field("walk-cross", TEXT.cross, this.cross, (text) => { this.cross = text; this.change({ cross: wordsOf(text, MOST) }); }),
      ] : []),
      el("div", { class: "switches" }), el("p", { class: "note" }, this.say(TEXT.legend)),
      el("div", { class: "worked-examples" }, el("h3", {}, this.say(TEXT.examples)), el("ol", { class: "examples" }, ...NAMES.map((name) => el("li", {}, el("button", { "data-example": name, "aria-pressed": String(name === current), click: () => this.open(name) }, this.say(exampleTitle(name))))))),
      this.exercises);
    fill(this.exercises, el("h3", {}, this.say(TEXT.exercises)), ...EXERCISES.map((exercise, at) => el("div", { class: "exercise" }, el("p", {}, this.say(exercise.asks)),
        el("button", { class: "chip wide", click: () => { this.settings = this.sentence(); this.example = null; this.change(exercise.change as Partial<Settings>); } }, this.say(TEXT.attempt)),
        el("details", { toggle: () => this.answers() }, el("summary", {}, this.say(TEXT.answer)), el("p", { "data-answer": at }, "")))));
  }

  private drawSwitches(): void {
    const { settings } = this, { window } = settings, allowed = this.example ? BY_NAME[this.example]!.options : settings.given ? ["scale", "mask"] : null;
    const choice = <K extends keyof Settings>(name: string, key: K, options: [Settings[K], string][]) => (allowed && !allowed.includes(key) ? null : el("div", { class: "control", role: "group", "aria-label": name }, el("span", {}, name),
      el("div", { class: "chips" }, ...options.map(([value, text]) => el("button", { class: "chip", "data-switch": `${key}:${value}`, "aria-pressed": String(settings[key] === value), click: () => this.change({ [key]: value } as Partial<Settings>) }, text)))));
    const numbers = (usual: number[], now: number): [number, string][] => [...new Set([...usual, now])].sort((a, b) => a - b).map((n) => [n, String(n)]);
    const yes: [boolean, string][] = this.store.state.language === "zh" ? [[true, "是"], [false, "否"]] : [[true, "yes"], [false, "no"]];
    const focus = this.focused("data-switch");
    fill(this.side.querySelector(".switches")!,
      choice(this.say(TEXT.heads), "heads", numbers([1, 2, 4].filter((n) => settings.width % n === 0), settings.heads)),
      choice(this.say(TEXT.width), "width", numbers([4, 8, 16], settings.width)),
      settings.cross.length ? null : choice(this.say(TEXT.mask), "mask", [["none", this.say(TEXT.none)], ["causal", this.say(TEXT.causal)], ["window", this.say(TEXT.window, { n: window })], ["both", this.say(TEXT.both, { n: window })]]),
      choice(this.say(TEXT.scale), "scale", yes), choice(this.say(TEXT.positions), "positions", yes),
      choice(this.say(TEXT.seed), "seed", numbers([0, 1, 2], settings.seed)));
    if (focus) this.side.querySelector<HTMLElement>(`[data-switch="${focus}"]`)?.focus();
    this.answers();
  }

  /** Fill the open answers with numbers of the page as it stands, after the change that the exercise asks for. */
  private answers(): void {
    EXERCISES.forEach((exercise, at) => {
      const place = this.exercises.querySelector(`[data-answer="${at}"]`);
      if (!place || !(place.parentElement as HTMLDetailsElement).open) return;
      const given: Settings = { ...this.sentence(), cross: [], ...(exercise.change as Partial<Settings>) };
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
    const { example, source } = this, zh = this.store.state.language === "zh" ? 1 : 0;
    const { intro, sections } = example ? tellExample(example, this.settings, this.say) : { intro: source?.intro?.[zh] ?? [], sections: sectionsOf(this.settings, this.say) };
    const title = example ? this.say(exampleTitle(example)) : source ? this.say(source.title!) : null;
    const words = !example && !this.settings.given && this.settings.words.length === MOST && wordsOf(this.text, MOST + 1).length > MOST ? [this.say(TEXT.cut, { n: MOST })] : [];
    const top = this.told === String(example) ? this.body.scrollTop : 0;
    this.told = String(example);
    fill(this.body, title ? el("div", { class: "lead" }, el("h2", {}, title), ...intro.map((line) => el("p", {}, ...quoted(line)))) : null, ...words.map((line) => el("p", { class: "note" }, line)),
      ...sections.map((section, at) => stepElement(section, at, this.store, this.say)));
    this.body.scrollTop = top;
  }
}
