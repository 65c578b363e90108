"""Bytes of the caches of keys and values, as `regard.cache` sets them aside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from regard.cost._given import SIZES, Asked
from regard.models import DecoderConfig, LatentConfig, TransformerConfig
from regard.models._parts import head_sizes

GROUP = 32  # numbers that share a float32 scale in int8


class Slots(NamedTuple):
    """What one layer holds for one item."""

    heads: int
    dims: tuple[int, ...]  # of key and value, or of the latent alone
    slots: int  # tokens there is room for

    def bytes(self, size: int, int8: bool) -> int:
        each = sum(dim + 4 * -(-dim // GROUP) if int8 else dim * size for dim in self.dims)
        return self.heads * self.slots * each


@dataclass(frozen=True)
class CacheCost:
    """Keys and values of the tokens before, kept for decoding.

    Args:
        kind: what is kept, in words.
        layers: how many caches there are.
        token: bytes of one token in one layer.
        layer: bytes of one layer, for the whole batch and length.
        total: bytes of all layers.
        kinds: bytes of all layers for each kind of cache that could be meant, as they are and in int8.
    """

    kind: str
    layers: int
    token: int
    layer: int
    total: int
    kinds: dict[str, tuple[int, ...]]


def rolling_slots(window: int, sinks: int) -> int:
    """Room for the sinks and the window, and for as many more before older tokens are moved out."""
    return sinks + window + max(window, 64)


def cache_of(asked: Asked, length: int, source: int) -> CacheCost | None:
    """None for models that decode nothing."""
    kinds = _kinds(asked, length, source)
    if not kinds:
        return None
    batch, size, int8 = asked.batch, SIZES[asked.dtype], asked.int8
    name = next(name for name in kinds if name.startswith("rolling")) if asked.rolling else next(iter(kinds))
    layers, chosen = kinds[name]
    layer = batch * sum(slots.bytes(size, int8) for slots in chosen)
    token = sum(slots._replace(slots=1).bytes(size, int8) for slots in chosen[:1])
    others = {
        kind: tuple(count * batch * sum(slots.bytes(size, small) for slots in of) for small in (False, True))
        for kind, (count, of) in kinds.items()
    }
    return CacheCost(f"{name}, int8" if int8 else name, layers, token, layer, layers * layer, others)


def _kinds(asked: Asked, length: int, source: int) -> dict[str, tuple[int, list[Slots]]]:
    """Kinds of cache by name, the configuration's own first: how many layers, and what each holds."""
    config, latent, sinks = asked.config, asked.latent, asked.sinks
    if isinstance(config, LatentConfig):
        return {_latent_name(config): (1, [_latent(config, length)]), **_expanded(config, 1, length)}
    if isinstance(config, TransformerConfig):
        own, across = (Slots(config.num_heads, head_sizes(config)[1:], n) for n in (length, source))
        return {f"MHA, {_heads(config.num_heads)}, target + source": (config.target_layers, [own, across])}
    if not isinstance(config, DecoderConfig):
        return {}
    layers, heads = config.num_layers, config.num_heads
    if latent is not None:
        return {_latent_name(latent): (layers, [_latent(latent, length)]), **_expanded(latent, layers, length)}
    own_heads, *dims = head_sizes(config)
    found = {}
    for count in dict.fromkeys((own_heads, heads, 1)):
        kind = "MHA" if count == heads else "MQA" if count == 1 else "GQA"
        found[f"{kind}, {_heads(count)}"] = (layers, [Slots(count, tuple(dims), length)])
    if config.window is not None and config.windowed is None:
        slots = rolling_slots(config.window, sinks)
        name = f"rolling, window {config.window}" + (f", {sinks} sinks" if sinks else "")
        found[name] = (layers, [Slots(own_heads, tuple(dims), slots)])
    return found


def _heads(count: int) -> str:
    return "1 head" if count == 1 else f"{count} heads"


def _latent_name(config: LatentConfig) -> str:
    return f"MLA, latent {config.kv_lora_rank} + {config.rope_dim}"


def _latent(config: LatentConfig, length: int) -> Slots:
    return Slots(1, (config.kv_lora_rank + config.rope_dim,), length)


def _expanded(config: LatentConfig, layers: int, length: int) -> dict[str, tuple[int, list[Slots]]]:
    """What the same heads would keep if their keys and values were kept themselves."""
    value = config.nope_dim if config.value_head_dim is None else config.value_head_dim
    dims = (config.nope_dim + config.rope_dim, value)
    return {f"MHA, {_heads(config.num_heads)}": (layers, [Slots(config.num_heads, dims, length)])}
