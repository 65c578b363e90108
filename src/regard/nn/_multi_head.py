"""Multi-head attention as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard import _sharded, api
from regard._checks import MODULE_NAMES, is_exporting, unknown_names
from regard.masks import Mask
from regard.nn import _cached, _checks, _inputs
from regard.nn._heads import Call, ProjectedHeads, check_inputs, finish, shown
from regard.nn._inputs import Inputs
from regard.nn._products import product, three_products
from regard.nn._protocols import Cache, Positions
from regard.statistics import Want


class MultiHeadAttention(ProjectedHeads):
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

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | None = None,
        bias: Any = None,
        cache: Cache | None = None,
        **how: Any,
    ) -> Tensor:
        """Attend from `query` to `key` and `value`.

        Args:
            query: `[batch, L, embed_dim]`, padded or nested (`torch.nested`, layout jagged).
            key: `[batch, S, key_dim]`; `query` when not given (self-attention).
            value: `[batch, S, value_dim]`; `key` when not given.
            mask: from `regard.masks`. In self-attention, rows that are padding by `masks.padding` (or a document id of
                −1) are exactly 0 in the output, and nothing in them reaches another row or any gradient.
            bias: added to the logits, as in `regard.attention`.
            cache: keys and values of earlier tokens (`regard.nn.Cache`).
            how: `scale`, `softcap`, `sinks` (a tensor `[num_heads]`), `backend`, as in `regard.attention`: they replace
                the module's own.

        Nested input runs as one packed sequence in which an item sees only itself; or as a padded batch, if the mask, a
        bias or `positions` depend on a token's position. In both cases positions start at 0 in each item, `masks.keep`
        and a bias index rows and columns of the padded batch, and the result is nested as `query` is.
        """
        if cache is not None and torch.compiler.is_compiling() and not is_exporting():
            return self._forward_aside(query, key, value, mask=mask, bias=bias, cache=cache, **how)
        call = self._prepare(query, key, value, mask, bias, cache, how)
        if cache is None:
            return finish(self, api.attention(*call.tensors, **call.keywords), call)
        if _cached.can_attend(cache, call.keywords):
            found: Any = cache
            keywords = call.keywords
            out = found.attend(*call.tensors, mask=keywords["mask"], bias=keywords["bias"], **call.how)
            return finish(self, out, call)
        call = self._through(cache, call)
        return finish(self, api.attention(*call.tensors, **call.keywords), call)

    _forward_aside = _cached.aside(forward)

    def observe(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | None = None,
        bias: Any = None,
        cache: Cache | None = None,
        want: Want | None = None,
        differentiable: bool = False,
        **how: Any,
    ) -> Any:
        """`forward` with statistics of the heads: a `regard.Observation` whose `.out` is the module's output.

        For nested input the statistics are those of the packed or padded call (see `forward`). With
        `Want(value_mass=True)`, values are measured after the module's output projection. `differentiable`, as in
        `regard.observe`, gives some statistics gradients, for a penalty on them.
        """
        api.check_want(want)  # a cache keeps the tokens of a call that goes on
        call = self._prepare(query, key, value, mask, bias, cache, how)
        call = call if cache is None else self._through(cache, call)
        output = self.out_proj.weight if want is not None and want.value_mass else None
        seen = api.observe(*call.tensors, want=want, output=output, differentiable=differentiable, **call.keywords)
        seen.out = finish(self, seen.out, call)
        return seen

    def explain(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | None = None,
        bias: Any = None,
        cache: Cache | None = None,
        want: Want | None = None,
        **how: Any,
    ) -> Any:
        """Say how `forward` (or `observe`, with `want`) would run this call, as a `regard.Plan`.

        Only the projections run; a cache does not change.
        """
        call = self._prepare(query, key, value, mask, bias, cache, how)
        _cached.check_call(cache, call.tensors, call.keywords)
        return _cached.explain(cache, call.tensors, call.keywords, want)

    def _prepare(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        mask: Mask | None,
        bias: Any,
        cache: Cache | None,
        how: dict[str, Any],
    ) -> Call:
        how = self._how(how)
        itself = key is None or key is query
        positions = self.positions
        inputs = _inputs.arrange(query, key, value, mask, may_pack=bias is None and positions is None)
        check_inputs(self, inputs, cache is not None)
        if cache is not None:
            _checks.check_cache(cache, with_positions=positions is not None)
            _cached.claim(cache, self)
        keys = inputs.key
        pads = _inputs.padding(mask, keys.shape[1], keys.device) if cache is None else _cached.pads_of(cache, keys)
        if pads is not None:
            _sharded.refuse_padding()
            inputs = _inputs.without_padding(inputs, pads, itself)
        try:
            q, k, v = self._project(inputs)
        except RuntimeError:
            _checks.check_dtypes(self, *inputs[:3])  # says it better, where dtypes are the reason
            raise
        q = _inputs.split_heads(q, self.num_heads)
        k, v = _inputs.split_heads(k, self.num_kv_heads), _inputs.split_heads(v, self.num_kv_heads)
        if (q_norm := self.q_norm) is not None and (k_norm := self.k_norm) is not None:
            q, k = q_norm(q), k_norm(k)
        if positions is not None:
            here = inputs.query_offset if cache is None else _cached.position_of(cache, keys)
            q, k = positions(q, k, query_offset=k.shape[2] - q.shape[2] if here is None else here)
        seen = inputs.mask
        if pads is not None and cache is not None and itself:
            seen = _cached.without_rows(seen, pads)
        dropout = self.dropout if self.training else 0.0
        keywords = {"mask": seen, "bias": bias, "dropout": dropout, "query_offset": inputs.query_offset, **how}
        return Call(inputs, (q, k, v), keywords, pads, itself, how)

    def _how(self, given: dict[str, Any]) -> dict[str, Any]:
        """What says how to attend, of the call or else of the module; what is as usual is left out."""
        if not given and self.scale is None and self.softcap is None and self.backend == "auto" and self.sinks is None:
            return {}  # the usual call
        own = {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks, "backend": self.backend}
        if unknown := given.keys() - own.keys():
            otherwise = f"{', '.join(own)} say how to attend, mask and bias to what"
            hints = unknown_names(unknown, MODULE_NAMES, otherwise)
            raise TypeError(f"{', '.join(sorted(unknown))}: no such keyword; {hints}")
        merged = {name: own[name] if given.get(name) is None else given[name] for name in own}
        return {name: value for name, value in merged.items() if value is not None and value != "auto"}

    def _through(self, cache: Cache, call: Call) -> Call:
        """The call over all keys and values that the cache gives back."""
        _cached.check_call(cache, call.tensors, call.keywords)
        tensors, keywords = _cached.update(cache, call.tensors, call.keywords)
        pads = call.pads
        if pads is None:
            pads = _inputs.padding_of_new_rows(call.inputs.mask, *tensors[:2], keywords["query_offset"])
        return call._replace(tensors=tensors, keywords=keywords, pads=pads)

    def _project(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = inputs[:3]
        if not self.packed:
            return three_products((self.q_proj, self.k_proj, self.v_proj), (query, key, value))
        widths = list(self.projection_widths)
        if query is key and key is value:
            q, k, v = torch.split_with_sizes(product(self.qkv_proj, query), widths, dim=-1)
            return q, k, v
        weights = torch.split_with_sizes(self.qkv_proj.weight, widths)
        bias = self.qkv_proj.bias
        biases = (None, None, None) if bias is None else torch.split_with_sizes(bias, widths)
        q, k, v = (product(F.linear, x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        return q, k, v

    def extra_repr(self) -> str:
        usual = {
            "num_kv_heads": self.num_heads, "value_head_dim": self.head_dim, "key_dim": self.embed_dim,
            "value_dim": self.key_dim, "dropout": 0.0, "out_dropout": 0.0, "scale": None, "softcap": None,
            "sinks": False, "backend": "auto",
        }  # fmt: skip
        return shown(self, usual, sinks=self.sinks is not None)
