"""BERT, RoBERTa, DistilBERT and ViT: configurations and names of weights."""

from __future__ import annotations

import dataclasses
from typing import Any

from regard.interop._hf_family import Family, Field, Given, Source, changed, projections
from regard.models import EncoderConfig

_SIZES: dict[str, Field] = {
    "embed_dim": Field.size("hidden_size", 768),
    "num_layers": Field.size("num_hidden_layers", 12),
    "num_heads": Field.size("num_attention_heads", 12),
    "ff_dim": Field.size("intermediate_size", 3072),
    "norm_eps": Field.number("layer_norm_eps", 1e-12),
    "activation": Field.activation("hidden_act", "gelu"),
    "dropout": Field.number("hidden_dropout_prob", 0.1),
    "attention_dropout": Field.number("attention_probs_dropout_prob", 0.1),
    "init_std": Field.number("initializer_range", 0.02),
}
_OF_WORDS = {
    **_SIZES,
    "vocab_size": Field.size("vocab_size", 30522),
    "max_tokens": Field.size("max_position_embeddings", 512),
    "token_types": Field.size("type_vocab_size", 2),
}
_ONLY = {"position_embedding_type": ("absolute",), "is_decoder": (False,), "add_cross_attention": (False,)}
_EMBEDDED = {
    "embedding.token_embedding": "embeddings.word_embeddings",
    "embedding.position_embedding": "embeddings.position_embeddings",
    "embedding.type_embedding": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}


def _heads(source: Source, masked_lm: str) -> Given:
    """Which heads of words there are: one that predicts tokens has its weight of this name."""
    is_there = masked_lm in source.weights
    source.fields.only("tie_word_embeddings", *((True,) if is_there else (True, False)))
    classified = source.architecture.endswith("ForSequenceClassification")
    return {"masked_lm": is_there, "classes": _classes(source) if classified else None}


def _classes(source: Source) -> int:
    names = source.fields.take("id2label")
    if names and not isinstance(names, dict):
        raise ValueError(f"config field id2label is {names!r}; expected an object with a name for each class")
    return len(names) if names else source.fields.size("num_labels", 2)


def _lacking(config: EncoderConfig) -> dict[str, bool]:
    classified = config.classes is not None
    return {
        "token_types=0": not config.token_types,
        "masked_lm=True with pooler=True": config.masked_lm and config.pooler,
        "masked_lm=True with classes": config.masked_lm and classified,
        "classes without pooler=True": classified and not config.pooler,
    }


def _bert(source: Source, given: Given) -> Given:
    heads, of_head, dropout = _heads(source, "cls.predictions.bias"), _of_head(source), given["dropout"]
    if heads["classes"] is not None and of_head not in (None, dropout):
        raise ValueError(
            f"config field classifier_dropout is {of_head!r}; only hidden_dropout_prob ({dropout}) can be converted"
        )
    return {**heads, "pooler": "pooler.dense.weight" in source.weights}


def _of_head(source: Source) -> Any:
    return source.fields.take("classifier_dropout")


def _bert_written(config: EncoderConfig) -> Given:
    return {"num_labels": 2 if config.classes is None else config.classes}


def _bert_lacking(config: EncoderConfig) -> dict[str, bool]:
    of_head = config.head_dropout
    return {f"head_dropout={of_head}": of_head not in (None, config.dropout), **_lacking(config)}


_BERT_LAYER = {
    **projections(
        "layers.#.attention", "encoder.layer.#.attention.self", {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
    ),
    "layers.#.attention.out_proj": "encoder.layer.#.attention.output.dense",
    "layers.#.attention_norm": "encoder.layer.#.attention.output.LayerNorm",
    "layers.#.feed_forward.up": "encoder.layer.#.intermediate.dense",
    "layers.#.feed_forward.down": "encoder.layer.#.output.dense",
    "layers.#.feed_forward_norm": "encoder.layer.#.output.LayerNorm",
}
BERT = Family(
    name="BERT",
    config=EncoderConfig,
    theirs="BertConfig",
    fields=_OF_WORDS,
    usual=("image_size", "norm", "qkv_bias", "pooler_activation"),
    further=_bert,
    written=_bert_written,
    lacking=_bert_lacking,
    weights=lambda config: {
        **_EMBEDDED,
        **_BERT_LAYER,
        "pooler": "pooler.dense",
        "masked_lm.dense": "cls.predictions.transform.dense",
        "masked_lm.norm": "cls.predictions.transform.LayerNorm",
        "masked_lm.bias": "cls.predictions.bias",
        "classifier": "classifier",
    },
    only=_ONLY,
    # of the code that the first models were trained with; Hugging Face's reads none of them
    ignored=(
        *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
        *("pooler_size_per_head", "pooler_type"),
    ),
    prefix="bert.",
    renames=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
    copies={
        "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    computed=r"embeddings\.(position_ids|token_type_ids)$",
)


def _roberta(source: Source, given: Given) -> Given:
    fields, heads = source.fields, _heads(source, "lm_head.bias")
    if heads["masked_lm"] and given["activation"] != "gelu":
        raise ValueError(
            f"config field hidden_act is {given['activation']!r}; the head of RoBERTa has gelu, and one stands for both"
        )
    before = fields.size("pad_token_id", 1, least=0) + 1  # positions are counted from behind that of padding
    return {
        **heads,
        "max_tokens": given["max_tokens"] - before,
        "position_offset": before,
        "pooler": heads["classes"] is not None or "pooler.dense.weight" in source.weights,
        "head_dropout": None if _of_head(source) is None else fields.number("classifier_dropout", 0.1),
    }


def _roberta_written(config: EncoderConfig) -> Given:
    return {
        **_bert_written(config),
        "max_position_embeddings": (config.max_tokens or 0) + config.position_offset,
        "pad_token_id": config.position_offset - 1,
        "classifier_dropout": config.head_dropout,
    }


def _roberta_lacking(config: EncoderConfig) -> dict[str, bool]:
    other = config.masked_lm and config.activation != "gelu"
    return {f"activation={config.activation!r} with masked_lm=True": other, **_lacking(config)}


def _roberta_weights(config: EncoderConfig) -> dict[str, str]:
    classified = config.classes is not None  # theirs pools inside the head then
    return {
        **BERT.weights(config),
        "pooler": "classifier.dense" if classified else "pooler.dense",
        "masked_lm.dense": "lm_head.dense",
        "masked_lm.norm": "lm_head.layer_norm",
        "masked_lm.bias": "lm_head.bias",
        "classifier": "classifier.out_proj",
    }


ROBERTA = dataclasses.replace(
    BERT,
    name="RoBERTa",
    theirs="RobertaConfig",
    fields=changed(_OF_WORDS, vocab_size=50265),
    further=_roberta,
    written=_roberta_written,
    lacking=_roberta_lacking,
    weights=_roberta_weights,
    ignored=(),
    prefix="roberta.",
    renames=(),
    copies={"lm_head.decoder.weight": "embeddings.word_embeddings.weight", "lm_head.decoder.bias": "lm_head.bias"},
)


def _distilbert(source: Source, given: Given) -> Given:
    heads = _heads(source, "vocab_projector.bias")
    classified = heads["classes"] is not None
    return {
        **heads,
        "pooler": classified,
        "pooler_activation": "relu" if classified else "tanh",
        "head_dropout": source.fields.number("seq_classif_dropout", 0.2) if classified else None,
    }


def _distilbert_written(config: EncoderConfig) -> Given:
    of_head = config.dropout if config.head_dropout is None else config.head_dropout
    return {**_bert_written(config), "seq_classif_dropout": of_head}


def _distilbert_lacking(config: EncoderConfig) -> dict[str, bool]:
    classified = config.classes is not None
    return {
        "pooler=True without classes": config.pooler and not classified,
        "classes without pooler=True": classified and not config.pooler,
        "pooler_activation='tanh'": config.pooler and config.pooler_activation != "relu",
        "masked_lm=True with classes": config.masked_lm and classified,
    }


DISTILBERT = Family(
    name="an encoder without token types (DistilBERT)",
    config=EncoderConfig,
    theirs="DistilBertConfig",
    fields={
        "embed_dim": Field.size("dim", 768),
        "num_layers": Field.size("n_layers", 6),
        "num_heads": Field.size("n_heads", 12),
        "ff_dim": Field.size("hidden_dim", 3072),
        "vocab_size": Field.size("vocab_size", 30522),
        "max_tokens": Field.size("max_position_embeddings", 512),
        "activation": Field.activation("activation", "gelu"),
        "dropout": Field.number("dropout", 0.1),
        "attention_dropout": Field.number("attention_dropout", 0.1),
        "init_std": Field.number("initializer_range", 0.02),
    },
    usual=("norm", "qkv_bias", "norm_eps"),
    further=_distilbert,
    written=_distilbert_written,
    lacking=_distilbert_lacking,
    weights=lambda config: {
        **_EMBEDDED,
        **projections(
            "layers.#.attention",
            "transformer.layer.#.attention",
            {"q_proj": "q_lin", "k_proj": "k_lin", "v_proj": "v_lin", "out_proj": "out_lin"},
        ),
        "layers.#.attention_norm": "transformer.layer.#.sa_layer_norm",
        "layers.#.feed_forward.up": "transformer.layer.#.ffn.lin1",
        "layers.#.feed_forward.down": "transformer.layer.#.ffn.lin2",
        "layers.#.feed_forward_norm": "transformer.layer.#.output_layer_norm",
        "masked_lm.dense": "vocab_transform",
        "masked_lm.norm": "vocab_layer_norm",
        "masked_lm.bias": "vocab_projector.bias",
        "pooler": "pre_classifier",
        "classifier": "classifier",
    },
    # sines are what positions start as, whether they are learned or not; the rest belongs to other heads
    ignored=("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_"),
    prefix="distilbert.",
    copies={"vocab_projector.weight": "embeddings.word_embeddings.weight"},
    computed=r"embeddings\.position_ids$",
)


def _vit(source: Source, given: Given) -> Given:
    width = given["embed_dim"]
    source.fields.only("head_dim", None, width // given["num_heads"])
    source.fields.only("pooler_output_size", None, width)
    classified = source.architecture.endswith("ForImageClassification")
    return {"pooler": "pooler.dense.weight" in source.weights, "classes": _classes(source) if classified else None}


VIT = Family(
    name="ViT",
    config=EncoderConfig,
    theirs="ViTConfig",
    fields={
        **changed(_SIZES, dropout=0.0, attention_dropout=0.0),
        "image_size": Field.size("image_size", 224),
        "patch_size": Field.size("patch_size", 16),
        "channels": Field.size("num_channels", 3),
        "qkv_bias": Field.flag("qkv_bias", True),
    },
    fixed={"norm": "pre"},
    chosen={"init": "xavier"},
    further=_vit,
    weights=lambda config: {
        "embedding.first_token": "embeddings.cls_token",
        "embedding.position_embedding.weight": "embeddings.position_embeddings",
        "embedding.patch_embedding": "embeddings.patch_embeddings.projection",
        "norm": "layernorm",
        **{f"layers.#.attention.{name}": f"layers.#.attention.{name}" for name in ("q_proj", "k_proj", "v_proj")},
        "layers.#.attention.out_proj": "layers.#.attention.o_proj",
        "layers.#.attention_norm": "layers.#.layernorm_before",
        "layers.#.feed_forward_norm": "layers.#.layernorm_after",
        "layers.#.feed_forward.up": "layers.#.mlp.fc1",
        "layers.#.feed_forward.down": "layers.#.mlp.fc2",
        "pooler": "pooler.dense",
        "classifier": "classifier",
    },
    only={"pooler_act": ("tanh",)},
    ignored=("encoder_stride", "tie_word_embeddings", "tie_last_hidden_states"),
    prefix="vit.",
    renames=(
        (r"^encoder\.layer\.", "layers."),
        (r"\.attention\.attention\.(query|key|value)\.", r".attention.\1."),
        (r"\.attention\.query\.", ".attention.q_proj."),
        (r"\.attention\.key\.", ".attention.k_proj."),
        (r"\.attention\.value\.", ".attention.v_proj."),
        (r"\.attention\.output\.dense\.", ".attention.o_proj."),
        (r"\.intermediate\.dense\.", ".mlp.fc1."),
        (r"^(layers\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    ),
    batched=("position_embedding.weight",),
)
