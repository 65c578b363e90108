"""Remembering what was worked out about a mask, for as long as its tensors have not changed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from regard.masks._arguments import plain

Answer = TypeVar("Answer")

_ENTRIES = 16
_BYTES = 64 * 2**20
_SHARED_STRUCTURES = 256
_SHARED_BYTES = 8 * 2**20
_MISSING: Any = object()
_lock = threading.Lock()
# Masks without tensors that are built anew for every call find what an equal one has already worked out.
_shared: dict[str, Memo] = {}


class Memo:
    """A bounded dictionary that several threads may use; what is too large is not kept."""

    def __init__(self, largest: int = _BYTES) -> None:
        self._largest = largest
        self.found: dict[Any, Any] = {}

    def recall(self, key: Any, make: Callable[[], Answer]) -> Answer:
        value = self.found.get(key, _MISSING)
        if value is not _MISSING:
            return value  # type: ignore[no-any-return]
        value = make()
        if _lasting(value) and getattr(value, "nbytes", 0) <= self._largest:
            with _lock:
                self.found[key] = value
                while len(self.found) > _ENTRIES:
                    del self.found[next(iter(self.found))]
        return value


def _lasting(value: object) -> bool:
    """Whether a value means the same outside the mode (inference, vmap, fake tensors) in which it was made."""
    if not isinstance(value, Tensor):
        return True
    wrapped = type(value) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(value)
    return not wrapped and not value.is_inference()


def shared_memo(code: str) -> Memo:
    """The one memo of all masks of this structure; only for masks without tensors."""
    with _lock:
        memo = _shared.setdefault(code, Memo(_SHARED_BYTES))
        while len(_shared) > _SHARED_STRUCTURES:
            del _shared[next(iter(_shared))]
    return memo


def versions(tensors: tuple[Tensor, ...]) -> tuple[int, ...] | None:
    """A number for each tensor that grows when it is changed in place; None where torch keeps none."""
    if any([tensor.is_inference() or not plain(tensor) for tensor in tensors]):
        return None
    return tuple([tensor._version for tensor in tensors])
