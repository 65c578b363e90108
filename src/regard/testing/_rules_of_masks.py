"""What every mask means, written a second time in NumPy from the manual's words, so that masks are not their own judge.

A mask is described by a tree of plain values: `("and", ("causal",), ("window", 3, 0))`. `build` makes the object,
`define` says which pairs it permits, `source` writes the Python expression. Arrays inside a mask are drawn from a seed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Tree = tuple[Any, ...]
Pairs = NDArray[np.bool_]

CONSTRUCTORS = (
    "everything",
    "causal",
    "window",
    "padding",
    "documents_lengths",
    "documents_ids",
    "prefix",
    "columns",
    "strided",
    "blocks",
    "random_blocks",
    "keep",
    "drop",
    "from_additive",
)
COMBINATIONS = ("and", "or", "not")


def bits(seed: int, shape: tuple[int, ...]) -> Pairs:
    """Booleans, about two thirds of them True, the same for a seed everywhere."""
    drawn: Pairs = np.random.default_rng(seed).random(shape) < 0.67
    return drawn


def document_ids(seed: int, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Documents of several lengths, some of it padding (-1); in runs for most seeds, shuffled for every third."""
    random = np.random.default_rng(seed)
    ids = np.cumsum(random.random(shape) < 0.15, axis=-1)
    if seed % 3 == 0:
        ids = random.permuted(ids, axis=-1)
    return np.where(random.random(shape) < 0.1, -1, ids)


def build(masks: Any, tree: Tree, device: str | torch.device = "cpu") -> Any:
    """The mask object of a tree, made with the constructors of `masks`."""
    kind, *rest = tree
    if kind == "and":
        return build(masks, rest[0], device) & build(masks, rest[1], device)
    if kind == "or":
        return build(masks, rest[0], device) | build(masks, rest[1], device)
    if kind == "not":
        return ~build(masks, rest[0], device)
    if kind == "padding":
        return masks.padding(list(rest[0]), side=rest[1])
    if kind == "documents_lengths":
        return masks.documents(lengths=list(rest[0]))
    if kind == "documents_ids":
        return masks.documents(ids=torch.tensor(_ids(*rest), dtype=torch.int64, device=device))
    if kind == "blocks":
        return masks.blocks(torch.from_numpy(bits(*rest[:2])).to(device), rest[2])
    if kind == "from_additive":
        additive = np.where(bits(*rest), 0.0, -np.inf)
        return masks.from_additive(torch.from_numpy(additive).float().to(device))
    if kind in ("keep", "drop"):
        return getattr(masks, kind)(torch.from_numpy(bits(*rest)).to(device))
    return getattr(masks, kind)(*rest)


def define(tree: Tree, sizes: tuple[int, int, int, int], offset: Any = None, masks: Any = None) -> Pairs:
    """The pairs a tree permits, `[B, H, L, S]`; `offset` is an int, one number per batch item, or None for S - L.

    Only `random_blocks`, whose choice is a hash, is asked of the object itself (`masks`).
    """
    B, H, L, S = sizes
    kind, *rest = tree
    if kind == "and":
        return define(rest[0], sizes, offset, masks) & define(rest[1], sizes, offset, masks)
    if kind == "or":
        return define(rest[0], sizes, offset, masks) | define(rest[1], sizes, offset, masks)
    if kind == "not":
        return ~define(rest[0], sizes, offset, masks)
    if kind in ("keep", "drop", "from_additive"):
        array = bits(*rest)
        return np.broadcast_to(~array if kind == "drop" else array, sizes)
    starts = np.broadcast_to(np.asarray(S - L if offset is None else offset, dtype=np.int64), (B,))
    if kind == "random_blocks":
        given = int(starts[0]) if B and (starts == starts[0]).all() else torch.from_numpy(starts.copy())
        dense = masks.random_blocks(*rest).dense(L, S, query_offset=given).numpy()
        return np.broadcast_to(dense, sizes)
    i = (starts[:, None] + np.arange(L))[:, None, :, None]  # absolute query positions
    j = np.arange(S)[None, None, None, :]
    return np.broadcast_to(_POSITIONAL[kind](i, j, S, *rest), sizes)


def source(tree: Tree) -> str:
    """The expression a person would write for this tree."""
    kind, *rest = tree
    if kind in ("and", "or"):
        return f"({source(rest[0])} {'&' if kind == 'and' else '|'} {source(rest[1])})"
    if kind == "not":
        return f"~{source(rest[0])}"
    return f"masks.{kind}({', '.join(map(repr, rest))})"


def kinds(tree: Tree) -> list[str]:
    """Every constructor and operator in a tree, with repetition."""
    found = [tree[0]]
    if tree[0] in COMBINATIONS:
        for part in tree[1:]:
            found += kinds(part)
    return found


def _ids(*given: Any) -> Any:
    """Documents as they were given, or drawn from a seed and a shape."""
    return given[0] if len(given) == 1 else document_ids(*given)


def _padding(i: Any, j: Any, S: int, lengths: tuple[int, ...], side: str) -> Any:
    length = np.asarray(lengths)[:, None, None, None]
    return (j < length) if side == "right" else (j >= S - length)


def _documents(i: Any, j: Any, S: int, ids: Any) -> Any:
    table = np.atleast_2d(np.asarray(ids, dtype=np.int64).reshape(-1, S) if S else np.zeros((1, 0), dtype=np.int64))
    if S == 0:
        return np.zeros(np.broadcast_shapes(i.shape, j.shape), dtype=bool)
    inside = (i >= 0) & (i < S)
    batch = np.arange(max(i.shape[0], len(table)))[:, None, None, None]
    row = np.minimum(batch, len(table) - 1)
    mine = table[row, np.clip(i, 0, S - 1)]
    theirs = table[row, j]
    return inside & (mine == theirs) & (theirs >= 0)


def _blocks(i: Any, j: Any, S: int, seed: int, shape: tuple[int, ...], size: int) -> Any:
    table = bits(seed, shape).reshape((1,) * (4 - len(shape)) + shape)
    row, column = i // size, j // size
    inside = (row >= 0) & (row < table.shape[2]) & (column < table.shape[3])
    row, column = np.clip(row, 0, table.shape[2] - 1), np.clip(column, 0, table.shape[3] - 1)
    batch = np.minimum(np.arange(max(i.shape[0], table.shape[0])), table.shape[0] - 1)[:, None, None, None]
    head = np.arange(table.shape[1])[None, :, None, None]
    return inside & table[batch, head, row, column]


_POSITIONAL: dict[str, Any] = {
    "everything": lambda i, j, S: (i == i) & (j == j),
    "causal": lambda i, j, S: j <= i,
    "window": lambda i, j, S, left, right: (j - i >= -left) & (j - i <= right),
    "padding": _padding,
    "documents_lengths": lambda i, j, S, lengths: _documents(i, j, S, np.repeat(np.arange(len(lengths)), lengths)),
    "documents_ids": lambda i, j, S, *given: _documents(i, j, S, _ids(*given)),
    "prefix": lambda i, j, S, n: (i < n) & (j < n),
    "columns": lambda i, j, S, n: (j < n) & (i == i),
    "strided": lambda i, j, S, s: (i - j) % s == 0,
    "blocks": _blocks,
}
