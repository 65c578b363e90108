"""Small configurations of Hugging Face's model types: the defaults of each, with every size made small."""

from __future__ import annotations

import re
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WIDTH, HEADS, GROUPS, DEPTH, WORDS = 64, 4, 2, 2, 99
IMAGE, PATCH = 32, 8

# Sizes by the names that configurations give them. The first pattern that fits the whole name wins.
_SIZES: list[tuple[str, Any]] = [
    (r"(text_|decoder_|encoder_|lm_|audio_|semantic_)?vocab_size|char_vocab_size|tokenizer_vocab_size", WORDS),
    (r"(num_(hidden|encoder|decoder|block|text|transformer|cross|speech_encoder|text_decoder|prenet)?_?layers|n_layers?"
     r"|(encoder|decoder|memory_attention|text|resampler|perceiver|detr|transformer)_?(num_)?(hidden_)?(layers|depth)"
     r"|num_(mem|latent)_layers|depth|L|num_layer|num_blocks_per_stage|num_self_attends_per_block|num_adapter_layers"
     r"|decoder_num_hidden_layers|num_speech_encoder_layers|speech_decoder_layers|speech_encoder_layers)", DEPTH),
    (r"num_key_value_heads|num_kv_heads|num_global_key_value_heads|swa_num_key_value_heads", GROUPS),
    (r"(encoder_|decoder_|swa_|speech_encoder_|text_decoder_|decoder_num_|memory_attention_)?"
     r"(num_)?(self_|cross_)?(attention|attn)_heads|n_heads?|num_heads|heads|decoder_num_attention_heads"
     r"|encoder_attention_heads|decoder_attention_heads|num_query_heads|(speech|text)_(encoder|decoder)_attention_heads",
     HEADS),
    (r"(global_|swa_)?head_dim|d_kv|attention_head_dim|v_head_dim|qk_nope_head_dim|dim_head|kv_channels|d_head"
     r"|resampler_head_dim|index_head_dim|attention_head_size|qk_rope_head_dim|hidden_size_per_head", WIDTH // HEADS),
    (r"kv_lora_rank|q_lora_rank|o_lora_rank|index_n_heads", 16),
    (r"index_topk", 4),
    (r"hidden_size|hidden_size_global|d_model|n_embd|dim|embed_dim|d_embed|(text|vision|audio|decoder|encoder|fusion|projector|resampler|"
     r"cross|mask|memory_attention|q)_(hidden_size|hidden_dim|dim|embed_dim)|hidden_dim|embedding_size|embedding_dim|"
     r"projection_dim|emb_dim|hidden_sizes_per_layer|out_hidden_size|lm_hidden_size|output_hidden_size|pooler_hidden_size|"
     r"decoder_hidden_size|projection_size|output_size|output_dim|projector_hidden_dim|text_config_hidden|word_embed_proj_dim|"
     r"d_inner_size|backbone_hidden_size|audio_hidden_size|encoder_hidden_dim|visual_hidden_size|attention_hidden_size|"
     r"hidden_size_per_layer_input|shared_hidden_size|fpn_hidden_size|mask_feature_size|feature_size|width|model_dim|"
     r"pooler_output_size|query_dim|text_embed_dim|vision_embed_dim|conv_pos_dim|decoder_dim|latent_size", WIDTH),
    (r".*(intermediate|ffn|feed_forward|mlp|ff|inner)_?(size|dim|hidden_size|hidden_dim)|ffn_dim|d_ff|n_inner|mlp_dim"
     r"|dim_feedforward|mlp_hidden_size|ffn_hidden_size|.*_ffn_dim|.*ffn_embed_dim|moe_ffn_hidden_size"
     r"|moe_intermediate.*", 48),
    (r"max_position_embeddings|n_positions|max_seq_len|max_target_positions|max_seq_length|context_length_max", 256),
    (r"(num_(local_|routed_|moe_)?experts|n_routed_experts|moe_num_experts|moe_num_primary_experts)", 4),
    (r"num_experts_per_(tok|token)|moe_(top_?k|k)|experts_per_token|num_selected_experts|top_k_experts|moe_topk", 2),
    (r"n_shared_experts|num_shared_experts|n_group|topk_group|first_k_dense_replace|moe_num_shared_experts", 1),
    (r"image_size|input_size|pretrain_image_size|img_size|spec_size|input_resolution", IMAGE),
    (r"patch_size|spatial_patch_size", PATCH),
    (r"num_queries|num_query_tokens|num_latents|num_object_queries|resampler_n_latents", 5),
    (r"type_vocab_size", 2),
    (r"sliding_window|attention_window_size|local_attention|window_left", 5),
    (r"num_mel_bins|feature_dim_mel|n_mels|input_feat_per_channel", 16),
    (r"max_source_positions", 50),
    (r"num_position_embeddings", 16),
    (r"codebook_size|num_embeddings|codevector_dim|proj_codevector_dim", 32),
    (r"mamba_n_heads|linear_num_value_heads|linear_num_key_heads|linear_num_heads|mamba_num_heads", 4),
    (r"linear_key_head_dim|linear_value_head_dim|mamba_d_head|mamba_head_dim|linear_head_dim", 16),
    (r"(mamba_)?chunk_size|mamba_chunk_size", 8),
]  # fmt: skip
_RULES = [(re.compile(pattern), value) for pattern, value in _SIZES]
_TOKENS = re.compile(r".*(_token_id|_token_index|_token_ids)$")
_PER_LAYER = ("layer_types", "mlp_layer_types", "indexer_types", "layers_block_type", "block_types", "attention_types",
              "attn_types", "layer_rope_theta", "no_rope_layers", "mlp_only_layers", "attention_layers")  # fmt: skip
_MAX_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def _alike(names: tuple[str, ...], sizes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: dict(sizes) for name in names}


_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_HALF_MROPE = {**_MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}  # half of each head turns
_RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 8, 16], "depths": [1, 1, 1, 1]}
# What the rules cannot know.
OVERRIDES: dict[str, dict[str, Any]] = {
    **_alike(
        ("qwen2_vl_text", "qwen2_5_vl_text", "paddleocr_vl_text"),
        {"rope_parameters": _MROPE},
    ),
    **_alike(
        ("glm4v_text", "glm4v_moe_text", "glm_ocr_text", "glm_image_text", "glm46v_text"),
        {"rope_parameters": _HALF_MROPE},
    ),
    **_alike(
        ("detr", "conditional_detr", "dab-detr", "table-transformer"),
        {"backbone_config": {**_RESNET, "out_features": ["stage4"]}},
    ),
    **_alike(
        ("deformable_detr",),
        {"backbone_config": {**_RESNET, "out_features": ["stage2", "stage3", "stage4"]}},
    ),
    "bamba": {"mamba_d_head": 32, "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_d_head": 32, "layer_types": ["mamba", "attention"]},
    **_alike(
        ("deepseek_v2", "dots1"),
        {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    ),
    "dia_decoder": {"num_channels": 3},
    "gemma3n_text": {"intermediate_size": [48, 48], "activation_sparsity_pattern": [0.0, 0.0],
                     "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
    **_alike(("glm5_next", "glm5_next_text"), {"index_kpool": 4}),
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mimi": {"upsample_groups": 64},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "n_groups": 2},
    "swin2sr": {"embed_dim": 16, "num_heads": [2, 2], "depths": [1, 1], "window_size": 2, "patch_size": 1},
    **_alike(
        ("autoformer", "informer", "time_series_transformer"),
        {"prediction_length": 5, "context_length": 9, "lags_sequence": [1, 2], "num_time_features": 1,
         "feature_size": 5},
    ),
    "reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (4, 4), "num_hidden_layers": 2,
                 "attn_layers": ["local", "lsh"], "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4,
                 "num_buckets": 2, "num_hashes": 1, "max_position_embeddings": 16},
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 16},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 4},
    "xmod": {"languages": ["en"], "default_language": "en"},
    "levit": {"hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3, 4], "key_dim": [16, 16, 16],
              "depths": [1, 1, 1], "image_size": 64, "patch_size": 16},
    "cvt": {"num_heads": [1, 2, 4], "embed_dim": [16, 32, 64], "depth": [1, 1, 1]},
    "layoutlmv3": {"input_size": 32, "patch_size": 16, "coordinate_size": 12, "shape_size": 8},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "esmc": {"num_key_value_heads": HEADS},
    "dia": {"delay_pattern": [0, 1, 2]},
    "clvp": {},
    "blt": {"encoder_hash_byte_group_vocab": 50, "encoder_hash_byte_group_size": [3, 4], "use_cache": False},
    "lilt": {"hidden_size": 96, "channel_shrink_ratio": 4, "max_2d_position_embeddings": 64},
    "hunyuan_v1_dense": {"head_dim": 16},
    "gptj": {"n_embd": 64, "n_head": 4, "rotary_dim": 8},
    "codegen": {"n_embd": 64, "n_head": 4, "rotary_dim": 8, "mp_num": 1},
    "sam_vision_model": {"image_size": 32, "patch_size": 8, "global_attn_indexes": [1], "window_size": 2,
                         "output_channels": 64, "num_pos_feats": 32},
    "sam_prompt_encoder_config": {"image_size": 32, "patch_size": 8, "hidden_size": 64},
    "vit_mae": {"decoder_hidden_size": 64, "decoder_num_attention_heads": 4, "decoder_intermediate_size": 48},
    "lxmert": {"l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 64},
    "perceiver": {"d_model": 64, "d_latents": 64, "num_latents": 5, "num_self_attention_heads": 4,
                  "num_cross_attention_heads": 4, "num_self_attends_per_block": 1},
    "xlstm": {}, "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "videomae": {"num_frames": 4}, "vivit": {"num_frames": 4, "video_size": [4, 32, 32]},
    "timesformer": {"num_frames": 4}, "mobilevitv2": {"image_size": 64}, "mobilevit": {"image_size": 64},
    "wav2vec2-bert": {"feature_projection_input_dim": 160}, "idefics": {"use_resampler": False},
}  # fmt: skip


def small_config(model_type: str, **more: Any) -> Any:
    """A configuration of the type, small; ``more`` overrides what the rules give."""
    cls = CONFIG_MAPPING[model_type]
    return _made(cls, {}, more)


def _made(cls: Any, given: dict[str, Any], more: dict[str, Any]) -> Any:
    default = cls()
    fields = default.to_dict()
    sizes = {name: value for name, old in fields.items() if (value := _size(name, old)) is not None}
    sizes |= _agreeing(fields, sizes)
    known = OVERRIDES.get(getattr(cls, "model_type", ""), {})
    sizes |= known
    for name in getattr(default, "sub_configs", None) or {}:
        inner = getattr(default, name, None)
        if name not in known and inner is not None and hasattr(inner, "to_dict"):
            chosen = more.pop(name, {})
            sizes[name] = _made(type(inner), {}, dict(chosen)).to_dict() if isinstance(chosen, dict) else chosen
    return cls(**{**sizes, **given, **more})


def _agreeing(fields: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Sizes that must fit each other."""
    found: dict[str, Any] = {}
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        found["num_key_value_heads"] = HEADS  # keys are unpacked for all heads
    if "rotary_dim" in fields:
        found["rotary_dim"] = WIDTH // HEADS // 2
    stages = fields.get("num_heads")
    if (
        isinstance(stages, list)
        and isinstance(fields.get("embed_dim"), int)
        and isinstance(fields.get("depths"), list)
        and "window_size" in fields
    ):
        count = len(fields["depths"])  # Swin and its kin: each stage is twice as wide
        found |= {"embed_dim": 16, "num_heads": [2 * 2**n for n in range(count)], "depths": [1] * count}
        found |= {"window_size": 2, "image_size": 64, "patch_size": 2}
    if "head_dim" in fields and fields["head_dim"] is None:
        found["head_dim"] = WIDTH // HEADS
    return found


def _size(name: str, old: Any) -> Any:
    if isinstance(old, bool):
        return None
    if name in _MAX_TOKENS and isinstance(old, int):
        return _MAX_TOKENS[name]
    if _TOKENS.match(name) and isinstance(old, int):
        return 3 + sum(map(ord, name)) % 90 if old is not None else None
    if name in _PER_LAYER and isinstance(old, list):
        return _spread_over(old)
    if name == "rope_parameters" or name == "rope_scaling":
        return _rope(old)
    for pattern, value in _RULES:
        if pattern.fullmatch(name):
            if isinstance(old, int) and old > 0:
                return min(old, value) if value < 64 or old < value else value
            if isinstance(old, (list, tuple)) and old and all(isinstance(n, int) for n in old):
                return type(old)(min(n, value) for n in old)
    if name in ("depths", "num_blocks", "layers") and isinstance(old, (list, tuple)):
        return [min(int(n), 2) for n in old] if all(isinstance(n, int) for n in old) else None
    if name in ("hidden_sizes", "embed_dims", "dims", "embedding_dims") and isinstance(old, (list, tuple)):
        return [WIDTH // 2 * (i + 1) for i in range(len(old))]
    return None


def _spread_over(old: list[Any]) -> list[Any]:
    """A list with one entry for each of ``DEPTH`` layers, that has as many kinds as it can."""
    kinds = list(dict.fromkeys(map(str, old)))
    by_text = {str(entry): entry for entry in old}
    chosen = [by_text[kind] for kind in kinds[:DEPTH]]
    if any("attention" in str(entry) for entry in by_text) and not any("attention" in str(c) for c in chosen):
        chosen[-1] = next(entry for text, entry in by_text.items() if "attention" in text)
    return (chosen * DEPTH)[:DEPTH] if old else old


def _rope(old: Any) -> Any:
    if not isinstance(old, dict):
        return None
    new = dict(old)
    if isinstance(new.get("mrope_section"), (list, tuple)):
        half = WIDTH // HEADS // 2
        new["mrope_section"] = [half - 2 * (half // 4), half // 4, half // 4]
    return {name: _rope(value) if isinstance(value, dict) else value for name, value in new.items()}
