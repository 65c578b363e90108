type Value = string | number | boolean | null | ((event: never) => void);
type Attributes = Record<string, Value>;

/** An element. Strings become text nodes, never markup; functions become listeners of the event they are named after. */
export function el<K extends keyof HTMLElementTagNameMap>(
  tag: K, attributes: Attributes = {}, ...children: (Node | string | null)[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  if (made instanceof HTMLButtonElement) made.type = "button";
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value as EventListener);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null) made.setAttribute(name, String(value));
  }
  made.append(...children.filter((child): child is Node | string => child !== null));
  return made;
}

export function fill(parent: Element, ...children: (Node | string | null)[]): void {
  parent.replaceChildren(...children.filter((child): child is Node | string => child !== null));
}

/** A button with a text; `pressed` says whether it is what is chosen. */
export function chip(text: string, click: (event: MouseEvent) => void, pressed: boolean | null = null, more: Attributes = {}): HTMLButtonElement {
  return el("button", { class: "chip wide", "aria-pressed": pressed === null ? null : String(pressed), click, ...more }, text);
}

/** A list of values to choose from, each with its text. */
export function select(options: (readonly [value: string, text: string])[], value: string, change: (value: string) => void, more: Attributes): HTMLSelectElement {
  const made = el("select", { change: () => change(made.value), ...more }, ...options.map(([key, text]) => el("option", { value: key, selected: key === value }, text)));
  return made;
}

/** Fill an element again; what had the focus, by its `name`, has it afterwards. */
export function refill(parent: HTMLElement, name: string, ...children: (Node | string | null)[]): void {
  const focus = parent.contains(focused(parent)) ? focused(parent)!.getAttribute(name) : null;
  fill(parent, ...children);
  if (focus !== null) parent.querySelector<HTMLElement>(`[${name}="${focus}"]`)?.focus();
}

function focused(element: Element): Element | null { return (element.getRootNode() as Document | ShadowRoot).activeElement; }

/** A table of statistics; each row begins with what it is about. */
export function statistics(columns: string[], rows: (HTMLElement | null)[]): HTMLElement {
  return el("table", { class: "stats" }, columns.length ? el("thead", {}, el("tr", {}, el("td", {}), ...columns.map((name) => el("th", { scope: "col" }, name)))) : null,
    el("tbody", {}, ...rows));
}
export function line(name: string, ...cells: (Node | string)[]): HTMLElement {
  return el("tr", {}, el("th", { scope: "row" }, name), ...cells.map((cell) => (typeof cell === "string" ? el("td", {}, cell) : cell)));
}

/** A sentence whose `quoted` parts are code. */
export function quoted(line: string): (Node | string)[] {
  return line.split("`").map((part, at) => (at % 2 ? el("code", {}, part) : part));
}

/** A canvas's context at the screen's own resolution, cleared; null where it has no size yet. */
export function sharp(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D | null {
  const ratio = Math.min(window.devicePixelRatio || 1, 2.5);
  const wide = Math.round(width * ratio), high = Math.round(height * ratio);
  if (wide < 1 || high < 1) return null;
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d")!;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** Bring what is chosen into sight in rows and grids that scroll, and move nothing else. */
export function reveal(...rows: (Element | null)[]): void {
  requestAnimationFrame(() => {
    for (const row of rows) {
      const chosen = row?.querySelector('[aria-pressed="true"], [aria-selected="true"]');
      if (!row || !chosen) continue;
      const inside = chosen.getBoundingClientRect(), outside = row.getBoundingClientRect();
      if (inside.left < outside.left || inside.right > outside.right) row.scrollLeft += inside.left - outside.left - (outside.width - inside.width) / 2;
      if (inside.top < outside.top || inside.bottom > outside.bottom) row.scrollTop += inside.top - outside.top - (outside.height - inside.height) / 2;
    }
  });
}

export function clamp(value: number, least: number, most: number): number {
  return Math.max(least, Math.min(most, value));
}
