import type { Picture } from "../data";
import { clamp, el, sharp } from "../dom";
import type { Chosen } from "../state";
import { label } from "../tokens";
import type { Shade, Spot, Words } from "./pane";

/** The picture that a model was given, and its patches: they are pointed at and shaded as words are. */
export class PicturePane implements Words {
  readonly element: HTMLElement;
  readonly side = "query" as const;
  readonly isColumn = false;
  private readonly canvas = el("canvas", { "aria-hidden": "true" });
  private readonly image = new Image();
  private readonly specials: HTMLElement[];
  private shades = new Map<number, Shade>();
  private marked: number | null = null;

  constructor(
    readonly tokens: string[], private readonly picture: Picture, labelled: string,
    act: { hover: (chosen: Chosen | null) => void; choose: (chosen: Chosen) => void; key: (event: KeyboardEvent) => void },
  ) {
    this.specials = tokens.slice(0, picture.first).map((token, at) => el("span", { class: "t", "data-at": at }, label(token)));
    const holder = el("div", { class: "tokens", dir: "ltr" }, el("p", {}, ...this.specials.flatMap((token) => [token, " "])), this.canvas);
    const scroller = el("div", { class: "scroller", tabindex: 0, role: "group", "aria-label": labelled }, holder);
    this.element = el("div", { class: "pane picture query" }, scroller);
    const under = (event: MouseEvent): number | null => {
      const special = (event.target as Element).closest<HTMLElement>(".t");
      if (special) return Number(special.dataset.at);
      if (event.target !== this.canvas) return null;
      const column = Math.floor((event.offsetX / this.canvas.clientWidth) * picture.columns), row = Math.floor((event.offsetY / this.canvas.clientHeight) * picture.rows);
      return picture.first + clamp(row, 0, picture.rows - 1) * picture.columns + clamp(column, 0, picture.columns - 1);
    };
    holder.addEventListener("pointermove", (event) => {
      const at = event.pointerType === "touch" ? null : under(event);
      if (at !== null) act.hover({ side: "query", at });
    });
    scroller.addEventListener("pointerleave", () => act.hover(null));
    holder.addEventListener("click", (event) => {
      const at = under(event);
      if (at !== null) act.choose({ side: "query", at });
    });
    scroller.addEventListener("keydown", (event) => act.key(event));
    this.image.addEventListener("load", () => this.draw());
    this.image.src = `data:image/png;base64,${picture.png}`;
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  get scroller(): HTMLElement { return this.element.firstElementChild as HTMLElement; }
  remove(): void {}
  scrollTo(): void {}
  spot(): Spot | null { return null; }
  drawStrip(): void {}

  shade(shades: Map<number, Shade>): void {
    this.shades = shades;
    this.specials.forEach((token, at) => {
      const shade = shades.get(at);
      token.style.background = shade ? `color-mix(in srgb, ${shade.colour} calc(var(--most) * ${Math.sqrt(shade.weight).toFixed(3)}), transparent)` : "";
    });
    this.draw();
  }

  mark(at: number | null): void {
    this.marked = at;
    this.specials.forEach((token, own) => token.classList.toggle("chosen", own === at));
    this.draw();
  }

  private draw(): void {
    const { picture, image } = this;
    if (!image.naturalWidth) return;
    const room = Math.min(this.scroller.clientWidth - 40, 560), wide = Math.max(120, room), high = (wide * image.naturalHeight) / image.naturalWidth;
    const context = sharp(this.canvas, wide, high);
    if (!context) return;
    context.imageSmoothingEnabled = true;
    context.drawImage(image, 0, 0, wide, high);
    const patches = [...this.shades].filter(([at]) => at >= picture.first);
    const most = Math.max(1e-9, ...patches.map(([, shade]) => shade.weight));
    const cell = (at: number) => {
      const place = at - picture.first, w = wide / picture.columns, h = high / picture.rows;
      return [(place % picture.columns) * w, Math.floor(place / picture.columns) * h, w, h] as const;
    };
    context.fillStyle = "rgb(10 12 18 / .55)";
    context.fillRect(0, 0, wide, high);
    for (const [at, shade] of patches) {
      const [x, y, w, h] = cell(at);
      context.save();
      context.globalAlpha = clamp(Math.sqrt(shade.weight / most), 0, 1);
      context.beginPath();
      context.rect(x, y, w, h);
      context.clip();
      context.drawImage(image, 0, 0, wide, high);
      context.globalAlpha *= 0.45;
      context.fillStyle = shade.colour;
      context.fillRect(x, y, w, h);
      context.restore();
    }
    context.strokeStyle = "rgb(255 255 255 / .16)";
    context.lineWidth = 0.5;
    for (let row = 1; row < picture.rows; row++) { context.beginPath(); context.moveTo(0, (row * high) / picture.rows); context.lineTo(wide, (row * high) / picture.rows); context.stroke(); }
    for (let column = 1; column < picture.columns; column++) { context.beginPath(); context.moveTo((column * wide) / picture.columns, 0); context.lineTo((column * wide) / picture.columns, high); context.stroke(); }
    if (this.marked !== null && this.marked >= picture.first) {
      const [x, y, w, h] = cell(this.marked);
      context.lineWidth = 3; context.strokeStyle = "#000"; context.strokeRect(x + 1, y + 1, w - 2, h - 2);
      context.lineWidth = 1.5; context.strokeStyle = "#fff"; context.strokeRect(x + 1, y + 1, w - 2, h - 2);
    }
  }
}
