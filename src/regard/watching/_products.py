"""Products of weights and values: which axes they sum and keep, and what becomes of their output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.watching import _axes
from regard.watching._axes import FEATURE, Dims, Piece
from regard.watching._tracked import Factors, Trace, Weights

aten = torch.ops.aten

PRODUCTS = frozenset(
    (aten.bmm, aten.mm, aten.baddbmm, aten.addmm, aten.mv, aten.addmv, aten.addbmm, aten._sparse_addmm)
)  # fmt: skip


def _feature_size(other: Tensor, side: int) -> int:
    return other.shape[-1] if side == 0 else other.shape[-2]


def same_but_feature(dims: Dims, others: Dims) -> bool:
    return all(
        mine == other or all(piece.axis == FEATURE for piece in other) for mine, other in zip(dims, others, strict=True)
    )


def next_to_feature(dims: Dims) -> tuple[Piece, ...] | None:
    """The pieces of the weights that share a dim with the values' dim; None when it stands alone, or with the items
    where attention is over channels (see below)."""
    for dim in () if _of_channels(dims) else dims:
        if any(piece.axis == FEATURE for piece in dim):
            heads = tuple(piece for piece in dim if piece.axis >= 0)
            return heads or None
    return None


def _of_channels(dims: Dims) -> tuple[Piece, ...]:
    """The heads where the queries are a head's channels, which are laid next to each other as values' dims are."""
    width = dims[-1] if dims else ()
    return width[:-1] if all(piece.axis >= 0 for piece in width) else ()


def trace_in(dims: Dims, reduced: tuple[Piece, ...] = ()) -> Trace:
    """What the dims of the output tell of the heads when something else than a view reads it, or reduces an axis."""
    heads = next_to_feature(dims) or reduced or _of_channels(dims) or None
    cut = any(piece.outer != 1 or piece.inner != 1 for dim in dims for piece in dim)
    return Trace(heads, cut=heads is None and cut, dims=dims)


def factors(dims: Dims, packet: Any, at: int, args: Any) -> Factors | None:
    """A product in which a tensor of these dims is argument ``at``; None where it is what a product is added to."""
    shift = shift_of(packet)
    side = at - shift
    if side not in (0, 1):
        return None
    other = args[shift + 1 - side]
    summed, rows = (dims[-1], dims[-2]) if side == 0 else (dims[-2], dims[-1])
    if packet in (aten.mv, aten.addmv):
        summed, rows = dims[-1], dims[-2]
    feature = _axes.whole(FEATURE, _feature_size(other, side)) if other.dim() > 1 else ()
    made = (*dims[:-2], rows, feature) if side == 0 else (*dims[:-2], feature, rows)
    values = (*dims[:-2], summed, feature) if side == 0 else (*dims[:-2], feature, summed)
    followed = packet not in (aten.mv, aten.addmv, aten.addbmm)
    return Factors(other, summed, rows, made if followed else None, values if followed and not shift else None)


def shift_of(packet: Any) -> int:
    return 1 if packet in (aten.addmm, aten.baddbmm, aten.addmv, aten.addbmm, aten._sparse_addmm) else 0


def scales_values(dims: Dims, other: Tensor) -> bool:
    """Whether a product of two tensors is one of weights with values: the other has a dim where the weights have 1."""
    if other.dim() == 0:
        return False
    ours = ((),) * (other.dim() - len(dims)) + dims
    theirs = (1,) * (len(ours) - other.dim()) + tuple(other.shape)
    return sum(not mine and size > 1 for mine, size in zip(ours, theirs, strict=True)) == 1


def scales_numbers(known: Weights, other: Tensor) -> bool:
    """Likewise where a value is a single number: a dim of 1 was made for it, and other queries take the same values."""
    if len(known.dims) <= len(known.softmax.shape) or other.dim() != len(known.dims):
        return False
    if known.softmax.shape[known.softmax.axis] == 1:
        return True
    repeated = [mine != () and size == 1 for mine, size in zip(known.dims, other.shape, strict=True)]
    keys = [any(piece.axis == known.softmax.axis for piece in dim) for dim in known.dims]
    return any(repeated) and any(keys) and not repeated[keys.index(True)]


def rows_of(known: Weights, values: Tensor) -> tuple[Piece, ...]:
    """The axes of the queries, from values that are multiplied by weights: other queries take the same values."""
    keys, shape = known.softmax.axis, known.softmax.shape
    rows = tuple(piece for piece in repeated_along(known.dims, values) if piece.axis != keys)
    alone = shape[keys] == 1 and 1 in shape[:keys] + shape[keys + 1 :]  # one query, perhaps, which looks at one key
    others = [n for n, size in enumerate(shape) if n != keys and size > 1]
    items = len(others) == 1 and 0 in (keys, others[0])  # each with one query, as pooling has it: [item, token]
    if not rows and shape[keys - 1] > 1 and not alone and not items:
        # values that were copied for each query: it may be any axis
        rows = tuple(piece for dim in known.dims for piece in dim if piece.axis != keys)
    return rows


def repeated_along(dims: Dims, values: Tensor) -> tuple[Piece, ...]:
    """The axes along which values are repeated that are multiplied by what has these dims."""
    ours = ((),) * (values.dim() - len(dims)) + dims
    first = len(ours) - values.dim()
    repeated = [n < first or values.shape[n - first] == 1 or values.stride(n - first) == 0 for n in range(len(ours))]
    return tuple(piece for dim, same in zip(ours, repeated, strict=True) if same for piece in dim)


def with_feature(dims: Dims, shape: Sequence[int]) -> Dims:
    ours = ((),) * (len(shape) - len(dims)) + dims
    return tuple(mine or _axes.whole(FEATURE, size) for mine, size in zip(ours, shape, strict=True))
