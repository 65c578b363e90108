"""Decoding over a cache as it is stored, by the kernels of ``stored`` and ``stored_codes``."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._triton.decoding import joining, split_keys
from regard._triton.inputs import PRECISION, power, widest
from regard._triton.launcher import Launch, kept, maker, run_on

# rows of a program at most, and numbers that share a scale
_MOST_ROWS, _GROUP = 64, 32
# of one that multiplies codes: heads, and rows. With more heads, Triton exchanges numbers among threads, and the kernel
# takes more instructions than that which widens every code
_MOST_HEADS, _MOST_CODE_ROWS = 8, 32


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
    if stored.table is not None and not _in_one_line(stored):
        reasons.append("blocks do not follow each other in memory")
    return reasons


def _in_one_line(stored: Stored) -> bool:
    """Whether a block begins where the one before it ends, so that a slot of the pool is one number."""
    parts = (*stored.key, *stored.value)
    return all(part.stride(0) == stored.block_size * part.stride(2) for part in parts)


def takes_codes(query: Tensor, stored: Stored) -> bool:
    """Whether the kernel takes it that multiplies codes as they are: two at a time, in few rows."""
    if len(stored.key) == 1 or query.dtype.itemsize != 2 or not _multiplies_bfloat16(query.device):
        return False
    for codes in (stored.key[0], stored.value[0]):
        if codes.shape[3] % 2 or codes.storage_offset() % 2 or any(stride % 2 for stride in codes.stride()[:3]):
            return False
    widths = _widths(query, stored)
    heads = code_rows(query.shape[1] // stored.key[0].shape[1], *widths)
    return heads <= _MOST_HEADS and max(widths) // _GROUP * heads <= _MOST_CODE_ROWS


def _multiplies_bfloat16(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 8


def code_rows(group: int, wide: int, wide_v: int) -> int:
    """Rows for the heads of a group, of which each has one for every group of scales; 16 of them together, or more."""
    return max(power(group), 16 * _GROUP // min(wide, wide_v))


def code_options(wide: int, wide_v: int, paged: bool) -> dict[str, int]:
    """Keys of a tile, warps, and stages of the pipeline; of blocks, whose places are loaded first, it takes more."""
    if max(wide, wide_v) > 128:
        return {"BN": 32, "num_warps": 4, "num_stages": 3 if paged else 2}
    return {"BN": 64, "num_warps": 4, "num_stages": 5 if paged else 3}


def _options(dtype: torch.dtype, wide: int, wide_v: int) -> dict[str, int]:
    """The same of numbers."""
    small = dtype.itemsize == 2 and max(wide, wide_v) <= 128
    return {"BN": 64 if small else 32, "num_warps": 4, "num_stages": 3 if small else 2}


def _widths(query: Tensor, stored: Stored) -> tuple[int, int]:
    least = _GROUP if len(stored.key) == 2 else 16
    return max(least, power(query.shape[3])), max(least, power(stored.value[0].shape[3]))


def decode(query: Tensor, stored: Stored, scale: float, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """[B, H, 1, value dim]: the query of each item over all that is held for it."""
    query = query.detach() if query.stride(3) == 1 else query.detach().contiguous()
    sinks = None if sinks is None else sinks.detach().contiguous()
    parts = (*stored.key, *stored.value)
    splits = split_keys(stored.longest, query.shape[0] * parts[0].shape[1], stored.value[0].shape[3])
    kind = (
        "stored", query.dtype, query.device, query.shape, query.stride(), scale, softcap, splits, stored.block_size,
        None if sinks is None else sinks.dtype, None if stored.table is None else stored.table.stride(0),
        parts[0].shape[1], stored.value[0].shape[3], *[(part.stride(), part.storage_offset() % 2) for part in parts],
    )  # fmt: skip
    step: _Step = kept(kind, lambda: _Step(query, stored, splits, scale, softcap, sinks is not None))
    return run_on(query.device, step, query, stored, sinks)


class _Step:
    """What steps over caches of one kind have in common: made from the first of them, and without its tensors."""

    def __init__(
        self, query: Tensor, stored: Stored, splits: int, scale: float, softcap: float | None, sinks: bool
    ) -> None:
        B, H, _, head_dim = query.shape
        heads, value_dim = stored.key[0].shape[1], stored.value[0].shape[3]
        wide, wide_v = _widths(query, stored)
        group, by_codes, paged = H // heads, takes_codes(query, stored), stored.table is not None
        rows = code_rows(group, wide, wide_v) if by_codes else max(16, power(group))
        self._new_out = maker((B, H, 1, value_dim), query.dtype, query.device)
        self._new_parts = maker((B * heads * splits * rows * (wide_v + 2),), torch.float32, query.device)
        # codes are read two at a time, and their logits are powers of two
        unit, factor = (2, math.log2(math.e)) if by_codes else (1, 1.0)
        memory = [(part, size) for pair in _with_scales(stored) for part, size in zip(pair, (unit, 1), strict=True)]
        strides = [stride // size for part, size in memory for stride in part.stride()[:2]]
        steps = [part.stride(2) // size for part, size in memory]
        scales = (scale * factor, 0.0) if softcap is None else (scale / softcap, softcap * factor)
        table_stride = 0 if stored.table is None else stored.table.stride(0)
        numbers = (query.stride(0), query.stride(1), *strides, table_stride, splits, *scales)
        constants = {
            "HKV": heads, "GROUP": group, "HEAD": head_dim, "D": wide, "VALUE": value_dim, "DV": wide_v, "ROWS": rows,
            **dict(zip(("K_STEP", "KS_STEP", "V_STEP", "VS_STEP"), steps, strict=True)), "SIZE": stored.block_size,
            "PAGED": paged, "SOFTCAP": softcap is not None,
        }  # fmt: skip
        if by_codes:
            constants |= {"FINE": query.dtype == torch.float16, "DIRECT": query.is_cuda}
            constants |= code_options(wide, wide_v, paged)
        else:
            constants |= {"INT8": len(stored.key) == 2, **_operands(query.dtype), **_options(query.dtype, wide, wide_v)}
        self._first = Launch(_kernel(by_codes), (splits, B * heads), numbers, constants)
        self._second = joining(1, splits, B * heads, heads, group, value_dim, wide_v, rows, sinks, False)

    def __call__(self, query: Tensor, stored: Stored, sinks: Tensor | None) -> Tensor:
        out, parts = self._new_out(), self._new_parts()
        key, value = _with_scales(stored)
        table = stored.lengths if stored.table is None else stored.table
        self._first((query, *key, *value, stored.lengths, table, parts))
        self._second((parts, parts if sinks is None else sinks, out, parts))
        return out


def _with_scales(stored: Stored) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(numbers, scales) of keys and of values; what has no scales stands in their place."""
    return (stored.key, stored.value) if len(stored.key) == 2 else (stored.key * 2, stored.value * 2)


def _kernel(by_codes: bool) -> Any:
    if by_codes:
        from regard._triton.stored_codes import decode_codes

        return decode_codes
    from regard._triton.stored import decode_stored

    return decode_stored


def _operands(dtype: torch.dtype) -> dict[str, Any]:
    import triton.language as tl

    names = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return {"OPERAND": names[dtype], "PRECISION": PRECISION[dtype]}
