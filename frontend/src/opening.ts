import type { Data, Layer } from "./data";

// a word: two letters, or one character of a script that writes words with one; or the number of a token without a text
const WORD = /^[\s▁Ġ]?(?:[\p{L}\p{M}]{2,}|[\p{Script=Han}\p{Script=Hangul}]|\[\d+\])$/u;
const MOST_QUERIES = 4096; // of a head that are looked at: evenly over the text where there are more

/** A place to begin that shows something: the clearest look of one word at another that is some way off. */
export function clearest(layers: Layer[]): { layer: number; head: number; at: number } | null {
  let best: { layer: number; head: number; at: number } | null = null, most = 0.1;
  layers.forEach((layer, index) => {
    if (layer.header.kind !== "self") return;
    const step = Math.ceil(layer.queries / MOST_QUERIES);
    for (let head = 0; head < layer.heads.length; head++) {
      const numbers = layer.header.rows[head]!;
      if (numbers.label === "first" || numbers.label === "broad" || numbers.label === "same") continue;
      for (let query = 0; query < layer.queries; query += step) {
        const own = layer.queryToken(query);
        if (!WORD.test(own)) continue;
        layer.top(head)?.row(query, (key, weight) => {
          const far = Math.abs(query + layer.header.first - key), score = weight * Math.min(1, far / 5);
          if (score <= most || far < 2 || !key) return; // the first token is where heads rest
          const other = layer.keyToken(key);
          if (WORD.test(other) && other.trim() !== own.trim()) {
            most = score;
            best = { layer: index, head, at: query + layer.header.first };
          }
        });
      }
    }
  });
  return best;
}

/** Where the page opens: as it was asked to, else at something worth seeing. */
export function opening(data: Data): { layer: number; heads: number[]; at: number | null } {
  const layers = data.recordings[0]?.scenes[0]?.layers ?? [];
  const wanted = data.header.open ?? {};
  const found = clearest(layers), { picture } = data.header;
  if (wanted.layer !== undefined || wanted.head !== undefined) {
    const layer = Math.max(0, layers.findIndex((one) => one.index === (wanted.layer ?? layers[0]?.index)));
    const head = wanted.head === undefined ? -1 : layers[layer]?.heads.indexOf(wanted.head) ?? -1;
    const same = clearest(layers.slice(layer, layer + 1));
    return { layer, heads: head >= 0 ? [head] : [], at: same?.at ?? found?.at ?? null };
  }
  // a picture: what its summary token looks at in the last layer, else the patch in the middle
  if (picture) return { layer: layers.length - 1, heads: [], at: picture.first ? 0 : (picture.rows >> 1) * picture.columns + (picture.columns >> 1) };
  return found ? { layer: found.layer, heads: [found.head], at: found.at } : { layer: 0, heads: [], at: null };
}
