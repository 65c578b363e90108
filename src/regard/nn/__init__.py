"""Attention as modules: projections, heads, masks, dropout, caches, residual and norm."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from regard.nn._multi_head import MultiHeadAttention
from regard.nn._protocols import Cache, Positions
from regard.nn._sublayer import AttentionSublayer

if TYPE_CHECKING:
    from regard.nn._latent import LatentAttention
    from regard.nn._linear import LinearAttention

__all__ = ["AttentionSublayer", "Cache", "LatentAttention", "LinearAttention", "MultiHeadAttention", "Positions"]

# what few use, and what loads much
_LATER = {"LatentAttention": "regard.nn._latent", "LinearAttention": "regard.nn._linear"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'regard.nn' has no attribute {name!r}; it has {', '.join(__all__)}")
    found = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
