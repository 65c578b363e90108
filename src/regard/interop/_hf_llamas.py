"""Llama and its relatives (Mistral, Qwen2, Qwen3, Gemma, Gemma 2): configurations and names of weights."""

from __future__ import annotations

from typing import Any

from regard._checks import is_int
from regard.interop._hf_family import Source, maybe
from regard.interop._hf_fields import Fields
from regard.models import DecoderConfig


def llama_config(source: Source) -> DecoderConfig:
    fields = source.fields
    fields.only("pretraining_tp", 1)
    fields.only("layer_types", None)
    fields.only("rope_interleaved", False)
    bias = fields.flag("attention_bias", False)
    config = _config(source, qkv_bias=bias, out_bias=bias, ff_bias=fields.flag("mlp_bias", False))
    fields.close("is_llama_config")
    return config


def mistral_config(source: Source) -> DecoderConfig:
    fields = source.fields
    fields.only("layer_types", None)
    defaults = {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 4096 * 32}
    config = _config(source, defaults, window=_window(fields, fields.size_or_none("sliding_window", 4096)))
    fields.close()
    return config


def qwen2_config(source: Source) -> DecoderConfig:
    config = _config(source, _QWEN, qkv_bias=True, **_some_windows(source.fields))
    source.fields.close()
    return config


def qwen3_config(source: Source) -> DecoderConfig:
    fields = source.fields
    bias = fields.flag("attention_bias", False)
    defaults = {**_QWEN, "head_dim": 128}
    config = _config(source, defaults, qk_norm=True, qkv_bias=bias, out_bias=bias, **_some_windows(fields))
    fields.close()
    return config


def gemma_config(source: Source) -> DecoderConfig:
    fields = source.fields
    fields.only("use_bidirectional_attention", None, False)
    # the first files say "gelu" and mean the approximation, as Hugging Face's class does too
    fields.only("hidden_activation", None, "gelu_pytorch_tanh")
    act = fields.take("hidden_act", "gelu")
    fields.given = {**fields.given, "hidden_act": "gelu_pytorch_tanh" if act == "gelu" else act}
    bias = fields.flag("attention_bias", False)
    defaults = {"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28}
    defaults |= {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256}
    defaults |= {"max_position_embeddings": 8192}
    config = _config(source, defaults, **_GEMMA, qkv_bias=bias, out_bias=bias)
    fields.close()
    return config


def gemma2_config(source: Source) -> DecoderConfig:
    fields = source.fields
    fields.only("use_bidirectional_attention", None, False)
    fields.given = {**fields.given, "hidden_act": fields.take("hidden_activation", "gelu_pytorch_tanh")}
    layers = fields.size("num_hidden_layers", 26)
    window = _window(fields, fields.size("sliding_window", 4096))
    last = _number_or_none(fields, "final_logit_softcapping", 30.0)
    usual = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    bias = fields.flag("attention_bias", False)
    defaults = {"vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
    defaults |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192}
    config = _config(
        source,
        defaults,
        **_GEMMA,
        **_of_layers(fields, usual, window),
        post_norms=True,
        attention_scale=float(fields.number("query_pre_attn_scalar", 256) ** -0.5),
        attention_softcap=_number_or_none(fields, "attn_logit_softcapping", 50.0),
        logit_softcap=last if source.has_head else None,
        qkv_bias=bias,
        out_bias=bias,
    )
    fields.close("hidden_act")
    return config


_QWEN = {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768}
_GEMMA: dict[str, Any] = {"scaled_embedding": True, "norm_plus_one": True, "tied": True}


def _config(source: Source, defaults: dict[str, int] | None = None, **more: Any) -> DecoderConfig:
    """What these models have in common, with the defaults of the class and what is its own."""
    fields, usual = source.fields, defaults or {}

    def size(name: str, otherwise: int) -> int:
        return fields.size(name, usual.get(name, otherwise))

    heads = size("num_attention_heads", 32)
    kv_heads = fields.size_or_none("num_key_value_heads", usual.get("num_key_value_heads"))
    base, scaling = fields.rotary()
    return DecoderConfig(
        **{
            "vocab_size": size("vocab_size", 32000),
            "embed_dim": size("hidden_size", 4096),
            "num_layers": size("num_hidden_layers", 32),
            "num_heads": heads,
            "num_kv_heads": heads if kv_heads is None else kv_heads,
            "head_dim": fields.size_or_none("head_dim", usual.get("head_dim")),
            "ff_dim": size("intermediate_size", 11008),
            "max_tokens": size("max_position_embeddings", 2048),
            "positions": "rotary",
            "rotary_base": base,
            "rotary_scaling": scaling,
            "norm": "rms",
            "norm_eps": fields.number("rms_norm_eps", 1e-6),
            "activation": fields.activation("hidden_act", "silu"),
            "gated": True,
            "qkv_bias": False,
            "out_bias": False,
            "ff_bias": False,
            "tied": fields.flag("tie_word_embeddings", bool(more.pop("tied", False))),
            "head": source.has_head,
            "attention_dropout": fields.number("attention_dropout", 0.0),
            "init_std": fields.number("initializer_range", 0.02),
            "scaled_residual": False,
            **more,
        }
    )


def _window(fields: Fields, theirs: int | None) -> int | None:
    """Theirs counts the token itself."""
    if theirs == 1:
        raise ValueError("config field sliding_window is 1: a token that sees nothing but itself is not converted")
    return None if theirs is None else theirs - 1


def _some_windows(fields: Fields) -> dict[str, Any]:
    """Of Qwen: from a layer on, where they are switched on."""
    used = fields.flag("use_sliding_window", False)
    theirs, first = fields.take("sliding_window"), fields.take("max_window_layers", 28)
    layers = fields.size("num_hidden_layers", 32)
    window = None
    if used and theirs is not None:
        window = _window(fields, fields.size("sliding_window"))
    if not is_int(first):
        raise ValueError(f"config field max_window_layers is {first!r}; expected a whole number")
    usual = ["sliding_attention" if window is not None and i >= first else "full_attention" for i in range(layers)]
    return _of_layers(fields, usual, window)


def _of_layers(fields: Fields, usual: list[str], window: int | None) -> dict[str, Any]:
    kinds = fields.take("layer_types")
    kinds = usual if kinds is None else kinds
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != len(usual) or any(kind not in known for kind in kinds):
        raise ValueError(f"config field layer_types is {kinds!r}; expected one of {', '.join(known)} for each layer")
    flags = tuple(kind == "sliding_attention" for kind in kinds)
    if not any(flags):
        return {"window": None}
    if window is None:
        raise ValueError("config field layer_types has sliding_attention, and there is no sliding_window")
    return {"window": window} if all(flags) else {"window": window, "windowed": flags}


def _number_or_none(fields: Fields, name: str, default: float) -> float | None:
    return None if fields.take(name, default) is None else fields.number(name, default)


def llama_names(config: DecoderConfig) -> dict[str, str]:
    """Of all of them; what a model lacks, its configuration says."""
    found = {"token_embedding.weight": "embed_tokens.weight", "norm.weight": "norm.weight"}
    for i in range(config.num_layers):
        here = f"layers.{i}"
        found[f"{here}.attention_norm.weight"] = f"{here}.input_layernorm.weight"
        before = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        found[f"{here}.feed_forward_norm.weight"] = f"{here}.{before}.weight"
        if config.post_norms:
            found[f"{here}.attention_post_norm.weight"] = f"{here}.post_attention_layernorm.weight"
            found[f"{here}.feed_forward_post_norm.weight"] = f"{here}.post_feedforward_layernorm.weight"
        for name in ("q_proj", "k_proj", "v_proj"):
            found |= maybe(config.qkv_bias, f"{here}.attention.{name}", f"{here}.self_attn.{name}")
        found |= maybe(config.out_bias, f"{here}.attention.out_proj", f"{here}.self_attn.o_proj")
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                found[f"{here}.attention.{name}.weight"] = f"{here}.self_attn.{name}.weight"
        for name in ("gate", "up", "down"):
            found |= maybe(config.ff_bias, f"{here}.feed_forward.{name}", f"{here}.mlp.{name}_proj")
    return found if config.tied or not config.head else {**found, "head.weight": "lm_head.weight"}
