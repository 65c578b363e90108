"""Attention over a cache that is read piece by piece, so that working memory does not grow with the cache.

Each piece is a call of its own; the results are merged exactly, by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from regard import api, masks
from regard.backends._base import accumulation
from regard.backends._tiled import add_sinks
from regard.cache._given import Asked
from regard.cache._lengths import Lengths
from regard.masks import Mask
from regard.masks._joins import both
from regard.statistics import Want, merge

# keys of a piece: enough to keep a core busy, few enough to be small next to a model's weights
PIECE = 1024
# pairs of a piece whose mask is kept with the mask that it is a part of
_KEPT = 1 << 16

Read = Callable[[int, int], tuple[Tensor, Tensor]]


def attend(asked: Asked, read: Read, held: Lengths, offset: int | Tensor) -> Tensor:
    """`regard.attention` over keys 0 … `held` of each item; `read(a, b)` gives keys and values a … b − 1."""
    query, sinks = asked.query, asked.sinks
    dtype, wide = query.dtype, _wide(query)
    work = accumulation(dtype)
    out: Tensor | None = None
    lse: Tensor | None = None
    for start, stop, own in _calls(asked, held, offset):
        key, value = (part.to(wide) for part in read(start, stop))
        if out is None and stop == held.longest and sinks is None:
            return api.attention(query.to(wide), key, value, **own).to(dtype)  # nothing to merge
        seen = api.observe(query.to(wide), key, value, want=Want.none(), **own)
        if out is None or lse is None:
            out, lse = seen.out.to(work), seen.lse
        else:
            merge(out, lse, seen.out.to(work), seen.lse)
    if out is None or lse is None:  # nothing is held, or nothing of it may be seen
        key, value = read(0, 0)
        return query.new_zeros(*query.shape[:3], value.shape[3])
    if sinks is not None:
        out, _ = add_sinks(out, lse, sinks)
    return out.to(dtype)


def explain(asked: Asked, key: Tensor, value: Tensor, held: Lengths, offset: int | Tensor) -> None:
    """Raise what a named backend would have against one of the pieces of `attend`; key and value have no memory."""
    wide = _wide(asked.query)
    for start, stop, own in _calls(asked, held, offset, least=1):
        part = [given[:, :, start:stop].to(wide) for given in (key, value)]
        api.explain(asked.query.to(wide), *part, **own)


def _wide(query: Tensor) -> torch.dtype:
    """Half precision is computed in float32 on a CPU anyway: a piece's result is not rounded before it is merged."""
    return accumulation(query.dtype) if query.device.type == "cpu" else query.dtype


def _calls(
    asked: Asked, held: Lengths, offset: int | Tensor, least: int = 0
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Each piece: its first key, its end, and the keywords of its call."""
    query, mask, bias = asked.query, asked.mask, asked.bias
    rows, keys = query.shape[2], held.longest
    if asked.fresh.one and bias is None and sees_all(mask):
        # The newest token sees all that is held: how much that is says enough, wherever the token stands.
        mask, offset = None, 0
    for start in range(_first(mask, rows, keys, offset), max(keys, least), PIECE):
        stop = min(start + PIECE, keys)
        own = {
            "mask": _of_piece(mask, held, rows, start, stop, offset, query.device),
            "bias": _bias_of_piece(bias, start, stop, _wide(query)),
            "query_offset": offset - start,
        }
        yield start, stop, {"scale": asked.scale, "softcap": asked.softcap, "backend": asked.backend, **own}


def sees_all(mask: Mask | None) -> bool:
    """Whether the newest token sees all that is held."""
    return mask is None or mask.is_causal


def _first(mask: Mask | None, rows: int, keys: int, offset: int | Tensor) -> int:
    """The first key that a row can see, cut to a whole piece: a window leaves most of a long cache unread."""
    flags = None if mask is None or isinstance(offset, Tensor) else mask.fused(rows, keys, offset)
    if flags is None or flags.left is None or isinstance(offset, Tensor):
        return 0
    return max(0, min(offset - flags.left, keys)) // PIECE * PIECE


def _of_piece(
    mask: Mask | None, held: Lengths, rows: int, start: int, stop: int, offset: int | Tensor, device: torch.device
) -> Mask | None:
    """What the mask says about keys start … stop − 1, in a call of which they are all the keys."""

    def make() -> Mask | None:
        part = mask
        if mask is not None and not mask.relative:
            with torch.inference_mode(False):  # it may be kept for a call outside of it
                tile = mask.tile(range(rows), range(start, stop), rows, held.longest, offset=offset, device=device)
            part = masks.keep(tile)
        if min(held.counts) >= stop:
            return part
        if device.type == "cpu":
            filled = _padding(tuple(min(max(count - start, 0), stop - start) for count in held.counts))
        else:
            filled = masks.padding((held.tensor - start).clamp(0, stop - start))
        return both(part, filled)

    if mask is None or not mask.tensors or rows * (stop - start) > _KEPT:
        return make()
    # one for all layers that are given this mask
    return mask.remember(("piece", held.counts, rows, start, stop, offset, device), offset, make)


@lru_cache(64)
def _padding(lengths: tuple[int, ...]) -> Mask:
    """One mask for all layers of a model: what is worked out about it for the first serves the others."""
    return masks.padding(lengths)


def _bias_of_piece(bias: Any, start: int, stop: int, dtype: torch.dtype) -> Any:
    if not isinstance(bias, Tensor):
        return bias  # none, or a rule of how far apart query and key are
    part = bias if bias.dim() == 0 or bias.shape[-1] == 1 else bias[..., start:stop]
    return part.to(dtype)
