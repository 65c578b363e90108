"""Weights of any rank as [batch, head, query, key]: which axis is which, found from what the model did with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._checks import is_int
from regard.watching import _axes
from regard.watching._axes import FEATURE, Dims, Piece
from regard.watching._in_memory import InMemory
from regard.watching._modules import Frame, attending
from regard.watching._seen import Unseen
from regard.watching._tracked import Multiplied, Trace, Weights

# What modules call their number of heads.
_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "num_head", "attention_heads")


class Arranged(NamedTuple):
    """Which pieces of which axes are batch, head, query and key, in weights as the softmax gave them."""

    heads: tuple[Piece, ...]  # the marks by which axes are cut into pieces
    groups: tuple[list[Piece], list[Piece], list[Piece], list[Piece]]

    def pieces(self, dims: Dims) -> list[Piece]:
        """The pieces of a tensor's dims, in their order there."""
        return [piece for dim in dims for piece in _axes.cut(dim, self.heads) or ()]


def laid_out(known: Weights, found: Arranged) -> InMemory:
    shape, axis = known.softmax.shape, known.softmax.axis
    weights = rearranged(known.final, found.pieces(known.final_dims), found.groups)
    first = [piece for piece in found.pieces(_axes.of_shape(shape)) if piece.axis != axis]
    lse = rearranged(known.softmax.lse, first, found.groups[:3])
    weights = weights.masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0)
    return InMemory(weights, lse, written_out=not known.softmax.by_function)


def with_values(made: InMemory, found: Arranged, product: Multiplied) -> InMemory:
    """The same with its values and their product; heads that share values have copies. As it is where one of the two
    cannot be laid out so."""
    batch, heads, rows, keys = found.groups
    feature = [piece for dim in product.dims for piece in dim if piece.axis == FEATURE]
    value = _shared(product.values, found.pieces(product.dims), (batch, heads, keys, feature))
    groups = (batch, heads, rows, feature)
    pieces = found.pieces(product.made)
    if value is None or sorted(pieces) != sorted(piece for group in groups for piece in group):
        return made
    return made._replace(value=value, result=rearranged(product.out.detach(), pieces, groups))


def _shared(values: Tensor, pieces: list[Piece], groups: Sequence[Sequence[Piece]]) -> Tensor | None:
    wanted = [piece for group in groups for piece in group]
    own = {piece for group in groups[2:] for piece in group}
    if not own <= set(pieces) <= set(wanted):
        return None
    order = [pieces.index(piece) for piece in wanted if piece in pieces]
    apart = values.detach().reshape([piece.size for piece in pieces]).permute(order)
    apart = apart.reshape([piece.size if piece in pieces else 1 for piece in wanted])
    return apart.expand([piece.size for piece in wanted]).reshape([_axes.size_of(group) for group in groups])


def arranged(
    known: Weights, rows: Sequence[Piece], trace: Trace, heads_dim: int | None, stack: Sequence[Frame]
) -> Arranged:
    """``rows`` are the axes that the product kept apart from batch and keys; ``trace`` what became of its output."""
    if 0 in known.softmax.shape:
        raise Unseen("it has no queries, keys or items")
    if known.changed:
        raise Unseen(f"its weights are {known.changed} between the softmax and the product with values")
    if known.softmax.picked:
        raise Unseen(f"its softmax is over scores that {known.softmax.picked} picked: which keys they are is not known")
    if trace.share:
        raise Unseen("its output is weighed by the log-sum-exp of its logits: it is of some of the keys, or has a sink")
    if known.softmax.divided and not _are_weights(known):
        raise Unseen("it multiplies values by numbers that are below 0, or of which a row has a sum above 1")
    shape, axis = known.softmax.shape, known.softmax.axis
    found = _heads(known, rows, trace, heads_dim, stack)
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
    known: Weights, rows: Sequence[Piece], trace: Trace, heads_dim: int | None, stack: Sequence[Frame]
) -> tuple[Piece, ...]:
    """The pieces of the heads, from facts alone: what was said, what became of the output, the number that modules
    name, the number of items that they were handed."""
    shape, axis = known.softmax.shape, known.softmax.axis
    if heads_dim is not None:
        if not -len(shape) <= heads_dim < len(shape) or heads_dim % len(shape) == axis:
            raise Unseen(f"heads_dim={heads_dim} is no axis of heads in weights of shape {list(shape)}")
        return _axes.whole(heads_dim % len(shape), shape[heads_dim])
    count = number_of_heads([frame.module for frame in stack])
    heads = _without(trace.heads, rows) or _moved(trace.dims, rows)
    if heads and not (count == 1 and len(shape) <= 3):
        return _whole_if_counted(heads, shape, count)
    if count == 1:
        return ()
    if known.softmax.by_function and count is None and len(shape) <= 3 and not trace.cut:
        return ()
    of_rows = {piece.axis for piece in rows}
    at = _counted(shape, axis, of_rows, count) if len(shape) >= 4 else None
    if at is None and known.softmax.by_function and len(shape) >= 4:
        at = axis - 2  # as torch's function says
    if at is not None:
        return _axes.whole(at, shape[at])
    alone = trace.alone and count is None  # else each head may have a matrix of its own
    if not trace.cut and (found := _by_items(known, of_rows, alone, stack)) is not None:
        return found
    raise Unseen(_unclear(shape))


def _whole_if_counted(heads: tuple[Piece, ...], shape: tuple[int, ...], count: int | None) -> tuple[Piece, ...]:
    """Heads that are laid together in groups are the whole axis, if that is as long as the module's number of them."""
    at, length = heads[0].axis, shape[heads[0].axis]
    return _axes.whole(at, length) if len(shape) >= 4 and len(heads) == 1 and length == count else heads


def _without(heads: tuple[Piece, ...] | None, rows: Sequence[Piece]) -> tuple[Piece, ...]:
    """Queries that were averaged are no heads."""
    return () if heads is None or (len(heads) == 1 and heads[0] in rows) else heads


def _moved(dims: Dims, rows: Sequence[Piece]) -> tuple[Piece, ...]:
    """The axis that was moved between the queries and the values' dim."""
    at = next((n for n, dim in enumerate(dims) if [piece.axis for piece in dim] == [FEATURE]), 0)
    before = [n for n in range(at) if dims[n] and all(_axes.lies_in(piece, rows) for piece in dims[n])]
    moved = dims[at - 1] if before and before[-1] < at - 1 else ()
    return tuple(moved) if all(piece.axis >= 0 for piece in moved) else ()


def _counted(shape: tuple[int, ...], axis: int, rows: set[int], count: int | None) -> int | None:
    """The one axis that is as long as the module's number of heads."""
    found = [n for n, size in enumerate(shape) if n != axis and size == count and (n not in rows or len(rows) > 1)]
    return found[0] if len(found) == 1 else None


def _others(shape: tuple[int, ...], axis: int, rows: set[int]) -> list[int]:
    """The axes that are neither queries nor keys. Of several that may be queries the last one is."""
    queries = max(rows, default=None)
    return [n for n, size in enumerate(shape) if n not in (axis, queries) and size > 1]


def _by_items(known: Weights, rows: set[int], alone: bool, stack: Sequence[Frame]) -> tuple[Piece, ...] | None:
    """The heads as what is left when the items are known; () where nothing is; None where that is not clear."""
    shape, axis = known.softmax.shape, known.softmax.axis
    others, given = _others(shape, axis, rows), _given(stack)
    if not others:
        return ()
    sizes = tuple(shape[n] for n in others)
    if not rows and any(tuple(x.shape[: len(sizes)]) == sizes for x in given):
        certain = shape[axis] not in sizes or not known.softmax.of_scores  # else its keys may be those tokens
        if certain:
            return ()  # one query for each token that was handed in: a gate, say
    if alone and (len(shape) < 4 or any(_has_all(x, sizes) for x in given)):
        return ()
    tokens = {shape[n] for n in (axis, max(rows, default=axis))}
    items = next((size for x in given if (size := _items(x, tokens)) is not None), None)
    if items is None or len(others) > 2:
        return None
    if len(others) == 1:
        at = others[0]  # and where there is but one item, the axis of 1 next to the heads is its
        return () if shape[at] == items else _axes.whole(at, shape[at]) if items == 1 and len(shape) > 3 else None
    left = [n for n in others if shape[n] != items]
    return _axes.whole(left[0], shape[left[0]]) if len(left) == 1 else None


def _given(stack: Sequence[Frame]) -> list[Tensor]:
    """The tensors that the module that attends was handed, then those of the modules around it."""
    inner = list(stack[: stack.index(attending(stack)) + 1])
    return [x for frame in reversed(inner) for x in frame.given().values() if isinstance(x, Tensor) and x.dim() >= 2]


def _items(x: Tensor, tokens: set[int]) -> int | None:
    """How many items a batch has, by a tensor [item, token, dim], [token, item, dim], [item, token], or an image."""
    first, second = x.shape[:2]
    if x.dim() == 4 and (x.shape[1] * x.shape[2] in tokens or x.shape[2] * x.shape[3] in tokens):
        return int(first)
    if x.dim() > 3 or (x.dim() == 2 and x.is_floating_point()):
        return None
    if second in tokens and (first not in tokens or first == second):
        return int(first)
    return int(second) if first in tokens and second not in tokens and x.dim() == 3 else None


def _has_all(x: Tensor, sizes: Sequence[int]) -> bool:
    """Whether a tensor has axes of all these sizes, next to one of its own."""
    left = list(x.shape)
    for size in sizes:
        if size not in left:
            return False
        left.remove(size)
    return len(left) >= 1


def _are_weights(known: Weights) -> bool:
    if known.final.is_meta:
        return True
    at = next((n for n, dim in enumerate(known.final_dims) if any(p.axis == known.softmax.axis for p in dim)), None)
    sums = known.final.sum(at, dtype=torch.float32) if at is not None else known.final
    return bool((known.final >= 0).all() and (sums < 1.01).all()) or bool(known.final.isnan().any())


def number_of_heads(modules: Sequence[Any]) -> int | None:
    """The number of heads by the module that attends, or by one around it."""
    for module in reversed(modules):
        for name in _COUNTS:
            count = getattr(module, name, None)
            if is_int(count):
                return count
    return None


def rows_of_both(one: Sequence[Piece], other: Sequence[Piece]) -> Sequence[Piece]:
    """The axes of the queries, where two products of the same weights keep different ones apart: values of relative
    positions, which all items and heads share, make those look like queries."""

    def unlikely(rows: Sequence[Piece]) -> tuple[bool, int]:
        axes = {piece.axis for piece in rows}
        return len(axes) > 1, -max(axes, default=-1)

    return min(one, other, key=unlikely)


def loops_over_heads(stack: Sequence[Frame], count: int) -> bool:
    """Whether a call has some of its module's heads, by what the module says."""
    return count != (number_of_heads([frame.module for frame in stack]) or count)


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
