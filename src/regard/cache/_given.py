"""Checks of a cache's inputs, and what it remembers of the first tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._checks import autocasts
from regard.cache._lengths import Fresh
from regard.masks import Mask

Updated = tuple[Tensor, Tensor, "int | Tensor"]
Preview = tuple[Tensor, Tensor, "int | Tensor", "Mask | None", int]
_ATTENDED = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _ATTENDED}


class Asked(NamedTuple):
    """What `attend` is asked, under its own names."""

    fresh: Fresh
    query: Tensor
    key: Tensor
    value: Tensor | None = None
    mask: Mask | None = None
    bias: Any = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    value_dim: int | None = None
    backend: str = "auto"


class Made(NamedTuple):
    """What a cache was made for, known from the first tokens it is given."""

    heads: int
    key_dim: int
    value_dim: int | None
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, key: Tensor, value: Tensor | None) -> Made:
        return cls(key.shape[1], key.shape[3], None if value is None else value.shape[3], key.dtype, key.device)

    def fits(self, key: object, value: object, batch: int) -> bool:
        """Whether it is plain that new tokens are as the first were."""
        if type(key) is not Tensor or key.dim() != 4 or key.dtype != self.dtype or key.device != self.device:
            return False
        if value is None or self.value_dim is None:
            return value is None and self.value_dim is None and self._sizes(key) == (batch, self.heads, self.key_dim)
        if type(value) is not Tensor or value.dim() != 4 or value.dtype != self.dtype or value.device != self.device:
            return False
        items, heads, tokens, dim = key.shape
        return (items, heads, dim) == (batch, self.heads, self.key_dim) and value.shape == (
            items, heads, tokens, self.value_dim
        )  # fmt: skip

    @staticmethod
    def _sizes(given: Tensor) -> tuple[int, int, int]:
        return given.shape[0], given.shape[1], given.shape[3]

    def check(self, key: Tensor, value: Tensor | None) -> None:
        if (value is None) != (self.value_dim is None):
            what = "keys and values" if self.value_dim is not None else "one tensor per token, without values"
            raise ValueError(f"value is {'None' if value is None else 'given'}, but this cache holds {what}")
        for name, given, dim in (("key", key, self.key_dim), ("value", value, self.value_dim)):
            if given is None:
                continue
            if given.shape[1] != self.heads or given.shape[3] != dim:
                raise ValueError(
                    f"{name} is {list(given.shape)}, but this cache holds {self.heads} heads of dim {dim}; "
                    "each layer needs a cache of its own"
                )
            if given.dtype != self.dtype or given.device != self.device:
                raise TypeError(
                    f"{name} is {given.dtype} on {given.device}, but this cache holds {self.dtype} on {self.device}"
                )


def check_heads(name: str, given: object) -> None:
    wanted = f"{name} must be a floating-point tensor [batch, num_kv_heads, token, dim]"
    if not isinstance(given, Tensor):
        raise TypeError(f"{wanted}, got {type(given).__name__}")
    if given.dim() != 4:
        raise ValueError(f"{name} must be [batch, num_kv_heads, token, dim], got shape {list(given.shape)}")
    if not given.is_floating_point():
        raise TypeError(f"{wanted}, got {given.dtype}")


def check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in _ATTENDED:
        raise TypeError(f"dtype must be one of {', '.join(sorted(DTYPES))}, got {dtype!r}")


def fits(query: object, key: Tensor) -> bool:
    """Whether it is plain that queries can meet these keys: under autocast it takes more than this to see."""
    if not isinstance(query, Tensor) or query.dim() != 4 or query.dtype != key.dtype or query.device != key.device:
        return False
    if key.dtype not in _ATTENDED or (not torch.compiler.is_compiling() and autocasts(key.device.type)):
        return False
    batch, heads, _, dim = key.shape
    return query.shape[0] == batch and query.shape[3] == dim > 0 and heads > 0 and query.shape[1] % heads == 0
