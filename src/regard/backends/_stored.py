"""One new token of each item over what a cache holds, by our kernels: nothing is gathered, widened or merged first."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import torch

from regard.backends._base import has_triton, no_autocast

if TYPE_CHECKING:
    from torch import Tensor

_dispatch_modes = torch._C._len_torch_dispatch_stack


class Stored(NamedTuple):
    """What a cache holds: see ``regard._triton.stored_decoding.Stored``, whose fields these are."""

    key: tuple[Tensor, ...]
    value: tuple[Tensor, ...]
    lengths: Tensor
    longest: int
    dtype: torch.dtype
    table: Tensor | None = None
    block_size: int = 1


def can_decode(query: Tensor, stored: Stored) -> bool:
    """Whether the kernels take it, and nobody wants to see the calls that would do it instead (``regard.watch``)."""
    if not (query.is_cuda or os.environ.get("TRITON_INTERPRET") == "1") or not has_triton() or _dispatch_modes():
        return False
    from regard._triton import stored_decoding as kernels

    return not kernels.refuse(query, kernels.Stored(*stored))


def decode(query: Tensor, stored: Stored, scale: float | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """[B, H, 1, value dim]; the arguments have been checked."""
    from regard._triton import stored_decoding as kernels

    with no_autocast(query.device.type):
        scale = query.shape[3] ** -0.5 if scale is None else float(scale)
        return kernels.decode(query, kernels.Stored(*stored), scale, softcap, sinks)
