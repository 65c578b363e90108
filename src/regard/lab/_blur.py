"""E8: averaging blurs, and how heads sharpen it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard import api
from regard.lab import _draw
from regard.lab._result import Result, Row, Table, Words, check_counts

WIDTH = 64
SHARED = (1, 2, 4, 8, 16, 32, 64)  # how many keys share the weight of one head
HEADS = (1, 2, 4, 8)
FACTS = 8  # what a token has to fetch, each from a key of its own
SYMBOLS = 256


@dataclass(frozen=True)
class Blur(Result):
    shared: tuple[int, ...]
    likeness: Row  # cosine of the output with each value it was averaged from, mean
    heads: tuple[int, ...]
    found: Row  # share of the facts that can be read from the outputs in any order, for each number of heads
    named: Row  # share that can be read where it belongs

    def _tables(self, say: Words) -> list[Table]:
        blurred = (
            (str(count), f"{cosine:.3f}", f"{count**-0.5:.3f}")
            for count, cosine in zip(self.shared, self.likeness, strict=True)
        )
        read = (
            (str(heads), str(WIDTH // heads), str(FACTS // heads), f"{found:.1%}", f"{named:.1%}")
            for heads, found, named in zip(self.heads, self.found, self.named, strict=True)
        )
        return [
            say.table("blurs", say.each("shared", "likeness", "expected"), blurred),
            say.table("sharpens", say.each("heads", "width", "each", "found", "named"), read, facts=FACTS),
        ]

    def _figure(self) -> _draw.Figure:
        likeness = f"{self.likeness[3]:.2f}"
        title = f"The mean of {FACTS} values has a cosine of {likeness} with each; {FACTS} heads keep them apart"
        figure, (left, right) = _draw.subplots(8.4, 3.6, title, 2)
        left.plot(self.shared, [count**-0.5 for count in self.shared], color="0.8", linewidth=5, label="1/√n")
        left.plot(self.shared, self.likeness, color=_draw.BLUE, marker="o", label="measured")
        left.set_xscale("log", base=2)
        left.set_xticks(self.shared, [str(count) for count in self.shared])
        left.set_ylim(0, 1.05)
        names = {"x": "n: keys that one head averages", "y": "cosine with each of their values"}
        _draw.tidy(left, **names, title="averaging blurs", legend="best")
        read = (
            _draw.Bars("in any order", self.found, _draw.GREY, "//"),
            _draw.Bars("each in its place", self.named, _draw.BLUE),
        )
        _draw.bars(right, read, gap=0.4, width=0.38, written=".0%", fontsize=8)
        right.set_xticks(range(len(self.heads)), [str(count) for count in self.heads])
        right.set_ylim(0, 1.25)
        names = {"x": f"heads (total width {WIDTH} throughout)", "y": "facts read from the output"}
        _draw.tidy(right, **names, title=f"{FACTS} facts to fetch at once", legend="upper left")
        return figure


def blur(trials: int = 400, seed: int = 0) -> Blur:
    """The output of one head that attends to n keys alike; then one token that fetches 8 facts with 1 … 8 heads."""
    check_counts(trials=trials)
    draw = torch.Generator().manual_seed(seed)
    read = [_read(heads, trials, draw) for heads in HEADS]
    likeness = tuple(_likeness(count, trials, draw) for count in SHARED)
    return Blur(SHARED, likeness, HEADS, tuple(found for found, _ in read), tuple(named for _, named in read))


def _likeness(count: int, trials: int, draw: torch.Generator) -> float:
    values = torch.randn(trials, 1, max(SHARED), WIDTH, generator=draw)
    out = _fetch(count, values)
    return torch.cosine_similarity(out, values[:, :, :count], dim=-1).mean().item()


def _read(heads: int, trials: int, draw: torch.Generator) -> tuple[float, float]:
    """Each head fetches its share of the facts, and the symbols that its output resembles most are read off.

    Returns the share of them that are right in any order, and that are right when the k-th is taken for the k-th fact.
    """
    each = FACTS // heads
    symbols = torch.randn(heads, SYMBOLS, WIDTH // heads, generator=draw)  # all symbols, as each head projects them
    facts = torch.rand(trials, heads, SYMBOLS, generator=draw).argsort(-1)[..., :each]
    values = torch.stack([symbols[head, facts[:, head]] for head in range(heads)], dim=1)
    out = _fetch(each, values)  # [trials, heads, 1, width]
    alike = torch.cosine_similarity(out, symbols, dim=-1)  # [trials, heads, symbols]
    best = alike.topk(each).indices
    found = (best[..., None] == facts[..., None, :]).any(-1)
    return found.double().mean().item(), (best == facts).double().mean().item()


def _fetch(count: int, values: Tensor) -> Tensor:
    """Attention of one query that fits the first `count` keys alike and the others not at all."""
    trials, heads, keys, _ = values.shape
    key = torch.eye(keys).expand(trials, heads, -1, -1)
    query = 100.0 * key[:, :, :count].sum(-2, keepdim=True)
    return api.attention(query, key, values, scale=1.0)
