"""Products with weight matrices while text is generated on a CPU.

Every new token reads all weights for a few rows. PyTorch gives these products to MKL, which uses one thread for them
on AMD's processors; oneDNN takes 0.3 to 1.0 of its time there (`benchmarks/generation.py --only products`). Only
generation uses oneDNN: training and the forward pass do not change, and layers stay `torch.nn.Linear`.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from regard.api import is_plain

Each = TypeVar("Each")
Three = tuple[Each, Each, Each]

# Numbers of a matrix, for one row and for more: below, what oneDNN needs to find its kernel (15 µs) is not won back.
SMALLEST_ALONE, SMALLEST = 1 << 19, 1 << 18


class _Here(threading.local):
    generating = False


_here = _Here()


@contextmanager
def generating() -> Iterator[None]:
    """Inside, in this thread, `product` takes oneDNN's products where they are the faster ones."""
    before, _here.generating = _here.generating, _is_faster()
    try:
        yield
    finally:
        _here.generating = before


def product(function: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """`function(*given)`, where the function is a layer or `F.linear`.

    The layer itself is called: its hooks run, and whatever took its place (a quantised layer, say) does as it does.
    """
    if not _here.generating or torch.compiler.is_compiling() or _is_compiled(function):
        return function(*given)
    weight = given[1] if function is F.linear else getattr(function, "weight", None)
    if not isinstance(weight, Tensor) or weight.numel() < SMALLEST:
        return function(*given)
    with _OneDnn():
        return function(*given)


def three_products(layers: Three[Callable[..., Tensor]], given: Three[Tensor]) -> Three[Tensor]:
    """`product` of the layers of query, key and value: a token outside of generation asks once for the three."""
    (q, k, v), (query, key, value) = layers, given
    if _here.generating:
        return product(q, query), product(k, key), product(v, value)
    return q(query), k(key), v(value)


def _is_compiled(function: Any) -> bool:
    """Whether a layer, or a part of it, was compiled: `_OneDnn` would be compiled with it, for each layer again."""
    return isinstance(function, nn.Module) and any(part._compiled_call_impl for part in function.modules())


class _OneDnn(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.compiler.is_compiling() and func is F.linear and not kwargs and _fits(*args):
            x, weight, *bias = args
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias[0] if bias else None, "none", [], "")
        return func(*args, **(kwargs or {}))


def _fits(x: Any, weight: Any, bias: Any = None) -> bool:
    """Whether oneDNN, which checks nothing, computes the same: of plain float32 tensors on a CPU, whose sizes fit and
    which no derivative is asked of. The matrix is large enough."""
    if type(x) is not Tensor or not {type(weight), type(bias)} <= {Tensor, nn.Parameter, type(None)}:
        return False
    if torch.is_grad_enabled() or not torch._C._get_mkldnn_enabled() or not is_plain():
        return False
    given = (x, weight) if bias is None else (x, weight, bias)
    if any(each.dtype != torch.float32 or not each.is_cpu or each.layout != torch.strided for each in given):
        return False
    if weight.dim() != 2 or x.shape[-1:] != weight.shape[1:] or (bias is not None and bias.shape != weight.shape[:1]):
        return False
    if not weight.is_contiguous() or not (bias is None or bias.is_contiguous()):  # it reads a bias as if it were
        return False
    alone = x.numel() == x.shape[-1]
    return bool(weight.numel() >= (SMALLEST_ALONE if alone else SMALLEST) and x.numel())


@cache
def _is_faster() -> bool:
    """On AMD's processors; on others nobody has measured it."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # type: ignore[no-untyped-call]
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "AuthenticAMD" in platform.processor()  # Windows says it here
