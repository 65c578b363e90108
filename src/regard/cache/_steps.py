"""The memory of `KVCache`s for identical steps: only the device knows the number of tokens.

A step reads and writes the same memory, at positions that it reads on the device, and gives attention all slots with a
mask that hides the empty ones. Nothing changes on the host from token to token, so a CUDA graph of a step stays valid.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard import masks
from regard.cache._slots import KVCache
from regard.masks import Mask


class Steps:
    """How many tokens each item has, `lengths` `[batch]`, for the caches of all layers."""

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths
        self.begin()

    def begin(self) -> None:
        """Before a step of one token for each item: where it will stand, and which slots it may see."""
        # tensors of their own: what was made of those of the step before must not be taken for this one's
        self.place = self.lengths.clone()
        self.place.tables = {}  # type: ignore[attr-defined]  # see `regard.positions.Rotary`: one for all layers
        self.filled = masks.padding(self.place + 1)

    def end(self) -> None:
        self.lengths.add_(1)


class StepCache:
    """One layer's memory; follows `regard.nn.Cache`."""

    def __init__(self, key: Tensor, value: Tensor, steps: Steps) -> None:
        self._key, self._value, self._steps = key, value, steps

    @property
    def position(self) -> Tensor:
        return self._steps.place

    @property
    def filled(self) -> Mask:
        return self._steps.filled

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store one token for each item; give all slots."""
        place = self._steps.place.view(-1, 1, 1, 1)
        for memory, new in ((self._key, key), (self._value, value)):
            memory.scatter_(2, place.expand(new.shape), new)
        return self._key, self._value, self._steps.place


def step_caches(caches: Sequence[KVCache]) -> tuple[Steps, list[StepCache]]:
    """Continue in the memory of these caches, which must not be used any more."""
    with torch.inference_mode(False):
        steps = Steps(torch.tensor(caches[0].lengths, device=caches[0].memory[0].device))
    return steps, [StepCache(*cache.memory, steps) for cache in caches]
