"""Decoding over a cache as it is stored, by the kernels of ``stored``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard._triton.decoding import split_keys
from regard._triton.inputs import PRECISION, power, widest
from regard._triton.launcher import Launch, kept, on

# rows of a program at most, and numbers that share a scale
_MOST_ROWS, _GROUP = 64, 32


class Stored(NamedTuple):
    """Keys and values as a cache keeps them: each (numbers,) or (codes, scales), [batch, head, slot, dim] by their
    strides; with a ``table``, [block, head, place, dim], and the blocks of each item in order, [batch, blocks]."""

    key: tuple[Tensor, ...]
    value: tuple[Tensor, ...]
    lengths: Tensor  # [batch]: tokens held
    longest: int  # of the lengths
    dtype: torch.dtype  # in which the numbers count
    table: Tensor | None = None
    block_size: int = 1


def refuse(query: Tensor, stored: Stored) -> list[str]:
    """Why the kernels cannot attend from ``query`` [B, H, 1, dim]."""
    reasons = []
    if query.dtype not in PRECISION or stored.dtype != query.dtype:
        reasons.append(f"they do not take {query.dtype} queries over {stored.dtype}")
    elif max(query.shape[3], stored.value[0].shape[3]) > widest(query.dtype):
        reasons.append("the heads do not fit their tiles")
    if query.shape[2] != 1 or query.shape[1] // stored.key[0].shape[1] > _MOST_ROWS:
        reasons.append("they take one query per head, and up to 64 heads over one key")
    if any(part.stride(3) != 1 for part in (*stored.key, *stored.value)):
        reasons.append("numbers of a token do not lie side by side")
    return reasons


def decode(query: Tensor, stored: Stored, scale: float, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """[B, H, 1, value dim]: the query of each item over all that is held for it."""
    import triton.language as tl

    from regard._triton import decode as joining
    from regard._triton import stored as kernels

    query = query.detach() if query.stride(3) == 1 else query.detach().contiguous()
    B, H, _, head_dim = query.shape
    key, value = stored.key[0], stored.value[0]
    heads, value_dim = key.shape[1], value.shape[3]
    int8, paged = len(stored.key) == 2, stored.table is not None
    key_scales, value_scales = (stored.key[1], stored.value[1]) if int8 else (key, value)
    group = H // heads
    least = _GROUP if int8 else 16
    rows, wide, wide_v = max(16, power(group)), max(least, power(head_dim)), max(least, power(value_dim))
    splits = split_keys(stored.longest, B * heads)
    new = query.new_empty
    out, lse = new(B, H, 1, value_dim), new(B, H, 1, dtype=torch.float32)
    parts = new(B * heads * splits * rows * (wide_v + 2), dtype=torch.float32)
    acc, highest, total = torch.split_with_sizes(parts, [B * heads * splits * rows * n for n in (wide_v, 1, 1)])
    table = stored.lengths if stored.table is None else stored.table
    tensors = (query, key, key_scales, value, value_scales)
    held = (query.device, query.dtype, head_dim, value_dim, int8, paged, stored.block_size, scale, softcap, splits)
    known = (*held, B, H, heads, table.shape[-1], *[tensor.stride() for tensor in tensors])

    def first() -> Launch:
        strides = [
            stride for tensor in tensors[1:] for stride in (tensor.stride(0), tensor.stride(1), tensor.stride(2))
        ]
        scales = (scale, 0.0) if softcap is None else (scale / softcap, softcap)
        wide_table = table.stride(0) if paged else 0
        numbers = (query.stride(0), query.stride(1), *strides, wide_table, splits, *scales)
        operand = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[query.dtype]
        half = query.dtype.itemsize == 2
        constants = {
            "HKV": heads, "GROUP": group, "HEAD": head_dim, "D": wide, "VALUE": value_dim, "DV": wide_v, "BM": rows,
            "BN": 64 if half and max(wide, wide_v) <= 128 else 32, "SIZE": stored.block_size, "PAGED": paged,
            "INT8": int8, "SOFTCAP": softcap is not None, "OPERAND": operand, "PRECISION": PRECISION[query.dtype],
            "num_warps": 4, "num_stages": 3 if half and max(wide, wide_v) <= 128 else 2,
        }  # fmt: skip
        return Launch(kernels.decode_stored, (splits, B * heads), numbers, constants)

    def second() -> Launch:
        constants = {
            "HKV": heads, "GROUP": group, "VALUE": value_dim, "DV": wide_v, "ROWS": rows, "SPLITS": power(splits),
            "SINK": sinks is not None, "num_warps": 4,
        }  # fmt: skip
        return Launch(joining.join_splits, (group, B * heads), (1, splits), constants)

    with on(query.device):
        memory = [query, key, key_scales, value, value_scales, stored.lengths, table, highest, total, acc]
        kept(("stored", *known), first)(memory)
        given = lse if sinks is None else sinks.detach().contiguous()
        joined = kept(("join stored", sinks is None, given.dtype, *known), second)
        joined([highest, total, acc, given, out, lse])
    return out
