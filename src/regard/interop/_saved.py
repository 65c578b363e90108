"""Models of `regard.models` in folders of their own: `config.json` and `model.safetensors`."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard import models, positions
from regard.interop._hf_fields import listed
from regard.interop._hf_files import WHOLE, Tensors, read_json
from regard.interop._hf_weights import check_amounts, check_dtypes, check_target, loaded
from regard.nn import LatentAttention

FORMAT, VERSION = "regard-model", 1
_KINDS: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (models.Encoder, models.Decoder, models.Transformer, models.Whisper, LatentAttention)
}
_CONFIGS: dict[str, Any] = {
    "Encoder": models.EncoderConfig,
    "Decoder": models.DecoderConfig,
    "Transformer": models.TransformerConfig,
    "Whisper": models.WhisperConfig,
    "LatentAttention": models.LatentConfig,
}
_SCALINGS = {kind.__name__: kind for kind in (positions.Linear, positions.DynamicNTK, positions.YaRN, positions.Llama3)}


def save(model: nn.Module, folder: str | Path, *, stop: Sequence[int] = ()) -> None:
    """Write a model of `regard.models`, or a `nn.LatentAttention`, into a folder, which is made if it is not there;
    `load` reads it again.

    A file is complete or not there: it is written beside its place and then moved. `stop` are the tokens that end a
    text, for whoever generates with it.
    """
    kind = type(model).__name__
    if _KINDS.get(kind) is not type(model):
        raise TypeError(f"model must be one of {', '.join(_KINDS)}, got {kind}")
    if any(isinstance(token, bool) or not isinstance(token, int) for token in stop):
        raise TypeError(f"stop must be token numbers (ints), got {stop!r}")
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise ImportError("saving a model needs safetensors: pip install 'regard[hf]'") from None
    config = latent_config(model) if isinstance(model, LatentAttention) else model.config
    described = {"format": FORMAT, "version": VERSION, "kind": kind, "config": _written(config), "stop": [*stop]}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().contiguous() for name, weight in model.state_dict().items()}
    try:
        _whole(folder / WHOLE, lambda path: save_file(weights, path, metadata={"format": "pt"}))
    except SafetensorError as error:  # a full disk, in words of its own
        raise OSError(f"the weights cannot be written: {error}") from None
    _whole(folder / "config.json", lambda path: path.write_text(json.dumps(described, indent=2) + "\n"))


def load(
    folder: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """The model of a folder that `save` wrote, in evaluation mode.

    Raises:
        ValueError: the folder is another's, or damaged; says what is wrong.
    """
    check_target(device, dtype)
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; expected one that regard.interop.save wrote")
    described = read_json(folder / "config.json")
    kind = described.get("kind")
    if described.get("format") != FORMAT or not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"{folder} was not written by regard.interop.save; from_hf reads Hugging Face's folders")
    if described.get("version") != VERSION:
        raise ValueError(f"{folder} has version {described.get('version')!r}; this regard reads version {VERSION}")
    try:
        config = _CONFIGS[kind](**_read(described.get("config")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / 'config.json'} does not describe a model of kind {kind}: {error}") from None
    with Tensors(folder) as stored:
        there = {name: stored.shape(name) for name in stored}
        check_amounts(config, list(there.values()))
        model = models.build(config, device="meta")
        shapes = {name: list(weight.shape) for name, weight in model.state_dict().items()}
        if wrong := sorted(name for name in shapes.keys() | there.keys() if shapes.get(name) != there.get(name)):
            raise ValueError(f"{folder} has weights that do not fit its config: {listed(wrong)}")
        held = {name: stored[name] for name in shapes}
        check_dtypes(held, dtype)
        state = {name: weight.to(device=device, dtype=dtype, copy=True) for name, weight in held.items()}
    return loaded(model, state).eval()


def latent_config(module: LatentAttention) -> models.LatentConfig:
    """What builds this module again.

    Raises:
        ValueError: it has positions, a scale or an output dropout that a `LatentConfig` does not say.
    """
    rotary = module.positions
    if type(rotary) is not positions.Rotary:
        raise ValueError(f"positions are {type(rotary).__name__}; only positions.Rotary can be written")
    config = models.LatentConfig(
        embed_dim=module.embed_dim,
        num_heads=module.num_heads,
        kv_lora_rank=module.kv_lora_rank,
        nope_dim=module.nope_dim,
        rope_dim=module.rope_dim,
        value_head_dim=module.value_head_dim,
        q_lora_rank=module.q_lora_rank,
        bias=module.out_proj.bias is not None,
        norm_eps=float(module.kv_norm.eps or 0.0),
        rotary_base=rotary.base,
        rotary_scaling=rotary.scaling,
        rotary_interleaved=rotary.interleaved,
        dropout=module.dropout,
    )
    again = models.build(config, device="meta")
    for name in ("scale", "out_dropout"):
        if getattr(module, name) != getattr(again, name):
            raise ValueError(f"the module has {name}={getattr(module, name)}, which a LatentConfig does not say")
    return config


def _written(config: Any) -> dict[str, Any]:
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    scaling = fields.get("rotary_scaling")
    if scaling is not None:
        kind = type(scaling).__name__
        if _SCALINGS.get(kind) is not type(scaling):
            raise TypeError(f"rotary_scaling is a {kind}, which cannot be written; {', '.join(_SCALINGS)} can")
        fields["rotary_scaling"] = {"kind": kind, **dataclasses.asdict(scaling)}
    return fields


def _read(fields: Any) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise TypeError(f"config is a {type(fields).__name__}; expected an object")
    scaling = fields.get("rotary_scaling")
    if scaling is None:
        return fields
    if not isinstance(scaling, dict) or scaling.get("kind") not in _SCALINGS:
        raise ValueError(f"rotary_scaling must name one of {', '.join(_SCALINGS)}, got {scaling!r}")
    given = {name: value for name, value in scaling.items() if name != "kind"}
    return {**fields, "rotary_scaling": _SCALINGS[scaling["kind"]](**given)}


def _whole(path: Path, write: Callable[[Path], object]) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    beside = Path(name)
    try:
        write(beside)
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        beside.chmod(0o666 & ~_umask())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _umask() -> int:
    """What the system takes away from new files; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
