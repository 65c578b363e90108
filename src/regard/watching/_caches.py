"""What Hugging Face's caches say about the tokens that they have seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from regard.watching._modules import Frame, attending


def tokens_held(stack: Sequence[Frame], queries: int, keys: int) -> int | None:
    """How many tokens a cache of Hugging Face's has seen, those of this call too, which it holds by now."""
    frame = attending(stack)
    cache = cache_of(frame)
    if cache is None:
        return None
    number = layer_number(frame)
    total = tokens_seen(cache, number) or tokens_seen(cache, 0)  # some layers use the keys of another
    if total < queries:
        return None
    if keys > total:  # memory that is set aside whole is handed over whole; other keys are none of the cache's
        layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
        memory = getattr(layers[number], "keys", None) if number < len(layers) else None
        if not isinstance(memory, Tensor) or memory.shape[-2] != keys:
            return None
    return total


def slides(stack: Sequence[Frame]) -> bool:
    """Whether a cache of Hugging Face's keeps the last tokens in order, and says so: others may keep any."""
    frame = attending(stack)
    layers = getattr(cache_of(frame), "layers", ())
    number = layer_number(frame)
    return number < len(layers) and getattr(layers[number], "is_sliding", False) is True


def cache_of(frame: Frame) -> Any:
    """The Hugging Face cache that the module which attends was handed itself: one above may be of other modules."""
    return next((value for _, value in frame.caches if hasattr(value, "get_seq_length")), None)


def tokens_seen(cache: Any, number: int) -> int:
    """Tokens that a layer of the cache has seen; 0 where it does not count them."""
    try:
        return int(cache.get_seq_length(number))
    except (TypeError, ValueError):  # Reformer's gives None, layers without attention raise
        return 0


def layer_number(frame: Frame) -> int:
    number = getattr(frame.module, "layer_idx", None)
    return number if isinstance(number, int) else 0
