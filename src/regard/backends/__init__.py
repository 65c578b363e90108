"""The ways to compute attention, by name."""

from __future__ import annotations

from regard.backends._base import Backend
from regard.backends.blockwise import Blockwise
from regard.backends.eager import Eager
from regard.backends.flex import Flex
from regard.backends.reference import Reference
from regard.backends.sdpa import Sdpa

ALL: dict[str, Backend] = {backend.name: backend for backend in (Sdpa(), Flex(), Blockwise(), Eager(), Reference())}


def available(device: str = "cpu") -> list[str]:
    """Names of the backends that can run some call on a device."""
    only = {"reference": "cpu", "flex": "cuda"}
    return [name for name in ALL if only.get(name, device) == device]


__all__ = ["ALL", "Backend", "available"]
