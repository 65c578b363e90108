"""E13: four questions that are always asked, each answered by something computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regard import api
from regard.lab import _draw
from regard.lab._permutation import permutation
from regard.lab._result import Result, Table, Words, look
from regard.lab._rnn import rnn

LENGTHS = (256, 512, 1024, 2048)


@dataclass(frozen=True)
class FourQuestions(Result):
    tokens: int
    steps: dict[str, int]  # that must follow each other over all tokens, by kind of layer
    lengths: tuple[int, ...]
    flops: tuple[int, ...]  # of attention, for each length
    recurrent_flops: tuple[int, ...]  # of a recurrent layer of the same width
    self_shape: tuple[int, ...]  # of the weights when a text of 5 looks at itself
    cross_shape: tuple[int, ...]  # and when it looks at a text of 7
    shuffled: dict[str, float]  # how much a shuffled input changes the output, by kind of positions

    def _tables(self, say: Words) -> list[Table]:
        steps = ((say(kind), str(self.steps[kind])) for kind in ("rnn", "attention"))
        growth = (
            (str(length), f"{flops:,}", _times(self.flops, at), f"{other:,}", _times(self.recurrent_flops, at))
            for at, (length, flops, other) in enumerate(
                zip(self.lengths, self.flops, self.recurrent_flops, strict=True)
            )
        )
        shapes = ((say("self"), str(list(self.self_shape))), (say("cross"), str(list(self.cross_shape))))
        shuffled = ((say(how), f"{self.shuffled[how]:.1e}") for how in ("none", "sinusoidal"))
        return [
            say.table("faster", ("", say("one_by_one")), steps, tokens=self.tokens),
            say.table("complexity", say.each("length", "attention", "grown", "recurrent", "grown"), growth),
            say.table("kinds", ("", say("shape")), shapes),
            say.table("positions", ("", say("changes")), shuffled),
        ]

    def _figure(self) -> _draw.Figure:
        title = "Twice the tokens: four times the operations of attention, twice those of an RNN"
        figure, axes = _draw.subplots(8.4, 3.4, title)
        axes.plot(self.lengths, self.flops, color=_draw.BLUE, marker="o", label="attention: n²·d")
        axes.plot(self.lengths, self.recurrent_flops, color=_draw.ORANGE, marker="s", label="recurrent: n·d²")
        axes.set_yscale("log")
        _draw.log_ticks(axes, self.lengths)
        _draw.tidy(axes, x="tokens", y="operations", legend="best")
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
