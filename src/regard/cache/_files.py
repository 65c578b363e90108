"""Caches in safetensors files. Blocks that sequences of a paged cache share are written once, and shared again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard._files import safetensors_files
from regard._files.write import write_atomically
from regard.cache import _storage
from regard.cache._given import DTYPES, Made
from regard.cache._lengths import Lengths

if TYPE_CHECKING:
    from regard.cache._paged import PagedCache
    from regard.cache._slots import _Slots

FORMAT, VERSION = "regard-cache", 1
_SIZES = ("capacity", "window", "sinks")
_MOST_BYTES = 1 << 38  # a number in a file alone must not cost more
_MOST_BLOCKS = 1 << 24


def save(cache: _Slots, path: Path) -> None:
    """Write the tokens in the cache and its settings, completely or not at all."""
    used = cache._held.longest
    tensors = cache._memory.change(lambda part: part.narrow(2, 0, used)).named()
    gone = getattr(cache, "_gone", None)
    built = {name: getattr(cache, name) for name in _SIZES if hasattr(cache, name)}
    _write(cache, path, tensors, built, {"gone": None if gone is None else list(gone.counts)})


def save_paged(cache: PagedCache, path: Path) -> None:
    """The blocks in use end to end, what holds no token zeroed, and the blocks of each item among them."""
    used = cache._used_blocks()
    places = {block: at for at, block in enumerate(used)}
    memory = _storage.Memory() if cache._made is None else cache.pool._memory  # others may have filled the pool
    tensors = memory.change(lambda part: part[list(used)]).named()
    for part in tensors.values():
        for place, count in enumerate(used.values()):
            part[place, count:] = 0
    table = [[places[block] for block in blocks] for blocks in cache._blocks]
    _write(cache, path, tensors, {"blocks": cache.pool.blocks, "block_size": cache.pool.block_size}, {"table": table})


def _write(
    cache: _Slots | PagedCache, path: Path, tensors: dict[str, Tensor], built: dict[str, Any], more: dict[str, Any]
) -> None:
    # the widest numbers first, so that each stands where its size divides its place
    tensors = dict(sorted(tensors.items(), key=lambda entry: -entry[1].dtype.itemsize))
    described = {
        "format": FORMAT,
        "version": VERSION,
        "kind": type(cache).__name__,
        "built": built | {"int8": cache.int8},
        "dtype": None if cache._made is None else str(cache._made.dtype).removeprefix("torch."),
        "held": list(cache._held.counts),
        "padded_by_mask": cache._padded_by_mask,
    } | more
    write_atomically(path, safetensors_files.pieces(tensors, {"regard": json.dumps(described)}))


def load(path: str | Path, *, device: torch.device | str | None = None) -> Any:
    """Load the cache that `cache.save(path)` wrote, to a device (the CPU when not given).

    Raises:
        ValueError: the file is not a cache, or is damaged; the message says what is wrong.
    """
    try:
        tensors, metadata = safetensors_files.read(Path(path))
        described = safetensors_files.parse(metadata.get("regard", "null"))
        if not isinstance(described, dict) or described.get("format") != FORMAT:
            raise ValueError("it holds no cache")
        if described.get("version") != VERSION:
            raise ValueError(f"it has version {described.get('version')!r}, and this regard reads {VERSION}")
        cache = _empty(described)
        _fill(cache, tensors, described)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a cache that can be read: {error}") from None
    return cache if device is None else cache.to(device)


def _empty(described: dict[str, Any]) -> Any:
    """A cache that is built as the one in the file was."""
    from regard.cache import _paged, _slots

    kinds = {kind.__name__: kind for kind in (_slots.KVCache, _slots.LatentCache, _slots.RollingCache)}
    name, built = str(described.get("kind")), described.get("built")
    if not isinstance(built, dict) or name not in (*kinds, "PagedCache"):
        raise ValueError(f"its kind is {name[:40]!r}; expected {', '.join([*kinds, 'PagedCache'])}")
    if name == "PagedCache":
        blocks = built.get("blocks")
        if type(blocks) is not int or blocks > _MOST_BLOCKS:
            raise ValueError(f"it says {blocks!r} blocks; {_MOST_BLOCKS} are the most that is made")
        return _paged.PagedCache(_paged.BlockPool(**built))
    given = dict(built)
    first = given.pop("window" if name == "RollingCache" else "capacity", None)
    return kinds[name](first, **given)


def _fill(cache: Any, tensors: dict[str, Tensor], described: dict[str, Any]) -> None:
    counts, dtype, pool = _counts(described.get("held")), described.get("dtype"), getattr(cache, "pool", None)
    if dtype is None:
        if tensors or counts:
            raise ValueError("it holds tokens of no dtype")
        return
    latent = type(cache).__name__ == "LatentCache" or "value.0" not in tensors
    heads = 1 if pool is None else 2  # the axis
    made = _checked(tensors, dtype, cache.int8, latent, heads)
    room, what = (cache._slots, "tokens") if pool is None else (pool.blocks, "blocks")
    lines = room * (len(counts) if pool is None else pool.block_size)
    size = lines * sum(part.shape[heads] * part.shape[3] * part.dtype.itemsize for part in tensors.values())
    if size > _MOST_BYTES:
        raise ValueError(f"it says room for {room} {what}, {size} bytes; {_MOST_BYTES} are the most that is made")
    if pool is None:
        _fill_slots(cache, made, tensors, counts, described.get("gone"))
    else:
        _fill_blocks(cache, made, tensors, counts, described.get("table"))
    cache._padded_by_mask = bool(described.get("padded_by_mask"))


def _checked(tensors: dict[str, Tensor], dtype: Any, int8: bool, latent: bool, heads: int) -> Made:
    """What the stored numbers were made of; refuses those that do not fit each other. ``heads``: the axis."""
    wanted = {f"{name}.{at}" for name in ("key", "value")[: 2 - latent] for at in range(1 + int8)}
    if set(tensors) != wanted or dtype not in DTYPES:
        raise ValueError("its tensors are not those of a cache")
    shape = tensors["key.0"].shape
    for name, part in sorted(tensors.items()):  # scales after the numbers that they are for
        scales = name.endswith(".1")
        kind = torch.float32 if scales else torch.int8 if int8 else DTYPES[dtype]
        fits = part.dim() == 4 and part.shape[:3] == shape[:3] and part.dtype == kind
        if not fits or (scales and part.shape[3] != -(-tensors[f"{name[:-2]}.0"].shape[3] // _storage.GROUP)):
            raise ValueError(f"its {name} is malformed")
    value_dim = None if latent else tensors["value.0"].shape[3]
    return Made(shape[heads], shape[3], value_dim, DTYPES[dtype], torch.device("cpu"))


def _fill_slots(cache: _Slots, made: Made, tensors: dict[str, Tensor], counts: list[int], gone: Any) -> None:
    items, _, longest, _ = tensors["key.0"].shape
    fits = items == len(counts) and longest == max(counts, default=0) <= cache._slots
    if not fits or made.heads < 1 or made.key_dim < 1:
        raise ValueError("its numbers of tokens do not fit its tensors")
    cache._allocate(made, items)
    for name, part in cache._memory.named().items():
        part.narrow(2, 0, longest).copy_(tensors[name])
    cache._made = made
    cache._held = cache._view = Lengths(counts, made.device)
    if hasattr(cache, "_gone"):
        before = _counts(gone)
        if len(before) != len(counts):
            raise ValueError("its numbers of forgotten tokens are malformed")
        cache._gone = Lengths(before, made.device)


def _fill_blocks(cache: PagedCache, made: Made, tensors: dict[str, Tensor], counts: list[int], table: Any) -> None:
    pool, (blocks, size, *rest) = cache.pool, tensors["key.0"].shape
    if size != pool.block_size or blocks > pool.blocks or min(rest) < 1:
        raise ValueError("its blocks do not fit its pool")
    rows = table if isinstance(table, list) and all(isinstance(row, list) for row in table) else None
    if rows is None or [len(row) for row in rows] != [-(-count // size) for count in counts]:
        raise ValueError("its table of blocks does not fit its numbers of tokens")
    named = [block for row in rows for block in row]
    if any(type(block) is not int for block in named) or set(named) != set(range(blocks)):
        raise ValueError("its table names blocks that are not there")
    pool._allocate(made)
    for name, part in pool._memory.named().items():
        part[:blocks].copy_(tensors[name])
    cache._blocks = rows
    cache._settle(pool, {block: block for block in range(blocks)}, Lengths(counts, made.device))


def _counts(given: Any) -> list[int]:
    if not isinstance(given, list) or not all(type(count) is int and 0 <= count < 1 << 40 for count in given):
        raise ValueError("its numbers of tokens are malformed")
    return given
