"""A call whose weights are in memory, because the model's code wrote it out; the same questions as a fused one's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from regard._arguments import prepare
from regard.observation._lengths import value_lengths
from regard.recording._weights import statistics_of
from regard.watching._seen import furthest

if TYPE_CHECKING:
    from regard.statistics import Want


class InMemory(NamedTuple):
    weights: Tensor  # [batch, head, query, key]; rows that see nothing are 0
    lse: Tensor  # [batch, head, query]
    offset: int | Tensor | None = None
    placed: bool = False
    real: Tensor | None = None
    written_out: bool = True
    placeless: bool = True  # weights are what they are, wherever the queries stand
    value: Tensor | None = None  # [batch, head, key, dim], where the product with values shows them
    result: Tensor | None = None  # that product, [batch, head, query, dim]
    live: Tensor | None = None  # the softmax's output with its place in autograd's graph, where it was kept
    arrange: Callable[[Tensor], Tensor] | None = None  # what makes [batch, head, query, key] of a tensor like ``live``

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
        value = None if self.value is None else self.value[:, heads]
        return self._replace(weights=self.weights[:, heads], lse=self.lse[:, heads], value=value)

    def can_take_heads(self) -> bool:
        return True

    def without(self, real: Tensor) -> InMemory:
        padding = ~real.to(self.device)[:, None]
        weights = self.weights.masked_fill(padding.unsqueeze(-1), 0.0)
        return self._replace(weights=weights, lse=self.lse.masked_fill(padding, -torch.inf))

    def statistics(self, want: Want, permitted: Tensor, lengths: Tensor | None = None) -> dict[str, Tensor]:
        offset = self.keys - self.queries if self.offset is None else self.offset
        return {"lse": self.lse, **statistics_of(self.weights, want, offset, lengths)}

    def lengths(self, output: Tensor | None) -> Tensor | None:
        """The length of each value, as that of a fused call; None where the values were not seen."""
        if self.value is None:
            return None
        query = self.value.new_zeros(*self.weights.shape[:3], 1)
        key = self.value.new_zeros(*self.value.shape[:3], 1)
        return value_lengths(prepare(query, key, self.value, None, None, None, None, None, 0.0, None), None, output)

    def permitted(self) -> Tensor:
        """How many keys have weight: what a model hides has none."""
        return (self.weights > 0).sum(-1, dtype=torch.int32)

    def last_key(self, of: range) -> Tensor | None:
        """The last key that any of some queries gives weight to, [batch]."""
        return furthest(self.weights[:, :, of.start : of.stop] > 0)
