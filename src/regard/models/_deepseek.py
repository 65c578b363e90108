"""DeepSeek-V3: a decoder whose attention caches latents, and whose feed-forwards are mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.cache import LatentCache, TokenCache
from regard.models import _parts
from regard.models._decoder import Decoder, DecoderConfig, DecoderLayer
from regard.models._parts import FeedForward
from regard.positions import Rotary


@dataclass(frozen=True, kw_only=True)
class DeepSeekConfig(DecoderConfig):
    """Configuration of a `DeepSeek`: a decoder with rotary positions and rms norms, and the fields below. The fields of
    a `DecoderConfig` for attention heads (`num_kv_heads`, `head_dim`, `qk_norm`, `packed`) do not exist here.

    Args:
        kv_lora_rank, nope_dim, rope_dim, value_head_dim, q_lora_rank: as in `regard.nn.LatentAttention`.
        dense_layers: number of layers at the start that have a feed-forward of `ff_dim`; the others have experts.
        experts, active_experts: number of experts per layer, and per token.
        expert_dim: `ff_dim` of an expert.
        shared_experts: every token goes through these too; they are one feed-forward of this many times `expert_dim`.
        expert_groups, active_groups: experts are in groups of equal size. A token chooses among the experts of its
            best groups (those whose two best experts have the largest sum).
        expert_scale: factor of the experts' output.
        normed_experts: whether the shares of a token's experts are normalised to 1 before that.
    """

    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_head_dim: int
    q_lora_rank: int | None
    dense_layers: int = field(metadata=_parts.OR_NONE)
    experts: int
    active_experts: int
    expert_dim: int
    shared_experts: int
    expert_groups: int
    active_groups: int
    expert_scale: float = 2.5
    normed_experts: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, expected in _FIXED.items():
            if getattr(self, name) != expected:
                raise ValueError(f"{name} must be {expected!r} in a DeepSeekConfig, got {getattr(self, name)!r}")
        if not 0 <= self.dense_layers <= self.num_layers:
            raise ValueError(f"dense_layers must be 0 to num_layers={self.num_layers}, got {self.dense_layers}")
        size = self.experts // self.expert_groups
        if self.experts % self.expert_groups or size < 2 or self.active_groups > self.expert_groups:
            raise ValueError(
                f"{self.experts} experts cannot be {self.expert_groups} groups of 2 or more, of which "
                f"{self.active_groups} are chosen"
            )
        if self.active_experts > size * self.active_groups:
            raise ValueError(
                f"active_experts={self.active_experts} are more than the {size * self.active_groups} experts of "
                f"active_groups={self.active_groups}"
            )


_FIXED: dict[str, Any] = {
    "positions": "rotary",
    "norm": "rms",
    "gated": True,
    "qk_norm": False,
    "packed": False,
    **dict.fromkeys(("num_kv_heads", "head_dim", "window", "attention_softcap", "attention_scale")),
}


class Mixture(nn.Module):
    """Mixture of experts: each token goes through a few of many feed-forwards, and through one that all share."""

    def __init__(self, config: DeepSeekConfig, **made: Any) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.embed_dim, config.experts, bias=False, **made)
        # what is added to the scores when experts are chosen, and not when their shares are computed
        self.register_buffer("correction", torch.zeros(config.experts, **made))
        each = [FeedForward.of(config, config.expert_dim, **made) for _ in range(config.experts)]
        self.experts = nn.ModuleList(each)
        self.shared = FeedForward.of(config, config.shared_experts * config.expert_dim, **made)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        shares, chosen = self.route(tokens)
        mixed = torch.zeros_like(tokens)
        for at in torch.unique(chosen).tolist():
            token, place = (chosen == at).nonzero(as_tuple=True)
            given = self.experts[at](tokens[token]) * shares[token, place, None].to(tokens.dtype)
            mixed = mixed.index_add(0, token, given)
        shared: Tensor = self.shared(x)
        return mixed.view_as(x) + shared

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """`[token, active]`: the shares of the experts that each token goes through, and which they are."""
        config = self.config
        wide = torch.promote_types(tokens.dtype, torch.float32)
        scores = torch.sigmoid(nn.functional.linear(tokens.to(wide), self.router.weight.to(wide)))
        wanted = scores + self.correction  # type: ignore[operator]
        groups = wanted.view(-1, config.expert_groups, config.experts // config.expert_groups)
        best = groups.topk(2, -1).values.sum(-1).topk(config.active_groups, -1).indices
        outside = torch.ones_like(groups, dtype=torch.bool).scatter(
            1, best[..., None].expand(-1, -1, groups.shape[2]), False
        )
        chosen = groups.masked_fill(outside, -torch.inf).flatten(1).topk(config.active_experts, -1).indices
        shares = scores.gather(1, chosen)
        if config.normed_experts:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        return shares * config.expert_scale, chosen


class DeepSeekLayer(DecoderLayer):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def _attention(self, config: Any, positions: Rotary | None, **made: Any) -> nn.Module:
        return _parts.latent_attention(config, positions, bias=config.qkv_bias, out_dropout=config.dropout, **made)

    def _feed_forward(self, config: Any, index: int, **made: Any) -> nn.Module:
        return FeedForward.of(config, **made) if index < config.dense_layers else Mixture(config, **made)


class DeepSeek(Decoder):
    """DeepSeek-V3: token numbers in, logits of the next token out; everything that a `Decoder` does.

    Its caches are `LatentCache`s: kv_lora_rank + rope_dim numbers per token and layer.
    """

    config: DeepSeekConfig
    _layer = DeepSeekLayer

    def caches(self, capacity: int, *, int8: bool = False) -> list[TokenCache]:
        """A `LatentCache` for each layer."""
        return [LatentCache(capacity, int8=int8) for _ in self.layers]
