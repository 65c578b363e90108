"""Inputs for a model by what its forward takes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from tests.watch.zoo.small import IMAGE

BATCH, TOKENS, TARGET = 2, 13, 7


def inputs_of(model: Any, padded: bool = True) -> dict[str, Any]:
    """Keyword arguments of ``model.forward``, in random numbers of the right shapes."""
    g = torch.Generator().manual_seed(0)
    names = inspect.signature(model.forward).parameters
    config = model.config
    words = _words(config)
    found: dict[str, Any] = {}
    ids = torch.randint(5, min(words, 60), (BATCH, TOKENS), generator=g)
    if "input_ids" in names:
        found["input_ids"] = ids
        if padded and "attention_mask" in names:
            mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
            mask[1, TOKENS - 4 :] = 0
            found["attention_mask"] = mask
    if "decoder_input_ids" in names:
        found["decoder_input_ids"] = ids[:, :TARGET].clone()
    if "pixel_values" in names and (
        "input_ids" not in names or main(model) == "pixel_values" or _needs(names, "pixel_values")
    ):
        found["pixel_values"] = torch.randn(BATCH, *_image(config), generator=g)
    if "input_features" in names and (
        "input_ids" not in names or _needs(names, "input_features") or main(model) == "input_features"
    ):
        found["input_features"] = torch.randn(BATCH, *_features(config), generator=g)
    if "input_values" in names:
        found["input_values"] = torch.randn(BATCH, 4000, generator=g)
    if "bbox" in names:
        found["bbox"] = torch.tensor([1, 2, 30, 40]).expand(BATCH, TOKENS, 4).contiguous()
    return found


def main(model: Any) -> str:
    return str(getattr(model, "main_input_name", "input_ids"))


def _needs(names: Any, name: str) -> bool:
    return names[name].default is inspect.Parameter.empty


def _words(config: Any) -> int:
    for part in (config, *(getattr(config, name, None) for name in ("text_config", "text_encoder", "decoder"))):
        size = getattr(part, "vocab_size", None)
        if isinstance(size, int):
            return size
    return 60


def _image(config: Any) -> tuple[int, int, int]:
    parts = [config, *(getattr(config, name, None) for name in ("vision_config", "encoder", "backbone_config"))]
    size, channels = IMAGE, 3
    for part in reversed(parts):
        given = getattr(part, "image_size", None)
        if given:
            size = given[0] if isinstance(given, (list, tuple)) else given
        channels = getattr(part, "num_channels", None) or channels
    return channels, size, size


def _features(config: Any) -> tuple[int, int]:
    parts = [config, *(getattr(config, name, None) for name in ("audio_config", "encoder_config"))]
    mel = next((n for part in parts if (n := getattr(part, "num_mel_bins", None))), 16)
    length = next((n for part in parts if (n := getattr(part, "max_source_positions", None))), 50)
    return mel, 2 * length
