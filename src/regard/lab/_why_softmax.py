"""M20: why softmax, and not the scores themselves or the largest alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.lab import _draw
from regard.lab._result import Result, Row, Table, Words, numbers

SCORES = (2.3, 9.1, 0.5)
LOWER = 9.0  # taken from all scores: nothing about who fits best changes


@dataclass(frozen=True)
class WhySoftmax(Result):
    scores: Row
    weights: dict[str, Row]  # as weights: the scores themselves, the largest alone, softmax
    lowered: dict[str, Row]  # the same when all scores are lower by the same amount
    slopes: dict[str, Row]  # derivative of the best key's weight by each score

    def _tables(self, say: Words) -> list[Table]:
        def summed(found: dict[str, Row]) -> list[tuple[str, ...]]:
            return [(*numbers(say(way), row, 5), f"{round(sum(row), 5) + 0.0:g}") for way, row in found.items()]

        columns, lower = (tuple(f"{score - less:g}" for score in self.scores) for less in (0, LOWER))
        slopes = [numbers(say(way), row, 5) for way, row in self.slopes.items()]
        return [
            say.table("weights", ("", *columns, say("total")), summed(self.weights)),
            say.table("lowered", ("", *lower, say("total")), summed(self.lowered), lower=f"{LOWER:g}"),
            say.table("slopes", ("", *columns), slopes),
        ]

    def _figure(self) -> _draw.Figure:
        title = "Only softmax gives weights that sum to 1 and can be learned from"
        figure, panels = _draw.subplots(8.4, 3.4, title, 2)
        shown = {"weights": self.weights, f"all scores lowered by {LOWER:g}": self.lowered}
        for axes, (name, found) in zip(panels, shown.items(), strict=True):
            colours = zip(found, (_draw.GREY, _draw.ORANGE, _draw.BLUE), strict=True)
            _draw.bars(
                axes, [_draw.Bars(self.say(way), found[way], colour) for way, colour in colours], gap=0.27, width=0.25
            )
            axes.axhline(0, color="black", linewidth=0.8)
            axes.set_xticks(range(len(self.scores)), [f"key {key}" for key in range(len(self.scores))])
            _draw.tidy(axes, x="", y="weight", title=name)
        panels[0].legend(fontsize=8, loc="upper right")
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
