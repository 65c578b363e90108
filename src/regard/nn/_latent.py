"""Multi-head latent attention as a module."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard import api
from regard._checks import is_exporting
from regard.cache import TokenCache
from regard.cache._padded import Padded
from regard.latent import absorb, expand, raise_values
from regard.masks import Mask
from regard.nn import _cached, _checks, _inputs
from regard.nn._heads import check_inputs, finish
from regard.nn._inputs import Inputs
from regard.nn._products import product
from regard.nn._protocols import Positions
from regard.positions import Rotary
from regard.statistics import Want

# what DeepSeek calls our projections
_DEEPSEEK = {
    "q_a_proj": "q_down_proj",
    "q_a_layernorm": "q_norm",
    "q_b_proj": "q_up_proj",
    "kv_a_proj_with_mqa": "kv_down_proj",
    "kv_a_layernorm": "kv_norm",
    "kv_b_proj": "kv_up_proj",
    "o_proj": "out_proj",
}


class _Call(NamedTuple):
    inputs: Inputs
    query: tuple[Tensor, Tensor]  # without positions [B, H, L, n], and rotary [B, H, L, p]
    latent: Tensor  # [B, 1, T, r + p] of the new tokens, the rotary key behind the latent
    absorbed: Tensor | None  # the queries that meet latents themselves [B, H, L, r + p], where there is a cache
    keywords: dict[str, Any]
    pads: Tensor | None
    itself: bool


class LatentAttention(nn.Module):
    """Multi-head latent attention (MLA) of DeepSeek-V2 and -V3.

    One latent per token, c = norm(W^DKV x), gives the keys and values of all heads, together with one rotary key that
    the heads share. Queries come from a latent of their own, or from x itself. Caches hold only c and the rotary key.

        mla = LatentAttention(7168, 128, q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64,
                              value_head_dim=128)
        cache = regard.cache.LatentCache(4096)                      # 576 numbers per token
        y = mla(prompt, mask=masks.causal(), cache=cache)           # prefill: keys and values are expanded
        y = mla(next_token, mask=masks.causal(), cache=cache)       # decoding: attends to the latents as cached

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads.
        kv_lora_rank: width of the latent.
        nope_dim: width of a head's query and key without positions.
        rope_dim: width of the rotary part of a query, and of the shared rotary key.
        value_head_dim: width of a value head; `nope_dim` when not given.
        q_lora_rank: width of the queries' latent; None makes queries directly from the input.
        bias: whether the projections into latents and out of the module have a bias.
        eps: of the RMS norms.
        positions: encodes the rotary parts (`regard.nn.Positions`); `Rotary(rope_dim, interleaved=True)` if not given.
        scale: of the logits; 1/√(nope_dim + rope_dim) when not given, times the `logit_factor` of a YaRN scaling.
        dropout, out_dropout: on the attention weights and on the output, in training only.

    State dicts with DeepSeek's names (`q_a_proj`, `kv_a_proj_with_mqa`, …) load too.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        nope_dim: int,
        rope_dim: int,
        value_head_dim: int | None = None,
        q_lora_rank: int | None = None,
        bias: bool = False,
        eps: float = 1e-6,
        positions: Positions | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        out_dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "kv_lora_rank": kv_lora_rank, "nope_dim": nope_dim}
        more = {"rope_dim": rope_dim, "value_head_dim": value_head_dim, "q_lora_rank": q_lora_rank}
        _checks.check_sizes({**sizes, **more})
        _checks.check_probability("dropout", dropout)
        _checks.check_probability("out_dropout", out_dropout)
        _checks.check_positions(positions)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.kv_lora_rank, self.q_lora_rank = kv_lora_rank, q_lora_rank
        self.nope_dim, self.rope_dim = nope_dim, rope_dim
        self.value_head_dim = nope_dim if value_head_dim is None else value_head_dim
        self.dropout, self.out_dropout = dropout, out_dropout
        self.positions = Rotary(rope_dim, interleaved=True, device=device) if positions is None else positions
        scaling = getattr(self.positions, "scaling", None)
        usual = (nope_dim + rope_dim) ** -0.5 * getattr(scaling, "logit_factor", 1.0)
        self.scale = usual if scale is None else scale

        made: dict[str, Any] = {"device": device, "dtype": dtype}
        queries = num_heads * (nope_dim + rope_dim)
        if q_lora_rank is None:
            self.q_proj = nn.Linear(embed_dim, queries, bias=False, **made)
        else:
            self.q_down_proj = nn.Linear(embed_dim, q_lora_rank, bias=bias, **made)
            self.q_norm = nn.RMSNorm(q_lora_rank, eps=eps, **made)
            self.q_up_proj = nn.Linear(q_lora_rank, queries, bias=False, **made)
        self.kv_down_proj = nn.Linear(embed_dim, kv_lora_rank + rope_dim, bias=bias, **made)
        self.kv_norm = nn.RMSNorm(kv_lora_rank, eps=eps, **made)
        self.kv_up_proj = nn.Linear(kv_lora_rank, num_heads * (nope_dim + self.value_head_dim), bias=False, **made)
        self.out_proj = nn.Linear(num_heads * self.value_head_dim, embed_dim, bias=bias, **made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in self.children():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
            elif isinstance(layer, nn.RMSNorm):
                layer.reset_parameters()

    @property
    def up_projections(self) -> tuple[Tensor, Tensor]:
        """W^UK [head, nope_dim, kv_lora_rank] and W^UV [head, value_head_dim, kv_lora_rank], views of `kv_up_proj`."""
        weight = self.kv_up_proj.weight.view(self.num_heads, -1, self.kv_lora_rank)
        return weight[:, : self.nope_dim], weight[:, self.nope_dim :]

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | None = None,
        bias: Any = None,
        cache: TokenCache | Padded | None = None,
    ) -> Tensor:
        """Attend from `query` to `key`.

        Args:
            query: `[batch, L, embed_dim]`, padded or nested.
            key: `[batch, S, embed_dim]`, from which latents are made; `query` when not given (self-attention).
            value: not needed; if given, must be `key`, since keys and values come from one latent.
            mask, bias: as in `MultiHeadAttention.forward`.
            cache: of `regard.cache`, such as a `LatentCache`. The first tokens of a cache are expanded; later ones
                attend in absorbed form, to the latents themselves.
        """
        if cache is not None and torch.compiler.is_compiling() and not is_exporting():
            return self._forward_aside(query, key, value, mask=mask, bias=bias, cache=cache)
        call = self._prepare(query, key, value, mask, bias, cache)
        if cache is not None and _is_in_use(cache) and _cached.can_attend(cache, call.keywords):
            assert call.absorbed is not None
            how = {"mask": call.keywords["mask"], "bias": call.keywords["bias"], "scale": self.scale}
            heads = cache.attend(call.absorbed, call.latent, None, value_dim=self.kv_lora_rank, **how)
            return finish(self, raise_values(heads, self.up_projections[1]), call)
        call, tensors, keywords, absorbed = self._arranged(call, cache)
        heads = api.attention(*tensors, **keywords)
        return finish(self, raise_values(heads, self.up_projections[1]) if absorbed else heads, call)

    _forward_aside = _cached.aside(forward)

    def observe(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | None = None,
        bias: Any = None,
        cache: TokenCache | Padded | None = None,
        want: Want | None = None,
        differentiable: bool = False,
    ) -> Any:
        """`forward` with statistics of the heads: a `regard.Observation` whose `.out` is the module's output.

        `differentiable`, as in `regard.observe`, gives some statistics gradients, for a penalty on them.
        """
        api.check_want(want)  # a cache keeps the tokens of a call that goes on
        call = self._prepare(query, key, value, mask, bias, cache)
        call, tensors, keywords, absorbed = self._arranged(call, cache)
        output = self._output(absorbed) if want is not None and want.value_mass else None
        seen = api.observe(*tensors, want=want, output=output, differentiable=differentiable, **keywords)
        heads = raise_values(seen.out, self.up_projections[1]) if absorbed else seen.out
        seen.out = finish(self, heads, call)
        return seen

    def explain(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | None = None,
        bias: Any = None,
        cache: TokenCache | Padded | None = None,
        want: Want | None = None,
    ) -> Any:
        """Say how `forward` (or `observe`, with `want`) would attend, as a `regard.Plan`.

        Only the projections run; a cache does not change.
        """
        call = self._prepare(query, key, value, mask, bias, cache)
        if cache is None or call.absorbed is None or not _is_in_use(cache):
            return api.explain(*self._expanded(call, call.latent), want=want, scale=self.scale, **call.keywords)
        more = {"value_dim": self.kv_lora_rank, "scale": self.scale}
        return _cached.explain(cache, (call.absorbed, call.latent, None), call.keywords, want, **more)

    def _prepare(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        mask: Mask | None,
        bias: Any,
        cache: TokenCache | Padded | None,
    ) -> _Call:
        if value is not None and value is not (query if key is None else key):
            raise ValueError("value must be key, or left out: latent attention makes keys and values from one latent")
        itself = key is None or key is query
        inputs = _inputs.arrange(query, key, None, mask, may_pack=False)
        self._check(inputs, cache)
        if cache is None:
            pads = _inputs.padding(mask, inputs.key.shape[1], inputs.key.device)
        else:
            pads = _cached.pads_of(cache, inputs.key)
        inputs = _inputs.without_padding(inputs, pads, itself)
        plain, turned = torch.split_with_sizes(self._queries(inputs.query), [self.nope_dim, self.rope_dim], -1)
        latent, rotary = self._parts(product(self.kv_down_proj, inputs.key))
        latent, rotary = self.kv_norm(latent).unsqueeze(1), rotary.unsqueeze(1)  # [B, 1, T, …]
        here = inputs.query_offset if cache is None else _cached.position_of(cache, inputs.key)
        turned, rotary = self.positions(
            turned, rotary, query_offset=inputs.key.shape[1] - inputs.query.shape[1] if here is None else here
        )
        keywords = {
            "mask": inputs.mask if cache is None or not itself else _cached.without_rows(inputs.mask, pads),
            "bias": bias,
            "dropout": self.dropout if self.training else 0.0,
            "query_offset": inputs.query_offset,
        }
        latent, absorbed = torch.cat([latent, rotary], -1), None
        if cache is not None:
            absorbed = absorb(plain, turned, self.up_projections[0])
            _cached.check_call(cache, (absorbed, latent, None), keywords)
        return _Call(inputs, (plain, turned), latent, absorbed, keywords, pads, itself)

    def _arranged(
        self, call: _Call, cache: TokenCache | Padded | None
    ) -> tuple[_Call, tuple[Tensor, Tensor, Tensor], dict[str, Any], bool]:
        """The tensors and keywords of `regard.attention`, and whether its result is in latents still."""
        keywords = {**call.keywords, "scale": self.scale}
        if cache is None:
            return call, self._expanded(call, call.latent), keywords, False
        in_use = _is_in_use(cache)
        (_, latents, _), keywords = _cached.update(cache, (call.query[0], call.latent, None), keywords)
        if call.pads is None:
            rows = _inputs.padding_of_new_rows(call.inputs.mask, call.query[0], latents, keywords["query_offset"])
            call = call._replace(pads=rows)
        if call.absorbed is None or not in_use:
            return call, self._expanded(call, latents), keywords, False
        return call, (call.absorbed, latents, latents[..., : self.kv_lora_rank]), keywords, True

    def _expanded(self, call: _Call, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        latent, rotary = self._parts(latents.squeeze(1))
        key, value = expand(latent, rotary, *self.up_projections)
        return torch.cat(call.query, -1), key, value

    def _parts(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        latent, rotary = torch.split_with_sizes(latents, [self.kv_lora_rank, self.rope_dim], -1)
        return latent, rotary

    def _output(self, absorbed: bool) -> Tensor:
        """The matrix that reads the heads side by side: of their values, or of their latents."""
        weight: Tensor = self.out_proj.weight
        if not absorbed:
            return weight
        by_head = torch.unflatten(weight, 1, (self.num_heads, -1))
        return torch.einsum("mhv,hvr->mhr", by_head, self.up_projections[1]).flatten(1)

    def _queries(self, x: Tensor) -> Tensor:
        if self.q_lora_rank is None:
            q = product(self.q_proj, x)
        else:
            q = product(self.q_up_proj, self.q_norm(product(self.q_down_proj, x)))
        return _inputs.split_heads(q, self.num_heads)

    def _check(self, inputs: Inputs, cache: object) -> None:
        if cache is not None:
            if not isinstance(cache, (TokenCache, Padded)):
                raise TypeError(
                    "cache must be one of regard.cache that holds one tensor per token, such as LatentCache(capacity); "
                    f"got {type(cache).__name__}"
                )
            _cached.claim(cache, self)
        check_inputs(self, inputs, cache is not None, ("embed_dim",) * 3)
        first = self.q_proj if self.q_lora_rank is None else self.q_down_proj
        for name, x, projection in (("query", inputs.query, first), ("key", inputs.key, self.kv_down_proj)):
            _checks.check_dtype(name, x, projection)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any, **keywords: Any) -> None:
        for theirs, ours in _DEEPSEEK.items():
            for kind in ("weight", "bias"):
                if f"{prefix}{theirs}.{kind}" in state_dict:
                    state_dict[f"{prefix}{ours}.{kind}"] = state_dict.pop(f"{prefix}{theirs}.{kind}")
        super()._load_from_state_dict(state_dict, prefix, *rest, **keywords)

    def extra_repr(self) -> str:
        names = ("embed_dim", "num_heads", "q_lora_rank", "kv_lora_rank", "nope_dim", "rope_dim", "value_head_dim")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


def _is_in_use(cache: TokenCache | Padded) -> bool:
    return any(cache.lengths)
