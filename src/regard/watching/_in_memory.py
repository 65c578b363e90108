"""A call whose weights are in memory, because the model's code wrote it out; the same questions as a fused one's."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from regard.recording._weights import statistics_of

if TYPE_CHECKING:
    from regard.statistics import Want


class InMemory(NamedTuple):
    weights: Tensor  # [batch, head, query, key]; rows that see nothing are 0
    lse: Tensor  # [batch, head, query]
    offset: int | Tensor | None = None
    placed: bool = False
    real: Tensor | None = None
    written_out: bool = True

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, queries, keys = self.weights.shape
        return batch, heads, queries, keys

    @property
    def queries(self) -> int:
        return self.weights.shape[2]

    @property
    def keys(self) -> int:
        return self.weights.shape[3]

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def only(self, heads: list[int]) -> InMemory:
        return self._replace(weights=self.weights[:, heads], lse=self.lse[:, heads])

    def can_take_heads(self) -> bool:
        return True

    def without(self, real: Tensor) -> InMemory:
        padding = ~real.to(self.device)[:, None]
        weights = self.weights.masked_fill(padding.unsqueeze(-1), 0.0)
        return self._replace(weights=weights, lse=self.lse.masked_fill(padding, -torch.inf))

    def statistics(self, want: Want, permitted: Tensor) -> dict[str, Tensor]:
        offset = self.keys - self.queries if self.offset is None else self.offset
        return {"lse": self.lse, **statistics_of(self.weights, want, offset)}

    def permitted(self) -> Tensor:
        """How many keys have weight: what a model hides has none."""
        return (self.weights > 0).sum(-1, dtype=torch.int32)

    def last_key(self) -> Tensor | None:
        """The last key that the last query gives weight to, [batch]."""
        seen = (self.weights[:, :, -1] > 0).any(1)
        last: Tensor = (seen * torch.arange(1, self.keys + 1, device=seen.device)).amax(-1) - 1
        return last
