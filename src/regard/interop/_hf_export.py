"""`to_hf`: a model of `regard.models` as one of Hugging Face's."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from regard.interop._hf_families import FAMILIES
from regard.interop._hf_family import Family
from regard.models import Decoder, DecoderConfig, Encoder, EncoderConfig
from regard.positions import DynamicNTK, Linear, Llama3, Scaling, YaRN

_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}


def to_hf(model: nn.Module) -> Any:
    """The same model, of transformers, with a copy of its weights, in the same mode: BERT, GPT-2 or Llama.

    What comes back from `from_hf` is bitwise what was given. Token numbers with a meaning (padding, start, end) are not
    part of our configurations: set them in the result's `config` and `generation_config`.

    Raises:
        TypeError: `model` is no `Encoder` or `Decoder`.
        ValueError: it does what none of the three can, by name.
    """
    try:
        import transformers
    except ImportError:
        raise ImportError("to_hf needs Hugging Face's transformers: pip install 'regard[hf]'") from None
    first = next(model.parameters(), None)
    made: dict[str, Any] = {"dtype": None if first is None else first.dtype}
    with torch.device("cpu" if first is None else first.device):
        if isinstance(model, Encoder):
            family, built = FAMILIES["bert"], _bert(transformers, model.config, **made)
        elif isinstance(model, Decoder) and model.config.positions == "learned":
            family, built = FAMILIES["gpt2"], _gpt2(transformers, model.config, **made)
        elif isinstance(model, Decoder):
            family, built = FAMILIES["llama"], _llama(transformers, model.config, **made)
        else:
            raise TypeError(f"to_hf takes a regard.models.Encoder or Decoder, got {type(model).__name__}")
    state = _state(family, model)
    with torch.no_grad():
        for name, weight in built.state_dict().items():
            inside = name.removeprefix(family.prefix)
            weight.copy_(state[inside if inside in state else (family.copies or {})[inside]])
    return built.train(model.training)


def _state(family: Family, model: Encoder | Decoder) -> dict[str, Tensor]:
    """The weights under their names."""
    held: nn.Module = model
    if isinstance(model, Decoder) and model.config.packed != (family is FAMILIES["gpt2"]):
        # attention converts between one matrix and three when it loads
        held = Decoder(dataclasses.replace(model.config, packed=not model.config.packed), device="meta")
        held.load_state_dict(model.state_dict(), assign=True)
    names = family.names(model.config)
    return {
        names[ours]: weight.t().contiguous() if ours.endswith(family.transposed) else weight
        for ours, weight in held.state_dict().items()
    }


def _bert(transformers: Any, config: EncoderConfig, **made: Any) -> Any:
    _refuse(
        "BERT",
        {
            f"image_size={config.image_size}": config.image_size is not None,
            f"norm={config.norm!r}": config.norm != "post",
            "qkv_bias=False": not config.qkv_bias,
            "token_types=0": not config.token_types,
            "masked_lm=True with pooler=True": config.masked_lm and config.pooler,
            "masked_lm=True with classes": config.masked_lm and config.classes is not None,
            "classes without pooler=True": config.classes is not None and not config.pooler,
        },
    )
    theirs = transformers.BertConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.embed_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=config.ff_dim,
        hidden_act=_ACTIVATIONS[config.activation],
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.attention_dropout,
        max_position_embeddings=config.max_tokens,
        type_vocab_size=config.token_types,
        layer_norm_eps=config.norm_eps,
        initializer_range=config.init_std,
        num_labels=2 if config.classes is None else config.classes,
    )
    if config.masked_lm:
        return transformers.AutoModelForMaskedLM.from_config(theirs, **made)
    if config.classes is not None:
        return transformers.AutoModelForSequenceClassification.from_config(theirs, **made)
    return transformers.AutoModel.from_config(theirs, add_pooling_layer=config.pooler, **made)


def _gpt2(transformers: Any, config: DecoderConfig, **made: Any) -> Any:
    _refuse(
        "GPT-2",
        {
            f"num_kv_heads={config.num_kv_heads}": config.num_kv_heads not in (None, config.num_heads),
            f"head_dim={config.head_dim}": config.head_dim not in (None, config.embed_dim // config.num_heads),
            f"window={config.window}": config.window is not None,
            f"norm={config.norm!r}": config.norm != "layer",
            "gated=True": config.gated,
            "a projection without bias": not (config.qkv_bias and config.out_bias and config.ff_bias),
        },
    )
    theirs = transformers.GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.max_tokens,
        n_embd=config.embed_dim,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        n_inner=config.ff_dim,
        activation_function=_ACTIVATIONS[config.activation],
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.attention_dropout,
        layer_norm_epsilon=config.norm_eps,
        initializer_range=config.init_std,
        tie_word_embeddings=config.tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.AutoModelForCausalLM.from_config(theirs, **made)


def _llama(transformers: Any, config: DecoderConfig, **made: Any) -> Any:
    _refuse(
        "Llama",
        {
            f"window={config.window}": config.window is not None,
            f"norm={config.norm!r}": config.norm != "rms",
            "gated=False": not config.gated,
            "rotary_interleaved=True": config.rotary_interleaved,
            f"qkv_bias={config.qkv_bias} with out_bias={config.out_bias}": config.qkv_bias != config.out_bias,
            f"dropout={config.dropout}": config.dropout > 0.0,
        },
    )
    theirs = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.embed_dim,
        intermediate_size=config.ff_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_act=_ACTIVATIONS[config.activation],
        max_position_embeddings=config.max_tokens,
        rms_norm_eps=config.norm_eps,
        initializer_range=config.init_std,
        attention_bias=config.qkv_bias,
        mlp_bias=config.ff_bias,
        attention_dropout=config.attention_dropout,
        tie_word_embeddings=config.tied,
        rope_parameters=_rope(config),
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.AutoModelForCausalLM.from_config(theirs, **made)


def _rope(config: DecoderConfig) -> dict[str, Any]:
    scaling: Scaling | None = config.rotary_scaling
    given: dict[str, Any] = {"rope_theta": config.rotary_base}
    match scaling:
        case None:
            return {**given, "rope_type": "default"}
        case Linear():
            return {**given, "rope_type": "linear", "factor": scaling.factor}
        case DynamicNTK() if scaling.original_length == config.max_tokens:
            return {**given, "rope_type": "dynamic", "factor": scaling.factor}
        case Llama3() | YaRN():
            fields = dataclasses.asdict(scaling)
            fields["original_max_position_embeddings"] = fields.pop("original_length")
            kind = "llama3" if isinstance(scaling, Llama3) else "yarn"
            return {**given, "rope_type": kind, **{name: value for name, value in fields.items() if value is not None}}
    raise ValueError(f"Llama cannot express rotary_scaling={scaling!r}")


def _refuse(family: str, lacking: dict[str, bool]) -> None:
    if found := [name for name, present in lacking.items() if present]:
        raise ValueError(f"the model has {', '.join(found)}, which {family} cannot express")
