"""Linear attention as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.linear._call import explain_linear, linear_attention
from regard.linear._plan import LinearPlan
from regard.linear._state import LinearState
from regard.masks import Mask
from regard.nn import _checks, _inputs
from regard.nn._heads import Call, ProjectedHeads, check_inputs, finish, shown
from regard.nn._inputs import Inputs, split_heads, without_padding
from regard.nn._protocols import Positions

# gates begin near 1: the sigmoid's logarithm over this, so that an untrained module forgets over hundreds of tokens
_GATE_TEMPERATURE = 16.0


class LinearAttention(ProjectedHeads):
    """Multi-head linear attention, called as `MultiHeadAttention` is.

        layer = LinearAttention(512, 8)
        y = layer(x, mask=masks.causal())                       # time O(L)
        state = LinearState()
        y = layer(x, mask=masks.causal(), cache=state)          # a state in place of a KV cache,
        z = layer(new, mask=masks.causal(), cache=state)        # whose size does not grow

    Args:
        embed_dim, num_heads, num_kv_heads, head_dim, value_head_dim: as in `MultiHeadAttention`; each loads the
            state dicts of the other.
        key_dim, value_dim, qkv_bias, out_bias, qk_norm, out_dropout, positions: as in `MultiHeadAttention`.
        feature_map: "elu", "relu", "identity", a `regard.linear.RandomFeatures` or another module or function.
        normalize: whether to divide the weights of a row by their sum.
        decay: None, one number in (0, 1] per head, or "retention" for 1 − 2^(−5−head).
        gate: earlier tokens fade by one factor per token and head, computed from `key` (`gate_proj`).
        out_norm: RMS-normalise each head's result (`out_norm`), as models without a normaliser do.

    Weights are initialised as in `MultiHeadAttention`.
    """

    _decay_bits: Tensor | None

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
        feature_map: Any = "elu",
        normalize: bool = True,
        decay: Sequence[float] | str | None = None,
        gate: bool = False,
        qkv_bias: bool = True,
        out_bias: bool = True,
        qk_norm: bool = False,
        out_norm: bool = False,
        out_dropout: float = 0.0,
        positions: Positions | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, num_kv_heads, head_dim, value_head_dim, key_dim, value_dim, qkv_bias=qkv_bias,
            packed=False, out_dropout=out_dropout, positions=positions, device=device, dtype=dtype,
        )  # fmt: skip
        self.feature_map = feature_map
        self.normalize = normalize
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(self.key_dim, num_heads, **made) if gate else None
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6, **made) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-6, **made) if qk_norm else None
        self.out_norm = nn.RMSNorm(self.value_head_dim, eps=1e-6, **made) if out_norm else None
        self.out_proj = nn.Linear(num_heads * self.value_head_dim, embed_dim, bias=out_bias, **made)
        rates = _rates(decay, num_heads, device)
        # as bits, so that .half() does not round what lies close to 1
        self.register_buffer("_decay_bits", None if rates is None else rates.view(torch.int64), persistent=False)
        self.reset_parameters()

    @property
    def decay(self) -> Tensor | None:
        """`[num_heads]` in float64, or None."""
        return None if self._decay_bits is None else self._decay_bits.view(torch.float64)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | None = None,
        cache: LinearState | None = None,
    ) -> Tensor:
        """Attend from `query` to `key` and `value`, padded `[batch, token, dim]` or nested (layout jagged).

        Args:
            query, key, value: as in `MultiHeadAttention`.
            mask: one that `regard.linear_attention` can honour: causal, padding, documents. Padding rows of the output
                are exactly 0, and nothing in them reaches another row or any gradient.
            cache: a `regard.linear.LinearState`; needs `masks.causal()`. Masks count all tokens, including those in the
                state.
        """
        call = self._prepare(query, key, value, mask, cache)
        heads = linear_attention(*call.tensors, **call.keywords)
        if self.out_norm is not None:
            heads = self.out_norm(heads)
        return finish(self, heads, call)

    def explain(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | None = None,
        cache: LinearState | None = None,
    ) -> LinearPlan:
        """Say how this call would compute its heads; the projections run, the attention does not."""
        with torch.no_grad():
            call = self._prepare(query, key, value, mask, cache)
            return explain_linear(*call.tensors, **call.keywords)

    def _prepare(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, mask: Mask | None, cache: LinearState | None
    ) -> Call:
        itself = key is None or key is query
        inputs = _inputs.arrange(query, key, value, mask, may_pack=self.positions is None)
        self._check(inputs, cache)
        first = 0 if cache is None else cache.position
        pads = _inputs.padding(mask, first + inputs.key.shape[1], inputs.key.device)
        pads = None if pads is None else pads[:, first:]
        inputs = without_padding(inputs, pads, itself)
        q = split_heads(self.q_proj(inputs.query), self.num_heads)
        k = split_heads(self.k_proj(inputs.key), self.num_kv_heads)
        v = split_heads(self.v_proj(inputs.value), self.num_kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.positions is not None:
            q, k = self.positions(q, k, query_offset=first if cache is not None else k.shape[2] - q.shape[2])
        log_gate = None
        if self.gate_proj is not None:
            gate: Tensor = self.gate_proj(inputs.key)
            gate = gate.float() if gate.dtype.itemsize == 2 else gate
            log_gate = F.logsigmoid(gate).transpose(1, 2) / _GATE_TEMPERATURE
        offset = inputs.query_offset
        rows = None if pads is None or not itself else _inputs.padding_of_rows(pads, q.shape[2], offset)
        keywords = {
            "mask": inputs.mask,
            "feature_map": self.feature_map,
            "normalize": self.normalize,
            "decay": self.decay,
            "log_gate": log_gate,
            "query_offset": offset,
            "state": cache,
        }
        return Call(inputs, (q, k, v), keywords, rows, itself, {})

    def _check(self, inputs: Inputs, cache: LinearState | None) -> None:
        if cache is not None:
            if not isinstance(cache, LinearState):
                raise TypeError(
                    f"cache must be a regard.linear.LinearState, got {type(cache).__name__}: linear attention keeps a "
                    "sum over its tokens, not their keys and values"
                )
            _checks.check_batch(*inputs[:3])
        check_inputs(self, inputs, cache is not None)
        _checks.check_dtypes(self, *inputs[:3])

    def extra_repr(self) -> str:
        usual: dict[str, Any] = {"num_kv_heads": self.num_heads, "value_head_dim": self.head_dim, "normalize": True}
        usual |= {"out_dropout": 0.0, "feature_map": None}
        return shown(self, usual, feature_map=self.feature_map if isinstance(self.feature_map, str) else None)


def _rates(decay: Sequence[float] | str | None, num_heads: int, device: Any) -> Tensor | None:
    if decay is None:
        return None
    if isinstance(decay, str):
        if decay != "retention":
            raise ValueError(f"decay must be 'retention' or one number in (0, 1] per head, got {decay!r}")
        return 1 - torch.exp2(-5.0 - torch.arange(num_heads, device=device, dtype=torch.float64))
    rates = torch.as_tensor(decay, device=device)
    if not rates.is_floating_point():
        raise TypeError(f"decay must hold floats in (0, 1], got {decay!r}")
    if rates.shape != (num_heads,):
        raise ValueError(f"decay must be one number per head, [num_heads] = [{num_heads}], got {list(rates.shape)}")
    if not bool(((rates > 0) & (rates <= 1)).all()):
        raise ValueError(f"decay must be above 0 and at most 1, got {rates.tolist()}")
    return rates.to(torch.float64)
