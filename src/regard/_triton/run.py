"""Launches kernels with less around them than ``kernel[grid](...)``: from the second like call on, nothing is bound or
specialised again. At short lengths that takes longer than the kernels themselves."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST = 4096
_WIDE = 1 << 31
_compiled: dict[tuple[Any, ...], Any] = {}


def run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: Mapping[str, Any]) -> None:
    """``kernel[grid](*args, **constants)``; all compile-time arguments, and only these, are among ``constants``."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1  # type: ignore[no-untyped-call]
    key = (id(kernel), device, *constants.values(), *map(_kind, args))
    found = _compiled.get(key)
    if found is None:
        made = kernel[grid](*args, **constants)
        if made is None:  # the interpreter
            return
        if len(_compiled) >= _MOST:
            _compiled.clear()
        _compiled[key] = made, tuple(constants[name] for name in kernel.arg_names[len(args) :])
        return
    made, rest = found
    made[(*grid, 1, 1)[:3]](*args, *rest)


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
