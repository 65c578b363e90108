"""Weights of any rank as [batch, head, query, key]: which axis is which, found from what the model did with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.watching import _axes
from regard.watching._axes import Dims, Piece
from regard.watching._in_memory import InMemory
from regard.watching._seen import Unseen
from regard.watching._written import Weights

# What modules call their number of heads.
_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "num_head", "attention_heads")


class Arranged(NamedTuple):
    """Which pieces of which axes are batch, head, query and key, in weights as the softmax gave them."""

    heads: tuple[Piece, ...]  # the marks by which axes are cut into pieces
    groups: tuple[list[Piece], list[Piece], list[Piece], list[Piece]]

    def pieces(self, dims: Dims) -> list[Piece]:
        """The pieces of a tensor's dims, in their order there."""
        return [piece for dim in dims for piece in _axes.cut(dim, self.heads) or ()]


def laid_out(
    known: Weights, rows: Sequence[Piece], heads: Sequence[Piece] | None, heads_dim: int | None, modules: Sequence[Any]
) -> InMemory:
    """``rows`` are the axes that the product kept apart from batch and keys; ``heads`` those that were laid next to the
    values' dim, None when none were seen to be; () when an axis was cut in two, and neither part was laid there."""
    found = arranged(known, rows, heads, heads_dim, modules)
    shape, axis = known.softmax.shape, known.softmax.axis
    weights = rearranged(known.final, found.pieces(known.final_dims), found.groups)
    first = [piece for piece in found.pieces(_axes.of_shape(shape)) if piece.axis != axis]
    lse = rearranged(known.softmax.lse, first, found.groups[:3])
    weights = weights.masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0)
    return InMemory(weights, lse, written_out=not known.softmax.by_function)


def arranged(
    known: Weights, rows: Sequence[Piece], heads: Sequence[Piece] | None, heads_dim: int | None, modules: Sequence[Any]
) -> Arranged:
    if 0 in known.softmax.shape:
        raise Unseen("it has no queries, keys or items")
    if known.changed:
        raise Unseen(f"its weights are {known.changed} between the softmax and the product with values")
    shape, axis = known.softmax.shape, known.softmax.axis
    found = _heads(known, rows, heads, heads_dim, modules)
    dims = [_axes.cut(dim, found) for dim in known.final_dims]
    if any(dim is None for dim in dims):
        raise Unseen(_unclear(shape))
    pieces = [piece for dim in dims for piece in dim or ()]
    of_heads = [piece for mark in found for piece in pieces if _axes.lies_in(piece, [mark])]
    rest = [piece for piece in pieces if piece.axis != axis and piece not in of_heads]
    of_rows = _queries(rest, rows, axis, len(shape))
    batch = [piece for piece in rest if piece not in of_rows]
    keys = [piece for piece in pieces if piece.axis == axis]
    return Arranged(tuple(found), (batch, of_heads, of_rows, keys))


def _heads(
    known: Weights, rows: Sequence[Piece], heads: Sequence[Piece] | None, heads_dim: int | None, modules: Sequence[Any]
) -> tuple[Piece, ...]:
    shape, axis = known.softmax.shape, known.softmax.axis
    if heads_dim is not None:
        if not -len(shape) <= heads_dim < len(shape) or heads_dim % len(shape) == axis:
            raise Unseen(f"heads_dim={heads_dim} is no axis of heads in weights of shape {list(shape)}")
        return _axes.whole(heads_dim % len(shape), shape[heads_dim])
    count = _count(modules)
    if heads and not (count == 1 and len(shape) <= 3):
        return tuple(heads)
    if count == 1 or (len(shape) <= 3 and count is None and heads is None):
        return ()
    at = _head_axis(known, {piece.axis for piece in rows}, count)
    if at is None:
        raise Unseen(_unclear(shape))
    return _axes.whole(at, shape[at])


def _head_axis(known: Weights, rows: set[int], count: int | None) -> int | None:
    """The axis of the heads by what the module calls their number, or by the order in which code has them."""
    shape, axis = known.softmax.shape, known.softmax.axis
    if len(shape) < 4:
        return None
    counted = [n for n, size in enumerate(shape) if n != axis and size == count and (n not in rows or len(rows) > 1)]
    if len(counted) == 1:
        return counted[0]
    if axis != len(shape) - 1:
        return None
    if len(shape) > 4:
        return axis - 2 if known.softmax.by_function else None
    # [batch, head, …, key] without the queries, wherever those are; a single query is an axis of 1
    queries = rows or ({axis - 1} if shape[axis - 1] == 1 else {n for n in range(axis) if shape[n] == 1})
    others = [n for n in range(axis) if n not in queries]
    return others[-1] if others else axis - 2


def _count(modules: Sequence[Any]) -> int | None:
    """The number of heads by the module that attends, or by one around it."""
    for module in reversed(modules):
        for name in _COUNTS:
            count = getattr(module, name, None)
            if isinstance(count, int) and not isinstance(count, bool):
                return count
    return None


def _queries(rest: list[Piece], rows: Sequence[Piece], axis: int, rank: int) -> list[Piece]:
    """Of what is neither heads nor keys, the axis of the queries: the others are batch. A single query has no pieces,
    and then all of it is batch."""
    free = sorted({piece.axis for piece in rest if _axes.lies_in(piece, rows)})
    if not free:
        return []
    if len(free) > 1 and axis != rank - 1:
        raise Unseen("the order of its axes is not clear: pass watch(model, heads_dim=…) or use recording.add")
    return [piece for piece in rest if piece.axis == free[-1]]


def rearranged(tensor: Tensor, pieces: list[Piece], groups: Sequence[Sequence[Piece]]) -> Tensor:
    apart = tensor.reshape([piece.size for piece in pieces])
    order = [pieces.index(piece) for group in groups for piece in group]
    return apart.permute(order).reshape([_axes.size_of(group) for group in groups])


def _unclear(shape: tuple[int, ...]) -> str:
    return (
        f"weights of shape {list(shape)}, of which the axis of the heads is not clear: pass "
        "watch(model, heads_dim=…) or use recording.add"
    )
