"""Multi-head latent attention as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.cache import TokenCache
from regard.cache._padded import Padded
from regard.latent import absorb, expand, raise_values
from regard.masks import Mask
from regard.nn import _checks
from regard.nn._attending import Attending
from regard.nn._heads import Call, finish
from regard.nn._inputs import Inputs, split_heads
from regard.nn._products import product
from regard.nn._protocols import Cache, Positions
from regard.positions import Rotary

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


class LatentAttention(Attending):
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

    Called as `MultiHeadAttention`. `value` is `key`, or left out: keys and values come from one latent. A cache is one
    of `regard.cache`, such as a `LatentCache`. Its first tokens are expanded; later ones attend in absorbed form, to
    the latents themselves.
    """

    softcap = sinks = None
    backend = "auto"
    _input_widths = ("embed_dim",) * 3

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
        if value is not None and value is not (query if key is None else key):
            raise ValueError("value must be key, or left out: latent attention makes keys and values from one latent")
        if cache is not None and not isinstance(cache, (TokenCache, Padded)):
            raise TypeError(
                "cache must be one of regard.cache that holds one tensor per token, such as LatentCache(capacity); "
                f"got {type(cache).__name__}"
            )
        call = super()._prepare(query, key, None, mask, bias, cache, how)
        plain, turned, latent = call.tensors
        if cache is None:
            return self._read(call._replace(tensors=(plain, latent, None), queries=(plain, turned)))
        if any(cache.lengths):
            absorbed = absorb(plain, turned, self.up_projections[0])
            how = {**(call.how or {}), "value_dim": self.kv_lora_rank}
            return call._replace(tensors=(absorbed, latent, None), how=how)
        # of the queries the cache looks at the shape alone, and expanding what it gives is cheaper for many
        like = plain.new_empty(1).expand(*plain.shape[:3], latent.shape[3])
        return call._replace(tensors=(like, latent, None), how=None, queries=(plain, turned))

    def _project(self, inputs: Inputs, positions: Any, first: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries without positions, their rotary part, and latents with the rotary key behind them."""
        if self.q_lora_rank is None:
            q = product(self.q_proj, inputs.query)
        else:
            q = product(self.q_up_proj, self.q_norm(product(self.q_down_proj, inputs.query)))
        plain, turned = torch.split_with_sizes(split_heads(q, self.num_heads), [self.nope_dim, self.rope_dim], -1)
        latent, rotary = self._parts(product(self.kv_down_proj, inputs.key))
        turned, rotary = positions(turned, rotary.unsqueeze(1), query_offset=first)
        return plain, turned, torch.cat([self.kv_norm(latent).unsqueeze(1), rotary], -1)

    def _read(self, call: Call) -> Call:
        """Over keys and values that are expanded from the latents, or over the latents as they are."""
        query, latents, _ = call.tensors
        if call.queries is None:
            return call._replace(tensors=(query, latents, latents[..., : self.kv_lora_rank]))
        latent, rotary = self._parts(latents.squeeze(1))
        return call._replace(tensors=(torch.cat(call.queries, -1), *expand(latent, rotary, *self.up_projections)))

    def _parts(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        latent, rotary = torch.split_with_sizes(latents, [self.kv_lora_rank, self.rope_dim], -1)
        return latent, rotary

    def _finish(self, heads: Tensor, call: Call) -> Tensor:
        return finish(self, heads if call.queries else raise_values(heads, self.up_projections[1]), call)

    def _output(self, call: Call) -> Tensor:
        weight: Tensor = self.out_proj.weight
        if call.queries:
            return weight
        by_head = torch.unflatten(weight, 1, (self.num_heads, -1))  # what reads latents
        return torch.einsum("mhv,hvr->mhr", by_head, self.up_projections[1]).flatten(1)

    @property
    def _input_projections(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        """The first layers that query, key and value meet."""
        queries = self.q_proj if self.q_lora_rank is None else self.q_down_proj
        return queries, self.kv_down_proj, self.kv_down_proj

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any, **keywords: Any) -> None:
        for theirs, ours in _DEEPSEEK.items():
            for kind in ("weight", "bias"):
                if f"{prefix}{theirs}.{kind}" in state_dict:
                    state_dict[f"{prefix}{ours}.{kind}"] = state_dict.pop(f"{prefix}{theirs}.{kind}")
        super()._load_from_state_dict(state_dict, prefix, *rest, **keywords)

    def extra_repr(self) -> str:
        names = ("embed_dim", "num_heads", "q_lora_rank", "kv_lora_rank", "nope_dim", "rope_dim", "value_head_dim")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)
