import type { Picture } from "../data";
import { clamp, el, sharp } from "../dom";
import { label } from "../tokens";
import { type Act, scrollerOf, type Shade, tokenUnder, type Words } from "./pane";

/** The picture that a model was given, and its patches: they are pointed at and shaded as words are. */
export function picturePane(tokens: string[], picture: Picture, labelled: string, act: Act): Words {
  const canvas = el("canvas", { "aria-hidden": "true" }), image = new Image();
  const specials = tokens.slice(0, picture.first).map((token, at) => el("span", { class: "t", "data-at": at }, label(token)));
  let shades = new Map<number, Shade>(), marked: number | null = null;
  const holder = el("div", { class: "tokens", dir: "ltr" }, el("p", {}, ...specials.flatMap((token) => [token, " "])), canvas);
  const scroller = scrollerOf(holder, "query", labelled, act, "pointermove", (event) => {
    if (event.target !== canvas) return tokenUnder(event);
    const column = Math.floor((event.offsetX / canvas.clientWidth) * picture.columns), row = Math.floor((event.offsetY / canvas.clientHeight) * picture.rows);
    return picture.first + clamp(row, 0, picture.rows - 1) * picture.columns + clamp(column, 0, picture.columns - 1);
  });
  const element = el("div", { class: "pane picture query" }, scroller);
  image.addEventListener("load", draw);
  image.src = `data:image/png;base64,${picture.png}`;
  new ResizeObserver(draw).observe(element);

  function shade(given: Map<number, Shade>): void {
    shades = given;
    specials.forEach((token, at) => {
      const shade = shades.get(at);
      token.style.background = shade ? `color-mix(in srgb, ${shade.colour} calc(var(--most) * ${Math.sqrt(shade.weight).toFixed(3)}), transparent)` : "";
    });
    draw();
  }

  function mark(at: number | null): void {
    marked = at;
    specials.forEach((token, own) => token.classList.toggle("chosen", own === at));
    draw();
  }

  function draw(): void {
    if (!image.naturalWidth) return;
    // as large as the window allows, and never so tall that a part of it is out of sight
    const tall = Math.max(220, scroller.clientHeight - (specials.length ? 72 : 36));
    const wide = Math.max(120, Math.min(scroller.clientWidth - 40, 720, (tall * image.naturalWidth) / image.naturalHeight));
    const high = (wide * image.naturalHeight) / image.naturalWidth;
    const context = sharp(canvas, wide, high);
    if (!context) return;
    context.imageSmoothingEnabled = true;
    context.drawImage(image, 0, 0, wide, high);
    const patches = [...shades].filter(([at]) => at >= picture.first);
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
    context.beginPath();
    for (let row = 1; row < picture.rows; row++) { context.moveTo(0, (row * high) / picture.rows); context.lineTo(wide, (row * high) / picture.rows); }
    for (let column = 1; column < picture.columns; column++) { context.moveTo((column * wide) / picture.columns, 0); context.lineTo((column * wide) / picture.columns, high); }
    context.stroke();
    if (marked !== null && marked >= picture.first) {
      const [x, y, w, h] = cell(marked);
      for (const [width, colour] of [[3, "#000"], [1.5, "#fff"]] as const) {
        context.lineWidth = width;
        context.strokeStyle = colour;
        context.strokeRect(x + 1, y + 1, w - 2, h - 2);
      }
    }
  }

  const nothing = () => undefined;
  return { element, side: "query", tokens, isColumn: false, scroller, across: picture.columns, remove: nothing, scrollTo: nothing, shade, mark, spot: () => null, drawStrip: nothing };
}
