"""T5: configuration and names of weights, and the way back."""

from __future__ import annotations

from typing import Any

from regard.interop._hf_export_llamas import refuse
from regard.interop._hf_family import Source
from regard.interop._hf_fields import _ACTIVATIONS
from regard.models import T5Config

_KINDS = {
    "relu": ("relu", False),
    "gated-gelu": ("gelu_tanh", True),
    "gated-silu": ("silu", True),
    "gelu": ("gelu", False),
}


def t5_config(source: Source) -> T5Config:
    fields = source.fields
    fields.only("is_decoder", False)
    kind = fields.take("feed_forward_proj", "relu")
    if kind not in _KINDS:
        raise ValueError(f"config field feed_forward_proj is {kind!r}; of these {', '.join(_KINDS)} can be converted")
    activation, gated = _KINDS[kind]
    for name, expected in (("dense_act_fn", activation), ("is_gated_act", gated)):
        given = fields.take(name)
        if given is not None and (_ACTIVATIONS.get(given, given) if name == "dense_act_fn" else given) != expected:
            raise ValueError(f"config fields {name} = {given!r} and feed_forward_proj = {kind!r} say different things")
    layers = fields.size("num_layers", 6)
    decoder_layers = fields.size_or_none("num_decoder_layers")
    tie = fields.take("tie_word_embeddings", True)
    scaled = fields.take("scale_decoder_outputs")
    has_head = not source.architecture.endswith("T5Model")
    config = T5Config(
        vocab_size=fields.size("vocab_size", 32128),
        embed_dim=fields.size("d_model", 512),
        num_layers=layers,
        decoder_layers=layers if decoder_layers is None else decoder_layers,
        num_heads=fields.size("num_heads", 8),
        head_dim=fields.size("d_kv", 64),
        ff_dim=fields.size("d_ff", 2048),
        norm_eps=fields.number("layer_norm_epsilon", 1e-6),
        activation=activation,
        gated=gated,
        buckets=fields.size("relative_attention_num_buckets", 32),
        max_distance=fields.size("relative_attention_max_distance", 128),
        # whether they are one is told by the weights: files of T5 1.1 have both, and classes differ in what they say
        tied="lm_head.weight" not in source.weights or source.equal("lm_head.weight", "shared.weight"),
        scaled_output=bool(tie is not False if scaled is None else scaled),
        head=has_head,
        dropout=fields.number("dropout_rate", 0.1),
        attention_dropout=fields.number("dropout_rate", 0.1),
    )
    fields.close("n_positions", "classifier_dropout", "output_past")
    return config


def t5_names(config: T5Config) -> dict[str, str]:
    attention = ".layer.0.SelfAttention.relative_attention_bias.weight"
    found = {
        "token_embedding.weight": "shared.weight",
        "encoder_bias.weight": f"encoder.block.0{attention}",
        "decoder_bias.weight": f"decoder.block.0{attention}",
        "encoder_norm.weight": "encoder.final_layer_norm.weight",
        "decoder_norm.weight": "decoder.final_layer_norm.weight",
    }
    decoder_layers = config.num_layers if config.decoder_layers is None else config.decoder_layers
    for side, layers in (("encoder", config.num_layers), ("decoder", decoder_layers)):
        kinds = {"attention": "SelfAttention", **({"cross_attention": "EncDecAttention"} if side == "decoder" else {})}
        for i in range(layers):
            ours, theirs = f"{side}_layers.{i}", f"{side}.block.{i}.layer"
            for at, (name, kind) in enumerate(kinds.items()):
                for our, their in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("out_proj", "o")):
                    found[f"{ours}.{name}.{our}.weight"] = f"{theirs}.{at}.{kind}.{their}.weight"
                found[f"{ours}.{name}_norm.weight"] = f"{theirs}.{at}.layer_norm.weight"
            last = f"{theirs}.{len(kinds)}"
            dense = {"gate": "wi_0", "up": "wi_1", "down": "wo"} if config.gated else {"up": "wi", "down": "wo"}
            for our, their in dense.items():
                found[f"{ours}.feed_forward.{our}.weight"] = f"{last}.DenseReluDense.{their}.weight"
            found[f"{ours}.feed_forward_norm.weight"] = f"{last}.layer_norm.weight"
    return found if config.tied or not config.head else {**found, "head.weight": "lm_head.weight"}


def to_t5(transformers: Any, config: T5Config, **made: Any) -> Any:
    kinds = {kind: name for name, kind in _KINDS.items()}
    kind = kinds.get((config.activation, config.gated))
    lacking = {
        f"activation={config.activation!r} with gated={config.gated}": kind is None,
        f"norm={config.norm!r}": config.norm != "pre",
        "rms_norm=False": not config.rms_norm,
        "a bias": config.ff_bias or config.attention_bias,
        f"attention_scale={config.attention_scale}": config.attention_scale != 1.0,
        "target_vocab_size": config.target_vocab_size is not None,
        f"attention_dropout={config.attention_dropout}": config.attention_dropout != config.dropout,
    }
    refuse("T5", lacking)
    theirs = transformers.T5Config(
        vocab_size=config.vocab_size,
        d_model=config.embed_dim,
        d_kv=config.embed_dim // config.num_heads if config.head_dim is None else config.head_dim,
        d_ff=config.ff_dim,
        num_layers=config.num_layers,
        num_decoder_layers=config.num_layers if config.decoder_layers is None else config.decoder_layers,
        num_heads=config.num_heads,
        relative_attention_num_buckets=config.buckets,
        relative_attention_max_distance=config.max_distance,
        dropout_rate=config.dropout,
        layer_norm_epsilon=config.norm_eps,
        feed_forward_proj=kind,
        decoder_start_token_id=0,
        tie_word_embeddings=config.tied,
    )
    theirs.scale_decoder_outputs = config.scaled_output
    theirs.tie_word_embeddings = config.tied
    auto = transformers.AutoModelForSeq2SeqLM if config.head else transformers.AutoModel
    return auto.from_config(theirs, **made)
