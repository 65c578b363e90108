// Colours that stay apart for colour-blind readers: order is by lightness, and kinds also have names and numbers.

const LIGHT = ["#0072b2", "#d55e00", "#008f68", "#b5488a", "#9a6b00", "#2a8fc9", "#6a3d9a", "#8b4513", "#3f5f66", "#5f7a00", "#c2185b", "#4f46c8"];
const DARK = ["#4aa8e0", "#f28a3c", "#2fc297", "#e08fc0", "#e0ad3a", "#8ad0f7", "#b595e6", "#d29a6b", "#9fc0c6", "#b3cf4f", "#f0719f", "#a5a0ff"];

export const HEAT_LIGHT: Rgb[] = [[250, 251, 252], [203, 232, 234], [118, 193, 201], [35, 137, 158], [9, 84, 112], [5, 40, 66]];
export const HEAT_DARK: Rgb[] = [[24, 27, 33], [17, 60, 74], [16, 109, 128], [40, 164, 178], [130, 217, 214], [244, 255, 246]];
export const DIFFERENCE_LIGHT: Rgb[] = [[18, 76, 190], [120, 165, 240], [250, 251, 252], [246, 164, 96], [190, 70, 0]];
export const DIFFERENCE_DARK: Rgb[] = [[120, 172, 255], [38, 84, 170], [24, 27, 33], [170, 82, 16], [255, 170, 96]];

type Rgb = [number, number, number];
export interface Palette { isDark: boolean; heads: string[]; heat: Uint32Array; difference: Uint32Array; ink: string; soft: string; line: string; paper: string; accent: string; from: string }

export function palette(root: Element, isDark: boolean): Palette {
  const style = getComputedStyle(root);
  const read = (name: string) => style.getPropertyValue(`--${name}`).trim();
  return {
    isDark, heads: isDark ? DARK : LIGHT,
    heat: table(isDark ? HEAT_DARK : HEAT_LIGHT), difference: table(isDark ? DIFFERENCE_DARK : DIFFERENCE_LIGHT),
    ink: read("ink"), soft: read("soft"), line: read("line"), paper: read("paper"), accent: read("accent"), from: read("from"),
  };
}

export function headColour(colours: Palette, head: number): string {
  return colours.heads[head % colours.heads.length]!;
}

/** 256 colours as the pixels of a canvas. */
export function table(stops: Rgb[]): Uint32Array {
  const found = new Uint32Array(256);
  for (let at = 0; at < 256; at++) {
    const place = (at / 255) * (stops.length - 1);
    const low = Math.min(Math.floor(place), stops.length - 2), part = place - low;
    const [r, g, b] = [0, 1, 2].map((i) => Math.round(stops[low]![i]! * (1 - part) + stops[low + 1]![i]! * part)) as Rgb;
    found[at] = (255 << 24) | (b << 16) | (g << 8) | r;
  }
  return found;
}

export function css(pixel: number): string {
  return `rgb(${pixel & 255} ${(pixel >> 8) & 255} ${(pixel >> 16) & 255})`;
}

/** A picture of values, one pixel each; brightness goes with the square root, and `top` is the strongest. */
export function heatmap(values: ArrayLike<number>, rows: number, columns: number, top: number, colours: Uint32Array): HTMLCanvasElement {
  return paint(rows, columns, (at) => colours[Math.min(255, Math.round(Math.sqrt(Math.max(0, values[at]!) / (top || 1)) * 255))]!);
}

/** A picture of differences: nothing in the middle of the colours, `top` at both ends. */
export function differences(values: ArrayLike<number>, rows: number, columns: number, top: number, colours: Uint32Array): HTMLCanvasElement {
  return paint(rows, columns, (at) => {
    const share = Math.max(-1, Math.min(1, values[at]! / (top || 1)));
    return colours[Math.round((Math.sign(share) * Math.sqrt(Math.abs(share)) + 1) * 127.5)]!;
  });
}

function paint(rows: number, columns: number, colour: (at: number) => number): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d")!;
  const image = context.createImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  for (let at = 0; at < pixels.length; at++) pixels[at] = colour(at);
  context.putImageData(image, 0, 0);
  return canvas;
}
