"""Functions that are no part of attention while nothing is known of any tensor: run out of everybody's sight.

Most of what a model calls is neither a softmax nor a product of two tensors that were computed. To show each operator
of such a function to an editor takes longer than to run it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional
from torch import nn

# Views, and functions that give one number for each number, or for each row of a learned layer.
_NAMES = (
    "view", "reshape", "transpose", "permute", "flatten", "unflatten", "unsqueeze", "squeeze", "expand", "unbind",
    "chunk", "split", "contiguous", "t", "movedim", "swapaxes", "narrow", "select", "__getitem__", "__iter__",
    "is_contiguous", "add", "__add__", "__radd__", "add_", "__iadd__", "sub", "__sub__",
    "__rsub__", "mul", "__mul__", "__rmul__", "mul_", "neg", "__neg__", "cos", "sin", "rsqrt", "sqrt", "abs", "tanh",
    "sigmoid", "relu", "relu_", "gelu", "silu", "layer_norm", "rms_norm", "group_norm", "embedding", "cat", "stack",
    "float", "to", "type_as", "clone", "detach", "arange", "full", "zeros", "ones", "empty", "zeros_like", "ones_like",
    "mean", "dropout", "_set_grad_enabled",
)  # fmt: skip
_OWNERS = (torch.Tensor, torch, nn.functional, torch._C._nn, torch._C)
# What a tensor is, which runs no operator.
ASKS = frozenset(getattr(torch.Tensor, name).__get__ for name in ("shape", "device", "dtype", "requires_grad")) | {
    getattr(torch.Tensor, name) for name in ("size", "dim", "stride", "numel")
}
PLAIN = (
    ASKS
    | frozenset(found for name in _NAMES for owner in _OWNERS if callable(found := getattr(owner, name, None)))
    | {torch.Tensor.is_nested.__get__}  # type: ignore[attr-defined]
)

# Functions that are plain where one of their arguments is a parameter, or a number, and was not computed.
PLAIN_WITH: dict[Any, tuple[int, tuple[type, ...]]] = {
    torch._C._nn.linear: (1, (nn.Parameter,)),
    torch.addmm: (2, (nn.Parameter,)),
    **dict.fromkeys((torch.pow, torch.Tensor.pow, torch.Tensor.__pow__), (1, (int, float))),
}


# Those that write into no tensor, and draw no numbers: they run unseen wherever nothing is known of their arguments.
APART = frozenset(
    each
    for each in (*PLAIN, *PLAIN_WITH)
    if (name := getattr(each, "__name__", "")) != "dropout"
    and not (name.startswith("__i") and name != "__iter__")
    and (not name.endswith("_") or name.endswith("__"))
)


def is_plain(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a function runs out of everybody's sight while nothing is known."""
    if func in PLAIN:
        return True
    found = PLAIN_WITH.get(func)
    return found is not None and len(args) > found[0] and type(args[found[0]]) in found[1]
