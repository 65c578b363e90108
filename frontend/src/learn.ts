// The page without a recording: the walk and the cost, which compute all that they show.
import { el } from "./dom";
import type { Around } from "./main";
import { shell } from "./shell";
import type { Teller } from "./state";
import { costView } from "./views/cost";
import { type Begin, walkView } from "./views/walk";
import * as W from "./words";

export function learn(target: HTMLElement, begin: Begin, view: "walk" | "cost", { back, language = "en", theme = "auto" }: Around): void {
  const page = el("div", { class: "regard file" });
  const teller = {
    state: { view, language, theme, recording: 0, scene: 0 }, say: (two, values) => W.say(teller.state.language, two, values),
    set(change) { Object.assign(teller.state, change); update(new Set()); },
  } as Teller;
  const title = () => el("div", { class: "title" }, el("h1", {}, "regard"), el("p", {}, teller.say(W.LEARN[teller.state.view as "walk"])));
  const update = shell(teller, page, { walk: () => walkView(teller, begin), cost: () => costView(teller) }, title, back ? () => back(teller.state) : null);
  target.replaceChildren(page);
  update(new Set());
}
