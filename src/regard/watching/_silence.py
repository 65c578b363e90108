"""Calls inside a call that is already recorded or being observed are not recorded again."""

from __future__ import annotations

import threading
from typing import Any

import torch

_here = threading.local()


def silent() -> bool:
    return getattr(_here, "depth", 0) > 0


class silence:  # entered at every call that is edited, by a class, which takes less time than a generator
    __slots__ = ()

    def __enter__(self) -> None:
        _here.depth = getattr(_here, "depth", 0) + 1

    def __exit__(self, *raised: Any) -> bool | None:
        _here.depth -= 1
        return None


class looking(silence):
    """Silence in which tensors are looked at, whatever mode the model runs in: what is made of them can be kept, and
    has no gradients."""

    __slots__ = ("_derives", "_inference")

    def __enter__(self) -> None:
        super().__enter__()
        self._inference = torch._C._InferenceMode(False)
        self._inference.__enter__()  # type: ignore[no-untyped-call]
        self._derives = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *raised: Any) -> bool | None:
        torch._C._set_grad_enabled(self._derives)
        self._inference.__exit__(None, None, None)
        return super().__exit__(*raised)
