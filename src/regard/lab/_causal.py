"""E5: a causal mask, and the same matrix read the wrong way round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from regard import api, masks
from regard.lab._result import Matrix, Result, Row, Table, look, numbers, rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTH = 5


@dataclass(frozen=True)
class Causal(Result):
    name = "E5"
    topic = "causal"

    weights: Matrix  # under masks.causal()
    mistaken: Matrix  # triu(k=1), which marks what is forbidden, read as what to keep
    last_out: Row  # the mistaken call's last output, whose row has nothing to attend to
    same_as_drop: bool  # masks.drop(triu(k=1)) permits what masks.causal() permits
    refusal: str  # what a bare tensor as mask is answered

    @property
    def future(self) -> float:
        """The share of the mistaken weight that lies on tokens that come later."""
        total = sum(map(sum, self.mistaken))
        return sum(weight for i, row in enumerate(self.mistaken) for weight in row[i + 1 :]) / total

    def tables(self, lang: str = "en") -> list[Table]:
        columns = ("", *(self.say("key", lang, number=at) for at in range(LENGTH)))
        made = []
        for key, values in (("weights", self.weights), ("mistaken", self.mistaken)):
            named = tuple(numbers(self.say("query", lang, number=at), row, 2) for at, row in enumerate(values))
            made.append(Table(self.say(key, lang), columns, named, values))
        answers = (
            (self.say("drop", lang), self.say("yes" if self.same_as_drop else "no", lang)),
            (self.say("future", lang), f"{self.future:.0%}"),
            (self.say("bare", lang), self.refusal if lang == "en" else self.say("refused", lang)),
        )
        return [*made, Table(self.say("answers", lang), ("", ""), answers)]

    def _figure(self) -> Figure:
        from regard.lab import _draw

        figure = _draw.figure(8.4, 3.8, "One matrix read two ways: the past, or only the future")
        grid = figure.subplots(1, 2)
        titles = ("masks.causal(): query i sees keys 0 … i", "triu(k=1) taken for what to keep: only later keys")
        for axes, values, title in zip(grid, (self.weights, self.mistaken), titles, strict=True):
            _draw.heatmap(axes, values, title)
            axes.set_xlabel("key")
        grid[0].set_ylabel("query")
        return figure


def causal(seed: int = 0) -> Causal:
    """Five tokens under a causal mask; then the note's matrix, in the meaning it was built for and in the other."""
    draw = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, 1, LENGTH, 8, generator=draw, dtype=torch.float64) for _ in range(3))
    above = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    mistaken = look(query, key, value, mask=masks.keep(above))
    try:
        api.attention(query, key, value, mask=above)  # type: ignore[arg-type]
    except TypeError as error:
        refusal = str(error)
    return Causal(
        weights=rows(look(query, key, value, mask=masks.causal()).weights),
        mistaken=rows(mistaken.weights),
        last_out=tuple(mistaken.out[0, 0, -1].tolist()),
        same_as_drop=bool((masks.drop(above).dense(LENGTH, LENGTH) == masks.causal().dense(LENGTH, LENGTH)).all()),
        refusal=refusal,
    )
