"""Caches in files (safetensors), and caches that move to another device or dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard._files import safetensors_files
from regard._files.write import write_atomically
from regard.cache import _paged_files, _storage
from regard.cache._given import _ATTENDED, Made
from regard.cache._lengths import Lengths

if TYPE_CHECKING:
    from regard.cache._paged import PagedCache
    from regard.cache._slots import _Slots

FORMAT, VERSION = "regard-cache", 1
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _ATTENDED}
_SIZES = ("capacity", "window", "sinks")
_MOST_BYTES = 1 << 38  # a number in a file alone must not cost more
_MOST_BLOCKS = 1 << 24


def move(cache: _Slots, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
    """In place, as a module moves; int8 numbers stay int8 and are read as the new dtype."""
    check_dtype(dtype)
    place = None if device is None else torch.device(device)
    made = cache._made
    if made is None:
        return  # it takes the place and dtype of its first tokens
    place = made.device if place is None else place
    kind = made.dtype if dtype is None else dtype

    def moved(part: Tensor) -> Tensor:
        with torch.inference_mode(False):
            return part.to(place) if cache.int8 else part.to(place, kind)

    cache._change(moved)
    fresh = Made.__new__(Made)
    fresh.__dict__.update(vars(made), device=place, dtype=kind)
    cache._made = fresh
    for name in ("_held", "_view", "_gone"):
        if hasattr(cache, name):
            setattr(cache, name, Lengths(getattr(cache, name).counts, place))


def check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in _ATTENDED:
        raise TypeError(f"dtype must be one of {', '.join(sorted(_DTYPES))}, got {dtype!r}")


def save(cache: _Slots, path: Path) -> None:
    """The tokens that are held, and what the cache was built with; complete or not at all."""
    used = cache._held.longest
    tensors = {
        f"{name}.{at}": part.narrow(2, 0, used)
        for name, parts in (("key", cache._key), ("value", cache._value))
        for at, part in enumerate(parts)
    }
    gone = getattr(cache, "_gone", None)
    built = {name: getattr(cache, name) for name in _SIZES if hasattr(cache, name)}
    _write(cache, path, tensors, built, {"gone": None if gone is None else list(gone.counts)})


def save_paged(cache: PagedCache, path: Path) -> None:
    tensors, table = _paged_files.packed(cache)
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
    """The cache that `cache.save(path)` wrote, on a device (the CPU when not given).

    Raises:
        ValueError: the file is no cache, or is damaged; says what is wrong.
    """
    from regard.cache import _paged, _slots

    try:
        tensors, metadata = safetensors_files.read(Path(path))
        described = safetensors_files.parse(metadata.get("regard", "null"))
        if not isinstance(described, dict) or described.get("format") != FORMAT:
            raise ValueError("it holds no cache")
        if described.get("version") != VERSION:
            raise ValueError(f"it has version {described.get('version')!r}, and this regard reads {VERSION}")
        kinds = {kind.__name__: kind for kind in (_slots.KVCache, _slots.LatentCache, _slots.RollingCache)}
        kind, built = kinds.get(str(described.get("kind"))), described.get("built")
        if described.get("kind") == "PagedCache" and isinstance(built, dict):
            blocks = built.get("blocks")
            if type(blocks) is not int or blocks > _MOST_BLOCKS:
                raise ValueError(f"it says {blocks!r} blocks; {_MOST_BLOCKS} are the most that is made")
            paged = _paged.PagedCache(_paged.BlockPool(**built))
            _fill_paged(paged, tensors, described)
            return paged if device is None else paged.to(device)
        if kind is None or not isinstance(built, dict):
            expected = ", ".join([*kinds, "PagedCache"])
            raise ValueError(f"its kind is {str(described.get('kind'))[:40]!r}; expected {expected}")
        given = dict(built)
        first = given.pop("window" if kind is _slots.RollingCache else "capacity", None)
        cache = kind(first, **given)
        _fill(cache, tensors, described)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a cache that can be read: {error}") from None
    return cache if device is None else cache.to(device)


def _fill(cache: _Slots, tensors: dict[str, Tensor], described: dict[str, Any]) -> None:
    held, gone, dtype = (described.get(name) for name in ("held", "gone", "dtype"))
    counts = _counts(held)
    if dtype is None:
        if tensors or counts:
            raise ValueError("it holds tokens of no dtype")
        return
    number = 2 if cache.int8 else 1
    names = [f"{name}.{at}" for name in ("key", "value") for at in range(number)]
    latent = type(cache).__name__ == "LatentCache" or "value.0" not in tensors
    wanted = set(names[:number] if latent else names)
    if set(tensors) != wanted or dtype not in _DTYPES:
        raise ValueError("its tensors are not those of a cache")
    longest = max(counts, default=0)
    shape = tensors["key.0"].shape
    for name, part in tensors.items():
        scales = name.endswith(".1")
        kind = torch.float32 if scales else torch.int8 if cache.int8 else _DTYPES[dtype]
        if part.dim() != 4 or part.shape[:2] != shape[:2] or part.shape[2] != longest or part.dtype != kind:
            raise ValueError(f"its {name} is malformed")
        if scales and part.shape[3] != -(-tensors[f"{name[:-2]}.0"].shape[3] // _storage.GROUP):
            raise ValueError(f"its {name} is malformed")
    if shape[0] != len(counts) or longest > cache._slots or shape[3] < 1 or shape[1] < 1:
        raise ValueError("its numbers of tokens do not fit its tensors")
    size = len(counts) * shape[1] * cache._slots * sum(part.shape[3] * part.dtype.itemsize for part in tensors.values())
    if size > _MOST_BYTES:
        raise ValueError(
            f"it says room for {cache._slots} tokens, {size} bytes; {_MOST_BYTES} are the most that is made"
        )
    value = None if latent else _no_tokens(tensors["value.0"], dtype)
    made = Made(_no_tokens(tensors["key.0"], dtype), value)
    cache._allocate(made, len(counts))
    for parts, name in ((cache._key, "key"), (cache._value, "value")):
        for at, part in enumerate(parts):
            part.narrow(2, 0, longest).copy_(tensors[f"{name}.{at}"])
    cache._made = made
    cache._held = cache._view = Lengths(counts, made.device)
    cache._padded_by_mask = bool(described.get("padded_by_mask"))
    if hasattr(cache, "_gone"):
        before = _counts(gone)
        if len(before) != len(counts):
            raise ValueError("its numbers of forgotten tokens are malformed")
        cache._gone = Lengths(before, made.device)


def _fill_paged(cache: PagedCache, tensors: dict[str, Tensor], described: dict[str, Any]) -> None:
    counts, dtype = _counts(described.get("held")), described.get("dtype")
    if dtype is None:
        if tensors or counts:
            raise ValueError("it holds tokens of no dtype")
        return
    if dtype not in _DTYPES or any(part.dim() != 4 for part in tensors.values()):
        raise ValueError("its tensors are not those of a cache")
    size = _paged_files.pool_bytes(cache.pool.blocks, cache.pool.block_size, tensors)
    if size > _MOST_BYTES:
        raise ValueError(
            f"it says room for {cache.pool.blocks} blocks, {size} bytes; {_MOST_BYTES} are the most that is made"
        )
    _paged_files.fill(cache, tensors, described.get("table"), counts, _DTYPES[dtype])
    cache._padded_by_mask = bool(described.get("padded_by_mask"))


def _no_tokens(part: Tensor, dtype: str) -> Tensor:
    """What tells a cache its heads, dims and dtype."""
    return torch.empty(0, part.shape[1], 0, part.shape[3], dtype=_DTYPES[dtype])


def _counts(given: Any) -> list[int]:
    if not isinstance(given, list) or not all(type(count) is int and 0 <= count < 1 << 40 for count in given):
        raise ValueError("its numbers of tokens are malformed")
    return given
