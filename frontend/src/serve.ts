// The start of the local page: the recordings of a folder, and a look at a model on text typed here.
import type { Around, Kept } from "./main";
import { chip, el, fill, select } from "./dom";
import { visible } from "./tokens";
import * as W from "./words";

interface Listed { name: string; title: string; bytes: number; modified: number }
interface Look { state: "none" | "running" | "done" | "failed" | "cancelled"; stage?: "loading" | "reading"; model?: string; done?: number; total?: number | null; name?: string; why?: string }
interface Answer { folder: string; recordings: Listed[]; models: string[]; look: Look }

async function ask<T>(path: string, method = "GET", body?: object): Promise<T> {
  const answer = await fetch(path, { method, ...(body ? { body: JSON.stringify(body), headers: { "content-type": "application/json" } } : {}) });
  const given = (await answer.json()) as T & { error?: string };
  if (!answer.ok) throw new Error(given.error ?? answer.statusText);
  return given;
}

export function home(
  target: HTMLElement, open: (packed: Uint8Array, around: Around) => Promise<void>, alone: (view: "walk" | "cost", around: Around) => void,
): void {
  let language: W.Language = target.dataset.lang === "zh" ? "zh" : "en", theme: Kept["theme"] = "auto";
  // what was opened from here is left by its own button and by the browser's; language and theme go along
  const back = (kept: Kept) => { ({ language, theme } = kept); history.back(); };
  const around = (): Around => { history.pushState(null, ""); return { back, language, theme }; };
  addEventListener("popstate", () => { void show(); });
  let text = "The cat sat on the mat because it was tired, and the dog slept beside it.";
  let picked: string[] = [];
  const say: W.Say = (two, values) => W.say(language, two, values);
  const status = el("p", { class: "status", role: "status" });
  const cancel = chip("", () => { void ask<Look>("/api/look", "DELETE").then(tell); }, null, { id: "cancel" });
  let waiting = 0;

  async function show(): Promise<void> {
    let answer: Answer;
    try {
      answer = await ask<Answer>("/api/state");
    } catch (error) {
      target.replaceChildren(el("p", { class: "failed" }, say(W.failed, { why: (error as Error).message })));
      return;
    }
    const page = el("div", { class: "regard file home" });
    page.dataset.theme = theme === "auto" ? matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light" : theme;
    page.lang = language === "zh" ? "zh-CN" : "en";
    fill(page,
      el("header", {}, el("div", { class: "title" }, el("h1", {}, "regard"), el("p", {}, say(W.home_help, { folder: answer.folder }))),
        el("div", { class: "tools" }, chip(say(W.language), () => { language = language === "zh" ? "en" : "zh"; void show(); }, null, { lang: language === "zh" ? "en" : "zh-CN" }))),
      el("main", {}, el("div", { class: "home-grid" }, form(answer), el("div", { class: "stack" }, list(answer), el("section", { class: "card" }, el("h2", {}, say(W.learn)),
        el("div", { class: "chips" }, ...(["walk", "cost"] as const).map((name) => chip(say(W.LEARN[name]), () => alone(name, around()), null, { "data-learn": name }))))))));
    target.replaceChildren(page);
    status.classList.remove("failed");
    fill(status, picked.length ? say(W.compare_second) : "");
    if (answer.look.state === "running") follow();
  }

  function form(answer: Answer): HTMLElement {
    if (!answer.models.length) return el("section", { class: "card" }, el("h2", {}, say(W.look_title)), el("p", { class: "help" }, say(W.no_models)));
    const model = select(answer.models.map((name) => [name, name]), "", () => undefined, { "aria-label": say(W.model), id: "model" });
    const area = el("textarea", { "aria-label": say(W.your_text), rows: 6, id: "text", maxlength: 400000, input: () => { text = area.value; } });
    area.value = text;
    fill(cancel, say(W.cancel));
    cancel.hidden = answer.look.state !== "running";
    return el("section", { class: "card" }, el("h2", {}, say(W.look_title)),
      el("div", { class: "field" }, el("span", {}, say(W.model)), model), area,
      el("div", { class: "chips" },
        chip(say(W.begin), () => { void begin(model.value); }, null, { class: "chip wide primary", id: "begin" }),
        cancel),
      status);
  }

  function list(answer: Answer): HTMLElement {
    const row = (one: Listed) => el("li", {},
      el("button", { class: "open", "data-name": one.name, click: () => { void load(one.name); } },
        el("bdi", {}, visible(one.title || one.name)), el("span", { class: "place" }, el("bdi", { class: "file" }, visible(one.name)),
          ` · ${one.bytes < 1e6 ? `${Math.ceil(one.bytes / 1e3)} kB` : `${(one.bytes / 1e6).toFixed(1)} MB`} · ${new Date(one.modified * 1000).toLocaleString(language === "zh" ? "zh-CN" : "en", { dateStyle: "medium", timeStyle: "short" })}`)),
      chip(say(W.compare_with), () => {
        picked = picked.includes(one.name) ? picked.filter((name) => name !== one.name) : [...picked, one.name];
        if (picked.length === 2) { const [a, b] = picked; picked = []; void load(a!, b); } else void show();
      }, picked.includes(one.name), { "aria-label": `${say(W.compare_with)} ${visible(one.name)}` }));
    return el("section", { class: "card" }, el("h2", {}, say(W.home)),
      answer.recordings.length ? el("ul", { class: "recordings" }, ...answer.recordings.map(row)) : el("p", { class: "help" }, say(W.no_recordings)), answer.models.length ? null : status);
  }

  function tell(look: Look): void {
    status.classList.toggle("failed", look.state === "failed");
    cancel.hidden = look.state !== "running";
    if (look.state === "running") {
      fill(status, look.stage === "reading" ? say(W.stage_reading, { done: look.done ?? 0, total: look.total ?? "…" }) : say(W.stage_loading, { model: look.model ?? "" }),
        look.total ? el("progress", { max: look.total, value: look.done ?? 0, "aria-label": say(W.stage_reading, { done: look.done ?? 0, total: look.total }) }) : null);
    } else fill(status, look.state === "failed" ? look.why ?? "" : look.state === "cancelled" ? say(W.look_cancelled) : "");
  }

  async function begin(model: string): Promise<void> {
    try {
      tell(await ask<Look>("/api/look", "POST", { model, text }));
      follow();
    } catch (error) {
      tell({ state: "failed", why: (error as Error).message });
    }
  }

  function follow(): void {
    const turn = ++waiting;
    const step = async () => {
      if (turn !== waiting) return;
      const look = await ask<Look>("/api/look").catch((error: Error): Look => ({ state: "failed", why: error.message }));
      if (turn !== waiting) return;
      tell(look);
      if (look.state === "running") setTimeout(step, 200);
      else if (look.state === "done" && look.name) await load(look.name);
    };
    setTimeout(step, 100);
  }

  async function load(name: string, against?: string): Promise<void> {
    waiting++;
    fill(status, say(W.opening));
    try {
      const answer = await fetch(`/api/recording?name=${encodeURIComponent(name)}${against ? `&against=${encodeURIComponent(against)}` : ""}`);
      if (!answer.ok) throw new Error(((await answer.json()) as { error?: string }).error ?? answer.statusText);
      const packed = new Uint8Array(await answer.arrayBuffer());
      await open(packed, {
        ...around(),
        detail: against ? undefined : async (layer, head, place) => {
          const given = await fetch("/api/weights", { method: "POST", body: JSON.stringify({ name, layer, head, ...place }), headers: { "content-type": "application/json" } });
          if (!given.ok) throw new Error(((await given.json()) as { error?: string }).error ?? given.statusText);
          return new Float32Array(await given.arrayBuffer());
        },
      });
    } catch (error) {
      tell({ state: "failed", why: (error as Error).message });
    }
  }

  void show();
}
