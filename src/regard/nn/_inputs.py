"""Turns a module's inputs (padded or nested, self or cross) into one plain `[batch, token, dim]` call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import masks
from regard.masks import Mask
from regard.nn._checks import check_tensors


class Inputs(NamedTuple):
    """One call. If query, key and value are the same tensor, they are the same object here too."""

    query: Tensor  # [B, L, E_q]
    key: Tensor  # [B, S, E_k]
    value: Tensor  # [B, S, E_v]
    mask: Mask | None
    query_offset: Tensor | None = None  # [B], only where items have their own
    ragged: Ragged | None = None


class Ragged(NamedTuple):
    """How to make the output nested again."""

    offsets: Tensor  # [items + 1]: where each item begins among all tokens
    total: int  # tokens of all items
    packed: bool  # the items stand one after another in a batch of one; else they are padded


def arrange(query: Tensor, key: Tensor | None, value: Tensor | None, mask: Mask | None, *, may_pack: bool) -> Inputs:
    """Fill in the defaults, and turn nested input into a packed or padded batch.

    `may_pack`: nothing but the mask depends on a token's position in its item.
    """
    if key is None:
        if value is not None:
            raise ValueError("value was given without key; give both, or key alone to use it as value too")
        if type(query) is Tensor and query.dim() == 3 and not query.is_nested:
            return Inputs(query, query, query, mask)
        key = query
    if value is None:
        value = key
    named = {"query": query, "key": key, "value": value}
    check_tensors(named)
    if not any(x.is_nested for x in named.values()):
        return Inputs(query, key, value, mask)
    _check_nested(named)
    return _nested(query, key, value, mask, may_pack)


def _check_nested(named: dict[str, Tensor]) -> None:
    padded = [name for name, x in named.items() if not x.is_nested]
    if padded:
        nested = [name for name in named if name not in padded]
        raise TypeError(
            f"{' and '.join(nested)} nested but {' and '.join(padded)} padded; give all three as nested (jagged) or "
            "all as padded tensors (torch.nested.to_padded_tensor, with masks.padding for the lengths)"
        )
    for name, x in named.items():
        if x.layout != torch.jagged:
            raise TypeError(f"{name} is nested with layout {x.layout}; build it with layout=torch.jagged")
    batches = {name: x.shape[0] for name, x in named.items()}
    if len(set(batches.values())) > 1:
        raise ValueError(f"query, key and value must hold the same number of items, got {batches}")


def _nested(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, may_pack: bool) -> Inputs:
    query, key, value = apply_once(_without_holes, query, key, value)
    if not _same_lengths(key, value):
        raise ValueError("key and value must have the same lengths, item by item; build value with key's offsets")
    itself = _same_lengths(query, key)
    offsets, total = _offsets(query), query.values().shape[0]
    if itself and may_pack and (mask is None or (isinstance(mask, Mask) and mask.relative)):
        rule = masks.documents(lengths=offsets.diff())
        packed = apply_once(lambda x: x.values().unsqueeze(0), query, key, value)
        return Inputs(*packed, rule if mask is None else rule & mask, None, Ragged(offsets, total, True))
    lengths = _offsets(key).diff()
    rule = masks.padding(lengths)
    padded = apply_once(_padded, query, key, value)
    own_offset = None if itself else lengths - offsets.diff()
    return Inputs(*padded, rule if mask is None else rule & mask, own_offset, Ragged(offsets, total, False))


def _padded(x: Tensor) -> Tensor:
    """`torch.nested.to_padded_tensor` pads to the number of all tokens where the longest item is not on record."""
    offsets, values = _offsets(x), x.values()
    longest = int(offsets.diff().max())
    zeros = values.new_zeros(offsets.shape[0] - 1, longest, values.shape[1])
    return zeros.index_put(token_places(offsets, values.shape[0]), values)


def apply_once(
    change: Callable[[Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply `change` to the three; those that were one object stay one object."""
    new_query = change(query)
    new_key = new_query if key is query else change(key)
    new_value = new_key if value is key else new_query if value is query else change(value)
    return new_query, new_key, new_value


def _without_holes(x: Any) -> Tensor:
    plain: Tensor = x if x.lengths() is None else x.contiguous()
    return plain


def _offsets(x: Any) -> Tensor:
    offsets: Tensor = x.offsets()  # known to nested tensors only
    return offsets


def _same_lengths(a: Tensor, b: Tensor) -> bool:
    """Nested tensors made apart have different symbolic lengths even where the numbers agree."""
    if a.shape[1] == b.shape[1]:
        return True
    return a.values().shape[0] == b.values().shape[0] and torch.equal(_offsets(a), _offsets(b))


def token_places(offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """For each of `total` packed tokens: the item it belongs to, and its position there."""
    items = torch.arange(offsets.shape[0] - 1, device=offsets.device)
    item = torch.repeat_interleave(items, offsets.diff(), output_size=total)
    place = torch.arange(total, device=offsets.device) - offsets[item]
    return item, place


def to_nested(out: Tensor, ragged: Ragged) -> Tensor:
    """The module's `[B, L, E]` output, nested as the query was."""
    values = out.squeeze(0) if ragged.packed else out[token_places(ragged.offsets, ragged.total)]
    return torch.nested.nested_tensor_from_jagged(values, offsets=ragged.offsets)


def padding(mask: Mask | None, keys: int, device: torch.device) -> Tensor | None:
    """`[B or 1, keys]`, True at the tokens that the mask calls padding."""
    if not isinstance(mask, Mask):
        return None  # none, or something that `regard.attention` refuses with an explanation
    return mask.padding_keys(keys, device)


def padding_of_new_rows(mask: Mask | None, query: Tensor, key: Tensor, offset: int | Tensor | None) -> Tensor | None:
    """`[B or 1, L]`: which queries stand at keys that the mask calls padding; both are `[B, head, token, dim]`."""
    pads = padding(mask, key.shape[2], key.device)
    return None if pads is None else padding_of_rows(pads, query.shape[2], offset)


def without_padding(inputs: Inputs, pads: Tensor | None, itself: bool) -> Inputs:
    """Replace padding tokens by zeros: a NaN there would reach a projection's weight gradient as 0 · NaN."""
    if pads is None:
        return inputs
    hide = pads.unsqueeze(-1)
    query, key, value = apply_once(lambda x: x.masked_fill(hide, 0.0), inputs.key, inputs.key, inputs.value)
    return inputs._replace(query=query if itself else inputs.query, key=key, value=value)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    batch, tokens, width = x.shape
    return x.view(batch, tokens, num_heads, width // num_heads).transpose(1, 2)  # [B, H, T, D]


def padding_of_rows(pads: Tensor, rows: int, offset: int | Tensor | None) -> Tensor:
    """`[B or 1, rows]`: which query rows stand at padding, given the keys that are padding."""
    keys = pads.shape[1]
    if isinstance(offset, Tensor):
        at = offset.unsqueeze(1) + torch.arange(rows, device=pads.device)
        return pads.expand(offset.shape[0], keys).gather(1, at.clamp(0, keys - 1))
    start = keys - rows if offset is None else offset
    return pads[:, start : start + rows]
