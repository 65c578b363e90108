"""Products of two tensors that were computed, such as queries and keys, before they become weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard.watching import _axes
from regard.watching._axes import Dims, Piece
from regard.watching._effects import name_of, picks
from regard.watching._products import PRODUCTS, factors
from regard.watching._views import VIEWS

if TYPE_CHECKING:
    from regard.watching._written import Tracker

aten = torch.ops.aten


class Scores(NamedTuple):
    """The products, or what became of them that are logits still."""

    dims: Dims = ()
    picked: str = ""
    of_items: bool = False  # whether each item, or head, has a product of its own, which no layer has

    def follow(self, tracker: Tracker, packet: Any, at: int, args: Any, kwargs: Any, out: Any) -> None:
        if picks(packet) and at == 0:
            out = out[0] if isinstance(out, (tuple, list)) else out
            if out.shape[-1] > 1:
                tracker.note(out, self._replace(picked=name_of(packet)))
        elif not isinstance(out, Tensor) or tracker.of(out) is not None:
            return
        elif self.of_items and bends(packet, at, args):
            tracker.note(out, curved(out, packet))
        elif packet in VIEWS or packet in _SCALES:
            tracker.note(out, self)


class Curved(NamedTuple):
    """What a function other than a softmax made of scores: weights of attention, if values are multiplied by them."""

    dims: Dims
    keys: tuple[Piece, ...]
    by: str

    def follow(self, tracker: Tracker, packet: Any, at: int, args: Any, kwargs: Any, out: Any) -> None:
        found = factors(self.dims, packet, at, args) if packet in PRODUCTS else None
        made = out[0] if packet is aten.native_dropout else out
        if found is not None and found.summed == self.keys and not tracker.seems_learned(found.other):
            tracker.suspected(self, lambda: False, f"its weights are made by {self.by}, not by a softmax")
            return
        follows = packet in _SCALES or packet in _CURVES or packet in _CUTS or packet is aten.native_dropout
        if follows and isinstance(made, Tensor) and made.shape == args[at].shape and tracker.of(made) is None:
            tracker.note(made, self)


def curved(out: Tensor, packet: Any) -> Curved:
    """Numbers whose last axis are the keys."""
    dims = _axes.of_shape(out.shape)
    return Curved(dims, dims[-1], name_of(packet).rstrip("_"))


def bends(packet: Any, at: int, args: Any) -> bool:
    """Whether an operator is such a function; one that cuts numbers off at 0 is, as sparsemax does it."""
    return packet in _CURVES or (packet in (aten.clamp, aten.clamp_) and at == 0 and len(args) == 2 and args[1] == 0)


# Operators after which logits are logits.
_SCALES = frozenset(
    (aten.mul, aten.mul_, aten.div, aten.div_, aten.add, aten.add_, aten.sub, aten.sub_, aten.tanh, aten.clamp,
     aten.masked_fill, aten.masked_fill_, aten.where)
)  # fmt: skip
# Functions of one number that attention takes instead of an exponential.
_CURVES = frozenset(
    (aten.sigmoid, aten.sigmoid_, aten.relu, aten.relu_, aten.softplus, aten.elu, aten.elu_, aten.gelu, aten.silu,
     aten.silu_, aten.leaky_relu, aten.hardsigmoid, aten.pow, aten.pow_, aten.clamp_min, aten.clamp_min_,
     aten.hardswish, aten.mish, aten.hardtanh)
)  # fmt: skip
# A causal mask of weights that need not sum to 1.
_CUTS = frozenset((aten.tril, aten.tril_, aten.triu, aten.triu_))
