"""E13: four questions that are always asked, each answered by something computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from regard import api
from regard.lab._permutation import permutation
from regard.lab._result import Result, Table, look
from regard.lab._rnn import rnn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTHS = (256, 512, 1024, 2048)


@dataclass(frozen=True)
class FourQuestions(Result):
    name = "E13"
    topic = "four_questions"

    tokens: int
    steps: dict[str, int]  # that must follow each other over all tokens, by kind of layer
    lengths: tuple[int, ...]
    flops: tuple[int, ...]  # of attention, for each length
    recurrent_flops: tuple[int, ...]  # of a recurrent layer of the same width
    self_shape: tuple[int, ...]  # of the weights when a text of 5 looks at itself
    cross_shape: tuple[int, ...]  # and when it looks at a text of 7
    shuffled: dict[str, float]  # how much a shuffled input changes the output, by kind of positions

    def tables(self, lang: str = "en") -> list[Table]:
        growth = tuple(
            (str(length), f"{flops:,}", _times(self.flops, at), f"{other:,}", _times(self.recurrent_flops, at))
            for at, (length, flops, other) in enumerate(
                zip(self.lengths, self.flops, self.recurrent_flops, strict=True)
            )
        )
        names = ("length", "attention", "grown", "recurrent", "grown")
        return [
            Table(
                self.say("faster", lang, tokens=self.tokens),
                ("", self.say("one_by_one", lang)),
                tuple((self.say(kind, lang), str(self.steps[kind])) for kind in ("rnn", "attention")),
            ),
            Table(self.say("complexity", lang), tuple(self.say(key, lang) for key in names), growth),
            Table(
                self.say("kinds", lang),
                ("", self.say("shape", lang)),
                (
                    (self.say("self", lang), str(list(self.self_shape))),
                    (self.say("cross", lang), str(list(self.cross_shape))),
                ),
            ),
            Table(
                self.say("positions", lang),
                ("", self.say("changes", lang)),
                tuple((self.say(how, lang), f"{self.shuffled[how]:.1e}") for how in ("none", "sinusoidal")),
            ),
        ]

    def _figure(self) -> Figure:
        from regard.lab import _draw

        figure = _draw.figure(
            8.4, 3.4, "Twice the tokens: four times the operations of attention, twice those of an RNN"
        )
        axes = figure.add_subplot()
        axes.plot(self.lengths, self.flops, color=_draw.BLUE, marker="o", label="attention: n²·d")
        axes.plot(self.lengths, self.recurrent_flops, color=_draw.ORANGE, marker="s", label="recurrent: n·d²")
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(self.lengths, [str(length) for length in self.lengths])
        axes.minorticks_off()
        axes.legend(fontsize=9)
        _draw.tidy(axes, x="tokens", y="operations")
        return figure


def four_questions(width: int = 64) -> FourQuestions:
    """Why faster than an RNN, which complexity, self against cross, why positions: each by something computed."""
    flops = []
    for length in LENGTHS:
        x = torch.empty(1, 1, length, width, device="meta")
        flops.append(api.explain(x, x, x).cost.flops)
    made = torch.Generator().manual_seed(0)
    one, other = (torch.randn(1, 1, tokens, 8, generator=made) for tokens in (5, 7))
    compared = rnn(tokens=65, draws=1)
    return FourQuestions(
        compared.tokens,
        compared.steps,
        LENGTHS,
        tuple(flops),
        tuple(2 * length * 2 * width**2 for length in LENGTHS),  # input and state, each by a matrix
        tuple(look(one, one, one).weights.shape[2:]),
        tuple(look(one, other, other).weights.shape[2:]),
        permutation().shuffled,
    )


def _times(numbers: tuple[int, ...], at: int) -> str:
    return "—" if at == 0 else f"× {numbers[at] / numbers[at - 1]:g}"
