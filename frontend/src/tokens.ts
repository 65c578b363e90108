// Token text is data: it is shown as text, never as markup, and nothing in it can turn a line around.

const UNSHOWN = /[\u0000-\u001f\u007f-\u009f\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069\ud800-\udfff]/;
const LONGEST = 48; // letters of one token in a text

/** Text from elsewhere as it can be shown: control characters get a sign. */
export function visible(given: string): string {
  if (!UNSHOWN.test(given)) return given;
  let shown = "";
  for (const letter of given) {
    const code = letter.codePointAt(0)!;
    if (letter === "\n") shown += "↵";
    else if (letter === "\t") shown += "⇥";
    else if (code < 32) shown += String.fromCodePoint(0x2400 + code);
    else if ((code >= 127 && code < 160) || (code >= 0x202a && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069)
      || (code >= 0xd800 && code < 0xe000) || code === 0x200e || code === 0x200f || code === 0x61c) shown += "\ufffd";
    else shown += letter;
  }
  return shown;
}

export function shorten(given: string, most = LONGEST): string {
  if (given.length <= most) return given;
  // a token of many kilobytes is cut before its letters are looked at
  const letters = [...given.slice(0, 4 * most)];
  return letters.length > most || given.length > 4 * most ? `${letters.slice(0, most - 1).join("")}…` : given;
}

/** A token in a list or a label: short, visible, its outer spaces shown. */
export function label(given: string, most = 24): string {
  const short = shorten(given.replace(/^[▁Ġ](?=.)/u, ""), most); // the mark of a space before the word
  const inner = short.trim();
  return inner === "" ? visible(short.slice(0, 4)).replace(/\s/g, "␣") || "∅" : visible(inner);
}

const PLAIN = /^ [A-Za-z]{1,40}$/; // most tokens of most texts: nothing to look for

export interface Piece { text: string; space: boolean; breaks: boolean }

/** How a list of tokens is written as a text: where spaces stand between them, and where lines end. */
export function pieces(tokens: string[]): (at: number) => Piece {
  // byte-pair and sentence-piece tokens carry their spaces; word pieces mark what continues a word instead
  const sample = tokens.slice(0, 4000);
  const carries = sample.some((token) => token.length > 1 && /^[\s▁Ġ]/u.test(token));
  const marks = !carries && sample.some((token) => token.startsWith("##"));
  return (at) => {
    const token = tokens[at]!;
    if (carries && PLAIN.test(token)) return { text: token.slice(1), space: true, breaks: false };
    const breaks = token.includes("\n");
    if (carries) {
      const plain = token.replace(/^[▁Ġ]/u, " ");
      const space = /^\s/u.test(plain) && plain.trim() !== "";
      return { text: visible(shorten(space ? plain.trimStart() : plain)) || "∅", space, breaks };
    }
    const goesOn = marks && token.startsWith("##") && token.length > 2;
    const shown = goesOn ? token.slice(2) : token;
    const closes = /^[.,;:!?)\]}’”'%…。，、；：！？）]+$/u.test(token);
    const wide = /^[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]/u.test(token) && at > 0 && /[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff][₁-₉]?$/u.test(tokens[at - 1]!);
    return { text: visible(shorten(shown)) || "∅", space: at > 0 && !goesOn && !closes && !wide, breaks };
  };
}

/** Some tokens of a list as a text. */
export function joined(tokens: string[], from: number, to: number): string {
  const piece = pieces(tokens);
  return tokens.slice(from, to).map((_, at) => (piece(from + at).space ? " " : "") + piece(from + at).text).join("");
}

const RTL = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff]/u;
const LTR = /[A-Za-z\u00c0-\u058f\u0900-\u1fff\u3040-\u9fff\uac00-\ud7af]/u;

/** The direction of a text: that of most of its letters. */
export function direction(tokens: string[]): "ltr" | "rtl" {
  let right = 0, left = 0;
  for (const token of tokens.slice(0, 2000)) for (const letter of token.slice(0, 64)) {
    if (RTL.test(letter)) right++;
    else if (LTR.test(letter)) left++;
  }
  return right > left ? "rtl" : "ltr";
}

export function percent(weight: number): string {
  const share = weight * 100;
  if (share >= 9.995) return `${share.toFixed(1)} %`;
  if (share >= 0.01) return `${share.toFixed(2)} %`;
  return share > 0 ? "< 0.01 %" : "0 %";
}
