"""The bill of a configuration."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from regard.cost import _given
from regard.cost._cache import CacheCost, cache_of
from regard.cost._crossings import Crossings, crossings_of
from regard.cost._describe import Block, Run, blocks_of
from regard.cost._ops import Experts, Numbers
from regard.cost._sums import Activations, Flops, Part, activations_of, parts_of, total
from regard.models import DecoderConfig, EncoderConfig, LatentConfig, T5Config, TransformerConfig, WhisperConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard import models


@dataclass(frozen=True, kw_only=True)
class Cost(_given.Asked):
    """What a configuration costs; `print` it for the table.

    Args:
        name, config: what was asked for.
        batch, length, source_length: sizes of the input; the source is what the encoder of an encoder-decoder reads.
        dtype, device: of weights, activations and cache; the device decides which tensors are kept.
        latent, experts, int8, rolling, sinks: as in `cost.of`.
        parts: the whole model by kind of operation.
        layers: one layer, by kind of operation; encoder and decoder each have theirs.
        parameters, weight_bytes: in all.
        active_parameters: those that one token uses: fewer only with experts.
        flops: over all pairs of query and key, as `torch.utils.flop_counter` counts them.
        kept_flops: over the pairs that the mask keeps: what a kernel that skips the others computes.
        activations: bytes kept for the backward pass.
        cache: of keys and values; None where nothing is decoded.
        notes: assumptions behind these numbers.
    """

    parts: tuple[Part, ...]
    layers: dict[str, tuple[Part, ...]]
    parameters: int
    active_parameters: int
    weight_bytes: int
    flops: Flops
    kept_flops: Flops
    activations: Activations
    cache: CacheCost | None
    notes: tuple[str, ...]

    @cached_property
    def crossings(self) -> Crossings:
        """Lengths at which something begins to cost more than something else."""
        return crossings_of(self)

    def part(self, name: str) -> Part:
        """The part of that name, such as "feed-forward"."""
        for part in self.parts:
            if part.name == name:
                return part
        raise ValueError(f"name must be one of {', '.join(part.name for part in self.parts)}, got {name!r}")

    def at(self, length: int) -> Cost:
        """The same for items of another length; an encoder-decoder's source has it too, but for sound."""
        sound = isinstance(self.config, WhisperConfig)
        again = {
            name: getattr(self, name)
            for name in ("batch", "dtype", "device", "latent", "experts", "int8", "rolling", "sinks")
        }
        return of(self.config, length=length, source_length=self.source_length if sound else None, **again)

    def to_dict(self) -> dict[str, Any]:
        """Everything as what JSON holds."""
        found = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        scaling = getattr(self.config, "rotary_scaling", None)
        if scaling is not None:
            found["config"]["rotary_scaling"] = {"kind": type(scaling).__name__, **found["config"]["rotary_scaling"]}
        return found | {"crossings": asdict(self.crossings)}

    def plot(self, lang: str = "en") -> Figure:
        """FLOPs, activations and cache against the length, in English or Chinese ("zh"); needs matplotlib."""
        from regard.cost._plots import draw

        return draw(self, lang)

    def table(self, lang: str = "en") -> str:
        """The bill as text, in English or Chinese ("zh")."""
        from regard.cost._tables import cost_table

        return cost_table(self, lang)

    def __str__(self) -> str:
        return self.table()


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    return {key: _plain(one) for key, one in value.items()} if isinstance(value, dict) else value


def of(
    config: str | models.Config,
    *,
    length: int | None = None,
    batch: int = 1,
    dtype: str = "bfloat16",
    source_length: int | None = None,
    device: str = "cuda",
    latent: LatentConfig | None = None,
    experts: tuple[int, int] | None = None,
    int8: bool = False,
    rolling: bool = False,
    sinks: int = 0,
) -> Cost:
    """What a configuration costs: parameters, FLOPs, activation bytes and cache bytes. Nothing is built or run.

        print(cost.of("gpt3-175b"))
        cost.of(models.config("llama-3-8b", num_kv_heads=1), length=131_072, batch=4).cache.total

    Args:
        config: a name, or a configuration of `regard.models`.
        length: number of tokens per item; by default the configuration's limit, or 1024 where it sets none.
            Images have as many as they have patches.
        batch: number of items.
        dtype: of weights, activations and cache: float64, float32, bfloat16, float16, or fp64, fp32, bf16, fp16.
        source_length: tokens the encoder of an encoder-decoder reads; `length`, or for Whisper all frames.
        device: "cuda" or "cpu": some kernels keep other tensors for the backward pass on one than on the other.
        latent: latent attention in place of a decoder's own, in every layer.
        experts: (number of experts, number per token): a mixture of feed-forwards of `ff_dim` each, with a router,
            in every layer of a decoder.
        int8: the cache keeps one byte per number.
        rolling: the cache is a `RollingCache` over the configuration's `window`, with this many `sinks`.
    """
    found = _given.config_of(config)
    kind = _given.dtype_of(dtype)
    _given.check_device(device)
    _given.check_count("batch", batch)
    _given.check_heads(found)
    _given.check_latent(found, latent)
    mixed = _given.experts_of(found, experts)
    _given.check_cache(found, int8, rolling, sinks)
    size = _given.SIZES[kind]
    run = Run(batch, *_given.lengths_of(found, length, source_length), Numbers(size, device == "cuda"), latent, mixed)
    blocks = blocks_of(found, run)
    parts = parts_of(blocks)
    parameters = sum(part.parameters for part in parts)
    name = config if isinstance(config, str) else type(config).__name__
    asked = _given.Asked(
        name=name, config=found, batch=batch, length=run.length,
        source_length=run.source if isinstance(found, TransformerConfig) else None, dtype=kind, device=device,
        latent=latent, experts=experts, int8=int8, rolling=rolling, sinks=sinks,
    )  # fmt: skip
    return Cost(
        **vars(asked),
        parts=parts,
        layers={block.name: parts_of([Block(block.name, block.ops)]) for block in blocks if "layer" in block.name},
        parameters=parameters,
        active_parameters=parameters if mixed is None else parameters - _idle(found, mixed),
        weight_bytes=parameters * size,
        flops=total(part.flops for part in parts),
        kept_flops=total(part.kept_flops for part in parts),
        activations=replace(activations_of(blocks), textbook=_textbook(found, run)),
        cache=cache_of(asked, run.length, run.source),
        notes=_notes(found, run),
    )


def _idle(config: models.DecoderConfig, experts: Experts) -> int:
    """Parameters of the experts that a token does not meet."""
    matrices = 3 if config.gated else 2
    biases = (matrices - 1) * config.ff_dim + config.embed_dim if config.ff_bias else 0
    one = matrices * config.embed_dim * config.ff_dim + biases
    return config.num_layers * (experts.all - experts.active) * one


def _textbook(config: Any, run: Run) -> int | None:
    if not isinstance(config, (DecoderConfig, EncoderConfig)) or run.latent is not None or run.experts is not None:
        return None
    width, scores = run.tokens * config.embed_dim, run.tokens * run.length * config.num_heads
    return config.num_layers * (34 * width + 5 * scores)


def _notes(config: Any, run: Run) -> tuple[str, ...]:
    notes = []
    most = getattr(config, "max_tokens", None)
    learned = isinstance(config, (EncoderConfig, WhisperConfig)) or getattr(config, "positions", "") == "learned"
    if most is not None and run.length > most:
        what = "the model has learned no positions there" if learned else "the model was made for no more"
        notes.append(f"length {run.length} is beyond max_tokens={most}: {what}")
    if isinstance(config, WhisperConfig) and run.source > config.max_frames:
        notes.append(f"source_length {run.source} is beyond max_frames={config.max_frames}")
    if isinstance(config, T5Config):
        notes.append("activations are counted without the learned biases, whose gradients keep more")
    if any(getattr(config, name, 0.0) for name in ("dropout", "attention_dropout", "ff_dropout")):
        notes.append("activations are counted without dropout, which keeps its random draws too")
    return tuple(notes)
