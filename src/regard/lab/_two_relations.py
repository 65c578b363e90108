"""X2: one head against many, on a task that needs two relations at once."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard import positions
from regard.lab import _draw
from regard.lab._result import Matrix, Result, Row, Table, Words, check_counts, parameter_count, rows
from regard.lab._train import Batch, fit, right, seeded
from regard.nn import MultiHeadAttention
from regard.statistics import Want

SYMBOLS, LENGTH, WIDTH = 11, 12, 32
HEADS = (1, 2, 4)
STEPS = 300


@dataclass(frozen=True)
class TwoRelations(Result):
    heads: tuple[int, ...]
    right: Row  # share of right answers, for each number of heads
    loss: Row  # at the end of training, nats
    parameters: tuple[int, ...]
    one: Matrix  # weights of the single head on one input
    both: tuple[Matrix, Matrix]  # of the two heads, where there are two

    def _tables(self, say: Words) -> list[Table]:
        lines = (
            (str(heads), f"{share:.1%}", f"{loss:.3f}", str(count))
            for heads, share, loss, count in zip(self.heads, self.right, self.loss, self.parameters, strict=True)
        )
        columns = say.each("heads", "share", "loss", "parameters")
        return [say.table("task", columns, lines, symbols=SYMBOLS, length=LENGTH)]

    def _figure(self) -> _draw.Figure:
        title = f"Two relations at once: one head gets {self.right[0]:.0%} right, two heads {self.right[1]:.0%}"
        figure, (left, *maps) = _draw.subplots(10.4, 3.4, title, 4, width_ratios=(1.15, 1, 1, 1))
        bars = left.bar([str(count) for count in self.heads], self.right, color=_draw.BLUE, width=0.6)
        left.bar_label(bars, [f"{share:.0%}" for share in self.right], padding=2, fontsize=9)
        left.set_ylim(0, 1.12)
        _draw.tidy(left, x="heads", y="right answers", title="same width, same parameters")
        names = ("one head: both at once", "two heads: the first", "two heads: the second")
        shown = (self.one, *self.both)
        most = max(max(map(max, values)) for values in shown)
        for axes, values, name in zip(maps, shown, names, strict=True):
            _draw.heatmap(axes, values, name, digits=None, most=most)
            axes.set_xticks(range(0, LENGTH, 3))
            axes.set_yticks(range(0, LENGTH, 3))
        maps[0].set_ylabel("query")
        return figure


class Neighbours(nn.Module):
    """One attention layer and a linear reading of it, twice: the symbol before, the symbol after."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.attend = MultiHeadAttention(WIDTH, heads)
        self.read = nn.Linear(WIDTH, 2 * SYMBOLS)

    def placed(self, symbols: Tensor) -> Tensor:
        x: Tensor = self.symbols(symbols) + positions.sinusoidal(LENGTH, WIDTH)
        return x

    def forward(self, symbols: Tensor) -> Tensor:
        answers: Tensor = self.read(self.attend(self.placed(symbols)))
        return answers.reshape(*symbols.shape, 2, SYMBOLS)


def two_relations(seed: int = 0, steps: int = STEPS) -> TwoRelations:
    """Every token names the symbol before it and the symbol after it. Layers of 1, 2 and 4 heads learn it."""
    check_counts(steps=steps)
    shares, losses, counts, maps = [], [], [], {}
    for heads in HEADS:
        with seeded(seed) as draw:
            model = Neighbours(heads)
            losses.append(fit(model, functools.partial(_sequences, draw, 64), steps=steps, rate=5e-3)[-1])
            shares.append(right(model, _sequences(draw, 2000)))
            maps[heads] = _weights(model, _sequences(draw, 1)[0])
        counts.append(parameter_count(model.attend))
    first, second = maps[2]
    return TwoRelations(HEADS, tuple(shares), tuple(losses), tuple(counts), maps[1][0], (first, second))


def _sequences(draw: torch.Generator, count: int) -> Batch:
    symbols = torch.randint(SYMBOLS, (count, LENGTH), generator=draw)
    answers = torch.stack([symbols.roll(1, 1), symbols.roll(-1, 1)], dim=-1)
    answers[:, 0, 0] = answers[:, -1, 1] = -100  # nothing stands before the first and after the last
    return symbols, answers


@torch.no_grad()
def _weights(model: Neighbours, symbols: Tensor) -> list[Matrix]:
    seen = model.attend.observe(model.placed(symbols), want=Want(weights=(slice(None), slice(None))))
    return [rows(head) for head in seen.weights[0]]
