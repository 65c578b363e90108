"""Positive numbers that a model's code divides by their sum: exponentials, mostly, before the product with values or
after it.

They are followed as weights are: through views, masking, dropout. Divided by their sum along an axis they are weights
over that axis; their product with values, divided by the same sum, is attention. Numbers that are summed along an axis
and multiplied by values along it, and of which no such division is met (because they come in chunks, say), are
attention that cannot be read. So are exponentials of queries times keys that are multiplied by values, whatever they
were divided by.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard.watching import _axes
from regard.watching._axes import FEATURE, OTHER, Dims, Piece
from regard.watching._effects import is_filled, name_of, picks
from regard.watching._output import Product
from regard.watching._products import PRODUCTS, factors, repeated_along, scales_values, with_feature
from regard.watching._projection import version_of
from regard.watching._tracked import Multiplied, Softmax, Weights, softmax_weights

if TYPE_CHECKING:
    from regard.watching._written import Tracker

aten = torch.ops.aten
Keys = tuple[Piece, ...]

UNFOLLOWED = (
    "its exponentials are multiplied by values and summed, and divided where it cannot be followed (in chunks, say)"
)


class Shift(NamedTuple):
    """What was taken off the logits before they became exponents, with the axis along which it is one number."""

    axis: int
    numbers: Tensor


class Source:
    """The numbers. Exponentials that were taken twice of the same logits are the same ones."""

    def __init__(
        self,
        given: Tensor,
        numbers: Tensor | None,
        shift: Shift | None = None,
        base: float = 1.0,
        of_scores: bool = False,
    ) -> None:
        self.of_scores = of_scores  # whether the exponents are products of two tensors that were computed
        self.given, self.version, self.base = weakref.ref(given), version_of(given), base
        self.numbers, self.shift = None if numbers is None else numbers.detach(), shift
        self.dims = _axes.of_shape(given.shape)
        self.summed: set[Keys] = set()
        self.multiplied: set[Keys] = set()
        self.read = False  # whether they are in a recording, as weights

    def is_of(self, given: Tensor, base: float) -> bool:
        return self.given() is given and self.version == version_of(given) and self.base == base

    def shift_over(self, axis: int) -> Tensor | None:
        """One number for each row, if it is one."""
        return self.shift.numbers if self.shift is not None and self.shift.axis == axis else None

    def mark(self, tracker: Tracker, group: set[Keys], keys: Keys) -> None:
        group.add(keys)
        if keys in self.multiplied and (keys in self.summed or self.of_scores):
            tracker.suspected(self, lambda: self.read, UNFOLLOWED)


class Raw(NamedTuple):
    """The numbers themselves, in whatever shape."""

    dims: Dims
    source: Source

    def follow(self, tracker: Tracker, packet: Any, at: int, args: Any, kwargs: Any, out: Any) -> None:
        if packet in SUMS and at == 0:
            self._summed(tracker, packet, args, kwargs, out)
        elif packet in PRODUCTS:
            found = factors(self.dims, packet, at, args)
            if found is not None and found.made is not None and _axis_of(found.summed, self.source):
                if tracker.learned(found.other):
                    return
                self.source.mark(tracker, self.source.multiplied, found.summed)
                product = RawProduct(found.made, self.source, found.summed, found.rows, found.multiplied(out))
                tracker.note(out, product)
        elif isinstance(out, Tensor) and (sums := _own_sums(tracker, self.source, packet, at, args)) is not None:
            self.divided(tracker, sums, args[1 - at], out)
        elif packet in (aten.mul, aten.mul_) and _are_values(tracker, self.dims, args[1 - at]):
            rows = repeated_along(self.dims, args[1 - at])
            tracker.note(out, RawPartial(with_feature(self.dims, out.shape), self.source, rows))
        elif packet is aten.native_dropout or _is_noise(tracker, packet, at, args):
            tracker.note(out[0] if isinstance(out, (tuple, list)) else out, self)
        elif picks(packet) and at == 0 and self.source.of_scores:
            made = out[0] if isinstance(out, (tuple, list)) else out
            softmax = Softmax(0, tuple(made.shape), made.new_zeros(()), False, [], of_scores=True)
            tracker.note(made, Weights((), softmax, made.detach(), (), f"moved by {name_of(packet)}"))
        elif _is_elementwise(tracker, packet, at, args, out):
            shift = self.source.shift if self.dims == self.source.dims else None
            tracker.note(out, Raw(_axes.of_shape(out.shape), Source(out, out, shift, of_scores=self.source.of_scores)))

    def _summed(self, tracker: Tracker, packet: Any, args: Any, kwargs: Any, out: Any) -> None:
        axis = one_axis(packet, args, kwargs)
        if axis is None or not _axis_of(keys := self.dims[axis % len(self.dims)], self.source):
            return
        axis %= len(self.dims)
        rest = (*self.dims[:axis], *([()] if out.dim() == len(self.dims) else []), *self.dims[axis + 1 :])
        self.source.mark(tracker, self.source.summed, keys)
        tracker.note(out, Denominator(rest, self.source, keys))

    def divided(self, tracker: Tracker, sums: Denominator, by: Tensor, out: Tensor) -> bool:
        if sums.keys not in self.dims:
            return False
        at = self.dims.index(sums.keys)
        rest = (*self.dims[:at], (), *self.dims[at + 1 :])
        divisor = sums.laid(by, self.dims, rest)
        if divisor is None:
            return False
        self.source.read = True
        lse = _lse(self.source, sums.keys, divisor, rest).squeeze(at)
        tracker.note(out, softmax_weights(out, _softmax(at, out, lse)))
        return True


class RawPartial(NamedTuple):
    """Values scaled by the numbers, not summed yet."""

    dims: Dims
    source: Source
    rows: Keys

    def follow(self, tracker: Tracker, packet: Any, at: int, args: Any, kwargs: Any, out: Any) -> None:
        axis = one_axis(packet, args, kwargs) if packet is aten.sum else None
        if axis is not None and _axis_of(keys := self.dims[axis % len(self.dims)], self.source):
            axis %= len(self.dims)
            rest = (*self.dims[:axis], *([()] if out.dim() == len(self.dims) else []), *self.dims[axis + 1 :])
            self.source.mark(tracker, self.source.multiplied, keys)
            rows = tuple(piece for piece in self.rows if piece not in keys)
            tracker.note(out, RawProduct(rest, self.source, keys, rows, None))


class RawProduct(NamedTuple):
    """The product with values of numbers that are not divided yet."""

    dims: Dims
    source: Source
    keys: Keys
    rows: Keys
    product: Multiplied | None

    def follow(self, tracker: Tracker, packet: Any, at: int, args: Any, kwargs: Any, out: Any) -> None:
        sums = _own_sums(tracker, self.source, packet, at, args)
        if sums is None:
            other = tracker.of(args[1]) if packet in (aten.div, aten.div_) and at == 0 else None
            if isinstance(other, RawProduct) and other.source is self.source:  # a value of 1 gave the sum
                tracker.suspected(self.source, lambda: self.source.read, UNFOLLOWED)
            return
        source, axis = self.source, self.keys[0].axis
        without = tuple(() if any(piece.axis == FEATURE for piece in dim) else dim for dim in self.dims)
        rest = (*source.dims[:axis], (), *source.dims[axis + 1 :])
        divisor = sums.laid(args[1 - at], without, rest) if sums.keys == self.keys else None
        if divisor is None or source.numbers is None:
            return
        softmax = _softmax(axis, source.numbers, _lse(source, self.keys, divisor, rest).squeeze(axis), late=True)
        source.read = True
        tracker.product = None if self.product is None else self.product._replace(out=out, made=self.dims)
        weights = Weights(source.dims, softmax, source.numbers / divisor, source.dims)
        call = tracker.attended(weights, self.rows)
        tracker.product = None
        if call is not None:
            tracker.note(out, Product(self.dims, call))


class Denominator(NamedTuple):
    """The sums of a source along an axis, or what a model made of them so that they can be divided by."""

    dims: Dims
    source: Source
    keys: Keys
    inverse: bool = False

    def follow(self, tracker: Tracker, packet: Any, at: int, args: Any, kwargs: Any, out: Any) -> None:
        if packet is aten.reciprocal:
            tracker.note(out, self._replace(inverse=not self.inverse))
        elif _is_elementwise(tracker, packet, at, args, out):
            tracker.note(out, self)

    def laid(self, tensor: Tensor, across: Dims, to: Dims) -> Tensor | None:
        """The divisor in the dims ``to``; None unless it has one number for each row of what it divides, which has the
        dims ``across``."""
        same = ((),) * (len(across) - len(self.dims)) + self.dims
        if len(same) != len(across):
            return None
        for at, (mine, theirs) in enumerate(zip(same, across, strict=True)):
            if any(piece.axis == OTHER for piece in mine):  # repeated there
                tensor = tensor.narrow(at - len(across), 0, 1)
            elif mine != theirs and not (mine == () and theirs == self.keys):
                return None
        bare = tuple(() if any(piece.axis == OTHER for piece in dim) else dim for dim in same)
        found = _axes.carried(tensor.detach(), bare, to)
        return found if found is None or not self.inverse else found.reciprocal()


def _softmax(axis: int, like: Tensor, lse: Tensor, late: bool = False) -> Softmax:
    return Softmax(axis, tuple(like.shape), lse, False, [], divided=True, late=late)


def _lse(source: Source, keys: Keys, divisor: Tensor, dims: Dims) -> Tensor:
    axis = keys[0].axis
    shift, lse = source.shift_over(axis), divisor.log()
    if shift is None:
        return lse
    laid = _axes.carried(shift, (*source.dims[:axis], (), *source.dims[axis + 1 :]), dims)
    return lse if laid is None else lse + laid


def _own_sums(tracker: Tracker, source: Source, packet: Any, at: int, args: Any) -> Denominator | None:
    """The sums of a source by which an operator divides it, or the product of it with values."""
    divides, multiplies = packet in (aten.div, aten.div_) and at == 0, packet in (aten.mul, aten.mul_)
    other = tracker.of(args[1 - at]) if divides or multiplies else None
    if isinstance(other, Denominator) and other.source is source and other.inverse == multiplies:
        return other
    return None


def _axis_of(dim: Keys, source: Source) -> bool:
    """Whether a dim is one whole axis of the numbers."""
    return len(dim) == 1 and 0 <= (axis := dim[0].axis) < len(source.dims) and source.dims[axis] == dim


def one_axis(packet: Any, args: Any, kwargs: Any) -> int | None:
    """The axis along which an operator sums, if it is one; the 1-norm of what is positive is its sum."""
    if packet is aten.sum:
        axes = args[1] if len(args) > 1 else kwargs.get("dim")
    else:
        order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
        axes = args[2] if len(args) > 2 and order == 1 else None
    axes = [axes] if isinstance(axes, int) else list(axes or ())
    return axes[0] if len(axes) == 1 else None


def _are_values(tracker: Tracker, dims: Dims, other: Any) -> bool:
    return isinstance(other, Tensor) and scales_values(dims, other) and not tracker.learned(other)


def _is_elementwise(tracker: Tracker, packet: Any, at: int, args: Any, out: Any) -> bool:
    """Whether an operator gave one number for each number of an argument, and nothing better is known of them."""
    if not (packet in ELEMENTWISE or is_filled(packet)) or not isinstance(out, Tensor) or out.shape != args[at].shape:
        return False
    return out is args[at] or tracker.of(out) is None


def _is_noise(tracker: Tracker, packet: Any, at: int, args: Any) -> bool:
    return packet in (aten.mul, aten.mul_) and id(args[1 - at]) in tracker.noise


SUMS = frozenset((aten.sum, aten.linalg_vector_norm, aten.norm))
# Operators that give one number for each number.
ELEMENTWISE = frozenset(
    (aten.mul, aten.mul_, aten.div, aten.div_, aten.add, aten.add_, aten.sub, aten.sub_, aten.clamp, aten.clamp_,
     aten.clamp_min, aten.clamp_min_, aten.clamp_max, aten.maximum, aten.minimum)
)  # fmt: skip
