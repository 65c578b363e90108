"""What each dim of a tensor stands for, followed through views: which axes of the weights it is made of.

A dim is a list of pieces. A piece is a factor of one axis of the weights: `Piece(axis, outer, size, inner)` is
``index // inner % size`` of that axis, which is ``outer · size · inner`` long. A dim of size 1 has no pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

FEATURE = -1  # the axis of the values' dim
OTHER = -2  # an axis that is in neither weights nor values


class Piece(NamedTuple):
    axis: int
    outer: int
    size: int
    inner: int


Dims = tuple[tuple[Piece, ...], ...]


def whole(axis: int, size: int) -> tuple[Piece, ...]:
    return () if size == 1 else (Piece(axis, 1, size, 1),)


def of_shape(shape: Sequence[int]) -> Dims:
    return tuple(whole(axis, size) for axis, size in enumerate(shape))


def size_of(pieces: Sequence[Piece]) -> int:
    size = 1
    for piece in pieces:
        size *= piece.size
    return size


def viewed(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """The dims after a view as ``shape``: merged and split; None where a piece would be cut unevenly."""
    left = [piece for dim in dims for piece in dim]
    left.reverse()
    found = []
    for size in shape:
        taken: list[Piece] = []
        while size > 1:
            if not left:
                return None
            axis, outer, length, inner = left.pop()
            if length <= size:
                if size % length:
                    return None
                taken.append(Piece(axis, outer, length, inner))
                size //= length
            else:
                if length % size:
                    return None
                rest = length // size
                taken.append(Piece(axis, outer, size, rest * inner))
                left.append(Piece(axis, outer * size, rest, inner))
                size = 1
        found.append(joined(taken))
    return None if left else tuple(found)


def joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Neighbours that are neighbouring factors of one axis, as one piece again."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if (
            last
            and last.axis == piece.axis
            and last.outer * last.size == piece.outer
            and last.inner == piece.size * piece.inner
        ):
            found[-1] = Piece(piece.axis, last.outer, last.size * piece.size, piece.inner)
        else:
            found.append(piece)
    return tuple(found)


def cut(dim: Sequence[Piece], marks: Sequence[Piece]) -> list[Piece] | None:
    """The pieces of a dim, cut so that each of ``marks`` that lies in them is a run of whole pieces."""
    found = []
    for piece in dim:
        points = {piece.outer, piece.outer * piece.size}
        for mark in marks:
            if mark.axis == piece.axis:
                points |= {
                    n for n in (mark.outer, mark.outer * mark.size) if piece.outer < n < piece.outer * piece.size
                }
        ordered = sorted(points)
        length = piece.outer * piece.size * piece.inner
        for start, stop in itertools.pairwise(ordered):
            if stop % start or length % stop:
                return None
            found.append(Piece(piece.axis, start, stop // start, length // stop))
    return found


def carried(tensor: Tensor, dims: Dims, to: Dims) -> Tensor | None:
    """A tensor that has the dims ``dims``, with the dims ``to``; None where those are not the same axes."""
    wanted = [cut(dim, [piece for given in dims for piece in given]) for dim in to]
    pieces = [piece for dim in dims for piece in cut(dim, [piece for given in to for piece in given]) or ()]
    order = [piece for dim in wanted for piece in dim or ()]
    if sorted(pieces) != sorted(order):
        return None
    apart = tensor.reshape([piece.size for piece in pieces])
    return apart.permute([pieces.index(piece) for piece in order]).reshape([size_of(dim) for dim in to])


def lies_in(piece: Piece, marks: Sequence[Piece]) -> bool:
    """Whether a piece is part of one of the marks."""
    return any(
        mark.axis == piece.axis and mark.outer <= piece.outer and piece.inner >= mark.inner
        and piece.outer * piece.size <= mark.outer * mark.size
        for mark in marks
    )  # fmt: skip
