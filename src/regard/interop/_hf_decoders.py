"""GPT-2 and Whisper: configurations and names of weights."""

from __future__ import annotations

from regard.interop._hf_family import NO_TOKENS, Family, Field, Given, Source, projections
from regard.models import DecoderConfig, WhisperConfig


def _gpt2(source: Source, given: Given) -> Given:
    fields, inner = source.fields, source.fields.size_or_none("n_inner")
    fields.equal("embd_pdrop", "resid_pdrop", given["dropout"], 0.1)
    return {"ff_dim": 4 * given["embed_dim"] if inner is None else inner, "head": source.has_head}


def _gpt2_lacking(config: DecoderConfig) -> dict[str, bool]:
    return {
        f"num_kv_heads={config.num_kv_heads}": config.num_kv_heads not in (None, config.num_heads),
        f"head_dim={config.head_dim}": config.head_dim not in (None, config.embed_dim // config.num_heads),
        "a projection without bias": not (config.qkv_bias and config.out_bias and config.ff_bias),
    }


GPT2 = Family(
    name="GPT-2",
    config=DecoderConfig,
    theirs="GPT2Config",
    fields={
        "vocab_size": Field.size("vocab_size", 50257),
        "embed_dim": Field.size("n_embd", 768),
        "num_layers": Field.size("n_layer", 12),
        "num_heads": Field.size("n_head", 12),
        "max_tokens": Field.size("n_positions", 1024),
        "norm_eps": Field.number("layer_norm_epsilon", 1e-5),
        "activation": Field.activation("activation_function", "gelu_new"),
        "tied": Field.flag("tie_word_embeddings", True),
        "dropout": Field.number("resid_pdrop", 0.1),
        "attention_dropout": Field.number("attn_pdrop", 0.1),
        "init_std": Field.number("initializer_range", 0.02),
    },
    usual=(
        *("norm", "window", "gated", "qk_norm", "post_norms", "attention_scale", "attention_softcap", "logit_softcap"),
        "scaled_embedding",
    ),
    chosen={"packed": True},
    further=_gpt2,
    written=lambda config: {"n_inner": config.ff_dim, "embd_pdrop": config.dropout, **NO_TOKENS},
    lacking=_gpt2_lacking,
    weights=lambda config: {
        "token_embedding": "wte",
        "position_embedding": "wpe",
        "norm": "ln_f",
        "head": "lm_head",
        "layers.#.attention_norm": "h.#.ln_1",
        "layers.#.attention.qkv_proj": "h.#.attn.c_attn",
        "layers.#.attention.out_proj": "h.#.attn.c_proj",
        "layers.#.feed_forward_norm": "h.#.ln_2",
        "layers.#.feed_forward.up": "h.#.mlp.c_fc",
        "layers.#.feed_forward.down": "h.#.mlp.c_proj",
    },
    only={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
    # reorder_and_upcast_attn keeps products of half precision in float32, which attention does here in any case
    ignored=(
        *("n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation"),
        *("summary_proj_to_labels", "summary_first_dropout"),
    ),
    prefix="transformer.",
    copies={"lm_head.weight": "wte.weight"},
    computed=r"\.attn\.(bias|masked_bias)$",
    transposed=("qkv_proj.weight", "out_proj.weight", "up.weight", "down.weight"),
)


def _whisper(source: Source, given: Given) -> Given:
    source.fields.equal("decoder_attention_heads", "encoder_attention_heads", given["num_heads"], 6)
    source.fields.equal("decoder_ffn_dim", "encoder_ffn_dim", given["ff_dim"], 1536)
    return {}


def _whisper_attention(ours: str, theirs: str) -> dict[str, str]:
    names = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "out_proj": "out_proj"}
    return {**projections(ours, theirs, names), f"{ours}_norm": f"{theirs}_layer_norm"}


def _whisper_layer(side: str) -> dict[str, str]:
    ours, theirs = f"{side}_layers.#", f"{side}.layers.#"
    return {
        **_whisper_attention(f"{ours}.attention", f"{theirs}.self_attn"),
        **_whisper_attention(f"{ours}.cross_attention", f"{theirs}.encoder_attn"),
        f"{ours}.feed_forward.up": f"{theirs}.fc1",
        f"{ours}.feed_forward.down": f"{theirs}.fc2",
        f"{ours}.feed_forward_norm": f"{theirs}.final_layer_norm",
    }


WHISPER = Family(
    name="Whisper",
    config=WhisperConfig,
    theirs="WhisperConfig",
    fields={
        "vocab_size": Field.size("vocab_size", 51865),
        "embed_dim": Field.size("d_model", 384),
        "num_layers": Field.size("encoder_layers", 4),
        "decoder_layers": Field.size("decoder_layers", 4),
        "num_heads": Field.size("encoder_attention_heads", 6),
        "ff_dim": Field.size("encoder_ffn_dim", 1536),
        "mel_bins": Field.size("num_mel_bins", 80),
        "max_frames": Field.size("max_source_positions", 1500),
        "max_tokens": Field.size("max_target_positions", 448),
        "activation": Field.activation("activation_function", "gelu"),
        "dropout": Field.number("dropout", 0.0),
        "attention_dropout": Field.number("attention_dropout", 0.0),
        "init_std": Field.number("init_std", 0.02),
    },
    further=_whisper,
    weights=lambda config: {
        "token_embedding": "decoder.embed_tokens",
        "source_positions": "encoder.embed_positions",
        "target_positions": "decoder.embed_positions",
        "conv1": "encoder.conv1",
        "conv2": "encoder.conv2",
        "encoder_norm": "encoder.layer_norm",
        "decoder_norm": "decoder.layer_norm",
        **_whisper_layer("encoder"),
        **_whisper_layer("decoder"),
    },
    only={
        **dict.fromkeys(("activation_dropout", "encoder_layerdrop", "decoder_layerdrop"), (0.0,)),
        "scale_embedding": (False,),
        "apply_spec_augment": (False,),
        "tie_word_embeddings": (True,),
    },
    # the weighted sum and its projection belong to a head of sound classification, whose weights are refused by name
    ignored=(
        *("num_hidden_layers", "median_filter_width", "use_weighted_layer_sum", "classifier_proj_size"),
        *(f"mask_{axis}_{what}" for axis in ("time", "feature") for what in ("prob", "length", "min_masks")),
    ),
    prefix="model.",
    copies={"proj_out.weight": "decoder.embed_tokens.weight"},
)
