"""X4: attention does not know the order of its tokens until something tells it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import bias, masks, positions
from regard.lab import _draw
from regard.lab._result import Result, Table, Words, check_counts
from regard.lab._train import seeded
from regard.nn import MultiHeadAttention

WORDS = ("dog", "bites", "man")
SWAPPED = ("man", "bites", "dog")
WIDTH, HEADS = 32, 4


@dataclass(frozen=True)
class Permutation(Result):
    tokens: int
    shuffled: dict[str, float]  # largest difference between "shuffle, then attend" and "attend, then shuffle"
    sentences: dict[str, float]  # between the mean outputs of "dog bites man" and "man bites dog"

    def _tables(self, say: Words) -> list[Table]:
        columns = ("", say("shuffled", tokens=self.tokens), say("sentences"))
        lines = ((say(how), f"{self.shuffled[how]:.1e}", f"{self.sentences[how]:.1e}") for how in self.shuffled)
        return [say.table("differences", columns, lines)]

    def _figure(self) -> _draw.Figure:
        title = "Without positions a shuffled input gives the shuffled output; with them it does not"
        figure, axes = _draw.subplots(8.4, 3.8, title)
        names = [self.say(how) for how in self.shuffled]
        floor = 1e-17
        for shift, values, colour, mark, label in (
            (0.12, self.shuffled, _draw.BLUE, "o", f"{self.tokens} tokens, shuffled"),
            (-0.12, self.sentences, _draw.ORANGE, "s", "“dog bites man”, “man bites dog”"),
        ):
            places = [at + shift for at in range(len(names))]
            lengths = [max(value, floor) for value in values.values()]
            axes.hlines(places, floor, lengths, color=colour, linewidth=2)
            axes.plot(lengths, places, color=colour, marker=mark, linestyle="none", label=label)
        axes.set_xscale("log")
        axes.set_xlim(floor, 100)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -1.0)
        axes.axvspan(floor, 1e-13, color="0.93", zorder=0)
        axes.text(2e-17, -0.6, "rounding of float64", fontsize=9, color=_draw.GREY)
        _draw.tidy(axes, x="largest difference", y="", legend="upper right", ncols=2)
        return figure


def permutation(tokens: int = 11, seed: int = 0) -> Permutation:
    """Shuffle the input of one layer: without positions the output is shuffled likewise and not changed otherwise."""
    check_counts(tokens=tokens)
    with seeded(seed):
        layer = MultiHeadAttention(WIDTH, HEADS, dtype=torch.float64)
        turning = MultiHeadAttention(WIDTH, HEADS, positions=positions.Rotary(WIDTH // HEADS), dtype=torch.float64)
        x = torch.randn(1, tokens, WIDTH, dtype=torch.float64)
        order = torch.randperm(tokens)
        known = {word: torch.randn(WIDTH, dtype=torch.float64) for word in WORDS}
    turning.load_state_dict(layer.state_dict())
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "none": layer,
        "sinusoidal": lambda x: layer(x + positions.sinusoidal(x.shape[1], WIDTH, dtype=x.dtype)),
        "rotary": turning,
        "alibi": lambda x: layer(x, bias=bias.alibi(HEADS)),
        "causal": lambda x: layer(x, mask=masks.causal()),
    }
    first, second = (torch.stack([known[word] for word in line])[None] for line in (WORDS, SWAPPED))
    with torch.no_grad():
        return Permutation(
            tokens,
            {how: (way(x[:, order]) - way(x)[:, order]).abs().max().item() for how, way in ways.items()},
            {how: (way(first) - way(second)).mean(1).abs().max().item() for how, way in ways.items()},
        )
