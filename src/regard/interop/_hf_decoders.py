"""GPT-2, Whisper and DeepSeek-V3's attention: configurations and names of weights."""

from __future__ import annotations

from regard.interop._hf_family import Source, both, maybe
from regard.models import DecoderConfig, LatentConfig, WhisperConfig


def gpt2_config(source: Source) -> DecoderConfig:
    fields = source.fields
    fields.only("scale_attn_weights", True)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    fields.only("add_cross_attention", False)
    width = fields.size("n_embd", 768)
    dropout = fields.number("resid_pdrop", 0.1)
    fields.equal("embd_pdrop", "resid_pdrop", dropout, 0.1)
    inner = fields.size_or_none("n_inner")
    config = DecoderConfig(
        vocab_size=fields.size("vocab_size", 50257),
        embed_dim=width,
        num_layers=fields.size("n_layer", 12),
        num_heads=fields.size("n_head", 12),
        ff_dim=4 * width if inner is None else inner,
        max_tokens=fields.size("n_positions", 1024),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation=fields.activation("activation_function", "gelu_new"),
        packed=True,
        tied=fields.flag("tie_word_embeddings", True),
        head=source.has_head,
        dropout=dropout,
        attention_dropout=fields.number("attn_pdrop", 0.1),
        init_std=fields.number("initializer_range", 0.02),
    )
    summary = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
    # reorder_and_upcast_attn keeps products of half precision in float32, which attention does here in any case
    fields.close("n_ctx", "reorder_and_upcast_attn", *(f"summary_{name}" for name in summary))
    return config


def gpt2_names(config: DecoderConfig) -> dict[str, str]:
    found = {"token_embedding.weight": "wte.weight", "position_embedding.weight": "wpe.weight", **both("norm", "ln_f")}
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"h.{i}"
        found |= both(f"{ours}.attention_norm", f"{theirs}.ln_1")
        found |= both(f"{ours}.attention.qkv_proj", f"{theirs}.attn.c_attn")
        found |= both(f"{ours}.attention.out_proj", f"{theirs}.attn.c_proj")
        found |= both(f"{ours}.feed_forward_norm", f"{theirs}.ln_2")
        found |= both(f"{ours}.feed_forward.up", f"{theirs}.mlp.c_fc")
        found |= both(f"{ours}.feed_forward.down", f"{theirs}.mlp.c_proj")
    return found if config.tied or not config.head else {**found, "head.weight": "lm_head.weight"}


def whisper_config(source: Source) -> WhisperConfig:
    fields = source.fields
    for name in ("activation_dropout", "encoder_layerdrop", "decoder_layerdrop"):
        fields.only(name, 0.0)
    fields.only("scale_embedding", False)
    fields.only("apply_spec_augment", False)
    fields.only("tie_word_embeddings", True)
    heads, inner = fields.size("encoder_attention_heads", 6), fields.size("encoder_ffn_dim", 1536)
    fields.equal("decoder_attention_heads", "encoder_attention_heads", heads, 6)
    fields.equal("decoder_ffn_dim", "encoder_ffn_dim", inner, 1536)
    layers = fields.size("encoder_layers", 4)
    config = WhisperConfig(
        vocab_size=fields.size("vocab_size", 51865),
        embed_dim=fields.size("d_model", 384),
        num_layers=layers,
        decoder_layers=fields.size("decoder_layers", 4),
        num_heads=heads,
        ff_dim=inner,
        mel_bins=fields.size("num_mel_bins", 80),
        max_frames=fields.size("max_source_positions", 1500),
        max_tokens=fields.size("max_target_positions", 448),
        activation=fields.activation("activation_function", "gelu"),
        dropout=fields.number("dropout", 0.0),
        attention_dropout=fields.number("attention_dropout", 0.0),
        init_std=fields.number("init_std", 0.02),
    )
    augment = [f"mask_{axis}_{what}" for axis in ("time", "feature") for what in ("prob", "length", "min_masks")]
    # the weighted sum and its projection belong to a head of sound classification, whose weights are refused by name
    fields.close("num_hidden_layers", "median_filter_width", "use_weighted_layer_sum", "classifier_proj_size", *augment)
    return config


def whisper_names(config: WhisperConfig) -> dict[str, str]:
    found = {
        "token_embedding.weight": "decoder.embed_tokens.weight",
        "source_positions.weight": "encoder.embed_positions.weight",
        "target_positions.weight": "decoder.embed_positions.weight",
        **both("conv1", "encoder.conv1"),
        **both("conv2", "encoder.conv2"),
        **both("encoder_norm", "encoder.layer_norm"),
        **both("decoder_norm", "decoder.layer_norm"),
    }
    decoder_layers = config.num_layers if config.decoder_layers is None else config.decoder_layers
    for side, layers in (("encoder", config.num_layers), ("decoder", decoder_layers)):
        for i in range(layers):
            ours, theirs = f"{side}_layers.{i}", f"{side}.layers.{i}"
            found |= _whisper_attention(f"{ours}.attention", f"{theirs}.self_attn")
            if side == "decoder":
                found |= _whisper_attention(f"{ours}.cross_attention", f"{theirs}.encoder_attn")
            found |= both(f"{ours}.feed_forward.up", f"{theirs}.fc1")
            found |= both(f"{ours}.feed_forward.down", f"{theirs}.fc2")
            found |= both(f"{ours}.feed_forward_norm", f"{theirs}.final_layer_norm")
    return found


def _whisper_attention(ours: str, theirs: str) -> dict[str, str]:
    found = both(f"{ours}_norm", f"{theirs}_layer_norm")
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        found |= maybe(name != "k_proj", f"{ours}.{name}", f"{theirs}.{name}")
    return found


def deepseek_config(source: Source) -> LatentConfig:
    fields = source.fields
    base, scaling = fields.rotary()
    interleaved = fields.take("rope_interleave", True)
    heads = fields.size("num_attention_heads", 128)
    fields.only("num_key_value_heads", None, heads)
    fields.only("quantization_config", None)
    return LatentConfig(
        embed_dim=fields.size("hidden_size", 7168),
        num_heads=heads,
        kv_lora_rank=fields.size("kv_lora_rank", 512),
        nope_dim=fields.size("qk_nope_head_dim", 128),
        rope_dim=fields.size("qk_rope_head_dim", 64),
        value_head_dim=fields.size("v_head_dim", 128),
        q_lora_rank=fields.size_or_none("q_lora_rank", 1536),
        bias=fields.flag("attention_bias", False),
        rotary_base=base,
        rotary_scaling=scaling,
        rotary_interleaved=bool(interleaved),
        dropout=fields.number("attention_dropout", 0.0),
        init_std=fields.number("initializer_range", 0.02),
    )


def deepseek_names(config: LatentConfig) -> dict[str, str]:
    found = {"kv_norm.weight": "kv_a_layernorm.weight", "kv_up_proj.weight": "kv_b_proj.weight"}
    if config.q_lora_rank is None:
        found["q_proj.weight"] = "q_proj.weight"
    else:
        found |= {"q_norm.weight": "q_a_layernorm.weight", "q_up_proj.weight": "q_b_proj.weight"}
        found |= maybe(config.bias, "q_down_proj", "q_a_proj")
    found |= maybe(config.bias, "kv_down_proj", "kv_a_proj_with_mqa")
    return found | maybe(config.bias, "out_proj", "o_proj")
