"""A recording as the bytes that the page reads: a JSON header, then arrays end to end, deflated.

    "RGD1", length of the header (u32), the header, zeros up to a multiple of 8, the arrays

Numbers are stored as coarsely as their use allows, and the header says how. Of each query's largest weights a file
keeps as many as fit: all of them where there is room; else each query's largest, and of the others those above a
floor that the page states.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._display.head_labels import LOCAL_KEYS, NEAR_BUCKETS, RULES
from regard._page._scenes import Layer, Scene, Texts, edges, scenes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard.recording import Recording

STRIP = 512  # numbers of a strip along an axis
EXACT = 256  # queries and keys up to which a map of single weights keeps 16 bits each, where there is room
SMALL, LARGE = 1_350_000, 4_050_000  # bytes after deflating that a page may take; base64 makes 4 of 3
SMALL_ROWS, LARGE_ROWS = 40_000, 300_000  # heads × queries up to which a page gets the one, and from which the other
SAMPLE = 8  # of this many layers, one
SERVED = 64_000_000  # of a page that a server gives on one machine

AS_THEY_ARE = (
    "path", "kind", "sight", "heads", "query_text", "key_text", "first", "generated", "queries", "keys",
)  # fmt: skip


@dataclass
class Detail:
    """How finely to store."""

    bits: int = 16  # of a weight
    floor: float = 0.0  # weights below it are left out …
    largest: bool = True  # … except each query's largest
    map: int = 256  # rows and columns of a map


class Store:
    """Arrays end to end, each at a multiple of 8."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def add(self, array: NDArray[Any]) -> list[int]:
        data = np.ascontiguousarray(array).tobytes()
        place = [self.size, len(data)]
        padding = -len(data) % 8
        self.parts += [data, b"\0" * padding]
        self.size += len(data) + padding
        return place


def pack(recordings: list[Recording], budget: int | None = None, extra: dict[str, Any] | None = None) -> bytes:
    """The deflated bytes of one or more recordings; coarser until they fit the budget."""
    texts = Texts()
    found = [scenes(recording.cpu(), texts) for recording in recordings]
    layers = [layer for many, _ in found for scene in many for layer in scene.layers]
    if budget is None:
        rows = sum(len(layer.heads) * layer.queries for layer in layers)
        part = (rows - SMALL_ROWS) / (LARGE_ROWS - SMALL_ROWS)
        budget = int(SMALL + (LARGE - SMALL) * min(1.0, max(0.0, part)))
    weights = [layer.top_weights for layer in layers if layer.top_weights is not None]
    detail = Detail()
    if len(layers) >= 2 * SAMPLE and sum(w.size for w in weights) > budget:
        # much to deflate: how finely to store is found on some of the layers
        some = [([replace(scene, layers=scene.layers[::SAMPLE]) for scene in many], total) for many, total in found]
        part = sum(len(scene.layers) for many, _ in some for scene in many) / len(layers)
        while (size := len(_packed(recordings, some, texts, detail, {}))) > part * budget:
            if not _coarser(detail, size / (part * budget), weights):
                break
    while True:
        packed = _packed(recordings, found, texts, detail, extra or {})
        if len(packed) <= budget or not _coarser(detail, len(packed) / budget, weights):
            return packed


def _coarser(detail: Detail, excess: float, weights: list[NDArray[np.float32]]) -> bool:
    """Make a detail coarser; False when nothing is left to give up."""
    if detail.map > 64 or detail.bits == 16:
        # far too much: all at once, as every try deflates everything
        detail.bits = 8 if detail.map <= 64 or excess > 1.5 else 16
        detail.map = min(detail.map, 64)
        if excess > 2.5 and weights:
            detail.floor = _floor(weights, 0.0, excess / 1.8)
    elif detail.floor < 0.5 and weights:
        detail.floor = _floor(weights, detail.floor, 1.15 * excess)
    elif detail.largest and weights:
        detail.largest, detail.floor = False, 0.02
    elif detail.floor < 0.9 and weights:
        detail.floor += 0.1
    elif detail.map > 16:
        detail.map //= 2
    else:
        return False
    return True


def _floor(weights: list[NDArray[np.float32]], floor: float, excess: float) -> float:
    """A floor that leaves about 1/excess of what the last one left."""
    some = np.concatenate([w[..., 1:].reshape(-1)[:: max(1, w.size // 20_000)] for w in weights])
    left = np.sort(some[some > floor])
    if not len(left):
        return 0.5
    at = min(len(left) - 1, int(len(left) * (1 - 1 / excess)) + 1)
    return float(min(0.5, max(floor * 1.25, left[at], 0.001)))


def _packed(
    recordings: list[Recording],
    found: list[tuple[list[Scene], int]],
    texts: Texts,
    detail: Detail,
    extra: dict[str, Any],
) -> bytes:
    store = Store()
    header = {
        "version": 1,
        "texts": texts.lists,
        "rules": [{"label": name, "statistic": statistic, "least": least} for name, statistic, least in RULES],
        "local": {"keys": LOCAL_KEYS, "near": 2 ** (NEAR_BUCKETS - 1) - 1},
        "recordings": [
            {
                "title": recording.title,
                "notes": recording.notes(),
                "scenes": [
                    {
                        "run": scene.run,
                        "item": scene.item,
                        "layers": [_layer(layer, store, detail) for layer in scene.layers],
                    }
                    for scene in many
                ],
                "all_scenes": total,
            }
            for recording, (many, total) in zip(recordings, found, strict=True)
        ],
        **extra,
    }
    text = json.dumps(header, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-(len(text) + 8) % 8)
    squeeze = zlib.compressobj(5 if store.size > 4_000_000 else 9, zlib.DEFLATED, -15)
    pieces = [b"RGD1" + struct.pack("<I", len(text)) + text, *store.parts]
    return b"".join([*(squeeze.compress(piece) for piece in pieces), squeeze.flush()])


def _layer(layer: Layer, store: Store, detail: Detail) -> dict[str, Any]:
    return {
        "layer": layer.index,
        **{name: getattr(layer, name) for name in AS_THEY_ARE},
        "rows": [{name: _rounded(value) for name, value in row.items()} for row in layer.rows],
        "top": _top(layer, store, detail),
        "map": _map(layer, store, detail),
        "entropy": _strip(layer.entropy, store),
        "mass": _strip(layer.key_mass, store, summed=True),
    }


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _top(layer: Layer, store: Store, detail: Detail) -> dict[str, Any] | None:
    """The largest weights: how many each query has, then the keys and weights of all, one byte of each at a time."""
    keys, weights = layer.top_keys, layer.top_weights
    if keys is None or weights is None or keys.shape[-1] == 0:
        return None
    kept = (keys >= 0) & (weights > 0) & (weights >= detail.floor)
    if detail.largest:
        kept[..., 0] |= (keys[..., 0] >= 0) & (weights[..., 0] > 0)
    at = np.arange(layer.queries)[None, :, None] + layer.first
    places, marks = [], []
    for head in range(len(layer.heads)):
        plain, apart = keys[head][kept[head]], (at[0] - keys[head])[kept[head]]
        # heads that look at fixed places repeat the key, those that look at fixed distances repeat the distance
        relative = layer.kind == "self" and _varied(apart) < _varied(plain)
        places.append(apart if relative else plain)
        marks.append(int(relative))
    joined = np.concatenate(places).astype(np.int32)
    amounts = weights[kept]
    most = 255 if detail.bits == 8 else 65535
    coded = np.rint((np.sqrt(amounts) if detail.bits == 8 else amounts) * most).astype(np.uint16)
    planes = 2 if layer.keys <= 32767 and layer.queries <= 32767 else 4
    return {
        "count": store.add(kept.sum(-1).astype(np.uint8)),
        "relative": marks,
        "keys": [store.add((joined >> (8 * plane)).astype(np.uint8)) for plane in range(planes)],
        "weights": [store.add((coded >> (8 * plane)).astype(np.uint8)) for plane in range(detail.bits // 8)],
        "k": int(keys.shape[-1]),
        "floor": detail.floor,
        "largest": detail.largest,
        "sizes": [int(part.sum()) for part in kept],
    }


def _varied(values: NDArray[Any]) -> int:
    return len(zlib.compress((values & 255).astype(np.uint8).tobytes(), 1))


def _map(layer: Layer, store: Store, detail: Detail) -> dict[str, Any] | None:
    grid = layer.map
    if grid is None or not grid.size:
        return None
    grid = np.nan_to_num(grid, nan=0.0, posinf=0.0, neginf=0.0).clip(min=0.0)
    exact, coarse = layer.is_exact, _pooled(grid, layer, detail.map)
    if coarse is not grid:
        exact = False
    heads, rows, columns = coarse.shape
    if exact and max(rows, columns) <= EXACT and detail.bits == 16:
        data, tops = np.rint(coarse * 65535).astype(np.uint16), [1.0] * heads
    else:
        exact = False  # eight bits are enough for a colour, not for a number
        tops = [float(head.max(initial=0.0)) for head in coarse]
        scale = np.array([top or 1.0 for top in tops], np.float32)[:, None, None]
        data = np.rint(np.sqrt(coarse / scale) * 255).astype(np.uint8)
    return {
        "rows": rows,
        "columns": columns,
        "exact": exact,
        "bits": 8 * data.itemsize,
        "tops": [float(f"{top:.5g}") for top in tops],
        "at": store.add(data),
    }


def _pooled(grid: NDArray[np.float32], layer: Layer, most: int) -> NDArray[np.float32]:
    """A map of at most this many rows and columns: means of cells, weighted by the pairs that each covers."""
    rows, columns = min(grid.shape[1], most), min(grid.shape[2], most)
    if (rows, columns) == grid.shape[1:]:
        return grid
    q, k = np.diff(edges(layer.queries, grid.shape[1])), np.diff(edges(layer.keys, grid.shape[2]))
    sums = grid * q[:, None] * k[None, :]
    row, column = edges(grid.shape[1], rows)[:-1], edges(grid.shape[2], columns)[:-1]
    sums = np.add.reduceat(np.add.reduceat(sums, row, 1), column, 2)
    pairs = np.add.reduceat(q, row)[:, None] * np.add.reduceat(k, column)[None, :]
    found: NDArray[np.float32] = (sums / pairs).astype(np.float32)
    return found


def _strip(values: NDArray[np.float32] | None, store: Store, *, summed: bool = False) -> dict[str, Any] | None:
    """One number per query or key, pooled (means, or sums) where there are more than fit; 65535 stands for missing."""
    if values is None or not values.size:
        return None
    size = values.shape[-1]
    count = min(size, STRIP)
    if count < size:
        starts = edges(size, count)[:-1]
        if summed:
            values = np.add.reduceat(values, starts, -1)
        else:
            there = ~np.isnan(values)
            total = np.add.reduceat(np.where(there, values, 0), starts, -1)
            number = np.add.reduceat(there.astype(np.float32), starts, -1)
            values = np.where(number > 0, total / np.maximum(number, 1), np.nan).astype(np.float32)
    top = float(np.nanmax(values)) if not np.isnan(values).all() else 0.0
    top = top if math.isfinite(top) and top > 0 else 1.0
    coded = np.where(np.isnan(values), 65535, np.rint(np.nan_to_num(values) / top * 65534)).astype(np.uint16)
    return {"count": count, "top": float(f"{top:.6g}"), "at": store.add(coded)}
