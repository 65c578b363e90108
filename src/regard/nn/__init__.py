"""Attention as modules: projections, heads, masks, dropout, caches, residual and norm."""

from __future__ import annotations

from regard.nn._latent import LatentAttention
from regard.nn._linear import LinearAttention
from regard.nn._multi_head import MultiHeadAttention
from regard.nn._protocols import Cache, Positions
from regard.nn._sublayer import AttentionSublayer

__all__ = ["AttentionSublayer", "Cache", "LatentAttention", "LinearAttention", "MultiHeadAttention", "Positions"]
