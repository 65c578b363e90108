"""What each of torch's views does to the dims of a tensor whose axes are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.watching import _axes
from regard.watching._axes import OTHER, Dims

aten = torch.ops.aten


def _same(dims: Dims, args: Any, kwargs: Any, out: Tensor) -> Dims | None:
    return dims if out.dim() == len(dims) else None


def _view(dims: Dims, args: Any, kwargs: Any, out: Tensor) -> Dims | None:
    return _axes.viewed(dims, tuple(out.shape))


def _permute(dims: Dims, args: Any, kwargs: Any, out: Tensor) -> Dims | None:
    order = args[1]
    return tuple(dims[n] for n in order)


def _transpose(dims: Dims, args: Any, kwargs: Any, out: Tensor) -> Dims | None:
    found = list(dims)
    a, b = args[1], args[2]
    found[a], found[b] = found[b], found[a]
    return tuple(found)


def _expand(dims: Dims, args: Any, kwargs: Any, out: Tensor) -> Dims | None:
    ours = ((),) * (out.dim() - len(dims)) + dims
    return tuple(mine or _axes.whole(OTHER, size) for mine, size in zip(ours, out.shape, strict=True))


def _slice(dims: Dims, args: Any, kwargs: Any, out: Tensor) -> Dims | None:
    axis = (args[1] if len(args) > 1 else 0) % len(dims)
    if out.shape[axis] == args[0].shape[axis]:
        return dims
    pieces = dims[axis]
    if len(pieces) != 1 or pieces[0].outer != 1 or pieces[0].inner != 1:
        return None
    return (*dims[:axis], _axes.whole(pieces[0].axis, out.shape[axis]), *dims[axis + 1 :])


# Operators whose output is the input in another shape, by what they do to the dims.
VIEWS: dict[Any, Callable[[Dims, Any, Any, Tensor], Dims | None]] = {
    **dict.fromkeys((aten.view, aten._unsafe_view, aten._reshape_alias, aten.reshape), _view),
    **dict.fromkeys((aten.squeeze, aten.unsqueeze, aten.flatten, aten.unflatten), _view),
    **dict.fromkeys((aten.clone, aten.contiguous, aten._to_copy, aten.alias, aten.detach, aten.lift_fresh), _same),
    aten.permute: _permute,
    aten.transpose: _transpose,
    aten.t: lambda dims, args, kwargs, out: dims[::-1],
    aten.expand: _expand,
    aten.slice: _slice,
}
