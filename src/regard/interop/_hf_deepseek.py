"""DeepSeek-V3 as a whole model: configuration, names of weights, and experts that are stored together or one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from regard.interop._hf_decoders import deepseek_config, deepseek_names
from regard.interop._hf_export_llamas import ACTIVATIONS, refuse, rope_parameters
from regard.interop._hf_family import Family, Source
from regard.models import DeepSeekConfig

_TOGETHER = re.compile(r"^(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")
Read = Callable[[str], Tensor]
Shape = Callable[[str], list[int]]


def whole_config(source: Source) -> DeepSeekConfig:
    fields = source.fields
    attention = deepseek_config(source)
    fields.only("pretraining_tp", 1)
    layers = fields.size("num_hidden_layers", 61)
    config = DeepSeekConfig(
        vocab_size=fields.size("vocab_size", 129280),
        embed_dim=attention.embed_dim,
        num_layers=layers,
        num_heads=attention.num_heads,
        ff_dim=fields.size("intermediate_size", 18432),
        max_tokens=fields.size("max_position_embeddings", 4096),
        positions="rotary",
        rotary_base=attention.rotary_base,
        rotary_scaling=attention.rotary_scaling,
        rotary_interleaved=attention.rotary_interleaved,
        norm="rms",
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.activation("hidden_act", "silu"),
        gated=True,
        qkv_bias=attention.bias,
        out_bias=attention.bias,
        ff_bias=False,
        tied=fields.flag("tie_word_embeddings", False),
        head=source.has_head,
        attention_dropout=attention.dropout,
        init_std=attention.init_std,
        scaled_residual=False,
        kv_lora_rank=attention.kv_lora_rank,
        nope_dim=attention.nope_dim,
        rope_dim=attention.rope_dim,
        value_head_dim=attention.value_head_dim or attention.nope_dim,
        q_lora_rank=attention.q_lora_rank,
        dense_layers=min(int(fields.number("first_k_dense_replace", 3)), layers),
        experts=fields.size("n_routed_experts", 256),
        active_experts=fields.size("num_experts_per_tok", 8),
        expert_dim=fields.size("moe_intermediate_size", 2048),
        shared_experts=fields.size("n_shared_experts", 1),
        expert_groups=fields.size("n_group", 8),
        active_groups=fields.size("topk_group", 4),
        expert_scale=fields.number("routed_scaling_factor", 2.5),
        normed_experts=fields.flag("norm_topk_prob", True),
    )
    # how files say what V3 always does; and layers that guess further tokens, whose weights are refused by name
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("moe_layer_freq", 1)
    ignored = ("num_mtp_layers", "num_nextn_predict_layers", "qk_head_dim", "head_dim", "num_local_experts")
    fields.close(*ignored, "ep_size", "aux_loss_alpha", "seq_aux", "router_aux_loss_coef", "output_router_logits")
    return config


def whole_names(config: DeepSeekConfig) -> dict[str, str]:
    found = {"token_embedding.weight": "embed_tokens.weight", "norm.weight": "norm.weight"}
    inside = deepseek_names(_Attention(config))  # type: ignore[arg-type]
    for i in range(config.num_layers):
        here = f"layers.{i}"
        found[f"{here}.attention_norm.weight"] = f"{here}.input_layernorm.weight"
        found[f"{here}.feed_forward_norm.weight"] = f"{here}.post_attention_layernorm.weight"
        found |= {f"{here}.attention.{ours}": f"{here}.self_attn.{theirs}" for ours, theirs in inside.items()}
        if i < config.dense_layers:
            found |= _feed_forward(f"{here}.feed_forward", f"{here}.mlp")
            continue
        found[f"{here}.feed_forward.router.weight"] = f"{here}.mlp.gate.weight"
        found[f"{here}.feed_forward.correction"] = f"{here}.mlp.gate.e_score_correction_bias"
        found |= _feed_forward(f"{here}.feed_forward.shared", f"{here}.mlp.shared_experts")
        for at in range(config.experts):
            found |= _feed_forward(f"{here}.feed_forward.experts.{at}", f"{here}.mlp.experts.{at}")
    return found if config.tied or not config.head else {**found, "head.weight": "lm_head.weight"}


class _Attention:
    """What the names of the attention's weights depend on."""

    def __init__(self, config: DeepSeekConfig) -> None:
        self.q_lora_rank, self.bias = config.q_lora_rank, config.qkv_bias


def _feed_forward(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.{name}.weight": f"{theirs}.{name}_proj.weight" for name in ("gate", "up", "down")}


WHOLE = Family(
    "model.",
    whole_config,
    whole_names,
    copies={"lm_head.weight": "embed_tokens.weight"},
    computed=r"rotary_emb\.(original_)?inv_freq$",
)


def one_by_one(names: Mapping[str, str], read: Read, shape: Shape) -> tuple[dict[str, str], Read, Shape]:
    """Experts that are stored together under the names that they have in files, each a part of what is stored."""
    parts: dict[str, tuple[str, int, int, int]] = {}  # new name: stored under, expert, first row, rows
    found: dict[str, str] = {}
    for name, stored in names.items():
        match = _TOGETHER.match(name)
        if match is None:
            found[name] = stored
            continue
        experts, rows = shape(stored)[:2]
        halves = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
        for at in range(experts):
            for place, half in enumerate(halves):
                new = f"{match[1]}.{at}.{half}.weight"
                size = rows // len(halves)
                parts[new] = (stored, at, place * size, size)
                found[new] = new

    def read_part(stored: str) -> Tensor:
        if stored not in parts:
            return read(stored)
        whole, at, first, size = parts[stored]
        return read(whole)[at, first : first + size]

    def shape_of(stored: str) -> list[int]:
        if stored not in parts:
            return shape(stored)
        whole, _, _, size = parts[stored]
        return [size, shape(whole)[2]]

    return found, read_part, shape_of


def together(state: dict[str, Tensor], config: DeepSeekConfig) -> dict[str, Tensor]:
    """The weights as Hugging Face's module holds them: the experts of a layer in two tensors."""
    found = {name: weight for name, weight in state.items() if not re.search(r"\.mlp\.experts\.\d+\.", name)}
    for i in range(config.dense_layers, config.num_layers):
        here = f"layers.{i}.mlp.experts"
        each = [[state[f"{here}.{at}.{name}_proj.weight"] for at in range(config.experts)] for name in _PARTS]
        gate, up, down = (torch.stack(part) for part in each)
        found |= {f"{here}.gate_up_proj": torch.cat([gate, up], 1), f"{here}.down_proj": down}
    return found


_PARTS = ("gate", "up", "down")


def to_deepseek(transformers: Any, config: DeepSeekConfig, **made: Any) -> Any:
    refuse(
        "DeepSeek-V3",
        {
            f"qkv_bias={config.qkv_bias} with out_bias={config.out_bias}": config.qkv_bias != config.out_bias,
            "ff_bias=True": config.ff_bias,
            "post_norms=True": config.post_norms,
            "norm_plus_one=True": config.norm_plus_one,
            "scaled_embedding=True": config.scaled_embedding,
            f"logit_softcap={config.logit_softcap}": config.logit_softcap is not None,
            f"dropout={config.dropout}": config.dropout > 0.0,
        },
    )
    theirs = transformers.DeepseekV3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.embed_dim,
        intermediate_size=config.ff_dim,
        moe_intermediate_size=config.expert_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        n_shared_experts=config.shared_experts,
        n_routed_experts=config.experts,
        routed_scaling_factor=config.expert_scale,
        kv_lora_rank=config.kv_lora_rank,
        q_lora_rank=config.q_lora_rank,
        qk_rope_head_dim=config.rope_dim,
        v_head_dim=config.value_head_dim,
        qk_nope_head_dim=config.nope_dim,
        n_group=config.expert_groups,
        topk_group=config.active_groups,
        num_experts_per_tok=config.active_experts,
        first_k_dense_replace=config.dense_layers,
        norm_topk_prob=config.normed_experts,
        hidden_act=ACTIVATIONS[config.activation],
        max_position_embeddings=config.max_tokens,
        initializer_range=config.init_std,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tied,
        rope_parameters=rope_parameters(config),
        rope_interleave=config.rotary_interleaved,
        attention_bias=config.qkv_bias,
        attention_dropout=config.attention_dropout,
        num_mtp_layers=0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    auto = transformers.AutoModelForCausalLM if config.head else transformers.AutoModel
    return auto.from_config(theirs, **made)
