"""Some of the heads of a tensor, without waiting for a device."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


@functools.lru_cache(256)
def index_of(numbers: tuple[int, ...], device: torch.device) -> slice | Tensor:
    """Evenly spaced heads are a view of the tensor, others a copy."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    if numbers and step > 0 and numbers == tuple(range(numbers[0], numbers[-1] + 1, step)):
        return slice(numbers[0], numbers[-1] + 1, step)
    return kept(list(numbers), device)


def kept(numbers: Any, device: torch.device) -> Tensor:
    """A small tensor that outlives its call: to move it for every call would wait for the device each time."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, device=device)
