"""Checks of what callers give to modules; errors use the callers' names and shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard._checks import autocasts, check_count, check_number

# What autocast casts to its own dtype; float64 and integers it leaves as they are.
_CAST = (torch.float32, torch.float16, torch.bfloat16)


def check_sizes(sizes: dict[str, int | None]) -> None:
    """Check the constructor's sizes by name; None means not given."""
    for name, size in sizes.items():
        if size is not None:
            check_count(name, size)


def check_heads(embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(f"embed_dim={embed_dim} is not a multiple of num_heads={num_heads}; give head_dim")


def check_probability(name: str, p: float) -> None:
    check_number(name, p, "in [0, 1]", lambda p: 0.0 <= p <= 1.0)


def check_positions(positions: object) -> None:
    if positions is not None and not callable(positions):
        raise TypeError(
            f"positions must be called as positions(query, key, query_offset=…) (see regard.nn.Positions), "
            f"got {type(positions).__name__}, which cannot be called"
        )


def check_tensors(named: dict[str, Tensor]) -> None:
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor [batch, token, dim], got {type(x).__name__}")
        if x.dim() != 3:
            raise ValueError(f"{name} must be [batch, token, dim], got shape {list(x.shape)}")


def check_dtypes(module: Any, query: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> None:
    """Refuse a dtype that the projection's matrix product would refuse."""
    named = zip(("query", "key", "value"), (query, key, value), module._input_projections, strict=True)
    for name, x, projection in named:
        if x is not None:
            check_dtype(name, x, projection)


def check_dtype(name: str, x: Tensor, projection: nn.Module) -> None:
    # a projection that was replaced (quantised, adapted) speaks for itself
    if type(projection) is not nn.Linear or x.dtype == projection.weight.dtype:
        return
    weight = projection.weight.dtype
    if autocasts(x.device.type) and x.dtype in _CAST and weight in _CAST:
        return
    given = f"{name} is {_name(x.dtype)} but the module's weights are {_name(weight)}; convert the input"
    raise TypeError(f"{given}, or the module with .to({x.dtype})" if x.is_floating_point() else f"{given} to {weight}")


def check_batch(query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.shape[0] == key.shape[0] == value.shape[0] and key.shape[1] == value.shape[1]:
        return
    given = f"got query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if query.shape[0] == key.shape[0] == value.shape[0]:
        raise ValueError(f"key and value must have the same number of tokens; {given}")
    raise ValueError(f"query, key and value must have one batch size (nothing is broadcast: use expand); {given}")


def check_cache(cache: Any, with_positions: bool) -> None:
    if isinstance(cache, type):
        raise TypeError(f"cache must be an object of a class, got the class {cache.__name__} itself: call it")
    # dict and set have an update too, which means something else
    able = callable(getattr(cache, "update", None)) and not isinstance(cache, (dict, set))
    missing = [] if able else ["update(key, value)"]
    # a property is not worked out, only looked for
    if with_positions and not hasattr(type(cache), "position") and not hasattr(cache, "position"):
        missing.append("position")
    if missing:
        raise TypeError(f"cache must follow regard.nn.Cache; {type(cache).__name__} has no {' and no '.join(missing)}")


def check_update(returned: Any) -> tuple[Tensor, Tensor, int | Tensor | None]:
    """Check what `cache.update` returned."""
    if isinstance(returned, (tuple, list)) and len(returned) == 3:
        key, value, offset = returned
        place = offset is None or (isinstance(offset, (int, torch.SymInt, Tensor)) and not isinstance(offset, bool))
        if isinstance(key, Tensor) and isinstance(value, Tensor) and place:
            return key, value, offset
    found = type(returned).__name__
    if isinstance(returned, (tuple, list)):
        found = f"({', '.join(type(part).__name__ for part in returned)})"
    raise TypeError(
        f"cache.update must return (key, value, query_offset): two tensors, and an int, a tensor or None; got {found}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
