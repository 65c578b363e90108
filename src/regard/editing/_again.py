"""One call that a model wrote out, done again: its softmax of other logits, its output with other numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard.editing import _fused
from regard.editing._chain import Node
from regard.editing._fused import Pattern
from regard.edits._edit import Change, Place
from regard.statistics import Want
from regard.watching import _axes
from regard.watching._axes import FEATURE, Piece
from regard.watching._in_memory import InMemory
from regard.watching._layout import Arranged, rearranged
from regard.watching._silence import silence

if TYPE_CHECKING:
    from regard.editing._editor import Editor, Met, Used

# Logits so far below the largest of their row are those that a model has hidden, whatever number it writes there.
HIDDEN = 5000.0


class _Layout(NamedTuple):
    arranged: Arranged
    shape: tuple[int, ...]

    def out_of(self, tensor: Tensor) -> Tensor:
        """[batch, head, query, key] of a tensor as the softmax has it."""
        return rearranged(tensor, self.arranged.pieces(_axes.of_shape(self.shape)), self._groups())

    def back(self, tensor: Tensor, like: Tensor) -> Tensor:
        return put_back(tensor, self.arranged.pieces(_axes.of_shape(self.shape)), self._groups(), like)

    def _groups(self) -> list[list[Piece]]:
        """With the softmax's own axis whole: what stands for a sink may have been cut off of the last weights."""
        axis = next(piece.axis for piece in self.arranged.groups[3]) if self.arranged.groups[3] else None
        pieces = self.arranged.pieces(_axes.of_shape(self.shape))
        keys = [piece for piece in pieces if piece.axis == axis] if axis is not None else []
        return [*self.arranged.groups[:3], keys]


class Call:
    """One written-out call while it is done again."""

    def __init__(self, editors: list[tuple[Editor, Met]], use: Used, found: Arranged, product: Node | None) -> None:
        self.arranged, self.product = found, product
        self.layout = _Layout(found, use.weights.softmax.shape)
        with silence(), torch.no_grad():
            weights = rearranged(use.weights.final, found.pieces(use.weights.final_dims), found.groups)
            seen = InMemory(weights, weights.new_zeros(weights.shape[:3]))
            places = [editor.place(met, seen, weights.shape[1]) for editor, met in editors]
            if not any(editor.adds_edges for editor, _ in editors):
                for place in places:
                    place.has_edges = _edges_of(weights)
            self.steps = [_Step(editor, place) for (editor, _), place in zip(editors, places, strict=True)]
            for place in places:
                place.has_edges = None  # it holds the weights

    def weights(self, node: Node) -> Tensor:
        """The softmax again, of other logits."""
        logits = node.logits if node.takes_softmax else _logarithm(node.logits)
        x = self.layout.out_of(logits)
        empty = None
        for step in self.steps:
            for change in step.changes:
                x, more = _changed(x, change, step.place)
                empty = more if empty is None else empty if more is None else empty | more
        out = self._softmax(node, self.layout.back(x, logits))
        if empty is not None:
            out = self.layout.back(self.layout.out_of(out).masked_fill(empty, 0.0), out)
        for step in self.steps:
            step.tell(self.layout.out_of(out.detach()))
            step.write(bool(step.changes))
        return out

    def _softmax(self, node: Node, logits: Tensor) -> Tensor:
        if not node.takes_softmax:
            return logits.softmax(node.axis)
        if "input" in node.kwargs:
            return node.run(node.args, {**node.kwargs, "input": logits})
        return node.run((logits, *node.args[1:]), node.kwargs)

    def output(self, node: Node, out: Tensor) -> Tensor:
        """The product, with the edits of its output."""
        if not any(edit.acts_on_output for step in self.steps for edit in step.editor.edits):
            return out
        pieces = self.arranged.pieces(node.dims or ())
        groups = [*self.arranged.groups[:3], [piece for piece in pieces if piece.axis == FEATURE]]
        if node is not self.product:
            raise self.steps[0].place.refuse(
                "its weights are multiplied by several values, whose outputs are not added"
            )
        if sorted(pieces) != sorted(piece for group in groups for piece in group):
            raise self.steps[0].place.refuse("its output is laid out, or added up, so that no head stands apart")
        apart, last = rearranged(out, pieces, groups), None
        for step in reversed(self.steps):  # the innermost has the last word
            new = step.editor.outputs(apart, step.place)
            step.write(new is not None)
            if new is not None:
                apart = last = new
        return out if last is None else put_back(last, pieces, groups, out)


class _Step:
    """What one edit does to a call."""

    def __init__(self, editor: Editor, place: Place) -> None:
        self.editor, self.place = editor, place
        self.changes = editor.changes(place)
        self._wrote = False

    def write(self, changed: bool) -> None:
        if changed and not self._wrote:
            self._wrote = True
            self.editor.wrote(self.place, True)

    def tell(self, weights: Tensor) -> None:
        """The weights [batch, head, query, key] that are used, to edits that go by them."""
        place = self.place
        with silence(), torch.no_grad():
            for edit in self.editor.each(place):
                if edit.wants_mass:
                    seen, counted = weights[..., : place.keys], edit.mass_of(place)
                    if isinstance(counted, Tensor):
                        seen, counted = seen.masked_fill(~counted[:, None, :, None], 0.0), None
                    edit.after(seen[:, :, counted or slice(None)].sum(2), place)
                edit.saw(Pattern(None, weights, weights.shape[3] - place.keys), place)


def _edges_of(weights: Tensor) -> Callable[[range, range], Tensor]:
    """The edges that a call has, as ``Place.has_edges`` gives them. Where a row does not sum to 1, the model took
    weights away after the softmax: a 0 there does not say that the softmax had no such edge."""

    def has_edges(rows: range, columns: range) -> Tensor:
        found = weights[:, :, rows.start : rows.stop]
        whole = found.sum(-1, keepdim=True, dtype=torch.float32) > 0.999
        return (found[..., columns.start : columns.stop] > 0) | ~whole

    return has_edges


def _changed(x: Tensor, change: Change, place: Place) -> tuple[Tensor, Tensor | None]:
    """Logits after a change, and the rows [batch, head, query, 1] that it left without keys."""
    extra = x.shape[3] - place.keys
    mine = _fused.head_rows(place)
    if change.pattern is not None:
        return torch.where(mine, _pattern(change.pattern, x, place), x), None
    if change.add is not None:
        u, b = (part.to(place.device) for part in change.add.factors())
        most = torch.finfo(x.dtype).max / 2
        more = u[:, None, :, None] * b[:, None, None].clamp(-most, most)
        x = torch.where(mine, x + torch.nn.functional.pad(more, (0, extra)).to(x), x)
    if change.hide is None:
        return x, None
    rows, columns = range(place.queries), range(place.keys)
    offset = place.offset.to(x.device) if isinstance(place.offset, Tensor) else place.offset
    change.hide.check(place.batch, place.count, place.queries, place.keys)
    hide = change.hide.tile(rows, columns, place.queries, place.keys, offset=offset, device=x.device)
    hide = torch.nn.functional.pad(hide & mine, (0, extra)).expand(*x.shape[:2], -1, -1)
    with torch.no_grad():
        top = x.amax(-1, keepdim=True)
        shown = (x > -torch.inf) & (x >= top - HIDDEN)
        empty = ~(shown & ~hide).any(-1, keepdim=True) & hide.any(-1, keepdim=True)
    # a row without keys keeps its logits, which are numbers, and then loses its weights
    return x.masked_fill(hide & ~empty, -torch.inf), empty


def _pattern(pattern: Pattern, x: Tensor, place: Place) -> Tensor:
    """The recorded weights as logits: their logarithm."""
    weights = pattern.weights
    if weights is None:
        assert pattern.seen is not None
        with silence():
            weights = pattern.seen.observe(Want(map=None, top_k=0, weights="all")).weights
    if weights.shape[1:] != x.shape[1:] or weights.shape[0] not in (1, x.shape[0]):
        raise place.refuse(
            f"its weights are {list(x.shape)} [batch, head, query, key], and the recorded ones "
            f"{list(weights.shape)}: patch a pattern from a run of the same length"
        )
    return _logarithm(weights.to(x)).expand_as(x)


def put_back(tensor: Tensor, pieces: list[Piece], groups: Any, like: Tensor) -> Tensor:
    """The inverse of ``rearranged``, in memory as ``like`` is: code that views the one can view the other."""
    order = [pieces.index(piece) for group in groups for piece in group]
    apart = tensor.reshape([piece.size for group in groups for piece in group])
    inverse = sorted(range(len(order)), key=order.__getitem__)
    made = apart.permute(inverse).reshape(like.shape)
    strides: list[int] = [like.stride(dim) for dim in range(like.dim())]
    outer_first = sorted(range(like.dim()), key=lambda dim: (-strides[dim], dim))
    back = sorted(range(like.dim()), key=outer_first.__getitem__)
    return made.permute(outer_first).contiguous().permute(back)


def _logarithm(weights: Tensor) -> Tensor:
    """Weights as logits; what has no weight is hidden, and takes no gradient."""
    none = weights <= 0
    return weights.masked_fill(none, 1.0).log().masked_fill(none, -torch.inf)
