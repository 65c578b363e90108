"""`to_hf`: a model of `regard.models` as one of Hugging Face's."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from regard.interop._hf_deepseek import together
from regard.interop._hf_families import FAMILIES
from regard.interop._hf_family import Family
from regard.interop._single import to_single
from regard.models import T5, Decoder, DecoderConfig, DeepSeek, Encoder, EncoderConfig
from regard.nn import MultiHeadAttention


def to_hf(model: nn.Module) -> Any:
    """The same model, of transformers, with a copy of its weights, in the same mode.

    A `T5` stays one; an `Encoder` becomes a BERT, RoBERTa or DistilBERT; a `Decoder` a GPT-2, Llama, Mistral, Qwen2,
    Qwen3, Gemma or Gemma 2: the first of them that has all that its configuration says; a `DeepSeek` a DeepSeek-V3.

    A single `regard.nn.MultiHeadAttention` becomes a `ViTAttention`, or a `BertSelfAttention` if it has no output
    projection, as `from_hf` leaves it.

    What comes back from `from_hf` is bitwise what was given. Token numbers with a meaning (padding, start, end) are not
    part of our configurations: set them in the result's `config` and `generation_config`.

    Raises:
        TypeError: `model` is no `Encoder`, `Decoder`, `T5`, `DeepSeek` or `MultiHeadAttention`.
        ValueError: it does what none of them can, by name.
    """
    try:
        import transformers
    except ImportError:
        raise ImportError("to_hf needs Hugging Face's transformers: pip install transformers") from None
    if type(model) is MultiHeadAttention:
        return to_single(transformers, model)
    family, (auto, more) = FAMILIES[_kind(model)], _auto(model.config)
    said = family.said(model.config)
    first = next(model.parameters())
    with torch.device(first.device):
        theirs = getattr(transformers, family.theirs)(**said)
        for name in family.overwritten:
            setattr(theirs, name, said[name])
        built = getattr(transformers, auto).from_config(theirs, dtype=first.dtype, **more)
    state = _state(family, model)
    with torch.no_grad():
        for name, weight in built.state_dict().items():
            inside = name.removeprefix(family.prefix)
            weight.copy_(state[inside if inside in state else (family.copies or {})[inside]])
    return built.train(model.training)


def _kind(model: Any) -> str:
    """The family that has all that the model's configuration says."""
    if isinstance(model, Encoder):
        config = model.config
        if config.position_offset:
            return "roberta"
        return "distilbert" if config.image_size is None and not config.token_types else "bert"
    if type(model) is T5:
        return "t5"
    if isinstance(model, DeepSeek):
        return "deepseek_v3"
    if isinstance(model, Decoder):
        return "gpt2" if model.config.positions == "learned" else _kind_of_llama(model.config)
    raise TypeError(
        "to_hf takes a regard.models.Encoder, Decoder, T5 or DeepSeek, or a regard.nn.MultiHeadAttention, got "
        f"{type(model).__name__}"
    )


def _kind_of_llama(config: DecoderConfig) -> str:
    if config.norm_plus_one:
        return "gemma2" if config.post_norms else "gemma"
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias and not config.out_bias:
        return "qwen2"
    return "llama" if config.window is None else "mistral"


def _auto(config: Any) -> tuple[str, dict[str, Any]]:
    """The class of transformers that chooses one for a configuration, by the head that is wanted."""
    if isinstance(config, EncoderConfig):
        if config.masked_lm:
            return "AutoModelForMaskedLM", {}
        if config.classes is not None:
            return "AutoModelForSequenceClassification", {}
        return "AutoModel", {"add_pooling_layer": config.pooler} if config.token_types else {}
    if not config.head:
        return "AutoModel", {}
    return "AutoModelForCausalLM" if isinstance(config, DecoderConfig) else "AutoModelForSeq2SeqLM", {}


def _state(family: Family, model: Any) -> dict[str, Tensor]:
    """The weights under their names."""
    config, held = model.config, model
    packed = (family.chosen or {}).get("packed", False)
    if isinstance(model, Decoder) and config.packed != packed:
        # attention converts between one matrix and three when it loads
        held = Decoder(dataclasses.replace(config, packed=packed), device="meta")
        held.load_state_dict(model.state_dict(), assign=True)
    state = held.state_dict()
    names = family.names(config, state)
    found = {
        names[ours]: weight.t().contiguous() if ours.endswith(family.transposed) else weight
        for ours, weight in state.items()
    }
    return together(found, config) if isinstance(model, DeepSeek) else found
