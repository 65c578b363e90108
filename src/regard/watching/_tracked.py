"""What is known of tensors on the way from a softmax to the model's width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from regard.watching import _axes
from regard.watching._axes import Dims, Piece

if TYPE_CHECKING:
    from regard.watching._written import Tracker


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


class Share(NamedTuple):
    """How much an attention over some keys has in one over more of them, by the log-sum-exp of its logits."""

    dims: Dims = ()

    def follow(self, tracker: Tracker, packet: Any, at: int, args: Any, kwargs: Any, out: Any) -> None:
        if isinstance(out, Tensor) and out.numel() == args[at].numel() and tracker.of(out) is None:
            tracker.note(out, self)


class Trace(NamedTuple):
    """What a model did with the output of attention that tells its heads."""

    heads: tuple[Piece, ...] | None = None  # the axes that were laid next to the values' dim, or averaged
    alone: bool = False  # the values' dim went into a learned matrix, with no other axis next to it
    cut: bool = False  # an axis was cut in two, and neither part was laid there
    dims: Dims = ()  # of the output, in the end
    share: bool = False  # whether it was multiplied by one (see above): its weights are not the ones that count


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


def softmax_weights(out: Tensor, softmax: Softmax) -> Weights:
    dims = _axes.of_shape(out.shape)
    return Weights(dims, softmax, out.detach(), dims)


def keys_of(known: Weights) -> tuple[Piece, ...]:
    """The softmax's own axis, as it is in the final weights: a sink may have been cut off."""
    axis = known.softmax.axis
    return next((dim for dim in known.final_dims if any(piece.axis == axis for piece in dim)), ())
