"""Named configurations, and models built from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regard._checks import check_choice
from regard.models import _parts
from regard.models._decoder import Decoder, DecoderConfig
from regard.models._deepseek import DeepSeek, DeepSeekConfig
from regard.models._encoder import Encoder, EncoderConfig
from regard.models._t5 import T5, T5Config
from regard.models._transformer import Transformer, TransformerConfig
from regard.models._whisper import Whisper, WhisperConfig
from regard.nn import LatentAttention
from regard.positions import Scaling, YaRN


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Configuration of a `regard.nn.LatentAttention`; `init_std` is that of its matrices."""

    embed_dim: int
    num_heads: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_head_dim: int | None = None
    q_lora_rank: int | None = None
    bias: bool = False
    norm_eps: float = 1e-6
    rotary_base: float = 10_000.0
    rotary_scaling: Scaling | None = None
    rotary_interleaved: bool = True
    dropout: float = 0.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        _parts.check_fields(self)


Config = EncoderConfig | DecoderConfig | TransformerConfig | LatentConfig


def _bert(embed_dim: int, num_layers: int, num_heads: int) -> EncoderConfig:
    return EncoderConfig(
        embed_dim=embed_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        ff_dim=4 * embed_dim,
        vocab_size=30_522,
        max_tokens=512,
        token_types=2,
        pooler=True,
    )


def _gpt(embed_dim: int, num_layers: int, num_heads: int, max_tokens: int = 1024) -> DecoderConfig:
    sizes: dict[str, Any] = {"embed_dim": embed_dim, "num_layers": num_layers, "num_heads": num_heads}
    dropout: dict[str, Any] = {"dropout": 0.1, "attention_dropout": 0.1}
    ff_dim, words = 4 * embed_dim, 50_257
    return DecoderConfig(vocab_size=words, ff_dim=ff_dim, max_tokens=max_tokens, packed=True, **sizes, **dropout)


def _llama(vocab_size: int, ff_dim: int, max_tokens: int, num_kv_heads: int, rotary_base: float) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab_size,
        embed_dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=num_kv_heads,
        ff_dim=ff_dim,
        max_tokens=max_tokens,
        positions="rotary",
        rotary_base=rotary_base,
        norm="rms",
        activation="silu",
        gated=True,
        qkv_bias=False,
        out_bias=False,
        ff_bias=False,
        tied=False,
        scaled_residual=False,
    )


NAMED: dict[str, Config] = {
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
    "vit-base": EncoderConfig(
        embed_dim=768,
        num_layers=12,
        num_heads=12,
        ff_dim=3072,
        image_size=224,
        patch_size=16,
        norm="pre",
        norm_eps=1e-6,
        dropout=0.0,
        attention_dropout=0.0,
        pooler=True,
        init="xavier",
    ),
    "gpt2": _gpt(768, 12, 12),
    "gpt2-medium": _gpt(1024, 24, 16),
    "gpt2-large": _gpt(1280, 36, 20),
    "gpt2-xl": _gpt(1600, 48, 25),
    "gpt3-175b": _gpt(12_288, 96, 96, max_tokens=2048),
    "llama-2-7b": _llama(32_000, 11_008, 4096, 32, 10_000.0),
    "llama-3-8b": _llama(128_256, 14_336, 8192, 8, 500_000.0),
    "transformer-base": TransformerConfig(vocab_size=37_000),
    "transformer-big": TransformerConfig(vocab_size=37_000, embed_dim=1024, num_heads=16, ff_dim=4096, dropout=0.3),
    "whisper-tiny": WhisperConfig(vocab_size=51_865, embed_dim=384, num_layers=4, num_heads=6, ff_dim=1536),
    "deepseek-v3-attention": LatentConfig(
        embed_dim=7168,
        num_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        nope_dim=128,
        rope_dim=64,
        value_head_dim=128,
        rotary_scaling=YaRN(factor=40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0),
        init_std=0.006,
    ),
}


def names() -> list[str]:
    """The names of all named configurations."""
    return list(NAMED)


def config(name: str, **changes: Any) -> Any:
    """The configuration of that name, with these fields changed.

    config("gpt2", num_layers=3, vocab_size=257)
    """
    check_choice("name", name, NAMED)
    known = [field.name for field in dataclasses.fields(NAMED[name])]
    if unknown := [field for field in changes if field not in known]:
        raise TypeError(f"{type(NAMED[name]).__name__} has no {', '.join(unknown)}; it has {', '.join(known)}")
    return dataclasses.replace(NAMED[name], **changes)


def build(
    config: Config | str, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """Build the model of a configuration or of a name; on the device "meta", it takes no memory."""
    given = NAMED.get(config) if isinstance(config, str) else config
    for kind in type(given).__mro__:
        if kind in MODELS:
            return MODELS[kind](given, device=device, dtype=dtype)
    if isinstance(config, str):
        raise ValueError(f"config must be a configuration or one of {', '.join(NAMED)}, got {config!r}")
    raise TypeError(f"config must be a configuration of regard.models or a name, got {type(config).__name__}")


def _latent(config: LatentConfig, **made: Any) -> LatentAttention:
    positions = _parts.rotary(config, made["device"])
    how: dict[str, Any] = {"bias": config.bias, "eps": config.norm_eps, "dropout": config.dropout}
    attention = _parts.latent_attention(config, positions, **how, **made)
    for layer in attention.children():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=config.init_std)
    return attention


MODELS: dict[type, Callable[..., nn.Module]] = {
    EncoderConfig: Encoder,
    DecoderConfig: Decoder,
    DeepSeekConfig: DeepSeek,
    TransformerConfig: Transformer,
    T5Config: T5,
    WhisperConfig: Whisper,
    LatentConfig: _latent,
}
