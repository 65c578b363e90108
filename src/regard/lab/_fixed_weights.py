"""E7: weights that are learned once and for all, against weights made from queries and keys."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch import Tensor, nn

from regard import positions
from regard.lab import _draw
from regard.lab._result import Result, Table, Words, check_counts
from regard.lab._train import Batch, fit, right, seeded
from regard.nn import MultiHeadAttention

NAMES, COLOURS = 32, 8
LENGTH, LONGER = 8, 32  # things, the last of which is the question
PLACE = 2  # where the answer stands in training
WIDTH = 32
STEPS = 250
WAYS = ("fixed", "fixed_anywhere", "qkv", "qkv_positions")


@dataclass(frozen=True)
class Answers:
    """Shares of right answers; None where the layer cannot run."""

    trained: float  # on new draws of what it was trained on
    moved: float  # the answer stands at another place
    longer: float | None  # 32 tokens in place of 8


@dataclass(frozen=True)
class FixedWeights(Result):
    chance: float
    answers: dict[str, Answers]

    def _tables(self, say: Words) -> list[Table]:
        def share(found: float | None) -> str:
            return say("cannot") if found is None else f"{found:.0%}"

        columns = ("", *say.each("trained", "moved", "longer", longer=LONGER))
        lines = ((say(way), *map(share, astuple(found))) for way, found in self.answers.items())
        return [say.table("answers", columns, lines, chance=f"{self.chance:.1%}")]

    def _figure(self) -> _draw.Figure:
        title = "Fixed weights learn a position; queries and keys learn what to look for"
        figure, axes = _draw.subplots(9.6, 3.9, title)
        trained, moved, longer = zip(*map(astuple, self.answers.values()), strict=True)
        shares = (
            _draw.Bars("as trained (8 tokens)", trained, _draw.GREY),
            _draw.Bars("answer at another position", moved, _draw.BLUE, "//"),
            _draw.Bars(f"{LONGER} tokens", longer, _draw.ORANGE, ".."),
        )
        _draw.bars(axes, shares, gap=0.27, width=0.25, written=".0%", fontsize=8)
        for place, share in enumerate(longer):
            if share is None:
                axes.text(place + 0.27, self.chance + 0.02, "cannot\nrun", ha="center", fontsize=8)
        axes.axhline(self.chance, color="black", linestyle=":", linewidth=1)
        axes.text(len(self.answers) - 0.55, self.chance + 0.015, "a guess", fontsize=8)
        axes.set_xlim(-0.5, len(self.answers) - 0.2)
        titles = (
            "fixed weights,\nanswer at one position",
            "fixed weights,\nanswer anywhere",
            "queries and keys,\nanswer at one position",
            "with position encodings,\nanswer at one position",
        )
        axes.set_xticks(range(len(titles)), titles, fontsize=9)
        axes.set_ylim(0, 1.32)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0 %", "25 %", "50 %", "75 %", "100 %"])
        names = {"x": "what the layer is, and what it was trained on", "y": "right answers"}
        _draw.tidy(axes, **names, legend="upper center", ncols=3)
        return figure


class Tokens(nn.Module):
    """A thing is a name and a colour; the question is a name without one."""

    def __init__(self) -> None:
        super().__init__()
        self.name = nn.Embedding(NAMES, WIDTH)
        self.colour = nn.Embedding(COLOURS + 1, WIDTH)

    def forward(self, things: Tensor) -> Tensor:
        embedded: Tensor = self.name(things[..., 0]) + self.colour(things[..., 1])
        return embedded


class Fixed(nn.Module):
    """One learned weight for each pair of places: nothing that a token says can change where it looks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = Tokens()
        self.logits = nn.Parameter(torch.zeros(LENGTH, LENGTH))
        self.value = nn.Linear(WIDTH, WIDTH)
        self.read = nn.Linear(WIDTH, COLOURS)

    def forward(self, things: Tensor) -> Tensor:
        out: Tensor = self.read(self.logits.softmax(-1) @ self.value(self.tokens(things)))
        return out[:, -1]


class Attending(nn.Module):
    """The same with attention in place of the table."""

    def __init__(self, *, with_positions: bool) -> None:
        super().__init__()
        self.tokens = Tokens()
        self.attend = MultiHeadAttention(WIDTH, 1)
        self.read = nn.Linear(WIDTH, COLOURS)
        self.with_positions = with_positions

    def forward(self, things: Tensor) -> Tensor:
        x = self.tokens(things)
        if self.with_positions:
            x = x + positions.sinusoidal(x.shape[1], WIDTH)
        out: Tensor = self.read(self.attend(x))
        return out[:, -1]


def fixed_weights(seed: int = 0, steps: int = STEPS) -> FixedWeights:
    """Which colour does the thing have that the last token names? Four layers are trained and then asked."""
    check_counts(steps=steps)
    return FixedWeights(1 / COLOURS, {way: _train(way, seed, steps) for way in WAYS})


def _train(way: str, seed: int, steps: int) -> Answers:
    place = None if way == "fixed_anywhere" else PLACE
    with seeded(seed) as draw:
        model = Fixed() if way.startswith("fixed") else Attending(with_positions=way == "qkv_positions")
        fit(model, lambda: _things(draw, 64, place=place), steps=steps, rate=5e-3)
        return Answers(
            right(model, _things(draw, 2000, place=place)),
            right(model, _things(draw, 2000, avoid=PLACE)),
            None if isinstance(model, Fixed) else right(model, _things(draw, 2000, length=LONGER)),
        )


def _things(
    draw: torch.Generator, count: int, *, length: int = LENGTH, place: int | None = None, avoid: int | None = None
) -> Batch:
    """Things with different names and any colours, then a question, whose answer is at `place`, or not at `avoid`."""
    names = torch.rand(count, NAMES, generator=draw).argsort(1)[:, :length]
    colours = torch.randint(COLOURS, (count, length), generator=draw)
    if place is not None:
        where = torch.full((count, 1), place)
    elif avoid is not None:
        where = (avoid + 1 + torch.randint(length - 2, (count, 1), generator=draw)) % (length - 1)
    else:
        where = torch.randint(length - 1, (count, 1), generator=draw)
    names[:, -1:] = names.gather(1, where)
    answers = colours.gather(1, where)[:, 0]
    colours[:, -1] = COLOURS
    return torch.stack([names, colours], dim=-1), answers
