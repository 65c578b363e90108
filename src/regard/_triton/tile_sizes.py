"""Sizes of the tiles of the attention kernels: the fastest that were measured among those that fit the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from regard._triton.inputs import power

if TYPE_CHECKING:
    from regard.spec import CallSpec

Tiles = dict[str, int]
# of devices that are not asked, the interpreter among them
_SHARED_MEMORY = 232_448


@lru_cache(16)
def shared_memory(device: str) -> int:
    """Bytes of shared memory that a program may use."""
    if device != "cuda" or not torch.cuda.is_available():
        return _SHARED_MEMORY
    return int(torch.cuda.get_device_properties().shared_memory_per_block_optin)  # type: ignore[attr-defined]


def _fitting(options: list[Tiles], needs: Callable[[Tiles], int], device: str) -> Tiles:
    """The first of the options that fits the device's shared memory, or the last."""
    limit = shared_memory(device)
    return next((tiles for tiles in options if needs(tiles) <= limit), options[-1])


def _option(BM: int, BN: int, num_warps: int, num_stages: int) -> Tiles:
    return {"BM": BM, "BN": BN, "num_warps": num_warps, "num_stages": num_stages}


def _short(spec: CallSpec) -> list[Tiles]:
    """Square tiles no larger than a short call, where the usual ones would be mostly empty: those of sentences, say.

    Two sizes only, since each is compiled by itself (benchmarks/gpu.py, "sentences").
    """
    size = max(16, power(max(spec.queries, spec.keys)))
    if size > 32 or max(widths(spec)) > 128 or spec.dtype.itemsize == 4:
        return []
    return [_option(size, size, size // 16, 2)]


def widths(spec: CallSpec) -> tuple[int, int]:
    return max(16, power(spec.head_dim)), max(16, power(spec.value_dim))


def _bias_item(spec: CallSpec) -> int:
    """Bytes of a number of the bias in shared memory, through which a matrix goes."""
    return 0 if spec.bias is None or spec.bias.rule is not None else spec.bias.dtype.itemsize


@lru_cache(4096)
def tiles_of(spec: CallSpec) -> Tiles:
    """Sizes of the forward pass' tiles, warps and stages of the pipeline: what is fastest of what fits."""
    wide, wide_v = widths(spec)
    widest, size = max(wide, wide_v), spec.dtype.itemsize
    if size == 4:
        options = [_option(64, 32, 4, 2), _option(32, 32, 4, 2), _option(32, 32, 4, 1)]
    elif spec.queries <= 64 and widest <= 128:
        options = [_option(64, 64, 4, 3), _option(64, 64, 4, 2)]
    elif widest <= 64:
        options = [_option(128, 64, 4, 3), _option(128, 64, 4, 2), _option(64, 64, 4, 2)]
    elif widest <= 128:
        # with a bias, more of a tile's time goes to its numbers, and larger tiles win
        options = [] if spec.bias is None else [_option(128, 128, 8, 3)]
        options += [_option(64, 64, 4, 3), _option(64, 64, 4, 2)]
    else:
        options = [_option(128, 64, 8, 2), _option(64, 64, 4, 2), _option(64, 32, 4, 2)]
    options = [*_short(spec), *options, _option(32, 32, 4, 1)]

    def needs(tiles: Tiles) -> int:
        rows, keys = tiles["BM"], tiles["BN"]
        stage = keys * (wide + wide_v) * size + rows * keys * _bias_item(spec)
        return rows * wide * size + tiles["num_stages"] * stage + rows * keys * 4 * (size == 4)

    return _fitting(options, needs, spec.device)


@lru_cache(4096)
def gradient_tiles(spec: CallSpec) -> tuple[Tiles, Tiles, Tiles]:
    """Those of the three backward kernels: of keys and values, of queries, of a bias."""
    wide, wide_v = widths(spec)
    widest, size = max(wide, wide_v), spec.dtype.itemsize
    if size == 4:
        own = [_option(32, 32, 4, 1)]
    elif widest <= 64:
        own = [_option(64, 64, 4, 3), _option(64, 64, 4, 2)]
    elif widest <= 128:
        own = [
            _option(64, 128, 8, 2 if _is_short(spec) else 3),
            _option(64, 128, 8, 2),
            _option(64, 64, 8, 2),
            _option(32, 64, 4, 2),
        ]
    else:
        own = [_option(64, 64, 8, 2), _option(32, 64, 8, 2), _option(32, 64, 8, 1)]
    own.append(_option(32, 32, 4, 1))

    def needs(walked: str, owned: str) -> Callable[[Tiles], int]:
        def of(tiles: Tiles) -> int:
            pairs = tiles["BM"] * tiles["BN"]
            kept = tiles[owned] * (wide + wide_v) * size
            stage = tiles[walked] * (wide + wide_v) * size + pairs * _bias_item(spec)
            return kept + tiles["num_stages"] * stage + 2 * pairs * size

        return of

    swapped = [{**tiles, "BM": tiles["BN"], "BN": tiles["BM"]} for tiles in own]
    keys = _fitting([*_short(spec), *own], needs("BM", "BN"), spec.device)
    queries = _fitting([*_short(spec), *swapped], needs("BN", "BM"), spec.device)
    square = [_option(64, 64, 4, 3), _option(64, 64, 4, 2), _option(64, 64, 4, 1), _option(32, 32, 4, 1)]
    return keys, queries, _fitting(square if size == 2 else square[3:], needs("BN", "BM"), spec.device)


def _is_short(spec: CallSpec) -> bool:
    """Whether each key is seen from a few tiles of rows only, too few for a long pipeline to be worthwhile."""
    if spec.flags is None:
        return False
    _, left, right, _, _ = spec.flags
    return left is not None and right is not None and left + right <= 1024
