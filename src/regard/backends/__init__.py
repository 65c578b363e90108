"""The ways to compute attention, by name."""

from __future__ import annotations

import torch

from regard.backends._base import Backend
from regard.backends.blockwise import Blockwise
from regard.backends.eager import Eager
from regard.backends.flex import Flex
from regard.backends.reference import Reference
from regard.backends.sdpa import Sdpa
from regard.backends.triton import Triton

_every: tuple[Backend, ...] = (Sdpa(), Flex(), Triton(), Blockwise(), Eager(), Reference())
ALL: dict[str, Backend] = {backend.name: backend for backend in _every}


def available(device: str | torch.device = "cpu") -> list[str]:
    """Names of the backends that can run some call on a device, such as `"cpu"`, `"cuda:1"` or a `torch.device`."""
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be a device's name or a torch.device, got {type(device).__name__}")
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f'device is {device!r}; expected a device of torch, such as "cpu" or "cuda"') from None
    only = {"reference": "cpu", "flex": "cuda", "triton": "cuda"}
    return [name for name in ALL if only.get(name, kind) == kind]


__all__ = ["ALL", "Backend", "available"]
