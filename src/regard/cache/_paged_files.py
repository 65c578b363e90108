"""Paged caches in files, and paged caches that move: blocks that sequences share stay shared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.cache import _storage
from regard.cache._given import Made
from regard.cache._lengths import Lengths

if TYPE_CHECKING:
    from regard.cache._paged import BlockPool, PagedCache


def used_blocks(cache: PagedCache) -> dict[int, int]:
    """The blocks in use, and how many tokens each holds; one that is shared counts once."""
    size, used = cache.pool.block_size, dict[int, int]()
    for blocks, count in zip(cache._blocks, cache._held.counts, strict=True):
        for column, block in enumerate(blocks):
            used[block] = max(used.get(block, 0), min(size, count - column * size))
    return used


def move(cache: PagedCache, device: torch.device, dtype: torch.dtype) -> None:
    """Into a pool of its own, as large as the one it leaves, which other caches may be using."""
    old, made, used = cache.pool, cache._made, list(used_blocks(cache))
    assert made is not None
    fresh = Made.__new__(Made)
    fresh.__dict__.update(vars(made), device=device, dtype=dtype)
    pool = type(old)(old.blocks, old.block_size, int8=old.int8)
    pool._allocate(fresh)
    for parts, others in ((pool._key, old._key), (pool._value, old._value)):
        for part, other in zip(parts, others, strict=True):
            part[: len(used)].copy_(other[used])
    before = cache._blocks
    _settle(cache, pool, fresh, {block: at for at, block in enumerate(used)}, Lengths(cache._held.counts, device))
    for blocks in before:
        old._give_back(blocks)


def _settle(cache: PagedCache, pool: BlockPool, made: Made, places: dict[int, int], held: Lengths) -> None:
    """Let the cache hold its blocks of another pool, the first of it, under their new numbers."""
    cache.pool = pool
    pool._free = list(range(pool.blocks - 1, len(places) - 1, -1))
    padded, blocks = cache._padded_by_mask, [[places[block] for block in blocks] for blocks in cache._blocks]
    for item in blocks:
        pool._share(item)
    cache._take_over(made, blocks, held)
    cache._padded_by_mask = padded


def packed(cache: PagedCache) -> tuple[dict[str, Tensor], list[list[int]]]:
    """The blocks in use end to end, what holds no token zeroed, and the blocks of each item among them."""
    used = used_blocks(cache)
    places = {block: at for at, block in enumerate(used)}
    tensors = {}
    for name, parts in (("key", cache.pool._key), ("value", cache.pool._value)):
        for at, part in enumerate(parts):
            held = part[list(used)]
            for place, count in enumerate(used.values()):
                held[place, count:] = 0
            tensors[f"{name}.{at}"] = held
    return tensors, [[places[block] for block in blocks] for blocks in cache._blocks]


def fill(cache: PagedCache, tensors: dict[str, Tensor], table: Any, counts: list[int], dtype: torch.dtype) -> None:
    """Let a new cache hold what was saved.

    Raises:
        ValueError: the parts do not fit each other; says how.
    """
    pool, size = cache.pool, cache.pool.block_size
    number = 2 if pool.int8 else 1
    wanted = {f"{name}.{at}" for name in ("key", "value") for at in range(number)}
    if set(tensors) not in (wanted, {f"key.{at}" for at in range(number)}):
        raise ValueError("its tensors are not those of a cache")
    shape = tensors["key.0"].shape
    for name, part in tensors.items():
        scales = name.endswith(".1")
        kind = torch.float32 if scales else torch.int8 if pool.int8 else dtype
        groups = -(-tensors[f"{name[:-2]}.0"].shape[-1] // _storage.GROUP)
        if part.dim() != 4 or part.shape[:3] != shape[:3] or part.dtype != kind or (scales and part.shape[3] != groups):
            raise ValueError(f"its {name} is malformed")
    if shape[1] != size or shape[0] > pool.blocks or min(shape[2:]) < 1:
        raise ValueError("its blocks do not fit its pool")
    rows = table if isinstance(table, list) and all(isinstance(row, list) for row in table) else None
    if rows is None or [len(row) for row in rows] != [-(-count // size) for count in counts]:
        raise ValueError("its table of blocks does not fit its numbers of tokens")
    named = {block for row in rows for block in row if type(block) is int}
    if sum(map(len, rows)) and (named != set(range(shape[0])) or any(type(b) is not int for row in rows for b in row)):
        raise ValueError("its table names blocks that are not there")
    value = tensors.get("value.0")
    made = Made(_like(tensors["key.0"], dtype), None if value is None else _like(value, dtype))
    pool._allocate(made)
    for parts, name in ((pool._key, "key"), (pool._value, "value")):
        for at, part in enumerate(parts):
            part[: shape[0]].copy_(tensors[f"{name}.{at}"])
    cache._blocks = rows
    _settle(cache, pool, made, {block: block for block in range(shape[0])}, Lengths(counts, made.device))


def _like(part: Tensor, dtype: torch.dtype) -> Tensor:
    """What tells a cache its heads, dims and dtype."""
    return torch.empty(0, part.shape[2], 0, part.shape[3], dtype=dtype)


def pool_bytes(blocks: int, size: int, tensors: dict[str, Tensor]) -> int:
    return blocks * size * sum(part.shape[2] * part.shape[3] * part.dtype.itemsize for part in tensors.values())
