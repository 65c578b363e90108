"""`from_hf`: a Hugging Face model, or its folder, as a model of `regard.models`."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard import models
from regard._checks import check_count
from regard.interop import _hf_deepseek
from regard.interop._hf_families import FAMILIES
from regard.interop._hf_family import Family, Source
from regard.interop._hf_fields import Fields, listed
from regard.interop._hf_files import Tensors, Weight, read_json
from regard.interop._single import attention_of, is_attention_of_hf
from regard.positions import Rotary

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# sizes that say nothing about how many weights there are: a long text needs none
_WITHOUT_WEIGHTS = ("max_tokens", "window", "max_distance")


def from_hf(
    model: nn.Module | str | Path,
    *,
    layer: int | None = None,
    ignore: Sequence[str] = (),
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """The same model, of `regard.models`, with a copy of its weights, in evaluation mode.

        encoder = from_hf(transformers.AutoModel.from_pretrained(folder))     # of a model
        decoder = from_hf(folder)                                             # of its files; transformers is not needed

    ==================  =====================================================================================
    bert, roberta,      `models.Encoder`, with the pooler, masked-LM or classification head that is there
    distilbert, vit
    gpt2, llama,        `models.Decoder`; of a class without an output layer (`LlamaModel`), one that gives states
    mistral, qwen2,
    qwen3, gemma,
    gemma2
    t5, whisper         `models.T5`, `models.Whisper`
    deepseek_v3         `models.DeepSeek`; `nn.LatentAttention` of a `DeepseekV3Attention` module, or with `layer`
    one attention       `nn.MultiHeadAttention`, of a `BertSelfAttention`, `ViTSelfAttention`, `ViTAttention` and the
    module              like; without an output projection where theirs has none
    ==================  =====================================================================================

    Args:
        model: a model (or an attention module, see above) of transformers, or a folder with `config.json` and
            safetensors files.
        layer: of deepseek_v3, where the attention of one layer is wanted.
        ignore: a pattern (`cls.seq_relationship.*`) of weights, or of unknown config fields, that are left out on
            purpose; or several.
        device, dtype: of the result; those of the weights by default.

    Raises:
        ValueError: an architecture or a configuration that has no counterpart, a weight that is missing, extra or of
            another shape, a folder without safetensors; each by name.
    """
    check_target(device, dtype)
    ignore = [ignore] if isinstance(ignore, str) else ignore
    if not isinstance(ignore, Sequence) or any(not isinstance(pattern, str) for pattern in ignore):
        raise TypeError(f"ignore must be a pattern of names or a list of them, such as ['cls.*'], got {ignore!r}")
    if layer is not None:
        check_count("layer", layer, 0)
    if isinstance(model, nn.Module):
        if is_attention_of_hf(model):
            if layer is not None or ignore:
                raise ValueError("layer and ignore are for whole models, and this is an attention module")
            return attention_of(model).to(device=device, dtype=dtype)
        config = getattr(model, "config", None)
        if config is None or not hasattr(config, "to_dict"):
            raise TypeError(f"model must be one of Hugging Face's, with a config; got {type(model).__name__}")
        held = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        if any(tensor.is_meta for tensor in held.values()):
            raise ValueError('the model is on the device "meta" and has no weights')
        weights = {name: Weight(name, list(x.shape), lambda x=x: x) for name, x in held.items()}  # type: ignore[misc]
        described = _Described(_unpacked(config.to_dict()), type(model).__name__, layer, ignore)
        return _converted(described, weights, device, dtype).train(model.training)
    if not isinstance(model, (str, Path)):
        raise TypeError(f"model must be a Hugging Face model or the folder of one, got {type(model).__name__}")
    folder = Path(model)
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder; expected one with config.json and safetensors files. from_hf downloads "
            "nothing: give it transformers.AutoModel.from_pretrained(…)"
        )
    given = read_json(folder / "config.json")
    described = _Described(given, "", layer, ignore)
    described.family()  # an unknown kind of model is said before its weights are looked for
    kinds = given.get("architectures") or [""]
    if not isinstance(kinds, list) or not isinstance(kinds[0], str):
        raise ValueError(f"config field architectures is {kinds!r}; expected a list of names")
    with Tensors(folder) as stored:
        return _converted(described._replace(architecture=kinds[0]), stored.weights(), device, dtype).eval()


class _Described(NamedTuple):
    """What is converted: a configuration, the class that it belongs to, and what of it is wanted."""

    config: dict[str, Any]
    architecture: str
    layer: int | None
    ignore: Sequence[str]

    def family(self) -> Family:
        kind = self.config.get("model_type")
        if self.config.get("format") == "regard-model":
            raise ValueError("this is a folder that regard.interop.save wrote: read it with regard.interop.load")
        if not isinstance(kind, str) or kind not in FAMILIES:
            raise ValueError(
                f"models of type {kind!r} cannot be converted; {', '.join(FAMILIES)} can. Any model whose attention "
                "goes through transformers' functions runs with regard.interop.register_hf()"
            )
        if kind == "deepseek_v3":
            alone = self.layer is not None or self.architecture == "DeepseekV3Attention"
            return _hf_deepseek.ATTENTION if alone else _hf_deepseek.WHOLE
        if self.layer is not None:
            raise ValueError(f"layer is for deepseek_v3, whose attention can be had alone; this is {kind}")
        return FAMILIES[kind]


def _unpacked(given: dict[str, Any]) -> dict[str, Any]:
    """Of a GGUF file, transformers unpacks every number when it reads it, and notes where they came from."""
    packed = given.get("quantization_config")
    if isinstance(packed, dict) and getattr(packed.get("quant_method"), "value", None) == "gguf":
        return {name: value for name, value in given.items() if name != "quantization_config"}
    return given


def _of_layer(weights: dict[str, Weight], layer: int) -> dict[str, Weight]:
    inside = re.compile(rf"^(?:model\.)?layers\.{layer}\.self_attn\.(.+)$")
    found = {match[1]: weight for name, weight in weights.items() if (match := inside.match(name))}
    if not found:
        raise ValueError(f"layer {layer} has no attention weights (layers.{layer}.self_attn.…) in this model")
    return found


def _converted(
    described: _Described, weights: dict[str, Weight], device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Module:
    family = described.family()
    weights = weights if described.layer is None else _of_layer(weights, described.layer)
    weights = _hf_deepseek.one_by_one(weights) if family is _hf_deepseek.WHOLE else weights
    weights = _canonical(family, weights, described.ignore)

    def equal(one: str, other: str) -> bool:
        return torch.equal(weights[one].read(), weights[other].read())

    fields = Fields(described.config, described.ignore)
    config = family.configured(Source(fields, described.architecture, frozenset(weights), equal))
    check_amounts(config, [weight.shape for weight in weights.values()])
    model = models.build(config, device="meta")
    shapes = {ours: list(weight.shape) for ours, weight in model.state_dict().items()}
    names = family.names(config, shapes)
    weights = _without_copies(family, weights, set(names.values()))
    _check(family, shapes, names, weights)
    state = {ours: turned(family, ours, weights[theirs].read()) for ours, theirs in names.items()}
    check_dtypes({weights[theirs].stored: state[ours] for ours, theirs in names.items()}, dtype)
    return loaded(model, {name: weight.to(device=device, dtype=dtype, copy=True) for name, weight in state.items()})


def check_target(device: Any, dtype: Any) -> None:
    if dtype is not None and dtype not in FLOATS:
        raise TypeError(f"dtype must be one of {', '.join(map(str, FLOATS))}, got {dtype!r}")
    try:
        torch.empty(0, device=torch.device("cpu" if device is None else device))
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for a device
        raise ValueError(f"device {device!r} is not known: {str(error).splitlines()[0]}") from None
    except TypeError:
        raise TypeError(f"device must be a torch.device or its name, such as 'cpu', got {device!r}") from None


def check_amounts(config: Any, shapes: list[list[int]]) -> None:
    """Refuse a configuration of sizes that these weights cannot have, before anything of that size is made."""
    numbers = sum(math.prod(shape) for shape in shapes)
    for field in dataclasses.fields(config):
        size = getattr(config, field.name)
        if not isinstance(size, int) or "int" not in str(field.type) or field.name in _WITHOUT_WEIGHTS:
            continue
        if size > (len(shapes) if field.name in ("num_layers", "decoder_layers") else numbers):
            raise ValueError(
                f"the configuration says {field.name} = {size}, and there are {len(shapes)} weights of {numbers} "
                "numbers in all"
            )


def check_dtypes(weights: dict[str, Tensor], dtype: torch.dtype | None) -> None:
    """Weights that were packed, and mixtures, whose sums no module computes."""
    for name, weight in weights.items():
        if weight.dtype not in FLOATS:
            raise ValueError(f"{name} holds {weight.dtype}; weights of {', '.join(map(str, FLOATS))} can be read")
    found = sorted({str(weight.dtype) for weight in weights.values()})
    if dtype is None and len(found) > 1:
        raise ValueError(f"the weights are of several dtypes ({', '.join(found)}); say which is wanted with dtype=…")


def loaded(model: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    """A model that was built on the device "meta", with these weights as its own."""
    model.load_state_dict(state, assign=True)
    place = next(iter(state.values())).device
    for part in model.modules():
        if isinstance(part, Rotary):  # its angles are in no state dict
            part.to_empty(device=place)
    return model


def _canonical(family: Family, weights: dict[str, Weight], ignore: Sequence[str]) -> dict[str, Weight]:
    """Names without the prefix of a base model, in one spelling, without what is computed or to be left out."""
    found: dict[str, Weight] = {}
    for name, weight in weights.items():
        if any(fnmatch.fnmatchcase(weight.stored, pattern) for pattern in ignore):
            continue
        name = name.removeprefix(family.prefix)
        if re.search(family.computed, name):
            continue
        for pattern, replacement in family.renames:
            name = re.sub(pattern, replacement, name)
        if name in found:
            raise ValueError(f"{weight.stored} and {found[name].stored} are the same weight under two names")
        found[name] = weight
    return found


def _without_copies(family: Family, weights: dict[str, Weight], wanted: set[str]) -> dict[str, Weight]:
    """A tied weight may be stored twice, and must then be the same."""
    kept = dict(weights)
    for copy, original in (family.copies or {}).items():
        if copy in kept and copy not in wanted and original in kept:
            if not torch.equal(kept[copy].read(), kept[original].read()):
                raise ValueError(
                    f"{kept[copy].stored} and {kept[original].stored} differ, and the configuration says that they are "
                    "one weight"
                )
            del kept[copy]
    return kept


def _check(family: Family, shapes: dict[str, list[int]], names: dict[str, str], weights: dict[str, Weight]) -> None:
    """Refuse weights that are missing, extra or of another shape, by name."""
    known = set(names.values())
    missing = [theirs for theirs in known if theirs not in weights]
    extra = [weight.stored for name, weight in weights.items() if name not in known]
    wrong = []
    for ours, theirs in names.items():
        expected = _stored_shape(family, ours, shapes[ours])
        if theirs in weights and weights[theirs].shape != expected:
            wrong.append(f"{weights[theirs].stored} {weights[theirs].shape} (expected {expected})")
    complaints = [
        f"{len(found)} {'weight is' if len(found) == 1 else 'weights are'} {what}: {listed(sorted(found))}"
        for what, found in (("missing", missing), ("of another shape", wrong), ("not known here", extra))
        if found
    ]
    if complaints:
        hint = ". What is not needed can be left out with ignore=[…]" if extra else ""
        raise ValueError(f"the weights do not fit the configuration: {'; '.join(complaints)}{hint}")


def _stored_shape(family: Family, ours: str, shape: list[int]) -> list[int]:
    if ours.endswith(family.transposed):
        return shape[::-1]
    return [1, *shape] if ours.endswith(family.batched) else shape


def turned(family: Family, ours: str, weight: Tensor) -> Tensor:
    """A weight as we keep it, of what they keep."""
    if ours.endswith(family.transposed):
        return weight.t().contiguous()
    return weight[0] if ours.endswith(family.batched) else weight
