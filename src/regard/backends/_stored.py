"""One new token of each item over what a cache holds, by our kernels: nothing is gathered, widened or merged first."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from regard._triton import stored_decoding as kernels
from regard._triton.stored_decoding import Stored
from regard.backends._base import has_triton, no_autocast

__all__ = ["Stored", "can_decode", "decode"]

_dispatch_modes = torch._C._len_torch_dispatch_stack


def can_decode(query: Tensor, stored: Stored) -> bool:
    """Whether the kernels take it, and nobody wants to see the calls that would do it instead (``regard.watch``)."""
    if not (query.is_cuda or os.environ.get("TRITON_INTERPRET") == "1") or not has_triton() or _dispatch_modes():
        return False
    return not kernels.refuse(query, stored)


def decode(query: Tensor, stored: Stored, scale: float | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """[B, H, 1, value dim]; the arguments have been checked."""
    with no_autocast(query.device.type):
        scale = query.shape[3] ** -0.5 if scale is None else float(scale)
        return kernels.decode(query, stored, scale, softcap, sinks)
