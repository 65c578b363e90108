"""E5: a causal mask, and the same matrix read the wrong way round."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regard import api, masks
from regard.lab import _draw
from regard.lab._result import Matrix, Result, Row, Table, Words, look, named_rows, rows

LENGTH = 5


@dataclass(frozen=True)
class Causal(Result):
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

    def _tables(self, say: Words) -> list[Table]:
        columns = ("", *(say("key", number=at) for at in range(LENGTH)))
        queries = [say("query", number=at) for at in range(LENGTH)]
        answers = (
            (say("drop"), say("yes" if self.same_as_drop else "no")),
            (say("future"), f"{self.future:.0%}"),
            (say("bare"), self.refusal if say.lang == "en" else say("refused")),
        )
        return [
            *(
                say.table(key, columns, named_rows(queries, values, 2))._replace(weights=values)
                for key, values in (("weights", self.weights), ("mistaken", self.mistaken))
            ),
            say.table("answers", ("", ""), answers),
        ]

    def _figure(self) -> _draw.Figure:
        title = "One matrix read two ways: the past, or only the future"
        figure, (left, right) = _draw.subplots(8.4, 3.8, title, 2)
        _draw.heatmap(left, self.weights, "masks.causal(): query i sees keys 0 … i", y="query")
        _draw.heatmap(right, self.mistaken, "True in triu(k=1) read as keep: only later keys")
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
