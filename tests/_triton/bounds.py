"""Holds interpreted kernels to the memory they were given.

On a GPU, and on the interpreter, an address beyond a tensor's end mostly finds some other tensor's memory, and the
result is right nearly always. Here every address that is read or written is looked up among the arguments' memories.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime import interpreter


class Held:
    """Stands for the interpreter's access to memory, and checks it."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.starts = self.stops = np.empty(0, np.uint64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def allow(self, arguments: tuple[Any, ...]) -> None:
        spans = set()
        for argument in arguments:
            tensor = getattr(argument, "base", argument)  # a descriptor has the tensor inside
            if hasattr(tensor, "untyped_storage"):
                storage = tensor.untyped_storage()
                spans.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        self.starts, self.stops = np.array(sorted(spans), np.uint64).reshape(-1, 2).T

    def check(self, done: str, addresses: Any, mask: Any, size: int) -> None:
        addresses, mask = np.broadcast_arrays(addresses, mask)
        used = addresses[mask.astype(bool)].astype(np.uint64).ravel()
        if not used.size:
            return
        if not self.starts.size:
            raise IndexError(f"a kernel without memory of its own {done} at {used[:3]}")
        span = np.maximum(np.searchsorted(self.starts, used, side="right"), 1) - 1
        outside = (used < self.starts[span]) | (used + np.uint64(size) > self.stops[span])
        if outside.any():
            raise IndexError(f"a kernel {done} {outside.sum()} of {used.size} numbers outside of all its arguments")

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self.check("reads", addresses, mask, np.dtype(dtype).itemsize)
        return self._memory.load(addresses, mask, other, dtype)

    def store(self, addresses: Any, value: Any, mask: Any) -> Any:
        self.check("writes", addresses, mask, value.dtype.itemsize)
        return self._memory.store(addresses, value, mask)

    def atomic_rmw(self, operation: Any, addresses: Any, value: Any, mask: Any, order: Any) -> Any:
        self.check("adds to", addresses, mask, value.dtype.itemsize)
        return self._memory.atomic_rmw(operation, addresses, value, mask, order)


def hold(patch: Any) -> None:
    """For as long as ``patch``, pytest's monkeypatch, lasts."""
    held = Held(interpreter._interpreter)
    given = interpreter.GridExecutor._init_args_hst

    def copied(self: Any, args: Any, kwargs: Any) -> Any:
        found = given(self, args, kwargs)
        held.allow((*found[0], *found[1].values()))
        return found

    patch.setattr(interpreter, "_interpreter", held)
    patch.setattr(interpreter.GridExecutor, "_init_args_hst", copied)
