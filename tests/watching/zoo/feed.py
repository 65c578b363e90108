"""Inputs for a model by what its forward takes: several sets, of which the first that runs is used."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tests.watching.zoo.small import IMAGE, WIDTH

BATCH, TOKENS, TARGET = 2, 13, 7


def runnable(model: Any) -> dict[str, Any]:
    """Keyword arguments with which the model runs; what the last set raised when none does."""
    problem: Exception = ValueError("it takes nothing that is known here")
    for inputs in candidates(model):
        try:
            torch.manual_seed(1)
            model(**inputs)
            return inputs
        except Exception as error:
            if not isinstance(problem, _TELLING) or not isinstance(error, TypeError):
                problem = error
    raise problem


_TELLING = (RuntimeError, IndexError)


def candidates(model: Any) -> Iterator[dict[str, Any]]:
    names = inspect.signature(model.forward).parameters
    text, needed = _text(model, names), _needed(model, names)
    images = [{"pixel_values": make(model.config)} for make in _IMAGES] if "pixel_values" in names else []
    sounds = []
    if "input_features" in names:
        sounds = [{"input_features": x} for x in _features(model.config)]
        if "attention_mask" in names and "input_ids" not in names:
            sounds += [{**s, "attention_mask": torch.ones(BATCH, s["input_features"].shape[1]).long()} for s in sounds]
    if "input_values" in names:
        sounds += [{"input_values": x} for x in _waves(model.config)]
    main = str(getattr(model, "main_input_name", "input_ids"))
    others = images + sounds
    if text and main not in ("pixel_values", "input_features", "input_values"):
        yield {**text, **needed}
    for other in others:
        yield {**needed, **other}
        if "decoder_input_ids" in names:
            yield {**needed, **other, "decoder_input_ids": _ids(model.config)[:, :TARGET]}
        if text:
            yield {**text, **needed, **other}
            yield {"input_ids": text["input_ids"], **needed, **other}
    for image in images:
        for sound in sounds:
            yield {**text, **needed, **image, **sound}
    yield {**text, **needed}
    yield needed


def _text(model: Any, names: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "input_ids" in names:
        found["input_ids"] = _ids(model.config)
        if "attention_mask" in names:
            found["attention_mask"] = torch.ones(BATCH, TOKENS, dtype=torch.long)
            found["attention_mask"][1, TOKENS - 4 :] = 0
    if "decoder_input_ids" in names and "input_ids" in names:
        found["decoder_input_ids"] = _ids(model.config)[:, :TARGET].clone()
        if hasattr(model.config, "delay_pattern"):  # Dia writes several channels at once
            found["decoder_input_ids"] = found["decoder_input_ids"][..., None].repeat(1, 1, 3)
    if "bbox" in names:
        found["bbox"] = torch.tensor([1, 2, 30, 40]).expand(BATCH, TOKENS, 4).contiguous()
    return found


def _needed(model: Any, names: Any) -> dict[str, Any]:
    """What has no default, or is needed though it has one, by name."""
    config = model.config
    known: dict[str, Callable[[], Any]] = {
        "grid_thw": lambda: torch.tensor([[1, 4, 4], [1, 2, 4]]),
        "merge_sizes": lambda: torch.tensor([1, 1]),
        "hidden_states": lambda: _noise(24, _patch(config)),
        "pixel_values": lambda: _noise(24, _patch(config)) if "grid_thw" in names else _IMAGES[0](config),
        "pixel_values_videos": lambda: _noise(BATCH, getattr(config, "num_frames", None) or 4, *_image(config)),
        "input_features_mask": lambda: torch.ones(BATCH, 100, dtype=torch.bool),
        "query_embeds": lambda: _noise(BATCH, 5, WIDTH),
        "inputs_embeds": lambda: _noise(BATCH, TOKENS, WIDTH),
        "inputs": lambda: _noise(BATCH, TOKENS, config.d_model) if hasattr(config, "d_latents") else _ids(config),
        "encoder_hidden_states": lambda: _noise(BATCH, 9, config.encoder_hidden_size),
        "past_values": lambda: _series(config),
        "past_values_padding": lambda: torch.zeros(BATCH, 64),
        "past_time_features": lambda: _noise(BATCH, _series(config).shape[1], 1),
        "past_observed_mask": lambda: torch.ones_like(_series(config)),
        "future_values": lambda: _noise(BATCH, config.prediction_length),
        "future_time_features": lambda: _noise(BATCH, config.prediction_length, 1),
        "states": lambda: _noise(BATCH, TOKENS, config.state_dim),
        "actions": lambda: _noise(BATCH, TOKENS, config.act_dim),
        "returns_to_go": lambda: _noise(BATCH, TOKENS, 1),
        "timesteps": lambda: torch.arange(TOKENS).expand(BATCH, -1),
        "freq": lambda: torch.zeros(BATCH, 1, dtype=torch.long),
        "visual_feats": lambda: _noise(BATCH, 5, getattr(config, "visual_feat_dim", 64)),
        "visual_pos": lambda: _noise(BATCH, 5, 4).abs(),
        "qformer_input_ids": lambda: _ids(config),
        "task_inputs": lambda: _ids(config),
        "prompt_pixel_values": lambda: _IMAGES[0](config),
        "prompt_masks": lambda: _IMAGES[0](config),
        "image_embeds_position_mask": lambda: None,
        "spatial_shapes": lambda: torch.tensor([[4, 4]] * BATCH),
        "pixel_attention_mask": lambda: torch.ones(BATCH, 16, dtype=torch.long),
        "audio_mel": lambda: _noise(BATCH, 48, getattr(config, "input_feat_size", 128)),
        "audio_mel_mask": lambda: torch.zeros(BATCH, 48, dtype=torch.bool),
        "pixel_position_ids": lambda: (
            torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1)
            .view(1, 16, 2)
            .expand(BATCH, -1, -1)
        ),
    }
    optional = ["visual_feats", "visual_pos", "states", "actions", "returns_to_go", "timesteps", "spatial_shapes"]
    optional += ["pixel_attention_mask"] if "spatial_shapes" in names else []
    optional += ["future_values", "future_time_features"] if "past_time_features" in names else []
    optional += ["encoder_hidden_states"] if "query_embeds" in names else []
    optional += ["pixel_values_videos"] if "input_ids" not in names else []
    return {
        name: known[name]()
        for name, given in names.items()
        if name in known and (given.default is inspect.Parameter.empty or name in optional)
    }


def _series(config: Any) -> torch.Tensor:
    """Numbers over time: as many as the model reads back to, of one channel or of several."""
    if hasattr(config, "lags_sequence"):
        return _noise(BATCH, config.context_length + max(config.lags_sequence))
    if hasattr(config, "num_input_channels"):
        return _noise(BATCH, config.context_length, config.num_input_channels)
    return _noise(BATCH, 64)


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _ids(config: Any) -> torch.Tensor:
    return torch.randint(
        5, max(6, min(_words(config), 60)), (BATCH, TOKENS), generator=torch.Generator().manual_seed(0)
    )


def _words(config: Any) -> int:
    for part in (config, *(getattr(config, name, None) for name in ("text_config", "text_encoder", "decoder"))):
        size = getattr(part, "vocab_size", None)
        if isinstance(size, int) and size > 6:
            return size
    return 60


def _parts(config: Any) -> list[Any]:
    names = ("vision_config", "encoder", "backbone_config", "audio_config", "encoder_config", "prompt_encoder_config")
    return [config, *(part for name in names if (part := getattr(config, name, None)) is not None)]


def _image(config: Any) -> tuple[int, int, int]:
    size, channels = IMAGE, 3
    for part in reversed(_parts(config)):
        given = getattr(part, "image_size", None)
        if given:
            size = given[0] if isinstance(given, (list, tuple)) else given
        channels = getattr(part, "num_channels", None) or channels
    return channels, int(size), int(size)


def _patch(config: Any) -> int:
    part = getattr(config, "vision_config", config)
    channels = getattr(part, "in_channels", None) or getattr(part, "in_chans", None) or 3
    size = getattr(part, "patch_size", 8)
    size = size[0] if isinstance(size, (list, tuple)) else size
    return int(channels * (getattr(part, "temporal_patch_size", None) or 1) * size * size)


_IMAGES: list[Callable[[Any], torch.Tensor]] = [
    lambda config: _noise(BATCH, *_image(config)),
    lambda config: _noise(BATCH, getattr(config, "num_frames", None) or 4, *_image(config)),
    lambda config: _noise(BATCH, 2, *_image(config)),
    lambda config: _noise(BATCH, 3, 224, 224),
    lambda config: _noise(BATCH, 16, _patch(config)),
]


def _features(config: Any) -> list[torch.Tensor]:
    parts = _parts(config)
    mels = [n for part in parts for n in (getattr(part, "num_mel_bins", None), getattr(part, "input_dim", None)) if n]
    length = next((n for part in parts if (n := getattr(part, "max_source_positions", None))), 50)
    found = []
    for mel in dict.fromkeys([*mels, 16, 64, 80, 128, 160]):
        found += [_noise(BATCH, mel, 2 * length), _noise(BATCH, 2 * length, mel)]
    return found


def _waves(config: Any) -> list[torch.Tensor]:
    mel, length = getattr(config, "num_mel_bins", None) or 16, getattr(config, "max_length", None) or 100
    return [_noise(BATCH, 4000), _noise(BATCH, 1, 4000), _noise(BATCH, length, mel), _noise(BATCH, 40, WIDTH)]
