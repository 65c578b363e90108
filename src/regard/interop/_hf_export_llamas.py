"""`to_hf` for decoders with rotary positions: Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma 2."""

from __future__ import annotations

import dataclasses
from typing import Any

from regard.models import DecoderConfig
from regard.positions import DynamicNTK, Linear, Llama3, Scaling, YaRN

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}


def to_llama_or_like(transformers: Any, config: DecoderConfig, **made: Any) -> tuple[str, Any]:
    """The name of the family, and a model of it that has the sizes of this configuration."""
    kind = _kind(config)
    biased = config.qkv_bias
    shown = {"llama": "Llama", "gemma2": "Gemma 2"}.get(kind, kind.capitalize())
    gemma = kind in ("gemma", "gemma2")
    refuse(
        shown,
        {
            f"window={config.window}": config.window is not None and kind in ("llama", "gemma"),
            "windowed for some layers": config.windowed is not None and kind == "mistral",
            "window=None": config.window is None and kind == "gemma2",
            f"norm={config.norm!r}": config.norm != "rms",
            "gated=False": not config.gated,
            "rotary_interleaved=True": config.rotary_interleaved,
            f"qkv_bias={biased} with out_bias={config.out_bias}": kind != "qwen2" and biased != config.out_bias,
            "out_bias=True": kind in ("mistral", "qwen2") and config.out_bias,
            "qk_norm=True": config.qk_norm and kind != "qwen3",
            "ff_bias=True": config.ff_bias and kind != "llama",
            "scaled_embedding=False": gemma and not config.scaled_embedding,
            "scaled_embedding=True": not gemma and config.scaled_embedding,
            f"attention_scale={config.attention_scale}": config.attention_scale is not None and kind != "gemma2",
            f"attention_softcap={config.attention_softcap}": config.attention_softcap is not None and kind != "gemma2",
            f"logit_softcap={config.logit_softcap}": config.logit_softcap is not None and kind != "gemma2",
            "post_norms=True": config.post_norms and kind != "gemma2",
            f"dropout={config.dropout}": config.dropout > 0.0,
        },
    )
    given = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.ff_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads if config.num_kv_heads is None else config.num_kv_heads,
        "head_dim": config.embed_dim // config.num_heads if config.head_dim is None else config.head_dim,
        "hidden_activation" if kind == "gemma2" else "hidden_act": _activation(config, gemma),
        "max_position_embeddings": config.max_tokens,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "attention_dropout": config.attention_dropout,
        "tie_word_embeddings": config.tied,
        "rope_parameters": rope_parameters(config),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **_of_kind(kind, config),
    }
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma": "Gemma"}
    theirs = getattr(transformers, f"{name.get(kind, 'Gemma2')}Config")(**given)
    auto = transformers.AutoModelForCausalLM if config.head else transformers.AutoModel
    return kind, auto.from_config(theirs, **made)


def _kind(config: DecoderConfig) -> str:
    if config.norm_plus_one:
        return "gemma2" if config.post_norms else "gemma"
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias and not config.out_bias:
        return "qwen2"
    return "llama" if config.window is None else "mistral"


def _of_kind(kind: str, config: DecoderConfig) -> dict[str, Any]:
    window = None if config.window is None else config.window + 1  # theirs counts the token itself
    flags = config.windowed or (config.window is not None,) * config.num_layers
    layers = ["sliding_attention" if flag else "full_attention" for flag in flags]
    if kind == "llama":
        return {"attention_bias": config.qkv_bias, "mlp_bias": config.ff_bias}
    if kind == "mistral":
        return {"sliding_window": window}
    if kind in ("qwen2", "qwen3"):
        slides = {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": layers}
        return slides if kind == "qwen2" else {**slides, "attention_bias": config.qkv_bias}
    if kind == "gemma":
        return {"attention_bias": config.qkv_bias}
    width = config.embed_dim // config.num_heads if config.head_dim is None else config.head_dim
    scale = width**-0.5 if config.attention_scale is None else config.attention_scale
    scalar = scale**-2
    return {
        "attention_bias": config.qkv_bias,
        "sliding_window": window,
        "layer_types": layers,
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
    }


def _activation(config: DecoderConfig, gemma: bool) -> str:
    """Gemma's class takes "gelu" for its approximation, and says so by the other name."""
    if gemma and config.activation == "gelu":
        raise ValueError("the model has activation='gelu', which Gemma cannot express")
    return "gelu_pytorch_tanh" if config.activation == "gelu_tanh" and gemma else ACTIVATIONS[config.activation]


def rope_parameters(config: DecoderConfig) -> dict[str, Any]:
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
    raise ValueError(f"Hugging Face's models cannot express rotary_scaling={scaling!r}")


def refuse(family: str, lacking: dict[str, bool]) -> None:
    if found := [name for name, present in lacking.items() if present]:
        raise ValueError(f"the model has {', '.join(found)}, which {family} cannot express")
