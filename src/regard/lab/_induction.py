"""X6: an induction head forms, while the attention of a model is watched; then one kind of look is cut."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard import edits, masks
from regard.editing import edit
from regard.lab import _draw
from regard.lab._result import Matrix, Result, Table, Words, check_counts, rows
from regard.lab._train import Batch, fit, right, seeded
from regard.nn import MultiHeadAttention
from regard.recording import Recording
from regard.statistics import Want
from regard.watching import watch

SYMBOLS, LENGTH, WIDTH, HEADS = 24, 32, 48, 4
SHORTEST = 6  # of the pieces that repeat while the model learns; it is tried on pieces of LENGTH / 2
STEPS, EVERY = 600, 40

TO_ITSELF = masks.window(left=0)
TO_THE_TOKEN_BEFORE = masks.window(left=1) & ~TO_ITSELF
# what is cut, in which layer
CUTS = {"before_first": (TO_THE_TOKEN_BEFORE, 0), "before_second": (TO_THE_TOKEN_BEFORE, 1), "itself": (TO_ITSELF, 0)}


@dataclass(frozen=True)
class Moment:
    """What the model can do at one step of its training, and what its heads do."""

    right: float  # share of the second half that it predicts
    previous: float  # weight of the best head of the first layer on the token before, in the first half
    induction: float  # weight of the best head of the second layer on what followed the same symbol, in the second half


@dataclass(frozen=True)
class Induction(Result):
    chance: float
    steps: tuple[int, ...]
    moments: tuple[Moment, ...]  # at these steps
    cuts: dict[str, Moment]  # after training, without these looks
    heads: tuple[int, int]  # the best of the first layer and of the second
    maps: tuple[Matrix, Matrix]  # their weights on one sequence

    def _tables(self, say: Words) -> list[Table]:
        columns = say.each("share", "previous", "induction")
        learned = ((str(step), *_cells(one)) for step, one in zip(self.steps, self.moments, strict=True))
        cut = ((say(name), *_cells(one)) for name, one in {"nothing": self.moments[-1], **self.cuts}.items())
        return [
            say.table("learning", (say("step"), *columns), learned, symbols=SYMBOLS, length=LENGTH),
            say.table("cutting", (say("without"), *columns), cut, chance=f"{self.chance:.0%}"),
        ]

    def _figure(self) -> _draw.Figure:
        last, cut = self.moments[-1].right, self.cuts["before_first"].right
        title = f"An induction head forms; without looks at the token before, {last:.0%} right become {cut:.0%}"
        figure, (left, *maps) = _draw.subplots(10.8, 3.8, title, 3, width_ratios=(1.3, 1, 1))
        curves = {
            "right": ("right answers", _draw.GREY, "o"),
            "previous": ("layer 0: on the token before", _draw.BLUE, "s"),
            "induction": ("layer 1: on what came next", _draw.ORANGE, "^"),
        }
        for field, (label, colour, marker) in curves.items():
            heights = [getattr(one, field) for one in self.moments]
            left.plot(self.steps, heights, color=colour, marker=marker, markersize=3, label=label)
        left.set_ylim(0, 1.02)
        _draw.tidy(left, x="step of training", y="share or weight", title="while it learns", legend="best")
        for layer, (axes, head, weights) in enumerate(zip(maps, self.heads, self.maps, strict=True)):
            _draw.heatmap(axes, weights, f"layer {layer}, head {head}", digits=None)
            axes.set_xticks(range(0, LENGTH, 8))
            axes.set_yticks(range(0, LENGTH, 8))
        maps[0].set_ylabel("query")
        return figure


def _cells(moment: Moment) -> tuple[str, ...]:
    return f"{moment.right:.0%}", f"{moment.previous:.2f}", f"{moment.induction:.2f}"


class TwoLayers(nn.Module):
    """Two layers of attention and nothing between them: no feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.layers = nn.ModuleList(MultiHeadAttention(WIDTH, HEADS, qkv_bias=False, out_bias=False) for _ in range(2))
        self.read = nn.Linear(WIDTH, SYMBOLS, bias=False)

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.symbols(symbols) + self.places.weight
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + layer(norm(x), mask=masks.causal())
        scores: Tensor = self.read(self.norms[-1](x))
        return scores


def induction(seed: int = 0, steps: int = STEPS, every: int = EVERY) -> Induction:
    """A model of two layers learns to continue sequences that repeat. It is watched every few steps; in the end, looks
    at the token before are cut, in the first layer and in the second."""
    check_counts(steps=steps, every=every)
    with seeded(seed) as draw:
        model = TwoLayers()
        tried = _sequences(draw, 128, LENGTH // 2)
        told, moments = [0], [_moment(model, tried)]
        while told[-1] < steps:
            more = min(every, steps - told[-1])
            fit(model, functools.partial(_sequences, draw, 32), steps=more)
            told.append(told[-1] + more)
            moments.append(_moment(model, tried))
        cuts = {}
        for name, (looks, layer) in CUTS.items():
            with edit(model, edits.cut(looks), layers=[layer]):
                cuts[name] = _moment(model, tried)
        found = _watched(model, tried[0], Want(scores=True))
        best = found.scores(queries=_FIRST).of("previous")[0], found.scores(queries=_SECOND).of("induction")[1]
        heads = tuple(max(of, key=lambda head: of[head] or 0.0) for of in best)
        seen = _watched(model, tried[0][:1], Want(weights="all"))
        maps = tuple(rows(seen[layer, head].weights) for layer, head in enumerate(heads))
    return Induction(1 / SYMBOLS, tuple(told), tuple(moments), cuts, heads, maps)  # type: ignore[arg-type]


_FIRST, _SECOND = slice(0, LENGTH // 2), slice(LENGTH // 2, None)


def _sequences(draw: torch.Generator, count: int, piece: int | None = None) -> Batch:
    """Random symbols that repeat after `piece` tokens. Only what is there again is asked."""
    if piece is None:
        piece = int(torch.randint(SHORTEST, LENGTH // 2 + 1, (), generator=draw))
    once = torch.randint(SYMBOLS, (count, piece), generator=draw)
    symbols = once.repeat(1, -(-LENGTH // piece))[:, :LENGTH]
    answers = symbols.roll(-1, 1)
    answers[:, :piece] = answers[:, -1] = -100
    return symbols, answers


def _watched(model: nn.Module, symbols: Tensor, want: Want) -> Recording:
    with torch.no_grad(), watch(model, want=want) as recording:
        model(symbols)
    return recording


def _moment(model: nn.Module, tried: Batch) -> Moment:
    recording = _watched(model, tried[0], Want(scores=True))
    previous, follows = recording.scores(queries=_FIRST), recording.scores(queries=_SECOND)
    best = [max(one or 0.0 for one in of.values()) for of in (previous.of("previous")[0], follows.of("induction")[1])]
    return Moment(right(model, tried), *best)
