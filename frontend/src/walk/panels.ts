// Matrices as people read them: small ones as coloured numbers, large ones as pictures; weights also as lines.
import { differences, headColour, heatmap } from "../colours";
import { el, quoted, sharp } from "../dom";
import type { Teller } from "../state";
import { label } from "../tokens";
import { largest, type Links, type Panel, type Say, type Section } from "./sections";
import * as T from "./words";

const ROWS = 24, COLUMNS = 16; // of a matrix that is printed as numbers
const OPEN = 12; // panels of a step; a model with many heads folds the rest away
const LINKED = 24; // tokens that are joined by lines

export function stepElement(section: Section, at: number, teller: Teller, say: Say): HTMLElement {
  const open = section.panels.filter((panel) => !panel.folded), folded = new Map<string, Panel[]>();
  for (const panel of section.panels) if (panel.folded) folded.set(panel.folded, [...(folded.get(panel.folded) ?? []), panel]);
  if (open.length > OPEN) folded.set(`+ ${open.length - OPEN}`, open.splice(OPEN));
  const { links } = section;
  const figures = [...open.map((panel) => figure(panel, teller, say)), ...(links && Math.max(links.rows.length, links.columns.length) <= LINKED ? [lines(links, teller)] : [])];
  return el("section", { class: "step", "data-step": section.name },
    el("h2", {}, el("span", { class: "index" }, String(at + 1)), ` ${section.title}`, section.shape ? el("code", { class: "shape" }, section.shape) : null),
    section.formula ? el("p", { class: "formula" }, section.formula) : null, el("p", {}, ...quoted(section.says)),
    figures.length ? el("div", { class: "panels" }, ...figures) : null,
    ...[...folded].map(([name, panels]) => el("details", { class: "matrices" }, el("summary", {}, name), el("div", { class: "panels" }, ...panels.map((panel) => figure(panel, teller, say))))),
    section.worked ? el("p", { class: "worked" }, el("b", {}, `${say(T.by_hand)}  `), el("bdi", {}, section.worked)) : null);
}

function figure(panel: Panel, teller: Teller, say: Say): HTMLElement {
  const rows = panel.values.length, columns = panel.values[0]?.length ?? 0;
  const isTable = panel.kind === "plain" || (rows <= ROWS && columns <= COLUMNS);
  return el("figure", { "data-matrix": panel.name, class: isTable ? null : "pictured" }, panel.name ? el("figcaption", {}, panel.name) : null,
    isTable ? table(panel, say) : picture(panel, teller, say));
}

function table(panel: Panel, say: Say): HTMLElement {
  const { kind, values, rows, columns } = panel, most = kind === "weight" || kind === "mask" ? 1 : panel.top || largest(values) || 1;
  const cell = (value: number) => {
    const made = el("td", { "data-v": value, title: kind === "plain" || kind === "mask" ? null : String(value) }, written(value, kind));
    if (kind !== "plain" && Number.isFinite(value) && value !== 0) {
      const share = Math.min(1, Math.abs(value) / most), name = kind === "weight" || kind === "mask" ? "share" : value > 0 ? "positive" : "negative";
      made.style.background = `color-mix(in srgb, var(--${name}) ${Math.round(share * 100)}%, transparent)`;
    }
    return made;
  };
  return el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": panel.name || say(T.matrix) }, el("table", {},
    el("thead", {}, el("tr", {}, el("td", {}), ...columns.map((column) => el("th", { scope: "col" }, el("bdi", {}, label(column, 12)))))),
    el("tbody", {}, ...values.map((row, at) => el("tr", {}, el("th", { scope: "row" }, el("bdi", {}, label(rows[at] ?? "", 16))), ...row.map(cell))))));
}

function written(value: number, kind: Panel["kind"]): string {
  if (kind === "mask") return value ? "■" : "·";
  if (value === -Infinity) return "−∞";
  const text = kind === "plain" ? (Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)))) : value.toFixed(2);
  return (Number(text) === 0 && kind !== "plain" ? text.replace("-", "") : text).replace("-", "−");
}

/** One pixel for each number, with the tokens at the side where they fit. */
function picture(panel: Panel, teller: Teller, say: Say): HTMLElement {
  const { values, rows, kind } = panel, high = values.length, wide = values[0]!.length;
  const flat = values.flat().map((value) => (Number.isFinite(value) ? value : 0)), most = kind === "signed" ? panel.top || largest(values) || 1 : 1;
  const drawn = kind === "signed" ? differences(flat, high, wide, most, teller.colours.difference) : heatmap(flat, high, wide, most, teller.colours.heat);
  const named = high <= ROWS, step = named ? 20 : Math.max(1, Math.min(8, Math.floor(480 / Math.max(high, wide)))), width = named ? Math.max(120, Math.min(560, wide * 8)) : wide * step;
  const canvas = el("canvas", { role: "img", "aria-label": panel.name || say(T.matrix) });
  const context = sharp(canvas, width, high * step);
  if (context) {
    context.imageSmoothingEnabled = false;
    context.drawImage(drawn, 0, 0, width, high * step);
  }
  const finite = values.flat().filter(Number.isFinite), low = finite.reduce((a, b) => Math.min(a, b), Infinity), up = finite.reduce((a, b) => Math.max(a, b), -Infinity);
  return el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": panel.name || say(T.matrix) },
    el("div", { class: "beside" }, named ? el("ol", { class: "rows" }, ...rows.map((row) => el("li", {}, el("bdi", {}, label(row, 16))))) : null, canvas),
    el("p", { class: "note", "data-range": `${low} ${up}` }, `[${high}, ${wide}] · ${say(T.layer.range, { low: written(low, "signed"), high: written(up, "signed") })}`));
}

/** Lines from who looks to who is looked at, one colour for each head. */
function lines(links: Links, teller: Teller): HTMLElement {
  const { attention, rows, columns } = links, step = 26, high = Math.max(rows.length, columns.length) * step + 8, wide = 330;
  const canvas = el("canvas", { "aria-hidden": "true" });
  let pointed: number | null = null;
  const draw = () => {
    const context = sharp(canvas, wide, high);
    if (!context) return;
    const { colours } = teller;
    context.font = "14px system-ui, sans-serif";
    context.textBaseline = "middle";
    const y = (at: number) => at * step + step / 2 + 4;
    rows.forEach((word, at) => {
      context.fillStyle = pointed === null || pointed === at ? colours.ink : colours.soft;
      context.textAlign = "right";
      context.fillText(label(word, 10), 92, y(at));
    });
    context.fillStyle = colours.ink;
    context.textAlign = "left";
    columns.forEach((word, at) => context.fillText(label(word, 10), wide - 92, y(at)));
    attention.forEach((one, head) => {
      context.strokeStyle = headColour(colours, head);
      one.forEach((row, i) => row.forEach((weight, j) => {
        if (weight < 0.01 || (pointed !== null && pointed !== i)) return;
        context.globalAlpha = 0.15 + 0.8 * weight;
        context.lineWidth = 0.6 + 3.4 * weight;
        const from = y(i) + head * 2, to = y(j) + head * 2;
        context.beginPath();
        context.moveTo(98, from);
        context.bezierCurveTo(150, from, wide - 150, to, wide - 98, to);
        context.stroke();
      }));
    });
    context.globalAlpha = 1;
  };
  canvas.addEventListener("pointermove", (event) => {
    const at = Math.floor((event.offsetY - 4) / step);
    pointed = at >= 0 && at < rows.length ? at : null;
    draw();
  });
  canvas.addEventListener("pointerleave", () => { pointed = null; draw(); });
  draw();
  return el("figure", { class: "lined" }, canvas);
}
