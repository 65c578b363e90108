"""Launches kernels with less around them than ``kernel[grid](...)``: from the second like call on, nothing is bound or
specialised again. At short lengths that takes longer than the kernels themselves."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST = 4096
_WIDE = 1 << 31
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


class Launched(NamedTuple):
    """A launch as it was: all arguments in order, compile-time ones included."""

    compiled: Any
    grid: tuple[int, int, int]
    args: tuple[Any, ...]


def run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: Mapping[str, Any]) -> Launched | None:
    """``kernel[grid](*args, **constants)``; all compile-time arguments, and only these, are among ``constants``.

    Nothing comes back from the interpreter, which compiles nothing.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1  # type: ignore[no-untyped-call]
    key = (id(kernel), device, *constants.values(), *map(_kind, args))
    x, y, z = (*grid, 1, 1)[:3]
    found = _compiled.get(key)
    if found is None:
        made = kernel[grid](*args, **constants)
        if made is None:
            return None
        if len(_compiled) >= _MOST:
            _compiled.clear()
        found = _compiled[key] = made, tuple(constants[name] for name in kernel.arg_names[len(args) :])
        return Launched(made, (x, y, z), (*args, *found[1]))
    made, rest = found
    args = (*args, *rest)
    made[x, y, z](*args)
    return Launched(made, (x, y, z), args)


def _kind(arg: Any) -> Any:
    """All that the compiled code of a kernel takes for granted of an argument."""
    of = type(arg)
    if of is int:
        # whether it is 1, whether 16 divides it, whether 32 bits hold it
        return arg & 15 if -_WIDE < arg < _WIDE and arg != 1 else (arg == 1, arg & 15)
    if of is float:
        return None
    if of is Tensor or isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() & 15
    return arg.base.dtype  # a descriptor; its blocks are among the constants


def on(device: torch.device) -> AbstractContextManager[object]:
    """A block in which kernels run on the device of their tensors."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
