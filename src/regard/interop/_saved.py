"""Models of `regard.models` in folders of their own: `config.json` and `model.safetensors`."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard import models, positions
from regard._checks import as_path, is_int
from regard._files import safetensors_files
from regard._files.write import Staged
from regard.interop._hf_fields import listed
from regard.interop._hf_files import WHOLE, Tensors, parse_json, read_json
from regard.interop._hf_weights import check_amounts, check_dtypes, check_target, loaded
from regard.nn import LatentAttention

FORMAT, VERSION = "regard-model", 1
IN_HEADER = "regard"  # where the weights' file says what config.json says
_KINDS: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (
        *(models.Encoder, models.Decoder, models.Transformer, models.T5, models.Whisper, models.DeepSeek),
        LatentAttention,
    )
}
_SCALINGS = {kind.__name__: kind for kind in (positions.Linear, positions.DynamicNTK, positions.YaRN, positions.Llama3)}


def save(model: nn.Module, folder: str | Path, *, stop: Sequence[int] = ()) -> None:
    """Write a model of `regard.models`, or a `nn.LatentAttention`, into a folder, which is created if needed;
    `load` reads it again.

    If interrupted, the folder holds the old model or the new one, complete: both files are complete before
    the first takes its place, and the weights' file says in its header what `config.json` says. `stop` are the tokens
    that end a generated text.
    """
    kind = type(model).__name__
    if _KINDS.get(kind) is not type(model):
        raise TypeError(f"model must be one of {', '.join(_KINDS)}, got {kind}")
    if not isinstance(stop, Sequence) or any(not is_int(token) for token in stop):
        raise TypeError(f"stop must be token numbers (a list of ints), got {stop!r}")
    config = latent_config(model) if isinstance(model, LatentAttention) else model.config
    described = {"format": FORMAT, "version": VERSION, "kind": kind, "config": _written(config), "stop": [*stop]}
    text = json.dumps({**described, "save": secrets.token_hex(8)}, indent=2) + "\n"
    folder = as_path("folder", folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a folder, which is created if needed")
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as staged:
        weights, shown = (staged.enter_context(closing(Staged(folder / name))) for name in (WHOLE, "config.json"))
        try:
            weights.write(safetensors_files.pieces(model.state_dict(), {"format": "pt", IN_HEADER: text}))
        except OSError as error:  # a full disk
            raise OSError(f"the weights cannot be written: {error.strerror or error}") from None
        shown.write([text.encode()])
        weights.commit()  # from here on the folder holds the new model: its header says what it is
        shown.commit()


def load(
    folder: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """The model of a folder that `save` wrote, in evaluation mode.

    Raises:
        ValueError: the folder is another's, or damaged; says what is wrong.
    """
    check_target(device, dtype)
    folder = as_path("folder", folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; expected one that regard.interop.save wrote")
    if not (folder / WHOLE).is_file():
        _check_description(folder, read_json(folder / "config.json"))
    with Tensors(folder) as stored:
        described = _description(folder, stored)
        config = _config(folder, described)
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


def description(folder: Path) -> dict[str, Any] | None:
    """What `save` wrote about the model of this folder; None where the folder is another's."""
    if (folder / WHOLE).is_file():
        with Tensors(folder) as stored:
            found = _description(folder, stored)
    else:
        found = read_json(folder / "config.json")
    return found if found.get("format") == FORMAT else None


def _description(folder: Path, stored: Tensors) -> dict[str, Any]:
    """What the header of the weights says, or config.json where both are of one save.

    The two files cannot be replaced at one instant. Weights and their header are one file, so the header decides, and
    what a save that was killed between the two left in config.json is not read. Of the same save, config.json holds
    the same, and what somebody changed in it since.
    """
    if IN_HEADER not in stored.metadata:  # written before headers said this, or by another
        return read_json(folder / "config.json")
    header = parse_json(stored.metadata[IN_HEADER], f"the header of {folder / WHOLE}")
    if not (folder / "config.json").is_file():
        return header
    shown = read_json(folder / "config.json")
    return shown if shown.get("save") == header.get("save") else header


def _check_description(folder: Path, described: dict[str, Any]) -> None:
    kind = described.get("kind")
    if described.get("format") != FORMAT or not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"{folder} was not written by regard.interop.save; from_hf reads Hugging Face's folders")
    if described.get("version") != VERSION:
        raise ValueError(f"{folder} has version {described.get('version')!r}; this regard reads version {VERSION}")


def _config(folder: Path, described: dict[str, Any]) -> Any:
    _check_description(folder, described)
    kind = described["kind"]
    try:
        return _config_class(kind)(**_read(described.get("config")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / 'config.json'} does not describe a model of kind {kind}: {error}") from None


def _config_class(kind: str) -> Any:
    return models.LatentConfig if kind == "LatentAttention" else getattr(models, f"{kind}Config")


def latent_config(module: LatentAttention) -> models.LatentConfig:
    """What builds this module again.

    Raises:
        ValueError: it has positions, a scale or an output dropout that a `LatentConfig` does not say.
    """
    rotary = module.positions
    if type(rotary) is not positions.Rotary:
        raise ValueError(f"positions are {type(rotary).__name__}; only positions.Rotary can be written")
    sizes = ("embed_dim", "num_heads", "q_lora_rank", "kv_lora_rank", "nope_dim", "rope_dim", "value_head_dim")
    config = models.LatentConfig(
        **{name: getattr(module, name) for name in (*sizes, "dropout")},
        bias=module.out_proj.bias is not None,
        norm_eps=float(module.kv_norm.eps or 0.0),
        **{f"rotary_{name}": getattr(rotary, name) for name in ("base", "scaling", "interleaved")},
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


def _read(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise TypeError(f"config is a {type(given).__name__}; expected an object")
    fields: dict[str, Any] = given
    if isinstance(fields.get("windowed"), list):
        fields = {**fields, "windowed": tuple(fields["windowed"])}
    scaling = fields.get("rotary_scaling")
    if scaling is None:
        return fields
    if not isinstance(scaling, dict) or scaling.get("kind") not in _SCALINGS:
        raise ValueError(f"rotary_scaling must name one of {', '.join(_SCALINGS)}, got {scaling!r}")
    said = {name: value for name, value in scaling.items() if name != "kind"}
    return {**fields, "rotary_scaling": _SCALINGS[scaling["kind"]](**said)}
