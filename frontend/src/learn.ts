// The page without a recording: the walk and the cost, which compute all that they show.
import { palette } from "./colours";
import { el, fill } from "./dom";
import type { Around } from "./main";
import type { State, Teller } from "./state";
import { CostView } from "./views/cost";
import { type Begin, WalkView } from "./views/walk";
import { say as sayIn } from "./words";

type Name = "walk" | "cost";

export function learn(target: HTMLElement, begin: Begin, first: Name, around: Around): void {
  const dark = matchMedia("(prefers-color-scheme: dark)"), page = el("div", { class: "regard file" });
  const header = el("header", {}), tabs = el("div", { class: "tabs", role: "tablist" }), main = el("main", {});
  let view = first, theme = around.theme ?? "auto", language = around.language ?? "en";
  const teller: Teller = { state: { language }, colours: palette(page, false) };
  const make: Record<Name, () => { element: HTMLElement; update(changed: Set<keyof State>): void }> = { walk: () => new WalkView(teller, begin), cost: () => new CostView(teller) };
  const views: Partial<Record<Name, ReturnType<(typeof make)[Name]>>> = {};
  const say = (word: Parameters<typeof sayIn>[1]) => sayIn(language, word);
  fill(page, header, tabs, main);
  target.replaceChildren(page);

  function update(): void {
    page.dataset.theme = theme === "dark" || (theme === "auto" && dark.matches) ? "dark" : "light";
    page.lang = language === "zh" ? "zh-CN" : "en";
    teller.state = { language };
    teller.colours = palette(page, page.dataset.theme === "dark");
    fill(header, around.back ? el("button", { class: "chip wide", click: () => around.back!({ language, theme }) }, `‹ ${say("back")}`) : null,
      el("div", { class: "title" }, el("h1", {}, "regard"), el("p", {}, say(`learn_${view}`))),
      el("div", { class: "tools" },
        el("button", { class: "chip wide", "data-tool": "language", lang: language === "zh" ? "en" : "zh-CN", click: () => { language = language === "zh" ? "en" : "zh"; update(); header.querySelector<HTMLElement>("[data-tool=language]")!.focus(); } }, say("language")),
        el("button", { class: "chip", "data-tool": "theme", "aria-label": say("theme"), title: say("theme"), click: () => { theme = page.dataset.theme === "dark" ? "light" : "dark"; update(); header.querySelector<HTMLElement>("[data-tool=theme]")!.focus(); } }, page.dataset.theme === "dark" ? "☀" : "☾")));
    tabs.setAttribute("aria-label", say("views"));
    fill(tabs, ...(Object.keys(make) as Name[]).map((name, at, all) => el("button", {
      role: "tab", "data-view": name, "aria-selected": String(name === view), tabindex: name === view ? 0 : -1,
      click: () => { view = name; update(); },
      keydown: (event: KeyboardEvent) => {
        if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
        view = all[1 - at]!;
        update();
        tabs.querySelector<HTMLElement>('[aria-selected="true"]')!.focus();
      },
    }, say(name))));
    const shown = (views[view] ??= make[view]());
    if (main.firstElementChild !== shown.element) main.replaceChildren(shown.element);
    shown.update(new Set());
  }

  dark.addEventListener("change", update);
  update();
}
