"""The attention sub-layer of a Transformer: residual and LayerNorm around the module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from regard.nn._checks import check_dtypes, check_tensors
from regard.nn._multi_head import MultiHeadAttention


class AttentionSublayer(nn.Module):
    """`LayerNorm(x + attention(x))` (`norm="post"`, as in 2017), or `x + attention(LayerNorm(x))` (`norm="pre"`).

    In cross-attention, residual and norm apply to the query; `key` and `value` are used unchanged. Padding rows get
    nothing from attention and keep their residual.

    Args:
        embed_dim, num_heads: as in `MultiHeadAttention`, which also gets all other keywords.
        norm: `"post"` or `"pre"`.
        eps: of the LayerNorm.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, norm: str = "post", eps: float = 1e-6, **attention: Any
    ) -> None:
        super().__init__()
        if norm not in ("post", "pre"):
            raise ValueError(f"norm must be 'post' or 'pre', got {norm!r}")
        self.pre_norm = norm == "pre"
        self.attention = MultiHeadAttention(embed_dim, num_heads, **attention)
        self.norm = nn.LayerNorm(embed_dim, eps=eps, device=attention.get("device"), dtype=attention.get("dtype"))

    def forward(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, **keywords: Any) -> Tensor:
        """As `MultiHeadAttention.forward`, with its keywords."""
        return self._join(query, self.attention(*self._inputs(query, key, value), **keywords))

    def observe(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, **keywords: Any) -> Any:
        """As `MultiHeadAttention.observe`; `.out` is this sub-layer's output."""
        seen = self.attention.observe(*self._inputs(query, key, value), **keywords)
        seen.out = self._join(query, seen.out)
        return seen

    def _inputs(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        check_tensors({"query": query})  # before the norm meets it
        check_dtypes(self.attention, query)
        normed: Tensor = self.norm(query) if self.pre_norm else query
        # Self attention stays so after the norm: what was the query's own tensor is the normed one.
        key = normed if key is None or key is query else key
        value = normed if value is query else value
        return normed, key, value

    def _join(self, query: Tensor, attended: Tensor) -> Tensor:
        joined = query + attended
        return joined if self.pre_norm else self.norm(joined)

    def extra_repr(self) -> str:
        return f"norm={'pre' if self.pre_norm else 'post'}"
