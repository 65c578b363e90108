"""What was read of tensors, for as long as a pass of the model, they live and hold the same: to read one on a GPU waits
for the device."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

_passes = itertools.count(1)
_pass = 0


def read_anew() -> None:
    """A pass begins. torch does not count who writes into a tensor past it (through NumPy, ``.data``, a kernel of one's
    own), as loops do that fill the same mask for each batch."""
    global _pass
    _pass = next(_passes)


class Read:
    """Answers about tensors, each worked out once. A view finds those about the same part of the same tensor."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], tuple[int, int], dict[Hashable, Any]]] = {}

    def once(self, tensor: Tensor, question: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, which the contents of the tensor alone decide."""
        if type(tensor) is not Tensor or tensor.is_inference():  # torch does not count who writes into those
            return make()
        whole = tensor if tensor._base is None else tensor._base
        at, version = id(whole), (tensor._version, _pass)
        found = self._found.get(at)
        if found is None or found[0]() is not whole or found[1] != version:
            found = self._found[at] = weakref.ref(whole, lambda gone: self._forget(at, gone)), version, {}
        answers, part = found[2], (question, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        if part not in answers:
            answers[part] = make()
        return answers[part]

    def _forget(self, at: int, gone: object) -> None:
        found = self._found.get(at)
        if found is not None and found[0] is gone:
            self._found.pop(at, None)
