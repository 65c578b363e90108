"""The ways in which code takes a softmax, as operators: the softmax itself, its logarithm, and exponentials divided."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.watching import _axes
from regard.watching._divided import ELEMENTWISE, SUMS, Denominator, Raw, Shift, Source, one_axis
from regard.watching._effects import is_filled, name_of
from regard.watching._scores import Scores, bends, curved
from regard.watching._tracked import Share, Softmax, Weights, softmax_weights
from regard.watching._written import Tracker

aten = torch.ops.aten
_COPIES = frozenset((aten.detach, aten.clone, aten.alias, aten._to_copy))
_MEETS = frozenset((aten.logaddexp, aten.logaddexp2))
_HIDES = frozenset((aten.where, aten.masked_fill, aten.masked_fill_, *_COPIES))


class LogWeights(NamedTuple):
    """The logarithm of a softmax's output."""

    axis: int
    lse: Tensor
    changed: str = ""
    dims: tuple[Any, ...] = ()

    def follow(self, tracker: Tracker, packet: Any, at: int, args: Any, kwargs: Any, out: Any) -> None:
        if not isinstance(out, Tensor) or out.dim() < 2 or not out.is_floating_point() or tracker.of(out) is not None:
            return
        changed = self.changed or f"changed by {name_of(packet)} before their exponential is taken,"
        tracker.note(out, self if packet in _COPIES else self._replace(changed=changed))


class Largest(NamedTuple):
    """The largest logits along an axis, or their log-sum-exp, with the axis kept."""

    axis: int
    numbers: Tensor
    is_lse: bool
    dims: tuple[Any, ...] = ()

    def follow(self, tracker: Tracker, packet: Any, at: int, args: Any, kwargs: Any, out: Any) -> None:
        """Rows that see nothing may have another number."""
        if not isinstance(out, Tensor) or out.shape != args[at].shape or tracker.of(out) is not None:
            return
        if packet in (aten.exp, aten.sigmoid) and self.is_lse:
            tracker.note(out, Share())
        elif packet in _MEETS or packet in ELEMENTWISE or is_filled(packet) or packet in _COPIES:
            numbers = out.detach() if out.dim() == self.numbers.dim() else out.detach().unsqueeze(self.axis)
            tracker.note(out, self._replace(numbers=numbers))


class Shifted(NamedTuple):
    """Logits less the largest, or less their log-sum-exp; it may be that of others, computed once more."""

    by: Largest
    of_scores: bool = False
    dims: tuple[Any, ...] = ()

    def follow(self, tracker: Tracker, packet: Any, at: int, args: Any, kwargs: Any, out: Any) -> None:
        """What is hidden may have another number."""
        if not isinstance(out, Tensor) or out.shape != args[at].shape:
            return
        if packet in _HIDES:
            tracker.note(out, self)
        elif self.of_scores and out.dim() > 2 and bends(packet, at, args) and tracker.of(out) is None:
            tracker.note(out, curved(out, packet))


class LessOne(NamedTuple):
    """Exponentials less 1, to which the model may add it again."""

    source: Source
    dims: tuple[Any, ...] = ()

    def follow(self, tracker: Tracker, packet: Any, at: int, args: Any, kwargs: Any, out: Any) -> None:
        if packet in (aten.add, aten.add_) and _number(args[1 - at]) == 1 and kwargs.get("alpha", 1) == 1:
            _exponentials(tracker, self.source, out)


def _softmax(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> bool:
    axis = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    tracker.softmax(args[0], axis, out)
    return True


def _safe_softmax(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> bool:
    axis = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    tracker.softmax(args[0], axis, out, by_function=True)
    return True


def _masked_softmax(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> bool:
    axis = args[2] if len(args) > 2 else kwargs.get("dim")
    tracker.softmax(args[0], -1 if axis is None else axis, out)
    return True


def _log_softmax(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> None:
    given = args[0]
    if given.dim() and given.numel():
        axis = args[1] % given.dim()
        lse = given.detach().amax(axis).to(out.dtype) - out.detach().amax(axis)
        tracker.note(out, LogWeights(axis, lse))


def _largest(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> None:
    _reduced(tracker, args, kwargs, out[0] if isinstance(out, (tuple, list)) else out, is_lse=False)


def _logsumexp(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> None:
    _reduced(tracker, args, kwargs, out, is_lse=True)


def _reduced(tracker: Tracker, args: Any, kwargs: Any, out: Tensor, is_lse: bool) -> None:
    given, axes = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
    axes = [axes] if isinstance(axes, int) else list(axes or ())
    if len(axes) == 1 and given.dim() >= 2 and given.is_floating_point() and out.numel():
        axis = axes[0] % given.dim()
        numbers = out.detach() if out.dim() == given.dim() else out.detach().unsqueeze(axis)
        tracker.note(out, Largest(axis, numbers, is_lse))


def _unsqueezed(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> None:
    known = tracker.of(args[0])
    if isinstance(known, Largest) and out.shape == known.numbers.shape:
        tracker.note(out, known)


def _less(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> None:
    known = tracker.of(args[1])
    if isinstance(tracker.of(args[0]), Largest):
        return
    if isinstance(known, Largest) and args[1].dim() == out.dim():
        rows = (*out.shape[: known.axis], 1, *out.shape[known.axis + 1 :])
        if tuple(args[1].shape) == rows and args[0].shape == out.shape:
            tracker.note(out, Shifted(known, isinstance(tracker.of(args[0]), Scores)))


def _exp(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> None:
    known = tracker.of(args[0])
    if isinstance(known, LogWeights) and known.changed:
        softmax = Softmax(known.axis, tuple(out.shape), known.lse, False, [])
        tracker.note(out, Weights((), softmax, out.detach(), (), known.changed))
    elif isinstance(known, LogWeights):
        _note(tracker, out, known.axis, known.lse)
    elif isinstance(known, Shifted) and known.by.is_lse and _sums_to_1(out, known.by.axis):
        _note(tracker, out, known.by.axis, known.by.numbers.squeeze(known.by.axis))
    else:
        _power(tracker, args[0], 1.0, out)


def _sums_to_1(out: Tensor, axis: int) -> bool:
    """In every row that has a sum: one that sees nothing has none."""
    return not bool(((out.sum(axis, dtype=torch.float32) - 1).abs() > 0.01).any())


def _exp2(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> None:
    _power(tracker, args[0], math.log(2.0), out)


def _pow(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> None:
    if isinstance(args[1], Tensor) and args[1].dim() >= 2:
        base = _number(args[0])
        known = tracker.of(args[1])
        if base is not None and base > 0 and base != 1:
            _power(tracker, args[1], math.log(base), out)
        elif isinstance(known, Shifted) and known.of_scores:
            tracker.note(out, curved(out, aten.pow))  # a base for each head, say


def _expm1(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> None:
    source = _source(tracker, args[0], 1.0, out)
    if source is not None:
        tracker.note(out, LessOne(source))


def _number(given: Any) -> float | None:
    """A number, which may stand in a tensor."""
    if isinstance(given, Tensor):
        # one on a device is not waited for
        readable = given.numel() == 1 and given.device.type == "cpu" and not given.is_complex()
        return given.item() if readable else None
    return given if isinstance(given, (int, float)) else None


def _power(tracker: Tracker, given: Tensor, base: float, out: Tensor) -> None:
    """Exponentials, of which ``base`` times the exponents are the logits."""
    source = _source(tracker, given, base, out)
    if source is not None:
        _exponentials(tracker, source, out)


def _exponentials(tracker: Tracker, source: Source, out: Tensor) -> None:
    if source.numbers is None:
        source.numbers = out.detach()
    tracker.note(out, Raw(source.dims, source))


def _source(tracker: Tracker, given: Tensor, base: float, out: Tensor) -> Source | None:
    """What is known of the exponentials of some numbers; None where they cannot be logits."""
    known = tracker.of(given)
    if given.dim() < 2 or not (known is None or isinstance(known, (Shifted, Scores))):
        return None
    by = known.by if isinstance(known, Shifted) else None
    source = tracker.sources.get(id(given))
    if source is None or out is given or not source.is_of(given, base):
        shift = None if by is None else Shift(by.axis, by.numbers * base)
        of_scores = isinstance(known, Scores) or (isinstance(known, Shifted) and known.of_scores)
        source = tracker.sources[id(given)] = Source(given, None, shift, base, of_scores)
    return source


def _sum(packet: Any, tracker: Tracker, args: Any, kwargs: Any, out: Any) -> None:
    """Weights may be divided by a sum of theirs again: what masking left of them, or those of a softmax over queries,
    if they are of queries at all."""
    known = tracker.of(args[0])
    if isinstance(known, Weights) and known.dims:
        given = args[0]
        made = Raw(_axes.of_shape(given.shape), Source(given, None))
        axis = one_axis(packet, args, kwargs)
        if axis is not None and (
            known.softmax.of_scores or any(p.axis == known.softmax.axis for p in known.dims[axis])
        ):
            made.follow(tracker, packet, 0, args, kwargs, out)


def _divide(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> bool:
    sums, known = tracker.of(args[1]), tracker.of(args[0])
    if not isinstance(sums, Denominator) or not isinstance(known, Weights) or sums.source.given() is not args[0]:
        return False
    if not Raw(sums.source.dims, sums.source).divided(tracker, sums, args[1], out):
        return False
    made = tracker.of(out)
    tracker.note(
        out, made._replace(softmax=made.softmax._replace(users=known.softmax.users))
    )  # who reads these, reads those
    return True


def _scored(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> None:
    factors = [factor for factor in args if isinstance(factor, Tensor)]
    if not any(map(tracker.learned, factors)):
        tracker.note(out, Scores(of_items=out.dim() > 2 and not any(map(tracker.seems_learned, factors))))


def _sparse_softmax(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> None:
    softmax = Softmax(0, tuple(out.shape), torch.zeros(()), False, [])
    tracker.note(out, Weights((), softmax, torch.zeros(()), (), "a sparse tensor (torch.sparse.softmax)"))


def _note(tracker: Tracker, out: Tensor, axis: int, lse: Tensor) -> None:
    tracker.note(out, softmax_weights(out, Softmax(axis, tuple(out.shape), lse.detach(), False, [])))


# Each says, by True, that its output is weights of their own, whatever its inputs were.
EXPONENTIALS: dict[Any, Callable[[Tracker, Any, Any, Any], bool | None]] = {
    aten._softmax: _softmax,
    aten.softmax: _softmax,  # with ``out=`` alone; else torch takes it apart
    aten._safe_softmax: _safe_softmax,
    aten._masked_softmax: _masked_softmax,
    aten._log_softmax: _log_softmax,
    aten.amax: _largest,
    aten.max: _largest,
    aten.logsumexp: _logsumexp,
    aten.unsqueeze: _unsqueezed,
    aten.sub: _less,
    aten.sub_: _less,
    aten.exp: _exp,
    aten.exp_: _exp,
    aten.exp2: _exp2,
    aten.exp2_: _exp2,
    aten.expm1: _expm1,
    aten.expm1_: _expm1,
    aten.pow: _pow,
    **{packet: functools.partial(_sum, packet) for packet in SUMS},
    aten.div: _divide,
    aten.div_: _divide,
    aten._sparse_softmax: _sparse_softmax,
    **dict.fromkeys((aten.bmm, aten.mm, aten.baddbmm), _scored),
}

# Those that say by themselves that a softmax is taken.
SOFTMAXES = frozenset(
    (aten._softmax, aten.softmax, aten._safe_softmax, aten._masked_softmax, aten._log_softmax, aten._sparse_softmax)
)
