"""E8: averaging blurs, and how heads sharpen it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard import api
from regard.lab._result import Result, Row, Table, check_counts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 64
SHARED = (1, 2, 4, 8, 16, 32, 64)  # how many keys share the weight of one head
HEADS = (1, 2, 4, 8)
FACTS = 8  # what a token has to fetch, each from a key of its own
SYMBOLS = 256


@dataclass(frozen=True)
class Blur(Result):
    name = "E8"
    topic = "blur"

    shared: tuple[int, ...]
    likeness: Row  # cosine of the output with each value it was averaged from, mean
    heads: tuple[int, ...]
    found: Row  # share of the facts that can be read from the outputs in any order, for each number of heads
    named: Row  # share that can be read where it belongs

    def tables(self, lang: str = "en") -> list[Table]:
        lines = tuple(
            (str(count), f"{cosine:.3f}", f"{count**-0.5:.3f}")
            for count, cosine in zip(self.shared, self.likeness, strict=True)
        )
        read = tuple(
            (str(heads), str(WIDTH // heads), str(FACTS // heads), f"{found:.1%}", f"{named:.1%}")
            for heads, found, named in zip(self.heads, self.found, self.named, strict=True)
        )
        return [
            Table(
                self.say("blurs", lang), tuple(self.say(key, lang) for key in ("shared", "likeness", "expected")), lines
            ),
            Table(
                self.say("sharpens", lang, facts=FACTS),
                tuple(self.say(key, lang) for key in ("heads", "width", "each", "found", "named")),
                read,
            ),
        ]

    def _figure(self) -> Figure:
        from regard.lab import _draw

        title = (
            f"A head that averages {FACTS} keys resembles each by {self.likeness[3]:.2f}; {FACTS} heads tell them apart"
        )
        figure = _draw.figure(8.4, 3.6, title)
        left, right = figure.subplots(1, 2)
        left.plot(self.shared, [count**-0.5 for count in self.shared], color="0.8", linewidth=5, label="1/√n")
        left.plot(self.shared, self.likeness, color=_draw.BLUE, marker="o", label="measured")
        left.set_xscale("log", base=2)
        left.set_xticks(self.shared, [str(count) for count in self.shared])
        left.set_ylim(0, 1.05)
        left.legend(fontsize=9)
        _draw.tidy(
            left,
            x="n: keys that share one head's weight",
            y="cosine with each of their values",
            title="averaging blurs",
        )
        places = range(len(self.heads))
        for shift, shares, colour, hatch, name in (
            (-0.2, self.found, _draw.GREY, "//", "in any order"),
            (0.2, self.named, _draw.BLUE, "", "each in its place"),
        ):
            bars = right.bar(
                [at + shift for at in places], shares, 0.38, color=colour, hatch=hatch, edgecolor="white", label=name
            )
            right.bar_label(bars, [f"{share:.0%}" for share in shares], padding=2, fontsize=8)
        right.set_xticks(places, [str(count) for count in self.heads])
        right.legend(fontsize=9, loc="upper left")
        right.set_ylim(0, 1.25)
        _draw.tidy(
            right,
            x=f"heads (total width {WIDTH} throughout)",
            y="facts read from the output",
            title=f"{FACTS} facts to fetch at once",
        )
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
