"""T5: configuration and names of weights."""

from __future__ import annotations

from regard.interop._hf_family import Family, Field, Given, Source, projections
from regard.interop._hf_fields import ACTIVATIONS
from regard.models import T5Config
from regard.models._parts import head_sizes

_KINDS = {
    "relu": ("relu", False),
    "gated-gelu": ("gelu_tanh", True),
    "gated-silu": ("silu", True),
    "gelu": ("gelu", False),
}
_KIND_OF = {kind: name for name, kind in _KINDS.items()}


def _t5(source: Source, given: Given) -> Given:
    fields = source.fields
    kind = fields.take("feed_forward_proj", "relu")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"config field feed_forward_proj is {kind!r}; of these {', '.join(_KINDS)} can be converted")
    activation, gated = _KINDS[kind]
    for name, expected in (("dense_act_fn", activation), ("is_gated_act", gated)):
        said = fields.take(name)
        meant = ACTIVATIONS.get(said, said) if isinstance(said, str) else said
        if said is not None and meant != expected:
            raise ValueError(f"config fields {name} = {said!r} and feed_forward_proj = {kind!r} say different things")
    decoder_layers = fields.size_or_none("num_decoder_layers")
    tie, scaled = fields.take("tie_word_embeddings", True), fields.take("scale_decoder_outputs")
    return {
        "decoder_layers": given["num_layers"] if decoder_layers is None else decoder_layers,
        "activation": activation,
        "gated": gated,
        # whether they are one is told by the weights: files of T5 1.1 have both, and classes differ in what they say
        "tied": "lm_head.weight" not in source.weights or source.equal("lm_head.weight", "shared.weight"),
        "scaled_output": bool(tie is not False if scaled is None else scaled),
        "head": not source.architecture.endswith("T5Model"),
    }


def _written(config: T5Config) -> Given:
    return {
        "d_kv": head_sizes(config)[1],
        "num_decoder_layers": config.target_layers,
        "feed_forward_proj": _KIND_OF[config.activation, config.gated],
        "decoder_start_token_id": 0,
        "tie_word_embeddings": config.tied,
        "scale_decoder_outputs": config.scaled_output,
    }


def _lacking(config: T5Config) -> dict[str, bool]:
    kind = (config.activation, config.gated)
    return {
        f"activation={config.activation!r} with gated={config.gated}": kind not in _KIND_OF,
        "a bias": config.ff_bias or config.attention_bias,
        "target_vocab_size": config.target_vocab_size is not None,
    }


def _sublayer(ours: str, theirs: str, kind: str) -> dict[str, str]:
    names = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "o"}
    return {**projections(ours, f"{theirs}.{kind}", names), f"{ours}_norm": f"{theirs}.layer_norm"}


def _weights(config: T5Config) -> dict[str, str]:
    dense = {"gate": "wi_0", "up": "wi_1", "down": "wo"} if config.gated else {"up": "wi", "down": "wo"}
    found = {
        "token_embedding": "shared",
        "head": "lm_head",
        **_sublayer("decoder_layers.#.cross_attention", "decoder.block.#.layer.1", "EncDecAttention"),
    }
    for side, last in (("encoder", 1), ("decoder", 2)):
        ours, theirs = f"{side}_layers.#", f"{side}.block.#.layer"
        found |= {
            f"{side}_bias": f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias",
            f"{side}_norm": f"{side}.final_layer_norm",
            **_sublayer(f"{ours}.attention", f"{theirs}.0", "SelfAttention"),
            **projections(f"{ours}.feed_forward", f"{theirs}.{last}.DenseReluDense", dense),
            f"{ours}.feed_forward_norm": f"{theirs}.{last}.layer_norm",
        }
    return found


T5 = Family(
    name="T5",
    config=T5Config,
    theirs="T5Config",
    fields={
        "vocab_size": Field.size("vocab_size", 32128),
        "embed_dim": Field.size("d_model", 512),
        "num_layers": Field.size("num_layers", 6),
        "num_heads": Field.size("num_heads", 8),
        "head_dim": Field.size("d_kv", 64),
        "ff_dim": Field.size("d_ff", 2048),
        "norm_eps": Field.number("layer_norm_epsilon", 1e-6),
        "buckets": Field.size("relative_attention_num_buckets", 32),
        "max_distance": Field.size("relative_attention_max_distance", 128),
        "dropout": Field.number("dropout_rate", 0.1),
        "attention_dropout": Field.number("dropout_rate", 0.1),
        "ff_dropout": Field.number("dropout_rate", 0.1),
    },
    usual=("norm", "rms_norm", "attention_scale", "scale", "embedding_norm", "value_head_dim"),
    further=_t5,
    written=_written,
    lacking=_lacking,
    weights=_weights,
    only={"is_decoder": (False,)},
    ignored=("n_positions", "classifier_dropout", "output_past"),
    overwritten=("scale_decoder_outputs", "tie_word_embeddings"),
    copies={
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
        "lm_head.weight": "shared.weight",
    },
)
