"""A view of a cache for one call with padded tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.cache._given import Asked, Preview, Updated
from regard.cache._lengths import Fresh, Lengths, first_row
from regard.masks import Mask

if TYPE_CHECKING:
    from regard.cache._base import TokenCache


class Padded:
    """A cache for one call with padded tokens; made by `TokenCache.padded`."""

    def __init__(self, cache: TokenCache, fresh: Fresh) -> None:
        self.cache = cache
        self._fresh = fresh

    @property
    def position(self) -> int | Tensor:
        """The position of the first token of each row, padding or not."""
        seen = self.cache._seen
        if self.cache._made is None:
            seen = Lengths((0,) * len(self._fresh.of(0)), seen.device)
        return first_row(self._fresh, seen)

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    @property
    def filled(self) -> Mask | None:
        return self.cache.filled

    @property
    def pads(self) -> Tensor | None:
        made = self.cache._made
        return self._fresh.pads(torch.device("cpu") if made is None else made.device)

    def check(self, query: Tensor, key: Tensor, value: Tensor | None, *, mask: Mask | None, bias: Any) -> None:
        self.cache._check(Asked(self._fresh, query, key, value, mask, bias))

    def update(self, key: Tensor, value: Tensor | None = None) -> Updated:
        self.cache._check_new(self._fresh, key, value)
        return self.cache._update(self._fresh, key, value, torch.is_grad_enabled())

    def preview(self, key: Tensor, value: Tensor | None = None) -> Preview:
        return self.cache._preview(self._fresh, key, value)

    def attend(self, query: Tensor, key: Tensor, value: Tensor | None = None, **how: Any) -> Tensor:
        return self.cache._attend(Asked(self._fresh, query, key, value, **how))
