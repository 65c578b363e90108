"""Checks of what `cost.of` is given. Everything here raises TypeError or ValueError that names the argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from regard import _checks, models
from regard.cost._ops import Experts
from regard.models import DecoderConfig, DeepSeekConfig, EncoderConfig, LatentConfig, TransformerConfig, WhisperConfig

SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DEVICES = ("cuda", "cpu")
LENGTH = 1024  # of a configuration that names none
MOST = 1 << 62  # nothing is as long: what is larger is a slip of the hand


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a bill is made of: the configuration, and how it is run."""

    name: str
    config: Any
    batch: int
    length: int
    source_length: int | None
    dtype: str
    device: str
    latent: LatentConfig | None
    experts: tuple[int, int] | None
    int8: bool
    rolling: bool
    sinks: int


def config_of(given: Any) -> Any:
    if isinstance(given, str):
        return models.config(given)
    if not isinstance(given, (EncoderConfig, DecoderConfig, TransformerConfig, LatentConfig)):
        raise TypeError(f"config must be a name or a configuration of regard.models, got {type(given).__name__}")
    if isinstance(given, DeepSeekConfig):
        raise ValueError("config is a DeepSeekConfig; give a DecoderConfig of its sizes, with latent= and experts=")
    return given


def dtype_of(given: Any) -> str:
    _checks.check_choice("dtype", given, [*SIZES, *SHORT])
    return SHORT.get(given) or str(given)


def check_device(given: object) -> None:
    _checks.check_choice("device", given, DEVICES)


def check_count(name: str, count: object, least: int = 1) -> None:
    _checks.check_count(name, count, least, kind=int)
    if count > MOST:  # type: ignore[operator]
        raise ValueError(f"{name} must be at most 2**62, got {count}")


def check_counts(**counts: object) -> None:
    for name, count in counts.items():
        check_count(name, count)


def lengths_of(config: Any, length: int | None, source: int | None) -> tuple[int, int]:
    """Tokens of an item, and of its source."""
    if source is not None:
        check_count("source_length", source)
        if not isinstance(config, TransformerConfig):
            raise ValueError("source_length is for encoder-decoders (transformer-base, whisper-tiny); leave it out")
    if isinstance(config, EncoderConfig) and config.image_size is not None:
        assert config.patch_size is not None
        tokens = 1 + (config.image_size // config.patch_size) ** 2
        if length not in (None, tokens):
            raise ValueError(
                f"length is {length}; an image of {config.image_size} in patches of {config.patch_size} has {tokens} "
                "tokens: leave it out, or change image_size"
            )
        return tokens, 0
    found = getattr(config, "max_tokens", None) or LENGTH if length is None else length
    check_count("length", found)
    if not isinstance(config, TransformerConfig):
        return found, 0
    if source is not None:
        return found, source
    return found, config.max_frames if isinstance(config, WhisperConfig) else found


def check_heads(config: Any) -> None:
    """As the modules do when they are built."""
    dim, heads = config.embed_dim, config.num_heads
    width, kv_heads = (getattr(config, name, None) for name in ("head_dim", "num_kv_heads"))
    if not isinstance(config, LatentConfig) and width is None and dim % heads:
        more = "" if isinstance(config, EncoderConfig) else "; give head_dim otherwise"
        raise ValueError(f"num_heads={heads} must divide embed_dim={dim}{more}")
    if kv_heads is not None and heads % kv_heads:
        raise ValueError(f"num_kv_heads={kv_heads} must divide num_heads={heads}")
    if isinstance(config, LatentConfig) and config.rope_dim % 2:
        raise ValueError(f"rotary positions turn pairs: rope_dim must be even, got {config.rope_dim}")
    if isinstance(config, DecoderConfig) and config.positions == "rotary":
        width = dim // heads if width is None else width
        if width % 2:
            raise ValueError(f"rotary positions turn pairs: heads must have an even width, got {width}")


def check_latent(config: Any, latent: object) -> None:
    if latent is None:
        return
    if not isinstance(latent, LatentConfig):
        raise TypeError(f"latent must be a regard.models.LatentConfig, got {type(latent).__name__}")
    if not isinstance(config, DecoderConfig):
        raise ValueError(f"latent takes the place of a decoder's attention, and this is a {type(config).__name__}")
    check_heads(latent)
    if latent.embed_dim != config.embed_dim:
        raise ValueError(f"latent has embed_dim={latent.embed_dim}, and the configuration has {config.embed_dim}")
    if config.window is not None:
        raise ValueError(f"latent attention has no window, and the configuration has window={config.window}")


def check_cache(config: Any, int8: bool, rolling: bool, sinks: int) -> None:
    check_count("sinks", sinks, 0)
    if int8 and isinstance(config, EncoderConfig):
        raise ValueError("int8 is of a cache, and an encoder keeps none; leave it out")
    windowed = isinstance(config, DecoderConfig) and config.window is not None and config.windowed is None
    if rolling and not windowed:
        raise ValueError(
            "rolling needs a decoder with a window in every layer, such as models.config('gpt2', window=256)"
        )
    if sinks and not rolling:
        raise ValueError(f"sinks={sinks} stay in a rolling cache; give rolling=True")


def experts_of(config: Any, given: Any) -> Experts | None:
    """(count, active) of a mixture of experts, checked."""
    if given is None:
        return None
    if not isinstance(config, DecoderConfig):
        raise ValueError(f"experts is for decoders, got {type(config).__name__}")
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise TypeError(f"experts must be (how many, how many a token goes through), got {given!r}")
    for name, value in zip(("experts", "active experts"), given, strict=True):
        check_count(name, value)
    if given[1] > given[0]:
        raise ValueError(f"experts must be (how many, how many a token goes through), of {given[0]} not {given[1]}")
    return Experts(*given)
