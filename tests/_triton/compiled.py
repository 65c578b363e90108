"""Stands for the compiler where kernels are interpreted: what is launched again gets addresses, as from compiled code.

An address is looked up among the tensors that are alive, so that a kernel gets one of that memory, of the kind it had
when it was launched first.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from tests._triton.inside import launcher
from torch import Tensor


class Memory:
    """Tensors that were given to kernels or allocated, as long as they live."""

    def __init__(self, patch: Any) -> None:
        self.tensors: list[weakref.ref[Tensor]] = []
        for name in ("empty", "zeros"):
            patch.setattr(torch, name, self._noting(getattr(torch, name)))

    def _noting(self, make: Any) -> Any:
        def made(*args: Any, **more: Any) -> Tensor:
            tensor: Tensor = make(*args, **more)
            self.note(tensor)
            return tensor

        return made

    def note(self, *tensors: Tensor) -> None:
        self.tensors += map(weakref.ref, tensors)

    def at(self, address: int, dtype: torch.dtype) -> Tensor:
        for ref in reversed(self.tensors):
            tensor = ref()
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            beyond = address - storage.data_ptr()
            if 0 <= beyond < storage.nbytes():
                size = (storage.nbytes() - beyond) // dtype.itemsize
                return tensor.new_tensor([], dtype=dtype).set_(storage, beyond // dtype.itemsize, (size,))
        raise AssertionError(f"no memory is known at {address}")


class Compiled:
    """A kernel whose constants, and the kinds of whose arguments, are fixed."""

    function = packed_metadata = None

    def __init__(self, kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], memory: Memory) -> None:
        self.kernel, self.constants, self.memory = kernel, constants, memory
        self.kinds = [getattr(arg, "dtype", None) for arg in args]

    def run(self, x: int, y: int, z: int, stream: int, *more: Any) -> None:
        args = more[5 : 5 + len(self.kinds)]
        assert more[:5] == (None,) * 5 and stream == 7
        found = [arg if kind is None else self.memory.at(arg, kind) for arg, kind in zip(args, self.kinds, strict=True)]
        self.kernel[(x, y, z)](*found, **self.constants)


class Kernel:
    """What gives compiled code back when it is launched, as a kernel on a device does."""

    def __init__(self, kernel: Any, memory: Memory) -> None:
        self.kernel, self.memory = kernel, memory
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> Compiled:
            self.kernel[grid](*args, **constants)
            return Compiled(self.kernel, args, constants, self.memory)

        return launch


def compile_kernels(patch: Any) -> None:
    """For as long as ``patch``, pytest's monkeypatch, lasts."""
    memory = Memory(patch)
    make, launch = launcher.Launch.__init__, launcher.Launch.__call__

    def made(self: launcher.Launch, kernel: Any, *given: Any) -> None:
        make(self, Kernel(kernel, memory), *given)

    def launched(self: launcher.Launch, given: Any) -> None:
        memory.note(*(each for each in given if isinstance(each, Tensor)))
        launch(self, given)

    patch.setattr(launcher.Launch, "__init__", made)
    patch.setattr(launcher.Launch, "__call__", launched)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
