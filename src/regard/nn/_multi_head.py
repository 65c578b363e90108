"""Multi-head attention as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.nn import _checks
from regard.nn._attending import Attending
from regard.nn._heads import Call, ProjectedHeads, shown
from regard.nn._inputs import Inputs, split_heads
from regard.nn._products import product, three_products
from regard.nn._protocols import Positions


class MultiHeadAttention(ProjectedHeads, Attending):
    """Concat(head_1 … head_H) W^O, with head_i = attention(Q W_i^Q, K W_i^K, V W_i^V).

        mha = MultiHeadAttention(512, 8)
        y = mha(x)                                  # self-attention, [batch, token, 512]
        y = mha(x, mask=masks.causal())             # causal; masks.window(left=256) for local
        y = mha(x, memory)                          # cross-attention: queries from x, keys and values from memory
        y = mha(x, mask=masks.padding(lengths))     # a padded batch: padding rows are 0
        y = mha(torch.nested.nested_tensor(items, layout=torch.jagged), mask=masks.causal())    # no padding at all

    Args:
        embed_dim: width of `query` and of the output.
        num_heads: query heads H.
        num_kv_heads: key/value heads; a divisor of `num_heads` (grouped-query; 1 is multi-query). H when not given.
        head_dim: width of a query or key head; `embed_dim / num_heads` when not given.
        value_head_dim: width of a value head; `head_dim` when not given.
        key_dim, value_dim: widths of `key` and `value`; `embed_dim`, and `key_dim`, when not given.
        qkv_bias, out_bias: whether those projections have a bias.
        packed: one matrix `qkv_proj` in place of `q_proj`, `k_proj`, `v_proj`. It is applied once if the three inputs
            are the same tensor; otherwise each input is multiplied with its own rows. State dicts of either layout
            load into the other. Needs `key_dim == value_dim == embed_dim`.
        qk_norm: RMS-normalise each head of the projected query and key (`q_norm`, `k_norm`, with a learned gain).
        dropout: on the attention weights, in training only.
        out_dropout: on the projected output, in training only.
        positions: a position encoding (`regard.nn.Positions`) for the heads of query and key.
        scale, softcap, backend: as in `regard.attention`, for every call; a call may give others.
        sinks: whether to learn one sink logit per head (`sinks`, initially 0), as in `regard.attention`.

    Weights are initialised as in `torch.nn.MultiheadAttention`: Xavier uniform for the input projections (a packed
    matrix as one), `torch.nn.Linear`'s default for the output projection, zeros for all biases. A state dict with the
    names `q_linear`, `k_linear`, `v_linear` and `out`, common in tutorials, loads too.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
        packed: bool = False,
        qk_norm: bool = False,
        dropout: float = 0.0,
        out_dropout: float = 0.0,
        positions: Positions | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, num_kv_heads, head_dim, value_head_dim, key_dim, value_dim, qkv_bias=qkv_bias,
            packed=packed, out_dropout=out_dropout, positions=positions, device=device, dtype=dtype,
        )  # fmt: skip
        _checks.check_probability("dropout", dropout)
        self.dropout = dropout
        self.scale, self.softcap, self.backend = scale, softcap, backend
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6, **made) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-6, **made) if qk_norm else None
        self.out_proj = nn.Linear(num_heads * self.value_head_dim, embed_dim, bias=out_bias, **made)
        if not isinstance(sinks, bool):
            raise TypeError(f"sinks must be True or False (give a tensor to the call), got {type(sinks).__name__}")
        self.sinks = nn.Parameter(torch.empty(num_heads, **made)) if sinks else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def _project(self, inputs: Inputs, positions: Any, first: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = inputs[:3]
        tokens = key.shape[1]
        if not self.packed and type(tokens) is int and tokens == 0 and not torch.is_grad_enabled():
            # a cache has read them all; layers that lie in parts on several processes take no empty input
            q, (_, *widths) = product(self.q_proj, query), self.projection_widths
            k, v = (q.new_empty(key.shape[0], 0, width) for width in widths)
        elif not self.packed:
            q, k, v = three_products((self.q_proj, self.k_proj, self.v_proj), (query, key, value))
        elif query is key and key is value:
            q, k, v = torch.split_with_sizes(product(self.qkv_proj, query), list(self.projection_widths), dim=-1)
        else:
            weights = torch.split_with_sizes(self.qkv_proj.weight, list(self.projection_widths))
            bias = self.qkv_proj.bias
            biases = (None,) * 3 if bias is None else torch.split_with_sizes(bias, list(self.projection_widths))
            q, k, v = (product(F.linear, x, w, b) for x, w, b in zip(inputs[:3], weights, biases, strict=True))
        q = split_heads(q, self.num_heads)
        k, v = split_heads(k, self.num_kv_heads), split_heads(v, self.num_kv_heads)
        if (q_norm := self.q_norm) is not None and (k_norm := self.k_norm) is not None:
            q, k = q_norm(q), k_norm(k)
        if positions is not None:
            q, k = positions(q, k, query_offset=first)
        return q, k, v

    def _output(self, call: Call) -> Tensor:
        return self.out_proj.weight

    def extra_repr(self) -> str:
        usual = {
            "num_kv_heads": self.num_heads, "value_head_dim": self.head_dim, "key_dim": self.embed_dim,
            "value_dim": self.key_dim, "dropout": 0.0, "out_dropout": 0.0, "scale": None, "softcap": None,
            "sinks": False, "backend": "auto",
        }  # fmt: skip
        return shown(self, usual, sinks=self.sinks is not None)
