"""Whole models built on regard's attention.

    model = models.build("gpt2")                                     by name, with untrained weights
    model = models.Decoder(models.config("gpt2", num_layers=3))      with a changed configuration
    models.build("gpt3-175b", device="meta")                         sizes only, without memory

`Encoder` is BERT and ViT, `Decoder` GPT and Llama, `DeepSeek` a decoder with latent attention and experts,
`Transformer` the encoder-decoder of 2017; `T5` and `Whisper` are variants of it. Each model is one file that reads
from top to bottom.
"""

from __future__ import annotations

from regard.models._decoder import Decoder, DecoderConfig
from regard.models._deepseek import DeepSeek, DeepSeekConfig
from regard.models._encoder import Encoder, EncoderConfig
from regard.models._loss import label_smoothed_loss
from regard.models._named import Config, LatentConfig, build, config, names
from regard.models._search import Hypothesis
from regard.models._t5 import T5, T5Config
from regard.models._transformer import Transformer, TransformerConfig
from regard.models._whisper import Whisper, WhisperConfig

__all__ = [
    "T5",
    "Config",
    "Decoder",
    "DecoderConfig",
    "DeepSeek",
    "DeepSeekConfig",
    "Encoder",
    "EncoderConfig",
    "Hypothesis",
    "LatentConfig",
    "T5Config",
    "Transformer",
    "TransformerConfig",
    "Whisper",
    "WhisperConfig",
    "build",
    "config",
    "label_smoothed_loss",
    "names",
]
