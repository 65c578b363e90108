"""What is known of tensors on the way from a softmax to the model's width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard.watching import _axes
from regard.watching._axes import Dims, Piece
from regard.watching._effects import BATCHED, name_of, picks, shift_of
from regard.watching._views import VIEWS

if TYPE_CHECKING:
    from regard.watching._written import Tracker

aten = torch.ops.aten
# Operators after which logits are logits.
_SCALES = frozenset(
    (aten.mul, aten.mul_, aten.div, aten.div_, aten.add, aten.add_, aten.sub, aten.sub_, aten.tanh, aten.clamp,
     aten.masked_fill, aten.masked_fill_, aten.where)
)  # fmt: skip
# Functions of one number that attention takes instead of an exponential.
_CURVES = frozenset(
    (aten.sigmoid, aten.sigmoid_, aten.relu, aten.relu_, aten.softplus, aten.elu, aten.elu_, aten.gelu, aten.silu,
     aten.silu_, aten.leaky_relu, aten.hardsigmoid, aten.pow, aten.pow_, aten.square, aten.clamp_min, aten.clamp_min_)
)  # fmt: skip


class Weights(NamedTuple):
    """The output of a softmax, or what became of it."""

    dims: Dims  # of this tensor
    softmax: Softmax
    final: Tensor  # the weights as the product sees them, but before dropout
    final_dims: Dims
    changed: str = ""  # what makes them no softmax's output any more


class Softmax(NamedTuple):
    axis: int
    shape: tuple[int, ...]
    lse: Tensor  # the shape without the axis
    by_function: bool  # whether torch's attention function took it, not the model's code
    users: list[Any]  # calls of modules that multiplied values by it
    divided: bool = False  # whether the model divided numbers by their sum: see ``_divided``
    late: bool = False  # likewise, after the product with values
    of_scores: bool = False  # whether its logits are products of two tensors that were computed, not learned
    picked: str = ""  # by what some of those were picked out of each row: which keys they are is not known then


class Partial(NamedTuple):
    """Values scaled by weights, not summed yet."""

    dims: Dims
    weights: Weights
    rows: tuple[Piece, ...]  # axes of the weights along which the values are repeated: those of the queries


class Product(NamedTuple):
    """The output of attention on its way to the model's width."""

    dims: Dims
    call: Any  # what the watcher made of the product
    apart: tuple[Piece, ...] = ()  # an axis whose parts were taken one by one


class Trace(NamedTuple):
    """What a model did with the output of attention that tells its heads."""

    heads: tuple[Piece, ...] | None = None  # the axes that were laid next to the values' dim, or averaged
    alone: bool = False  # the values' dim went into a learned matrix, with no other axis next to it
    cut: bool = False  # an axis was cut in two, and neither part was laid there
    dims: Dims = ()  # of the output, in the end


class Factors(NamedTuple):
    """A product of two tensors, of which one has axes that are known."""

    other: Tensor
    summed: tuple[Piece, ...]
    rows: tuple[Piece, ...]
    made: Dims | None  # of what it gives; None where nobody is to follow that
    values: Dims | None  # of the other; None where something is added to the product

    def multiplied(self, out: Tensor) -> Multiplied | None:
        if self.values is None or self.made is None:
            return None
        return Multiplied(self.other, self.values, out, self.made)


class Multiplied(NamedTuple):
    """Values, and their product with weights."""

    values: Tensor
    dims: Dims
    out: Tensor
    made: Dims


class Scores(NamedTuple):
    """Products of two tensors that were computed, such as queries and keys, or what became of them."""

    dims: Dims = ()
    picked: str = ""
    of_items: bool = False  # whether each item, or head, has a product of its own: learned layers have none

    def follow(self, tracker: Tracker, packet: Any, at: int, args: Any, kwargs: Any, out: Any) -> None:
        if picks(packet) and at == 0:
            out = out[0] if isinstance(out, (tuple, list)) else out
            if out.shape[-1] > 1:
                tracker.note(out, self._replace(picked=name_of(packet)))
        elif not isinstance(out, Tensor) or tracker.of(out) is not None:
            return
        elif self.of_items and (packet in _CURVES or _hides_below_0(packet, at, args)):
            tracker.note(out, Curved(name_of(packet).rstrip("_")))
        elif packet in VIEWS or packet in _SCALES:
            tracker.note(out, self)


class Curved(NamedTuple):
    """What a function other than a softmax made of scores: weights of attention, if values are multiplied by them."""

    by: str
    dims: Dims = ()

    def follow(self, tracker: Tracker, packet: Any, at: int, args: Any, kwargs: Any, out: Any) -> None:
        if packet in BATCHED:
            shift = shift_of(packet)
            if at - shift in (0, 1) and not tracker.learned(args[2 * shift + 1 - at]):
                tracker.suspected(self, lambda: False, f"its weights are made by {self.by}, not by a softmax")
            return
        made = out[0] if packet is aten.native_dropout else out
        follows = packet in VIEWS or packet in _SCALES or packet in _CURVES or packet is aten.native_dropout
        if follows and isinstance(made, Tensor) and tracker.of(made) is None:
            tracker.note(made, self)


def _hides_below_0(packet: Any, at: int, args: Any) -> bool:
    """Whether numbers are cut off at 0, as those of sparsemax are."""
    return packet in (aten.clamp, aten.clamp_) and at == 0 and len(args) == 2 and args[1] == 0


def softmax_weights(out: Tensor, softmax: Softmax) -> Weights:
    dims = _axes.of_shape(out.shape)
    return Weights(dims, softmax, out.detach(), dims)
