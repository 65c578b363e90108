"""X3: inverted masks, and what goes wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from regard import api, masks, positions
from regard.lab import _draw
from regard.lab._result import Result, Row, Table, Words, check_counts, look
from regard.lab._train import Batch, fit, seeded
from regard.nn import MultiHeadAttention

if TYPE_CHECKING:
    from regard.masks import Mask

SYMBOLS, PERIOD, WIDTH = 11, 6, 32  # a sequence is six random symbols, then the same six again
STEPS = 300


@dataclass(frozen=True)
class Trained:
    losses: Row  # of every step, nats
    generated: float  # share of right symbols when the second half is generated


@dataclass(frozen=True)
class InvertedMasks(Result):
    floor: float  # the least loss that anyone can have who does not see the future
    chance: float
    causal: Trained
    inverted: Trained
    on_padding: float  # share of the weight that an inverted padding mask gives to padding
    empty_row: dict[str, float | None]  # weight of each key when a row has nothing to attend to; None: not a number

    def _tables(self, say: Words) -> list[Table]:
        lines = (
            (say(key), f"{sum(found.losses[-20:]) / 20:.4f}", f"{found.generated:.0%}")
            for key, found in (("causal", self.causal), ("inverted", self.inverted))
        )
        limit = (say("possible"), f"{self.floor:.4f}", f"{self.chance:.0%}")
        empty = ((say(key), "NaN" if weight is None else f"{weight:.4g}") for key, weight in self.empty_row.items())
        columns = ("", *say.each("loss", "generated"))
        return [
            say.table("trained", columns, (*lines, limit), steps=len(self.causal.losses)),
            say.table("padding", ("", ""), [(say("on_padding"), f"{self.on_padding:.0%}")]),
            say.table("empty", ("", say("weight")), empty),
        ]

    def _figure(self) -> _draw.Figure:
        last = self.inverted.losses[-1]
        title = f"The inverted mask trains to a loss of {last:.2f} and then generates no better than a guess"
        figure, (left, right) = _draw.subplots(9.2, 3.6, title, 2, width_ratios=(3, 2))
        steps = range(1, len(self.causal.losses) + 1)
        left.plot(steps, self.causal.losses, color=_draw.BLUE, label="causal")
        left.plot(steps, self.inverted.losses, color=_draw.ORANGE, label="inverted: sees only the future")
        left.axhline(self.floor, color=_draw.GREY, linestyle=":")
        note = {"fontsize": 8, "color": _draw.GREY}
        left.text(steps[-1], self.floor - 0.15, "lowest loss possible without seeing the future", ha="right", **note)
        left.set_ylim(0, 2.8)
        _draw.tidy(left, x="step", y="loss (nats)", title="in training", legend="best")
        shares = (self.causal.generated, self.inverted.generated)
        bars = right.bar(("causal", "inverted"), shares, color=(_draw.BLUE, _draw.ORANGE), width=0.5)
        right.bar_label(bars, [f"{share:.0%}" for share in shares], padding=2)
        right.axhline(self.chance, color=_draw.GREY, linestyle=":")
        right.text(0.5, self.chance + 0.02, "a guess", ha="center", **note)
        right.set_ylim(0, 1.12)
        _draw.tidy(right, x="mask", y="right symbols", title="when it has to generate")
        return figure


class Speaker(nn.Module):
    """One layer that says what comes next."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.places = positions.LearnedPositions(2 * PERIOD, WIDTH)
        self.attend = MultiHeadAttention(WIDTH, 2)
        self.read = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.places(self.symbols(symbols))
        said: Tensor = self.read(x + self.attend(x, mask=self.mask))
        return said


def inverted_masks(seed: int = 0, steps: int = STEPS) -> InvertedMasks:
    """Train one model under a causal mask and one under its inverse, let both generate; then look at empty rows."""
    check_counts(steps=steps)
    asked = 2 * PERIOD - 1
    return InvertedMasks(
        floor=(PERIOD - 1) / asked * math.log(SYMBOLS),  # the first half cannot be known, the second half can
        chance=1 / SYMBOLS,
        causal=_train(masks.causal(), seed, steps),
        inverted=_train(~masks.causal(), seed, steps),
        on_padding=_on_padding(seed),
        empty_row=_empty_row(seed),
    )


def _train(mask: Mask, seed: int, steps: int) -> Trained:
    with seeded(seed) as draw:
        model = Speaker(mask)
        losses = fit(model, lambda: _repeated(draw, 64), steps=steps, rate=5e-3)
        return Trained(tuple(losses), _generated(model, _repeated(draw, 1000)[0]))


def _repeated(draw: torch.Generator, count: int) -> Batch:
    symbols = torch.randint(SYMBOLS, (count, PERIOD), generator=draw).repeat(1, 2)
    answers = symbols.roll(-1, 1)
    answers[:, -1] = -100
    return symbols, answers


@torch.no_grad()
def _generated(model: Speaker, symbols: Tensor) -> float:
    """The first half is given; the second is said symbol by symbol, each from those before it."""
    said = symbols[:, :PERIOD]
    for _ in range(PERIOD):
        said = torch.cat([said, model(said)[:, -1:].argmax(-1)], dim=1)
    return (said[:, PERIOD:] == symbols[:, PERIOD:]).double().mean().item()


def _on_padding(seed: int) -> float:
    """Seven tokens, of which the last three are padding, under a padding mask that was read the wrong way round."""
    draw = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, 1, 7, 8, generator=draw) for _ in range(3))
    mask = ~masks.padding(torch.tensor([4]))
    return look(query, key, value, mask=mask).weights[..., 4:].sum(-1).mean().item()


def _empty_row(seed: int) -> dict[str, float | None]:
    """The last row of an inverted causal mask sees nothing. The values are the identity: the output is the weights."""
    draw = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(1, 1, 5, 8, generator=draw) for _ in range(2))
    value = torch.eye(5)[None, None]
    keep = torch.ones(5, 5, dtype=torch.bool).triu(1)
    scores = query @ key.mT / 8**0.5
    billion = torch.tensor(-1e9)
    rows = {
        "infinity": scores.masked_fill(~keep, -torch.inf).softmax(-1) @ value,
        "billion": torch.where(keep, scores, billion).softmax(-1) @ value,
        "half": torch.where(keep, scores.half(), billion.half()).softmax(-1) @ value.half(),
        "sdpa": nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=keep),
        "regard": api.attention(query, key, value, mask=masks.keep(keep)),
    }
    first = {how: out[0, 0, -1, 0].item() for how, out in rows.items()}
    return {how: None if math.isnan(weight) else weight for how, weight in first.items()}
