"""What the encodings refuse."""

from __future__ import annotations

from math import inf
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from regard._checks import check_count, check_number

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def even_size(name: str, value: Any) -> None:
    check_count(name, value, 2)
    if value % 2:
        raise ValueError(f"{name} must be even (entries are turned in pairs), got {value}")


def above(name: str, value: Any, least: float = 0.0) -> None:
    check_number(name, value, f"finite and above {least:g}", lambda value: least < value < inf)


def at_least_one(name: str, value: Any) -> None:
    above(name, value)
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def start(name: str, value: Any, batch: int | None = None) -> int | Tensor:
    """A first position: an int, or an integer tensor with one for each batch item."""
    if isinstance(value, Tensor):
        if value.dtype not in _INTEGERS:
            raise TypeError(f"{name} must hold integers, got {value.dtype}")
        if value.dim() > 1 or (value.dim() == 1 and batch is not None and value.shape[0] != batch):
            expected = "[batch]" if batch is None else f"[{batch}], one position for each batch item"
            raise ValueError(f"{name} must be an int or a tensor {expected}; got shape {list(value.shape)}")
        return value
    if isinstance(value, bool) or not isinstance(value, (Integral, torch.SymInt)):
        raise TypeError(f"{name} must be an int or an integer tensor [batch], got {value!r} ({type(value).__name__})")
    return value  # type: ignore[return-value]  # an int, or a symbolic one


def tensor(name: str, x: Any, layout: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor {layout}, got {type(x).__name__}")
    if x.dim() != layout.count(",") + 1:
        raise ValueError(f"{name} must be {layout}, got shape {list(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be of a floating dtype, got {x.dtype}")
