// What the page of a recording and a page without one share: the header, the tabs, and the view below them.
import { palette } from "./colours";
import { chip, el, fill, refill, reveal } from "./dom";
import type { Shown, State, Teller, View } from "./state";
import * as W from "./words";

/** Fill a page that shows one of several views; what is given back draws it again. */
export function shell(teller: Teller, page: HTMLElement, make: Partial<Record<View, () => Shown>>, title: () => HTMLElement, back: (() => void) | null, above?: Shown): (changed: Set<keyof State>) => void {
  const dark = matchMedia("(prefers-color-scheme: dark)"), names = Object.keys(make) as View[], views: Partial<Record<View, Shown>> = {}, { say } = teller;
  const header = el("header", {}), tabs = el("div", { class: "tabs", role: "tablist" }), main = el("main", {});
  let written = "";
  fill(page, header, tabs, above?.element ?? null, main);

  function head(): void {
    const { view, language, theme, recording, scene } = teller.state, isDark = theme === "dark" || (theme === "auto" && dark.matches), isChinese = language === "zh";
    const key = JSON.stringify([view, language, isDark, recording, scene]);
    if (key === written) return; // the pointer moves more often than this changes
    written = key;
    page.dataset.theme = isDark ? "dark" : "light";
    page.lang = isChinese ? "zh-CN" : "en";
    teller.colours = palette(page, isDark);
    refill(header, "data-tool", back ? chip(`‹ ${say(W.back)}`, back, null, { "data-tool": "back" }) : null, title(), el("div", { class: "tools" },
      chip(say(W.language), () => teller.set({ language: isChinese ? "en" : "zh" }), null, { lang: isChinese ? "en" : "zh-CN", "data-tool": "language" }),
      chip(isDark ? "☀" : "☾", () => teller.set({ theme: isDark ? "light" : "dark" }), null, { class: "chip", "aria-label": say(W.theme), title: say(W.theme), "data-tool": "theme" })));
    tabs.setAttribute("aria-label", say(W.views));
    refill(tabs, "data-view", ...names.map((name, at) => el("button", {
      role: "tab", "data-view": name, "aria-selected": String(name === view), tabindex: name === view ? 0 : -1, click: () => teller.set({ view: name }),
      keydown: (event: KeyboardEvent) => {
        const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
        if (!step) return;
        teller.set({ view: names[(at + step + names.length) % names.length]! });
        tabs.querySelector<HTMLElement>('[aria-selected="true"]')!.focus();
      },
    }, say(W.VIEWS[name]))));
    reveal(tabs);
  }

  function update(changed: Set<keyof State>): void {
    head();
    above?.update(changed);
    const { view } = teller.state;
    const shown = (views[view] ??= make[view]!());
    if (main.firstElementChild !== shown.element) main.replaceChildren(shown.element);
    shown.update(changed);
  }

  dark.addEventListener("change", () => update(new Set<keyof State>(["theme"])));
  return update;
}
