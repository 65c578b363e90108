"""Llama and its relatives (Mistral, Qwen2, Qwen3, Gemma, Gemma 2): configurations and names of weights."""

from __future__ import annotations

import dataclasses
from typing import Any

from regard._checks import is_int
from regard.interop._hf_family import NO_TOKENS, Family, Field, Given, Source, changed, projections
from regard.interop._hf_fields import Fields, rope_parameters
from regard.models import DecoderConfig
from regard.models._parts import head_sizes

_FIELDS: dict[str, Field] = {
    "vocab_size": Field.size("vocab_size", 32000),
    "embed_dim": Field.size("hidden_size", 4096),
    "num_layers": Field.size("num_hidden_layers", 32),
    "num_heads": Field.size("num_attention_heads", 32),
    "num_kv_heads": Field.size_or_none("num_key_value_heads"),
    "head_dim": Field.size_or_none("head_dim"),
    "ff_dim": Field.size("intermediate_size", 11008),
    "max_tokens": Field.size("max_position_embeddings", 2048),
    "norm_eps": Field.number("rms_norm_eps", 1e-6),
    "activation": Field.activation("hidden_act", "silu"),
    "tied": Field.flag("tie_word_embeddings", False),
    "attention_dropout": Field.number("attention_dropout", 0.0),
    "init_std": Field.number("initializer_range", 0.02),
}
_BIASED = {"qkv_bias": Field.flag("attention_bias", False), "out_bias": Field.flag("attention_bias", False)}
_LLAMA: Given = {"positions": "rotary", "norm": "rms", "gated": True}
_FIXED: Given = {**_LLAMA, "ff_bias": False}
_IN_GEMMA2 = ("rotary_interleaved", "dropout", "qk_norm")
_USUAL = (*_IN_GEMMA2, "attention_scale", "attention_softcap", "logit_softcap", "scaled_embedding", "post_norms")


def _rotary(source: Source, given: Given) -> Given:
    base, scaling = source.fields.rotary()
    kv_heads = given["num_kv_heads"]
    return {
        "num_kv_heads": given["num_heads"] if kv_heads is None else kv_heads,
        "rotary_base": base,
        "rotary_scaling": scaling,
        "head": source.has_head,
    }


def _written(config: DecoderConfig) -> Given:
    kv_heads, width, _ = head_sizes(config)
    return {
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "rope_parameters": rope_parameters(config),
        "pad_token_id": None,
        **NO_TOKENS,
    }


def _weights(config: DecoderConfig) -> dict[str, str]:
    """Of all of them; what a model lacks, its configuration says."""
    before = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    names = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
    return {
        "token_embedding": "embed_tokens",
        "norm": "norm",
        "head": "lm_head",
        "layers.#.attention_norm": "layers.#.input_layernorm",
        "layers.#.attention_post_norm": "layers.#.post_attention_layernorm",
        "layers.#.feed_forward_norm": f"layers.#.{before}",
        "layers.#.feed_forward_post_norm": "layers.#.post_feedforward_layernorm",
        **{f"layers.#.attention.{name}": f"layers.#.self_attn.{name}" for name in names},
        "layers.#.attention.out_proj": "layers.#.self_attn.o_proj",
        **feed_forward("layers.#.feed_forward", "layers.#.mlp"),
    }


def feed_forward(ours: str, theirs: str) -> dict[str, str]:
    return projections(ours, theirs, {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"})


# A window of theirs counts the token itself.
def _read_window(fields: Fields, name: str, usual: int | None) -> int | None:
    theirs = fields.size_or_none(name, usual)
    if theirs == 1:
        raise ValueError("config field sliding_window is 1: a token that sees nothing but itself is not converted")
    return None if theirs is None else theirs - 1


def _written_window(window: int | None) -> int | None:
    return None if window is None else window + 1


LLAMA = Family(
    name="Llama",
    config=DecoderConfig,
    theirs="LlamaConfig",
    fields={**_FIELDS, **_BIASED, "ff_bias": Field.flag("mlp_bias", False)},
    fixed=_LLAMA,
    usual=(*_USUAL, "window"),
    chosen={"scaled_residual": False},
    further=_rotary,
    written=_written,
    weights=_weights,
    only={"pretraining_tp": (1,), "layer_types": (None,), "rope_interleaved": (False,)},
    ignored=("is_llama_config",),
    prefix="model.",
    copies={"lm_head.weight": "embed_tokens.weight"},
    computed=r"rotary_emb\.(original_)?inv_freq$",
)
MISTRAL = dataclasses.replace(
    LLAMA,
    name="Mistral",
    theirs="MistralConfig",
    fields={
        **changed(_FIELDS, ff_dim=14336, num_kv_heads=8, max_tokens=4096 * 32),
        "window": Field("sliding_window", 4096, _read_window, _written_window),
    },
    fixed={**_FIXED, "qkv_bias": False, "out_bias": False},
    usual=_USUAL,
    lacking=lambda config: {"windowed for some layers": config.windowed is not None},
    only={"layer_types": (None,)},
    ignored=(),
)


def _qwen(source: Source, given: Given) -> Given:
    """Windows from a layer on, where they are switched on."""
    fields = source.fields
    used = fields.flag("use_sliding_window", False)
    theirs, first = fields.take("sliding_window"), fields.take("max_window_layers", 28)
    window = _read_window(fields, "sliding_window", None) if used and theirs is not None else None
    if not is_int(first):
        raise ValueError(f"config field max_window_layers is {first!r}; expected a whole number")
    slides = [window is not None and i >= first for i in range(given["num_layers"])]
    return {**_rotary(source, given), **_of_layers(fields, slides, window)}


def _of_layers(fields: Fields, usual: list[bool], window: int | None) -> Given:
    """Which layers have the window, from a list of theirs or from what is usual."""
    known = ("full_attention", "sliding_attention")
    kinds = fields.take("layer_types")
    kinds = [known[flag] for flag in usual] if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != len(usual) or any(kind not in known for kind in kinds):
        raise ValueError(f"config field layer_types is {kinds!r}; expected one of {', '.join(known)} for each layer")
    flags = tuple(kind == "sliding_attention" for kind in kinds)
    if not any(flags):
        return {"window": None}
    if window is None:
        raise ValueError("config field layer_types has sliding_attention, and there is no sliding_window")
    return {"window": window} if all(flags) else {"window": window, "windowed": flags}


def _written_layers(config: DecoderConfig) -> Given:
    flags = config.windowed or (config.window is not None,) * config.num_layers
    kinds = ["sliding_attention" if flag else "full_attention" for flag in flags]
    return {**_written(config), "sliding_window": _written_window(config.window), "layer_types": kinds}


_OF_QWEN = changed(_FIELDS, vocab_size=151936, ff_dim=22016, num_kv_heads=32, max_tokens=32768)
QWEN2 = dataclasses.replace(
    LLAMA,
    name="Qwen2",
    theirs="Qwen2Config",
    fields=_OF_QWEN,
    fixed={**_FIXED, "qkv_bias": True, "out_bias": False},
    usual=_USUAL,
    further=_qwen,
    written=lambda config: {**_written_layers(config), "use_sliding_window": config.window is not None},
    only={},
    ignored=(),
)
QWEN3 = dataclasses.replace(
    QWEN2,
    name="Qwen3",
    theirs="Qwen3Config",
    fields={**changed(_OF_QWEN, head_dim=128), **_BIASED},
    fixed={**_FIXED, "qk_norm": True},
)


def _read_gemma_activation(fields: Fields, name: str, usual: str) -> str:
    # the first files say "gelu" and mean the approximation, as Hugging Face's class does too
    return fields.activation(name, usual, gelu="gelu_pytorch_tanh")


def _written_gemma_activation(ours: str) -> Any:
    return "gelu_pytorch_tanh" if ours == "gelu_tanh" else ours


_OF_GEMMA = {
    **changed(_FIELDS, vocab_size=256000, head_dim=256, max_tokens=8192, tied=True),
    **_BIASED,
    "activation": Field("hidden_act", "gelu", _read_gemma_activation, _written_gemma_activation),
}
_FIXED_GEMMA: Given = {**_FIXED, "scaled_embedding": True, "norm_plus_one": True}
GEMMA = dataclasses.replace(
    LLAMA,
    name="Gemma",
    theirs="GemmaConfig",
    fields=changed(_OF_GEMMA, embed_dim=3072, ff_dim=24576, num_layers=28, num_heads=16, num_kv_heads=16),
    fixed=_FIXED_GEMMA,
    lacking=lambda config: {"activation='gelu'": config.activation == "gelu"},
    only={"use_bidirectional_attention": (None, False), "hidden_activation": (None, "gelu_pytorch_tanh")},
    ignored=(),
)


def _gemma2(source: Source, given: Given) -> Given:
    fields = source.fields
    fields.size("sliding_window", 4096)
    window = _read_window(fields, "sliding_window", 4096)
    last, scalar = fields.number_or_none("final_logit_softcapping", 30.0), fields.number("query_pre_attn_scalar", 256)
    if scalar <= 0.0:
        raise ValueError(f"config field query_pre_attn_scalar is {scalar}; expected a number above 0")
    return {
        **_rotary(source, given),
        **_of_layers(fields, [i % 2 == 0 for i in range(given["num_layers"])], window),
        "attention_scale": scalar**-0.5,
        "logit_softcap": last if source.has_head else None,
    }


def _gemma2_written(config: DecoderConfig) -> Given:
    scale = head_sizes(config)[1] ** -0.5 if config.attention_scale is None else config.attention_scale
    scalar = scale**-2
    whole = abs(scalar - round(scalar)) < 1e-6 * scalar
    return {
        **_written_layers(config),
        "query_pre_attn_scalar": round(scalar) if whole else scalar,
        "final_logit_softcapping": config.logit_softcap,
    }


GEMMA2 = dataclasses.replace(
    GEMMA,
    name="Gemma 2",
    theirs="Gemma2Config",
    fields={
        **changed(_OF_GEMMA, embed_dim=2304, ff_dim=9216, num_layers=26, num_heads=8, num_kv_heads=4),
        "activation": Field("hidden_activation", "gelu_pytorch_tanh", Fields.activation, _written_gemma_activation),
        "attention_softcap": Field("attn_logit_softcapping", 50.0, Fields.number_or_none),
    },
    fixed={**_FIXED_GEMMA, "post_norms": True},
    usual=_IN_GEMMA2,
    further=_gemma2,
    written=_gemma2_written,
    lacking=lambda config: {**GEMMA.lacking(config), "window=None": config.window is None},
    only={"use_bidirectional_attention": (None, False)},
    ignored=("hidden_act",),
)
