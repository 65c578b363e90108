"""Lengths at which one thing begins to cost more than another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regard.cost._cache import cache_of
from regard.cost._describe import Run, blocks_of
from regard.cost._given import MOST, SIZES
from regard.cost._ops import ATTENTION, FEED_FORWARD, Numbers
from regard.cost._sums import parts_of
from regard.models import WhisperConfig

if TYPE_CHECKING:
    from regard.cost._cost import Cost


@dataclass(frozen=True)
class Crossings:
    """The smallest lengths at which one thing costs more than another; None: never.

    Args:
        attention_over_feed_forward: FLOPs of attention itself (scores and weighted values) against the feed-forward.
        attention_over_rest: against all other FLOPs of the model.
        kept_attention_over_feed_forward, kept_attention_over_rest: counting only the pairs that the mask keeps.
        cache_over_weights: bytes of the cache, for this batch, against those of the weights.
    """

    attention_over_feed_forward: int | None
    attention_over_rest: int | None
    kept_attention_over_feed_forward: int | None
    kept_attention_over_rest: int | None
    cache_over_weights: int | None


def crossings_of(cost: Cost) -> Crossings:
    def cache_is_larger(length: int) -> bool:
        source = cost.source_length if isinstance(cost.config, WhisperConfig) else length
        found = cache_of(cost, length, source or 0)
        return found is not None and found.total > cost.weight_bytes

    return Crossings(
        attention_over_feed_forward=_attention_over(cost, rest=False, kept=False),
        attention_over_rest=_attention_over(cost, rest=True, kept=False),
        kept_attention_over_feed_forward=_attention_over(cost, rest=False, kept=True),
        kept_attention_over_rest=_attention_over(cost, rest=True, kept=True),
        cache_over_weights=_first(cache_is_larger),
    )


def _attention_over(cost: Cost, *, rest: bool, kept: bool) -> int | None:
    config = cost.config
    if isinstance(config, WhisperConfig) or getattr(config, "image_size", None) is not None:
        return None  # what they read has one length

    def crossed(length: int) -> bool:
        run = Run(1, length, length, Numbers(SIZES[cost.dtype], cost.device == "cuda"), cost.latent)
        parts = parts_of(blocks_of(config, run))
        found = {part.name: (part.kept_flops if kept else part.flops).forward for part in parts}
        attention = found.pop(ATTENTION)
        other = sum(found.values()) if rest else found.get(FEED_FORWARD, 0)
        return other > 0 and attention > other

    return _first(crossed)


def _first(crossed: Callable[[int], bool]) -> int | None:
    """The smallest length at which something is true that stays true for all that are larger."""
    low, high = 0, 1
    while not crossed(high):
        low, high = high, 2 * high
        if high > MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if crossed(middle) else (middle, high)
    return high
