"""A stack of causal layers that predicts the next token: GPT-2, GPT-3, Llama, Mistral, Qwen, Gemma."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard import masks
from regard._checks import check_choice
from regard.cache import KVCache, TokenCache
from regard.masks import Mask
from regard.models import _parts
from regard.models._parts import FeedForward, Hidden, Model
from regard.positions import LearnedPositions, Rotary, Scaling


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Configuration of a `Decoder`. The defaults are GPT-2's; those of Llama are in `models.config("llama-2-7b")`.

    Args:
        max_tokens: the longest input. Learned positions end there; rotary positions can go on, beyond their range.
        num_kv_heads, head_dim: as in `regard.nn.MultiHeadAttention`.
        positions: "learned", a vector per position, added to the token; or "rotary", which rotates queries and keys.
        rotary_base, rotary_scaling, rotary_interleaved: as in `regard.positions.Rotary`.
        window: a token sees itself and this many tokens before it; all of them when None.
        windowed: which layers have that window, one flag per layer; all of them when None.
        qk_norm: as in `regard.nn.MultiHeadAttention`, with `norm_eps`.
        attention_scale, attention_softcap: `scale` and `softcap` of the attention.
        norm: "layer" or "rms", before attention, before the feed-forward, and at the end.
        norm_plus_one: the gain of a norm ("rms") is 1 + its weight (Gemma).
        post_norms: norms also on the outputs of attention and feed-forward, before they are added (Gemma 2).
        activation: relu, gelu, gelu_tanh or silu; with `gated`, of the gate.
        packed: one matrix for query, key and value.
        tied: the output layer is the token embedding.
        head: whether there is an output layer; without one, the model returns states.
        logit_softcap: c of c · tanh(logit / c) on the output.
        scaled_embedding: the embedding of a token is multiplied by √embed_dim (Gemma).
        dropout: on embeddings and on the outputs of attention and feed-forward; `attention_dropout`: on the weights.
        init_std: of all matrices and the token embedding; `position_std` of learned positions.
        scaled_residual: matrices whose output is added to the residual start smaller by √(2 · num_layers) (GPT-2).
    """

    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    ff_dim: int
    max_tokens: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    positions: str = "learned"
    rotary_base: float = 10_000.0
    rotary_scaling: Scaling | None = None
    rotary_interleaved: bool = False
    window: int | None = None
    windowed: tuple[bool, ...] | None = None
    qk_norm: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    norm: str = "layer"
    norm_eps: float = 1e-5
    norm_plus_one: bool = False
    post_norms: bool = False
    activation: str = "gelu_tanh"
    gated: bool = False
    qkv_bias: bool = True
    out_bias: bool = True
    ff_bias: bool = True
    packed: bool = False
    tied: bool = True
    head: bool = True
    logit_softcap: float | None = None
    scaled_embedding: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    init_std: float = 0.02
    position_std: float = 0.01
    scaled_residual: bool = True

    def __post_init__(self) -> None:
        _parts.check_fields(self)
        check_choice("positions", self.positions, ("learned", "rotary"))
        check_choice("norm", self.norm, ("layer", "rms"))
        if self.windowed is not None:
            if len(self.windowed) != self.num_layers or not all(isinstance(flag, bool) for flag in self.windowed):
                raise ValueError(f"windowed must be {self.num_layers} flags, one for each layer, got {self.windowed!r}")
            if self.window is None:
                raise ValueError("windowed says which layers have a window, and window is None")
        if self.norm_plus_one and self.norm != "rms":
            raise ValueError(f"norm_plus_one is for norm='rms', got norm={self.norm!r}")
        if self.logit_softcap is not None and not self.head:
            raise ValueError("logit_softcap is for the output layer, and head=False leaves it out")
        if self.rotary_scaling is not None and self.positions != "rotary":
            raise ValueError(f"rotary_scaling is given, but positions are {self.positions!r}")


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); with `post_norms` what is added is normed too."""

    def __init__(self, config: Any, positions: Rotary | None, index: int, **made: Any) -> None:
        super().__init__()
        self.attention_norm = _parts.norm(config, **made)
        self.attention = self._attention(config, positions, **made)
        self.feed_forward_norm = _parts.norm(config, **made)
        after = [_parts.norm(config, **made) if config.post_norms else None for _ in range(2)]
        self.attention_post_norm, self.feed_forward_post_norm = after
        self.feed_forward = self._feed_forward(config, index, **made)

    def _attention(self, config: Any, positions: Rotary | None, **made: Any) -> nn.Module:
        attention = _parts.attention(config, positions=positions, **made)
        for norm in (attention.q_norm, attention.k_norm):
            if norm is not None:
                norm.eps = config.norm_eps
        return attention

    def _feed_forward(self, config: Any, index: int, **made: Any) -> nn.Module:
        return FeedForward.of(config, **made)

    def forward(self, x: Tensor, mask: Mask | None, cache: Any = None) -> Tensor:
        added: Tensor = self.attention(self.attention_norm(x), mask=mask, cache=cache)
        x = x + (added if self.attention_post_norm is None else self.attention_post_norm(added))
        added = self.feed_forward(self.feed_forward_norm(x))
        return x + (added if self.feed_forward_post_norm is None else self.feed_forward_post_norm(added))


class Decoder(Model[DecoderConfig]):
    """Token numbers in, logits of the next token out.

        decoder = Decoder(models.config("gpt2"))
        logits = decoder(tokens)                                     # [batch, token, vocab_size]
        logits = decoder(tokens, lengths=[7, 3])                     # a batch padded on the right; side="left" too
        new = decoder.eval().generate([[464, 3797]], max_new_tokens=20)

    `checkpoint_layers = True` saves memory in training: the backward pass computes the inside of each layer again.
    """

    _layer: type[DecoderLayer] = DecoderLayer

    def _build(self, config: DecoderConfig, **made: Any) -> None:
        self.token_embedding = nn.Embedding(config.vocab_size, config.embed_dim, **made)
        self.position_embedding = None
        rotary = None
        if config.positions == "learned":
            self.position_embedding = LearnedPositions(config.max_tokens, config.embed_dim, **made)
        else:
            rotary = _parts.rotary(config, made["device"])
        self.layers = nn.ModuleList(self._layer(config, rotary, at, **made) for at in range(config.num_layers))
        self.norm = _parts.norm(config, **made)
        self.head = self._make_head(config.vocab_size, **made)

    def reset_parameters(self) -> None:
        """As published: Radford et al., 2019, with the deviations of its released code; `DecoderConfig` has them."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=self.config.init_std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.position_embedding is not None:
            nn.init.normal_(self.position_embedding.weight, std=self.config.position_std)
        if self.config.scaled_residual:
            std = self.config.init_std / math.sqrt(2 * self.config.num_layers)
            for name, module in self.layers.named_modules():
                if name.endswith((".out_proj", ".down")):  # of all experts, where there are some
                    nn.init.normal_(module.weight, std=std)

    def forward(
        self,
        tokens: Tensor,
        *,
        lengths: Any = None,
        side: str = "right",
        mask: Mask | None = None,
        caches: Sequence[Any] | None = None,
        hidden_states: bool = False,
    ) -> Tensor | Hidden:
        """Logits `[batch, token, vocab_size]`, or states without an output layer; those at padding are undefined.

        Args:
            tokens: `[batch, token]`, integers; with caches, only the new ones.
            lengths, side: item b has `lengths[b]` tokens, and padding on this side. Positions count real tokens.
            mask: replaces the mask of the configuration (causal, and its window) or of the caches (`RollingCache`).
            caches: one of `regard.cache` for each layer, such as `decoder.caches(capacity)`.
            hidden_states: return `(logits, states)`: the input of the first layer and the output of every layer,
                before the last norm.
        """
        states, hidden = self._run(tokens, lengths, side, mask, caches, hidden_states)
        logits = self.logits(states) if self.config.head else states
        return (logits, hidden) if hidden_states else logits

    def states(
        self,
        tokens: Tensor,
        *,
        lengths: Any = None,
        side: str = "right",
        mask: Mask | None = None,
        caches: Sequence[Any] | None = None,
    ) -> Tensor:
        """The input of `logits`, `[batch, token, embed_dim]`; arguments as in `forward`."""
        return self._run(tokens, lengths, side, mask, caches, False)[0]

    def logits(self, states: Tensor) -> Tensor:
        """The output layer."""
        found, cap = self._predicted(states, self.token_embedding), self.config.logit_softcap
        return found if cap is None else cap * torch.tanh(found / cap)

    def _run(
        self,
        tokens: Tensor,
        lengths: Any,
        side: str,
        mask: Mask | None,
        caches: Sequence[Any] | None,
        keep: bool,
    ) -> Hidden:
        _parts.check_tokens("tokens", tokens, lengths, side)
        _parts.check_caches(caches, len(self.layers))
        if caches is None:
            first = _parts.first_position(lengths, side, tokens)
            seen = self._masks([None] * len(self.layers), tokens.shape[1], mask, lengths, side)
        else:
            seen = self._masks(caches, tokens.shape[1], mask)
            if lengths is not None:  # a cache keeps the real tokens only
                caches = [cache.padded(lengths, side=side, tokens=tokens.shape[1]) for cache in caches]
            first = caches[0].position

        x = _parts.embed("tokens", self.token_embedding, tokens)
        if self.config.scaled_embedding:
            x = x * torch.tensor(self.config.embed_dim**0.5, dtype=x.dtype)  # rounded as a weight is
        if self.position_embedding is not None:
            x = _parts.add_positions(self.position_embedding, x, first)
        x = F.dropout(x, self.config.dropout, self.training)
        given = zip(seen, caches or [None] * len(self.layers), strict=True)
        x, hidden = self._through(self.layers, x, given, keep, cached=caches is not None)
        return self.norm(x), hidden

    def _masks(
        self, caches: Sequence[Any], tokens: int, given: Mask | None, lengths: Any = None, side: str = "right"
    ) -> list[Mask | None]:
        """Of each layer; layers that see the same share one, and with it what is worked out about it."""
        made: dict[Any, Mask | None] = {}
        found = []
        for layer, cache in enumerate(caches):
            windowed = self.config.windowed is None or self.config.windowed[layer]
            window = self.config.window if windowed else None
            kept = (window, getattr(cache, "window", None), getattr(cache, "sinks", 0)) if given is None else None
            if kept not in made:
                mask = self._mask(cache, tokens, window) if given is None else given
                made[kept] = _parts.padding_mask(mask, lengths, side)
            found.append(made[kept])
        return found

    def _mask(self, cache: Any, tokens: int, window: int | None) -> Mask | None:
        """What the configuration says, and what the cache does: a `RollingCache` forgets."""
        own = getattr(cache, "mask", None)
        if own is not None:
            narrower = window is None or (cache.window <= window and not cache.sinks)
            return own if narrower else own & masks.window(left=window)  # type: ignore[arg-type, no-any-return]
        if cache is not None and tokens == 1 and window is None:
            return None  # the newest token sees all that is held
        return masks.causal() if window is None else masks.causal() & masks.window(left=window)

    def caches(self, capacity: int, *, int8: bool = False) -> list[TokenCache]:
        """One `KVCache` per layer."""
        return [KVCache(capacity, int8=int8) for _ in self.layers]

    def generate(
        self,
        prompts: Tensor | Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: int | Sequence[int] = (),
        seed: int | Sequence[int] | None = None,
        caches: Sequence[TokenCache] | None = None,
        use_cache: bool = True,
    ) -> list[list[int]]:
        """Generate the tokens that follow each prompt, up to and including a stop token.

        Args:
            prompts: token numbers, one or more for each item; lists may differ in length.
            max_new_tokens: maximum number of tokens to generate.
            temperature: 0 takes the likeliest token; above 0, tokens are sampled from softmax(logits / temperature).
            top_k: sample from the k likeliest tokens.
            top_p: sample from the smallest set of likeliest tokens whose probabilities add up to p.
            stop: an item ends with any of these; its row leaves the batch.
            seed: seed of the sampling, one per item or one for all; drawn from torch's generator when not given. An
                item's samples depend neither on the other items nor on the device.
            caches: one of `regard.cache` per layer; a `KVCache` of the right size when not given. Tokens that they
                already hold are the beginning of every prompt.
            use_cache: False recomputes everything for every token.
        """
        found: list[list[int]] = []
        for step in self.stream(
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop=stop,
            seed=seed,
            caches=caches,
            use_cache=use_cache,
        ):
            found = found or [[] for _ in step]
            for tokens, token in zip(found, step, strict=True):
                if token is not None:
                    tokens.append(token)
        return found

    def stream(self, prompts: Tensor | Sequence[Sequence[int]], **how: Any) -> Iterator[list[int | None]]:
        """`generate`, step by step: the next token of each item, None for those that have ended."""
        from regard.models._generation import stream

        return stream(self, prompts, **how)
