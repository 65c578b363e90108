"""Whisper (Radford et al., 2022): the Transformer with sound as its source."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.models import _parts
from regard.models._transformer import Transformer, TransformerConfig
from regard.positions import LearnedPositions


@dataclass(frozen=True, kw_only=True)
class WhisperConfig(TransformerConfig):
    """Configuration of a `Whisper`: a `TransformerConfig` with other defaults, and the sizes of the spectrogram.

    Args:
        mel_bins: frequencies of the spectrogram.
        max_frames: the encoder's positions; the spectrogram has twice as many frames.
        max_tokens: the decoder's positions.
        init_std: of all weights except the encoder's positions, which are sinusoidal.
    """

    mel_bins: int = 80
    max_frames: int = 1500
    max_tokens: int = 448
    norm: str = "pre"
    norm_eps: float = 1e-5
    activation: str = "gelu"
    attention_bias: bool = True
    key_bias: bool = False
    dropout: float = 0.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_vocab_size is not None:
            raise ValueError("target_vocab_size is for a source of words; give vocab_size")
        if self.embed_dim % 2:
            raise ValueError(f"embed_dim must be even (positions are sines and cosines), got {self.embed_dim}")


class Whisper(Transformer):
    """A spectrogram `[batch, mel_bins, frame]` in, logits of the next token out; all else as in `Transformer`."""

    config: WhisperConfig

    def make_embeddings(self, config: TransformerConfig, **made: Any) -> None:
        assert isinstance(config, WhisperConfig)
        dim = config.embed_dim
        self.conv1 = nn.Conv1d(config.mel_bins, dim, 3, padding=1, **made)
        self.conv2 = nn.Conv1d(dim, dim, 3, stride=2, padding=1, **made)
        self.source_positions = LearnedPositions(config.max_frames, dim, **made)
        self.source_positions.weight.requires_grad_(False)
        self.token_embedding = nn.Embedding(config.vocab_size, dim, **made)
        self.target_positions = LearnedPositions(config.max_tokens, dim, **made)

    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                nn.init.normal_(parameter, std=self.config.init_std)
        with torch.no_grad():
            self.source_positions.weight.copy_(_waves(self.config.max_frames, self.config.embed_dim))

    def embed_source(self, source: Tensor, lengths: Any, side: str) -> Tensor:
        bins = self.config.mel_bins
        if not isinstance(source, Tensor) or source.dim() != 3 or source.shape[1] != bins:
            given = list(source.shape) if isinstance(source, Tensor) else type(source).__name__
            raise ValueError(f"source must be a spectrogram [batch, {bins}, frame], got {given}")
        if lengths is not None:
            raise ValueError("source_lengths are for words: Whisper reads silence at the end as it is, without a mask")
        x = F.gelu(self.conv2(F.gelu(self.conv1(source)))).transpose(1, 2)  # [batch, frame / 2, embed_dim]
        return self.source_positions(x)  # type: ignore[no-any-return]

    def embed_target(self, target: Tensor, first: int | Tensor) -> Tensor:
        x = _parts.embed("target", self.token_embedding, target)
        return _parts.add_positions(self.target_positions, x, first)


def _waves(length: int, dim: int) -> Tensor:
    """Sines, then cosines, of wavelengths from 2π to 10 000 · 2π."""
    slower = torch.arange(dim // 2, dtype=torch.float64) * (-math.log(10_000) / max(dim // 2 - 1, 1))
    angles = torch.arange(length, dtype=torch.float64).unsqueeze(1) * slower.exp()
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()
