"""The ways in which code takes a softmax, as operators: the softmax itself, its logarithm, and exponentials divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.watching._written import Softmax, Tracker, softmax_weights

aten = torch.ops.aten


class LogWeights(NamedTuple):
    """The logarithm of a softmax's output."""

    axis: int
    lse: Tensor
    dims: tuple[Any, ...] = ()


class Largest(NamedTuple):
    """The largest logits along an axis, or their log-sum-exp, with the axis kept."""

    logits: int  # which tensor
    axis: int
    numbers: Tensor
    is_lse: bool
    dims: tuple[Any, ...] = ()


class Shifted(NamedTuple):
    """Logits less the largest, or less their log-sum-exp."""

    by: Largest
    dims: tuple[Any, ...] = ()


class Exponentials(NamedTuple):
    by: Largest | None
    dims: tuple[Any, ...] = ()


class Sums(NamedTuple):
    """Exponentials added along an axis, with the axis kept."""

    of: int
    axis: int
    by: Largest | None
    numbers: Tensor
    dims: tuple[Any, ...] = ()


def _softmax(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> None:
    axis = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    tracker.softmax(args[0], axis, out)


def _safe_softmax(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> None:
    axis = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    tracker.softmax(args[0], axis, out, by_function=True)


def _masked_softmax(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> None:
    axis = args[2] if len(args) > 2 else kwargs.get("dim")
    tracker.softmax(args[0], -1 if axis is None else axis, out)


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
        tracker.note(
            out,
            Largest(
                id(given), axis, out.detach() if out.dim() == given.dim() else out.detach().unsqueeze(axis), is_lse
            ),
        )


def _unsqueezed(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> None:
    known = tracker.of(args[0])
    if isinstance(known, (Largest, Sums)) and out.shape == known.numbers.shape:
        tracker.note(out, known)


def _less(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> None:
    known = tracker.of(args[1])
    if isinstance(known, Largest) and known.logits == id(args[0]) and args[1].dim() == args[0].dim():
        tracker.note(out, Shifted(known))


def _exp(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> None:
    known = tracker.of(args[0])
    if isinstance(known, LogWeights):
        _note(tracker, out, known.axis, known.lse)
    elif isinstance(known, Shifted) and known.by.is_lse:
        _note(tracker, out, known.by.axis, known.by.numbers.squeeze(known.by.axis))
    elif (known is None or isinstance(known, Shifted)) and args[0].dim() >= 2:
        tracker.note(out, Exponentials(known.by if isinstance(known, Shifted) else None))


def _sum(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> None:
    known, axes = tracker.of(args[0]), args[1] if len(args) > 1 else None
    if isinstance(known, Exponentials) and axes is not None and len(axes) == 1:
        axis = axes[0] % args[0].dim()
        kept = out.detach() if out.dim() == args[0].dim() else out.detach().unsqueeze(axis)
        tracker.note(out, Sums(id(args[0]), axis, known.by, kept))


def _divide(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> None:
    known = tracker.of(args[1])
    if isinstance(known, Sums) and known.of == id(args[0]) and args[1].dim() == args[0].dim():
        lse = known.numbers.log() + (0.0 if known.by is None else known.by.numbers)
        _note(tracker, out, known.axis, lse.squeeze(known.axis))


def _note(tracker: Tracker, out: Tensor, axis: int, lse: Tensor) -> None:
    tracker.note(out, softmax_weights(out, Softmax(axis, tuple(out.shape), lse.detach(), False, [])))


EXPONENTIALS: dict[Any, Callable[[Tracker, Any, Any, Any], None]] = {
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
    aten.exp: _exp,
    aten.sum: _sum,
    aten.div: _divide,
}

# Those that say by themselves that a softmax is taken.
SOFTMAXES = frozenset((aten._softmax, aten.softmax, aten._safe_softmax, aten._masked_softmax, aten._log_softmax))
