"""Functions that are no part of attention while nothing is known of any tensor: run out of everybody's sight.

Most of what a model calls is neither a softmax nor a product of two tensors that were computed. To show each operator
of such a function to an editor takes longer than to run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional
from torch import nn

from regard.watching._follower import Follower
from regard.watching._operators import Listening

_pop, _push = torch._C._pop_torch_dispatch_stack, torch._C._push_on_torch_dispatch_stack  # in a fraction of the time
_LINEAR = torch._C._nn.linear
# Views, and functions that give one number for each number, or for each row of a learned layer.
_NAMES = (
    "view", "reshape", "transpose", "permute", "flatten", "unflatten", "unsqueeze", "squeeze", "expand", "unbind",
    "chunk", "split", "contiguous", "t", "movedim", "swapaxes", "narrow", "select", "__getitem__", "__iter__", "size",
    "dim", "numel", "stride", "is_contiguous", "add", "__add__", "__radd__", "add_", "__iadd__", "sub", "__sub__",
    "__rsub__", "mul", "__mul__", "__rmul__", "mul_", "neg", "__neg__", "cos", "sin", "rsqrt", "sqrt", "abs", "tanh",
    "sigmoid", "relu", "relu_", "gelu", "silu", "layer_norm", "rms_norm", "group_norm", "embedding", "cat", "stack",
    "float", "type_as", "clone", "detach", "arange", "full", "zeros", "ones", "empty", "zeros_like", "ones_like",
)  # fmt: skip
_OWNERS = (torch.Tensor, torch, nn.functional, torch._C._nn)
_PLAIN = frozenset(
    found for name in _NAMES for owner in _OWNERS if callable(found := getattr(owner, name, None))
) | frozenset(
    getattr(torch.Tensor, name).__get__ for name in ("shape", "device", "dtype", "is_nested", "requires_grad")
)


def is_plain(func: Any, args: tuple[Any, ...]) -> bool:
    return func in _PLAIN or (func is _LINEAR and len(args) > 1 and type(args[1]) is nn.Parameter)


def run_unseen(follower: Follower, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function that is plain; where others listen too, they are shown what they always are."""
    if torch._C._len_torch_dispatch_stack() != 1:
        return func(*args, **kwargs)
    mode = _pop(None)
    ours = isinstance(mode, Listening) and mode.watcher is follower
    if not ours:
        _push(mode)
    try:
        return func(*args, **kwargs)
    finally:
        if ours:
            _push(mode)
