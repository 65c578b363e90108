"""What weights and values are multiplied into, until it is laid out as the model's width, which shows the heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard.watching import _axes
from regard.watching._axes import FEATURE, Dims, Piece
from regard.watching._effects import MOVERS, SCATTERS
from regard.watching._products import PRODUCTS, shift_of, trace_in
from regard.watching._tracked import Share, Trace, Weights, keys_of
from regard.watching._views import VIEWS

if TYPE_CHECKING:
    from regard.watching._written import Tracker

aten = torch.ops.aten


class Partial(NamedTuple):
    """Values scaled by weights, not summed yet."""

    dims: Dims
    weights: Weights
    rows: tuple[Piece, ...]  # axes of the weights along which the values are repeated: those of the queries

    def follow(self, tracker: Tracker, packet: Any, at: int, args: Any, kwargs: Any, out: Any) -> None:
        if packet is aten.sum and isinstance(out, Tensor):
            self._summed(tracker, args, out)
        elif not self.dims and packet in VIEWS:
            tracker.note(out, self)
        else:
            tracker.strayed(self.weights, packet, out)

    def _summed(self, tracker: Tracker, args: Any, out: Tensor) -> None:
        axes = args[1] if len(args) > 1 else None
        if not self.dims:
            tracker.attended(self.weights, ())
        if axes is None or not self.dims:
            return
        dims = {axis % len(self.dims) for axis in ([axes] if isinstance(axes, int) else axes)}
        keys = keys_of(self.weights)
        if len(dims) != 1 or self.dims[at := next(iter(dims))] != keys or not keys:
            return
        keep = bool(args[2]) if len(args) > 2 else False
        rest = [dim for n, dim in enumerate(self.dims) if n != at or keep]
        if keep:
            rest[at] = ()
        call = tracker.attended(self.weights, self.rows)
        if call is not None:
            tracker.note(out, Product(tuple(rest), call))


class Product(NamedTuple):
    """The output of attention on its way to the model's width."""

    dims: Dims
    call: Any  # what the watcher made of the product
    apart: tuple[Piece, ...] = ()  # an axis whose parts were taken one by one

    def follow(self, tracker: Tracker, packet: Any, at: int, args: Any, kwargs: Any, out: Any) -> None:
        """An operator that is no view has read the output. Most leave its axes as they are; some tell the heads."""
        if packet in (aten.mean, aten.sum):
            axes = args[1] if len(args) > 1 and args[1] is not None else ()
            reduced = [self.dims[axis] for axis in ([axes] if isinstance(axes, int) else axes)]
            if not any(reduced) and isinstance(out, Tensor) and out.dim() == len(self.dims):
                tracker.note(out, self)
            elif len(reduced) == 1 and reduced[0] and all(piece.axis >= 0 for piece in reduced[0]):
                tracker.settled(self.call, trace_in(self.dims, reduced[0]))
        elif packet in (aten.unbind, aten.select, aten.split):
            self._taken_apart(tracker, packet, args, out)
        elif packet in PRODUCTS or packet is aten.convolution:
            other = args[1 + shift_of(packet) - (0 if packet is aten.convolution else at - shift_of(packet))]
            trace = trace_in(self.dims)
            if trace.heads is None and not trace.cut and tracker.learned(other):
                channel = 1 if packet is aten.convolution else -1
                alone = [piece.axis for piece in self.dims[channel]] in ([FEATURE], [])
                trace = trace._replace(alone=alone)
            tracker.settled(self.call, trace)
        elif packet in MOVERS or packet in SCATTERS:
            tracker.settled(self.call, trace_in(self.dims))  # which row is which token is not known any more
        elif packet in (aten.mul, aten.mul_) and isinstance(tracker.of(args[1 - at]), Share):
            tracker.settled(self.call, Trace(share=True))
        elif isinstance(out, Tensor) and out.shape == args[at].shape:
            tracker.note(out, self)

    def _taken_apart(self, tracker: Tracker, packet: Any, args: Any, out: Any) -> None:
        axis = (args[2] if len(args) > 2 else 0) if packet is aten.split else (args[1] if len(args) > 1 else 0)
        axis %= len(self.dims)
        apart, kept = self.dims[axis], self.dims[:0]
        if packet is aten.split:  # an axis of heads and items: each part has the items of a head
            sizes = {part.shape[axis] for part in out}
            found = _axes.viewed((apart,), (len(out), *sizes)) if len(sizes) == 1 else None
            apart, kept = (found[0], found[1:]) if found is not None else ((), ((),))
        dims = (*self.dims[:axis], *kept, *self.dims[axis + 1 :])
        for part in [out] if isinstance(out, Tensor) else out:
            if apart and apart[0].axis >= 0 and not self.apart and part.dim() == len(dims):
                tracker.note(part, Product(dims, self.call, apart))
