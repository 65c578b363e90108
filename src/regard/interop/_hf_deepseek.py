"""DeepSeek-V3, whole or its attention alone: configurations, names of weights, and how its experts are stored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from regard.interop._hf_family import NO_TOKENS, Family, Field, Given, Source
from regard.interop._hf_fields import Fields, rope_parameters
from regard.interop._hf_files import Weight
from regard.interop._hf_llamas import feed_forward
from regard.models import DeepSeekConfig, LatentConfig

_FIELDS: dict[str, Field] = {
    "embed_dim": Field.size("hidden_size", 7168),
    "num_heads": Field.size("num_attention_heads", 128),
    "kv_lora_rank": Field.size("kv_lora_rank", 512),
    "nope_dim": Field.size("qk_nope_head_dim", 128),
    "rope_dim": Field.size("qk_rope_head_dim", 64),
    "value_head_dim": Field.size("v_head_dim", 128),
    "q_lora_rank": Field.size_or_none("q_lora_rank", 1536),
    "rotary_interleaved": Field("rope_interleave", True, lambda *field: bool(Fields.take(*field))),
    "init_std": Field.number("initializer_range", 0.02),
}
_WEIGHTS = {
    "q_proj": "q_proj",
    "q_down_proj": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_up_proj": "q_b_proj",
    "kv_down_proj": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up_proj": "kv_b_proj",
    "out_proj": "o_proj",
}


def _rotary(source: Source, given: Given) -> Given:
    source.fields.only("num_key_value_heads", None, given["num_heads"])
    base, scaling = source.fields.rotary()
    return {"rotary_base": base, "rotary_scaling": scaling}


class _Attention(Family):
    """The attention alone: what the rest of the configuration says is not asked."""

    def close(self, source: Source) -> None:
        source.fields.only("quantization_config", None)


ATTENTION = _Attention(
    name="DeepSeek-V3's attention",
    config=LatentConfig,
    theirs="DeepseekV3Config",
    fields={**_FIELDS, "bias": Field.flag("attention_bias", False), "dropout": Field.number("attention_dropout", 0.0)},
    further=_rotary,
    weights=lambda config: _WEIGHTS,
)


def _whole(source: Source, given: Given) -> Given:
    dense = int(source.fields.number("first_k_dense_replace", 3))
    return {**_rotary(source, given), "dense_layers": min(dense, given["num_layers"]), "head": source.has_head}


def _written(config: DeepSeekConfig) -> Given:
    return {
        "num_key_value_heads": config.num_heads,
        "first_k_dense_replace": config.dense_layers,
        "rope_parameters": rope_parameters(config),
        "num_mtp_layers": 0,
        "pad_token_id": None,
        **NO_TOKENS,
    }


WHOLE = Family(
    name="DeepSeek-V3",
    config=DeepSeekConfig,
    theirs="DeepseekV3Config",
    fields={
        **_FIELDS,
        "vocab_size": Field.size("vocab_size", 129280),
        "num_layers": Field.size("num_hidden_layers", 61),
        "ff_dim": Field.size("intermediate_size", 18432),
        "max_tokens": Field.size("max_position_embeddings", 4096),
        "norm_eps": Field.number("rms_norm_eps", 1e-6),
        "activation": Field.activation("hidden_act", "silu"),
        "qkv_bias": Field.flag("attention_bias", False),
        "out_bias": Field.flag("attention_bias", False),
        "attention_dropout": Field.number("attention_dropout", 0.0),
        "tied": Field.flag("tie_word_embeddings", False),
        "experts": Field.size("n_routed_experts", 256),
        "active_experts": Field.size("num_experts_per_tok", 8),
        "expert_dim": Field.size("moe_intermediate_size", 2048),
        "shared_experts": Field.size("n_shared_experts", 1),
        "expert_groups": Field.size("n_group", 8),
        "active_groups": Field.size("topk_group", 4),
        "expert_scale": Field.number("routed_scaling_factor", 2.5),
        "normed_experts": Field.flag("norm_topk_prob", True),
    },
    fixed={"positions": "rotary", "norm": "rms", "gated": True, "ff_bias": False},
    usual=("post_norms", "dropout", "norm_plus_one", "scaled_embedding", "logit_softcap"),
    chosen={"scaled_residual": False},
    further=_whole,
    written=_written,
    weights=lambda config: {
        "token_embedding": "embed_tokens",
        "norm": "norm",
        "head": "lm_head",
        "layers.#.attention_norm": "layers.#.input_layernorm",
        "layers.#.feed_forward_norm": "layers.#.post_attention_layernorm",
        **{f"layers.#.attention.{ours}": f"layers.#.self_attn.{theirs}" for ours, theirs in _WEIGHTS.items()},
        **feed_forward("layers.#.feed_forward", "layers.#.mlp"),
        **feed_forward("layers.#.feed_forward.shared", "layers.#.mlp.shared_experts"),
        **feed_forward("layers.#.feed_forward.experts.#", "layers.#.mlp.experts.#"),
        "layers.#.feed_forward.router": "layers.#.mlp.gate",
        "layers.#.feed_forward.correction": "layers.#.mlp.gate.e_score_correction_bias",
    },
    # how files say what V3 always does
    only={
        "pretraining_tp": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    # the first two are layers that guess further tokens, whose weights are refused by name
    ignored=(
        *("num_mtp_layers", "num_nextn_predict_layers", "qk_head_dim", "head_dim", "num_local_experts", "ep_size"),
        *("aux_loss_alpha", "seq_aux", "router_aux_loss_coef", "output_router_logits"),
    ),
    prefix="model.",
    copies={"lm_head.weight": "embed_tokens.weight"},
    computed=r"rotary_emb\.(original_)?inv_freq$",
)

_TOGETHER = re.compile(r"^(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def one_by_one(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Experts that are stored together under the names that they have in files, each a part of what is stored."""
    found: dict[str, Weight] = {}
    for name, weight in weights.items():
        match = _TOGETHER.match(name)
        if match is None or len(weight.shape) != 3:
            found[name] = weight
            continue
        parts, (experts, rows, width) = _PARTS[match[2]], weight.shape
        each = rows // len(parts)
        for expert in range(experts):
            for at, part in enumerate(parts):
                new = f"{match[1]}.{expert}.{part}.weight"
                read = partial(_rows, weight, expert, slice(at * each, (at + 1) * each))
                found[new] = Weight(new, [each, width], read)
    return found


def _rows(weight: Weight, expert: int, rows: slice) -> Tensor:
    return weight.read()[expert, rows]


def together(state: dict[str, Tensor], config: DeepSeekConfig) -> dict[str, Tensor]:
    """The weights as Hugging Face's module holds them: the experts of a layer in two tensors."""
    found = {name: weight for name, weight in state.items() if not re.search(r"\.mlp\.experts\.\d+\.", name)}
    for i in range(config.dense_layers, config.num_layers):
        here = f"layers.{i}.mlp.experts"
        for name, parts in _PARTS.items():
            each = [
                torch.stack([state[f"{here}.{at}.{part}.weight"] for at in range(config.experts)]) for part in parts
            ]
            found[f"{here}.{name}"] = torch.cat(each, 1)
    return found
