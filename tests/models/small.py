"""Small models of every kind, in float64 and in eval, with weights large enough that tokens matter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard import models
from regard.positions import Linear

SIZES: dict[str, Any] = {"embed_dim": 30, "num_layers": 3, "num_heads": 5, "ff_dim": 35}


def spread(config: models.Config) -> Any:
    """Norms and biases start as ones and zeros, and matrices so small that every token is much like any other."""
    model = models.build(config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 0.1 if parameter.dim() == 1 else 1.5 * parameter[0].numel() ** -0.5
            if isinstance(config, models.TransformerConfig):  # else positions and biases decide alone
                std = 1.0 if "embedding" in name else std / 1.5
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return model.eval()


def gpt(**changes: Any) -> models.Decoder:
    given = {"vocab_size": 37, "max_tokens": 64, **SIZES, **changes}
    return spread(models.config("gpt2", **given))


def llama(**changes: Any) -> models.Decoder:
    given = {"vocab_size": 37, "max_tokens": 64, **SIZES, "num_heads": 5, "num_kv_heads": 1, **changes}
    return spread(models.config("llama-3-8b", rotary_scaling=Linear(2.0), **given))


def bert(**changes: Any) -> models.Encoder:
    given = {"vocab_size": 37, "max_tokens": 64, "masked_lm": True, **SIZES, **changes}
    return spread(models.config("bert-base", **given))


def vit(**changes: Any) -> models.Encoder:
    given = {"image_size": 21, "patch_size": 7, "classes": 11, **SIZES, **changes}
    return spread(models.config("vit-base", **given))


def translator(**changes: Any) -> models.Transformer:
    given = {"vocab_size": 37, **SIZES, "num_layers": 2, "decoder_layers": 3, "tied": False, **changes}
    return spread(models.config("transformer-base", **given))


def whisper(**changes: Any) -> models.Whisper:
    given = {"vocab_size": 37, "mel_bins": 7, "max_frames": 15, "max_tokens": 33, **SIZES, **changes}
    return spread(models.config("whisper-tiny", **given))


def tokens(batch: int, length: int, most: int = 37) -> Tensor:
    return torch.randint(0, most, (batch, length))
