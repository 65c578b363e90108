"""M20: why softmax, and not the scores themselves or the largest alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.lab._result import Result, Row, Table, numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCORES = (2.3, 9.1, 0.5)
LOWER = 9.0  # taken from all scores: nothing about who fits best changes


@dataclass(frozen=True)
class WhySoftmax(Result):
    name = "M20"
    topic = "why_softmax"

    scores: Row
    weights: dict[str, Row]  # as weights: the scores themselves, the largest alone, softmax
    lowered: dict[str, Row]  # the same when all scores are lower by the same amount
    slopes: dict[str, Row]  # derivative of the best key's weight by each score

    def tables(self, lang: str = "en") -> list[Table]:
        columns = ("", *(f"{score:g}" for score in self.scores))
        lower = tuple(f"{score - LOWER:g}" for score in self.scores)
        total = self.say("total", lang)

        def lines(found: dict[str, Row], summed: bool = True) -> tuple[tuple[str, ...], ...]:
            return tuple(
                (*numbers(self.say(way, lang), row, 5), *((f"{round(sum(row), 5) + 0.0:g}",) if summed else ()))
                for way, row in found.items()
            )

        return [
            Table(self.say("weights", lang), (*columns, total), lines(self.weights)),
            Table(self.say("lowered", lang, lower=f"{LOWER:g}"), ("", *lower, total), lines(self.lowered)),
            Table(self.say("slopes", lang), columns, lines(self.slopes, summed=False)),
        ]

    def _figure(self) -> Figure:
        from regard.lab import _draw

        figure = _draw.figure(
            8.4, 3.4, "Only softmax gives shares that sum to 1, whatever the scores, and can be learned from"
        )
        for axes, (found, title) in zip(
            figure.subplots(1, 2),
            ((self.weights, "weights"), (self.lowered, f"all scores lower by {LOWER:g}")),
            strict=True,
        ):
            for at, (way, colour) in enumerate(zip(found, (_draw.GREY, _draw.ORANGE, _draw.BLUE), strict=True)):
                places = [key + 0.27 * (at - 1) for key in range(len(self.scores))]
                axes.bar(places, found[way], 0.25, color=colour, label=self.say(way))
            axes.axhline(0, color="black", linewidth=0.8)
            axes.set_xticks(range(len(self.scores)), [f"key {key}" for key in range(len(self.scores))])
            _draw.tidy(axes, x="", y="weight", title=title)
        axes.legend(fontsize=8, loc="lower left")
        return figure


def _best_alone(scores: Tensor) -> Tensor:
    # a constant to autograd, as a choice of one is: its slope is 0 wherever it has one
    return torch.nn.functional.one_hot(scores.argmax(), len(scores)).to(scores) + 0 * scores


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "raw": lambda scores: scores * 1,
    "argmax": _best_alone,
    "softmax": lambda scores: scores.softmax(0),
}


def why_softmax(scores: tuple[float, ...] = SCORES) -> WhySoftmax:
    """Three ways to make weights of scores: their sums, what lowering all scores does, and their derivatives."""
    given = torch.tensor(scores, dtype=torch.float64)
    best = int(given.argmax())
    slopes = {way: torch.autograd.functional.jacobian(make, given)[best] for way, make in WAYS.items()}  # type: ignore[no-untyped-call]
    return WhySoftmax(
        tuple(scores),
        {way: tuple(make(given).tolist()) for way, make in WAYS.items()},
        {way: tuple(make(given - LOWER).tolist()) for way, make in WAYS.items()},
        {way: tuple(row.tolist()) for way, row in slopes.items()},
    )
