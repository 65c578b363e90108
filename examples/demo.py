"""One attention call, the plan that ran it, and its weights as a picture in the terminal."""

from __future__ import annotations

import io
import signal
import sys

import torch
from rich.console import Console
from rich.text import Text

import regard
from regard import masks

SENTENCE = "the cat sat on the mat because the mat was warm and the cat was tired"
WORDS = SENTENCE.split()
SHADES = "·░▒▓█"
PLAIN_SHADES = ".:+*#"  # for an output that has ASCII only
COLOURS = ("#2a1a4a", "#6a2c8a", "#b8417a", "#f07f4f", "#fcd46a")


def embed(words: list[str], num_heads: int, head_dim: int) -> torch.Tensor:
    """[1, head, token, dim]: a fixed random vector for each distinct word, so that a word looks for its own kind."""
    generator = torch.Generator().manual_seed(0)
    table = {word: torch.randn(num_heads, head_dim, generator=generator) for word in dict.fromkeys(words)}
    return torch.stack([table[word] for word in words], dim=1)[None]


def shades() -> str:
    """What the output can show. The rest of the text then loses its few signs, and nothing else."""
    try:
        SHADES.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        return PLAIN_SHADES
    return SHADES


def draw(weights: torch.Tensor, allowed: torch.Tensor, title: str, levels: str, colour: bool) -> list[Text]:
    """One line per query; the shade of a cell is its weight, and what the mask forbids stays empty."""
    lines = [Text(title), Text("".join(f"{j:<4}" for j in range(0, weights.shape[1], 2)).rstrip(), style="dim")]
    for row, may in zip(weights.tolist(), allowed.tolist(), strict=True):
        line = Text()
        for weight, permitted in zip(row, may, strict=True):
            level = min(int(weight**0.5 * len(levels)), len(levels) - 1)  # the root lets small weights be seen
            if not permitted:
                line.append("  ")
            elif colour:
                line.append(levels[-1] * 2, style=COLOURS[level])
            else:
                line.append(levels[level] * 2)
        lines.append(line)
    return lines


def main() -> None:
    levels = shades()
    console = Console(highlight=False)
    tokens = embed(WORDS, num_heads=4, head_dim=16)
    length = len(WORDS)
    mask = masks.causal() & (masks.window(left=6) | masks.columns(1))
    call = {"mask": mask, "scale": 0.25}

    console.print(f'"{SENTENCE}"\n')
    console.print(f"tokens  [batch, head, token, dim] = {list(tokens.shape)}", markup=False)
    console.print(f"mask    {mask}\n", markup=False)
    print(regard.explain(tokens, tokens, tokens, **call))

    want = regard.Want(weights=(slice(None), slice(None)))
    seen = regard.observe(tokens, tokens, tokens, **call, want=want)
    same = torch.equal(seen.out, regard.attention(tokens, tokens, tokens, **call))
    allowed = mask.dense(length, length)
    colour = console.color_system is not None and not console.no_color

    labels = ["", "query", *(f"{i:>2} {word}" for i, word in enumerate(WORDS))]
    arrow = "→" if levels == SHADES else "->"
    pictures = [draw(seen.weights[0, head], allowed, f"head {head}: key {arrow}", levels, colour) for head in (0, 1)]
    console.print()
    for label, *cells in zip(labels, *pictures, strict=True):
        line = Text(f"{label:<11}")
        for cell in cells:
            cell.pad_right(2 * length + 2 - cell.cell_len)
            line.append_text(cell)
        line.rstrip()
        console.print(line, no_wrap=True, overflow="crop")

    query = length // 2
    console.print("A cell is a weight; what the mask forbids is blank.\n", style="dim")
    strongest = seen.top_keys[0, 0, query, :3].tolist()
    share = ", ".join(f"{WORDS[j]} ({j}) {seen.weights[0, 0, query, j]:.2f}" for j in strongest)
    console.print(f"'{WORDS[query]}' ({query}) in head 0 looks at: {share}")
    console.print(
        f"entropy of that row: {seen.entropy[0, 0, query]:.2f} nats of at most {allowed[query].sum().log():.2f}"
    )
    console.print(f"output with and without watching is the same, bit for bit: {same}")


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `make demo | head` ends quietly
    main()
