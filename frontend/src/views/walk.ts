import { chip, el, fill, quoted, refill } from "../dom";
import type { Shown, Teller } from "../state";
import { type Settings, sharpness, steps, wordsOf } from "../walk/compute";
import { BY_NAME, exampleTitle, NAMES, SENTENCE, started, tellExample } from "../walk/examples";
import { stepElement } from "../walk/panels";
import { sectionsOf } from "../walk/sections";
import * as T from "../walk/words";
import type { Two } from "../words";

const MOST = 16; // tokens of a sentence that is typed here: more would not fit as numbers

/** What a walk begins with: a sentence, an example by name, or a layer with its numbers, as `regard walk --html` writes it. */
export interface Begin { text?: string; cross?: string; example?: string; settings?: Partial<Settings>; title?: Two; intro?: [string[], string[]]; lang?: string }

/** Heads share the width evenly: where they cannot, there is one. */
const fitting = (settings: Settings): Settings => (settings.width % settings.heads ? { ...settings, heads: 1 } : settings);

/** Multi-head attention with real numbers, from the words to LayerNorm, computed here and at once. */
export function walkView(teller: Teller, begin: Begin): Shown {
  const { say } = teller, side = el("div", { class: "side" }), exercises = el("div", { class: "exercises" });
  const body = el("div", { class: "steps", tabindex: 0, role: "group" }), element = el("div", { class: "walk-view" }, side, body);
  let text = begin.text ?? SENTENCE, cross = begin.cross ?? "", example = begin.example && BY_NAME[begin.example] ? begin.example : null;
  let settings: Settings = { ...started(example ?? "E6"), ...(example ? {} : { words: wordsOf(text, MOST) }), ...begin.settings };
  let shown = "", told = ""; // what is open: the body goes back to its top where that changes

  /** What the page was written with, as long as it is what is shown. */
  function source(): Begin | null { return !example && begin.title && settings.given === begin.settings?.given ? begin : null; }

  function update(): void {
    const { language } = teller.state, key = JSON.stringify([settings, example, language, teller.colours.isDark]);
    if (key === shown) return;
    shown = key;
    body.setAttribute("aria-label", say(T.title));
    const beside = JSON.stringify([language, example, Boolean(settings.given)]);
    if (beside !== side.dataset.key) drawSide();
    side.dataset.key = beside;
    drawSwitches();
    drawSteps();
  }

  function change(given: Partial<Settings>): void {
    settings = fitting({ ...settings, ...given });
    update();
  }

  function open(name: string): void {
    example = BY_NAME[name] ? name : null;
    if (!example) text = SENTENCE;
    cross = "";
    settings = started(name);
    update();
    // where everything stands in one column, the example is below the list that it was chosen from
    if (getComputedStyle(element).display === "flex") body.scrollIntoView({ block: "start" });
  }

  /** The sentence that the switches are about; an exercise that is tried in an example leaves it. */
  function sentence(): Settings { return example || settings.given ? { ...started("E6"), words: wordsOf(text, MOST) } : settings; }

  function drawSide(): void {
    const field = (id: string, name: Two, value: string, write: (text: string) => void) => {
      const input = el("input", { type: "text", id, maxlength: 400, "aria-label": say(name), input: () => write(input.value) });
      input.value = value;
      return el("label", { class: "control" }, el("span", {}, say(name)), input);
    };
    const isOwn = !example && !settings.given;
    const current = example ?? (isOwn && text === SENTENCE && !cross ? "E6" : "");
    refill(side, "data-example", el("h2", {}, say(T.title)), el("p", { class: "help" }, say(T.intro), isOwn ? say(T.untrained) : ""),
      ...(isOwn ? [
        field("walk-text", T.sentence, text, (typed) => { text = typed; const words = wordsOf(text, MOST); if (words.length) change({ words }); }),
        field("walk-cross", T.cross, cross, (typed) => { cross = typed; change({ cross: wordsOf(typed, MOST) }); }),
      ] : []),
      el("div", { class: "switches" }), el("p", { class: "note" }, say(T.legend)),
      el("div", { class: "worked-examples" }, el("h3", {}, say(T.examples)), el("ol", { class: "examples" }, ...NAMES.map((name) => el("li", {}, el("button", { "data-example": name, "aria-pressed": String(name === current), click: () => open(name) }, say(exampleTitle(name))))))),
      exercises);
    fill(exercises, el("h3", {}, say(T.exercises)), ...T.EXERCISES.map((exercise, at) => el("div", { class: "exercise" }, el("p", {}, say(exercise.asks)),
        chip(say(T.attempt), () => { settings = sentence(); example = null; change(exercise.change as Partial<Settings>); }),
        el("details", { toggle: answers }, el("summary", {}, say(T.answer)), el("p", { "data-answer": at }, "")))));
  }

  function drawSwitches(): void {
    const { window } = settings, allowed = example ? BY_NAME[example]!.options : settings.given ? ["scale", "mask"] : null;
    const choice = <K extends keyof Settings>(name: string, key: K, options: [Settings[K], string][]) => (allowed && !allowed.includes(key) ? null : el("div", { class: "control", role: "group", "aria-label": name }, el("span", {}, name),
      el("div", { class: "chips" }, ...options.map(([value, text]) => chip(text, () => change({ [key]: value } as Partial<Settings>), settings[key] === value, { class: "chip", "data-switch": `${key}:${value}` })))));
    const numbers = (usual: number[], now: number): [number, string][] => [...new Set([...usual, now])].sort((a, b) => a - b).map((n) => [n, String(n)]);
    const yes: [boolean, string][] = [[true, say(T.yes)], [false, say(T.no)]];
    refill(side.querySelector<HTMLElement>(".switches")!, "data-switch",
      choice(say(T.heads), "heads", numbers([1, 2, 4].filter((n) => settings.width % n === 0), settings.heads)),
      choice(say(T.width), "width", numbers([4, 8, 16], settings.width)),
      settings.cross.length ? null : choice(say(T.mask), "mask", [["none", say(T.none)], ["causal", say(T.causal)], ["window", say(T.window, { n: window })], ["both", say(T.both, { n: window })]]),
      choice(say(T.scale), "scale", yes), choice(say(T.positions), "positions", yes),
      choice(say(T.seed), "seed", numbers([0, 1, 2], settings.seed)));
    answers();
  }

  /** Fill the open answers with numbers of the page as it stands, after the change that the exercise asks for. */
  function answers(): void {
    T.EXERCISES.forEach((exercise, at) => {
      const place = exercises.querySelector(`[data-answer="${at}"]`);
      if (!place || !(place.parentElement as HTMLDetailsElement).open) return;
      const given = fitting({ ...sentence(), cross: [], ...(exercise.change as Partial<Settings>) });
      const found = steps(given), names = given.words.map((word) => word.toLowerCase());
      const twin = names.findIndex((name, i) => names.indexOf(name) < i), other = twin < 0 ? -1 : names.indexOf(names[twin]!);
      const twins = twin < 0 ? NaN : Math.max(...found.attention.flatMap((one) => one[twin]!.map((value, j) => Math.abs(value - one[other]![j]!))));
      place.textContent = say(exercise.answer, {
        first: found.attention[0]![0]![0]!.toFixed(2), sharp: sharpness(found.attention).toFixed(2), soft: sharpness(steps({ ...given, scale: true }).attention).toFixed(2),
        twins: Number.isNaN(twins) ? "–" : twins.toFixed(4), rows: given.words.length, width: given.width, parameters: 4 * given.width ** 2,
        kept: found.allowed.flat().filter(Boolean).length, pairs: given.words.length ** 2,
      });
    });
  }

  function drawSteps(): void {
    const given = source(), zh = teller.state.language === "zh" ? 1 : 0;
    const { intro, sections } = example ? tellExample(example, settings, say) : { intro: given?.intro?.[zh] ?? [], sections: sectionsOf(settings, say) };
    const title = example ? say(exampleTitle(example)) : given ? say(given.title!) : null;
    const words = !example && !settings.given && settings.words.length === MOST && wordsOf(text, MOST + 1).length > MOST ? [say(T.cut, { n: MOST })] : [];
    const top = told === String(example) ? body.scrollTop : 0;
    told = String(example);
    const cards = sections.map((section, at) => stepElement(section, at, teller, say));
    const jump = el("nav", { class: "chips", "aria-label": say(T.contents) }, ...sections.map((section, at) => chip(`${at + 1} ${section.title}`, () => cards[at]!.scrollIntoView({ block: "start" }), null, { "data-jump": section.name })));
    fill(body, title ? el("div", { class: "lead" }, el("h2", {}, title), ...intro.map((line) => el("p", {}, ...quoted(line)))) : null, ...words.map((line) => el("p", { class: "note" }, line)),
      jump, ...cards);
    body.scrollTop = top;
  }

  return { element, update };
}
