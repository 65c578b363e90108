"""BERT, RoBERTa, DistilBERT and ViT: configurations and names of weights."""

from __future__ import annotations

import dataclasses

from regard.interop._hf_family import Source, both, maybe
from regard.interop._hf_fields import Fields
from regard.models import EncoderConfig


def bert_config(source: Source) -> EncoderConfig:
    fields, there = source.fields, source.weights
    fields.only("position_embedding_type", "absolute")
    fields.only("is_decoder", False)
    fields.only("add_cross_attention", False)
    masked_lm = "cls.predictions.bias" in there
    fields.only("tie_word_embeddings", *((True,) if masked_lm else (True, False)))
    classified = source.architecture.endswith("ForSequenceClassification")
    dropout = fields.number("hidden_dropout_prob", 0.1)
    of_head = fields.take("classifier_dropout")
    if classified and of_head not in (None, dropout):
        raise ValueError(
            f"config field classifier_dropout is {of_head!r}; only hidden_dropout_prob ({dropout}) can be converted"
        )
    config = EncoderConfig(
        embed_dim=fields.size("hidden_size", 768),
        num_layers=fields.size("num_hidden_layers", 12),
        num_heads=fields.size("num_attention_heads", 12),
        ff_dim=fields.size("intermediate_size", 3072),
        vocab_size=fields.size("vocab_size", 30522),
        max_tokens=fields.size("max_position_embeddings", 512),
        token_types=fields.size("type_vocab_size", 2),
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        activation=fields.activation("hidden_act", "gelu"),
        dropout=dropout,
        attention_dropout=fields.number("attention_probs_dropout_prob", 0.1),
        pooler="pooler.dense.weight" in there,
        masked_lm=masked_lm,
        classes=_classes(fields) if classified else None,
        init_std=fields.number("initializer_range", 0.02),
    )
    # of the code that the first models were trained with; Hugging Face's reads none of them
    older = ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")
    fields.close("directionality", *(f"pooler_{name}" for name in older))
    return config


def roberta_config(source: Source) -> EncoderConfig:
    fields, there = source.fields, source.weights
    fields.only("position_embedding_type", "absolute")
    fields.only("is_decoder", False)
    fields.only("add_cross_attention", False)
    masked_lm = "lm_head.bias" in there
    fields.only("tie_word_embeddings", *((True,) if masked_lm else (True, False)))
    activation = fields.activation("hidden_act", "gelu")
    if masked_lm and activation != "gelu":
        raise ValueError(
            f"config field hidden_act is {activation!r}; the head of RoBERTa has gelu, and one stands for both"
        )
    classified = source.architecture.endswith("ForSequenceClassification")
    of_head = fields.take("classifier_dropout")
    before = fields.take("pad_token_id", 1) + 1  # positions are counted from behind that of padding
    config = EncoderConfig(
        embed_dim=fields.size("hidden_size", 768),
        num_layers=fields.size("num_hidden_layers", 12),
        num_heads=fields.size("num_attention_heads", 12),
        ff_dim=fields.size("intermediate_size", 3072),
        vocab_size=fields.size("vocab_size", 50265),
        max_tokens=fields.size("max_position_embeddings", 512) - before,
        position_offset=before,
        token_types=fields.size("type_vocab_size", 2),
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        activation=activation,
        dropout=fields.number("hidden_dropout_prob", 0.1),
        attention_dropout=fields.number("attention_probs_dropout_prob", 0.1),
        pooler=classified or "pooler.dense.weight" in there,
        masked_lm=masked_lm,
        classes=_classes(fields) if classified else None,
        head_dropout=None if of_head is None else fields.number("classifier_dropout", 0.1),
        init_std=fields.number("initializer_range", 0.02),
    )
    fields.close()
    return config


def roberta_names(config: EncoderConfig) -> dict[str, str]:
    found = bert_names(dataclasses.replace(config, masked_lm=False, classes=None, pooler=False))
    if config.masked_lm:
        found |= both("masked_lm.dense", "lm_head.dense")
        found |= both("masked_lm.norm", "lm_head.layer_norm")
        found["masked_lm.bias"] = "lm_head.bias"
    if config.classes is not None:  # theirs pools inside the head
        return found | both("pooler", "classifier.dense") | both("classifier", "classifier.out_proj")
    return found | both("pooler", "pooler.dense") if config.pooler else found


def distilbert_config(source: Source) -> EncoderConfig:
    fields, there = source.fields, source.weights
    masked_lm = "vocab_projector.bias" in there
    fields.only("tie_word_embeddings", *((True,) if masked_lm else (True, False)))
    classified = source.architecture.endswith("ForSequenceClassification")
    config = EncoderConfig(
        embed_dim=fields.size("dim", 768),
        num_layers=fields.size("n_layers", 6),
        num_heads=fields.size("n_heads", 12),
        ff_dim=fields.size("hidden_dim", 3072),
        vocab_size=fields.size("vocab_size", 30522),
        max_tokens=fields.size("max_position_embeddings", 512),
        norm_eps=1e-12,
        activation=fields.activation("activation", "gelu"),
        dropout=fields.number("dropout", 0.1),
        attention_dropout=fields.number("attention_dropout", 0.1),
        pooler=classified,
        pooler_activation="relu" if classified else "tanh",
        masked_lm=masked_lm,
        classes=_classes(fields) if classified else None,
        head_dropout=fields.number("seq_classif_dropout", 0.2) if classified else None,
        init_std=fields.number("initializer_range", 0.02),
    )
    # sines are what positions start as, whether they are learned or not; the rest belongs to other heads
    fields.close("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_")
    return config


def distilbert_names(config: EncoderConfig) -> dict[str, str]:
    found = {
        "embedding.token_embedding.weight": "embeddings.word_embeddings.weight",
        "embedding.position_embedding.weight": "embeddings.position_embeddings.weight",
        **both("norm", "embeddings.LayerNorm"),
    }
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"transformer.layer.{i}"
        for our, their in (("q_proj", "q_lin"), ("k_proj", "k_lin"), ("v_proj", "v_lin"), ("out_proj", "out_lin")):
            found |= both(f"{ours}.attention.{our}", f"{theirs}.attention.{their}")
        found |= both(f"{ours}.attention_norm", f"{theirs}.sa_layer_norm")
        found |= both(f"{ours}.feed_forward.up", f"{theirs}.ffn.lin1")
        found |= both(f"{ours}.feed_forward.down", f"{theirs}.ffn.lin2")
        found |= both(f"{ours}.feed_forward_norm", f"{theirs}.output_layer_norm")
    if config.masked_lm:
        found |= both("masked_lm.dense", "vocab_transform")
        found |= both("masked_lm.norm", "vocab_layer_norm")
        found["masked_lm.bias"] = "vocab_projector.bias"
    if config.classes is not None:
        found |= both("pooler", "pre_classifier") | both("classifier", "classifier")
    return found


def _classes(fields: Fields) -> int:
    names = fields.take("id2label")
    return len(names) if names else fields.size("num_labels", 2)


def bert_names(config: EncoderConfig) -> dict[str, str]:
    found = {
        "embedding.token_embedding.weight": "embeddings.word_embeddings.weight",
        "embedding.position_embedding.weight": "embeddings.position_embeddings.weight",
        "embedding.type_embedding.weight": "embeddings.token_type_embeddings.weight",
        **both("norm", "embeddings.LayerNorm"),
    }
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"encoder.layer.{i}"
        for our, their in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")):
            found |= both(f"{ours}.attention.{our}", f"{theirs}.attention.self.{their}")
        found |= both(f"{ours}.attention.out_proj", f"{theirs}.attention.output.dense")
        found |= both(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm")
        found |= both(f"{ours}.feed_forward.up", f"{theirs}.intermediate.dense")
        found |= both(f"{ours}.feed_forward.down", f"{theirs}.output.dense")
        found |= both(f"{ours}.feed_forward_norm", f"{theirs}.output.LayerNorm")
    if config.pooler:
        found |= both("pooler", "pooler.dense")
    if config.masked_lm:
        found |= both("masked_lm.dense", "cls.predictions.transform.dense")
        found |= both("masked_lm.norm", "cls.predictions.transform.LayerNorm")
        found["masked_lm.bias"] = "cls.predictions.bias"
    if config.classes is not None:
        found |= both("classifier", "classifier")
    return found


def vit_config(source: Source) -> EncoderConfig:
    fields = source.fields
    width = fields.size("hidden_size", 768)
    heads = fields.size("num_attention_heads", 12)
    fields.only("head_dim", None, width // heads)
    fields.only("pooler_act", "tanh")
    fields.only("pooler_output_size", None, width)
    classified = source.architecture.endswith("ForImageClassification")
    config = EncoderConfig(
        embed_dim=width,
        num_layers=fields.size("num_hidden_layers", 12),
        num_heads=heads,
        ff_dim=fields.size("intermediate_size", 3072),
        image_size=fields.size("image_size", 224),
        patch_size=fields.size("patch_size", 16),
        channels=fields.size("num_channels", 3),
        norm="pre",
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        activation=fields.activation("hidden_act", "gelu"),
        qkv_bias=fields.flag("qkv_bias", True),
        dropout=fields.number("hidden_dropout_prob", 0.0),
        attention_dropout=fields.number("attention_probs_dropout_prob", 0.0),
        pooler="pooler.dense.weight" in source.weights,
        classes=_classes(fields) if classified else None,
        init="xavier",
        init_std=fields.number("initializer_range", 0.02),
    )
    fields.close("encoder_stride", "tie_word_embeddings", "tie_last_hidden_states")
    return config


def vit_names(config: EncoderConfig) -> dict[str, str]:
    found = {
        "embedding.first_token": "embeddings.cls_token",
        "embedding.position_embedding.weight": "embeddings.position_embeddings",
        **both("embedding.patch_embedding", "embeddings.patch_embeddings.projection"),
        **both("norm", "layernorm"),
    }
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj"):
            found |= maybe(config.qkv_bias, f"{ours}.attention.{name}", f"{theirs}.attention.{name}")
        found |= both(f"{ours}.attention.out_proj", f"{theirs}.attention.o_proj")
        found |= both(f"{ours}.attention_norm", f"{theirs}.layernorm_before")
        found |= both(f"{ours}.feed_forward_norm", f"{theirs}.layernorm_after")
        found |= both(f"{ours}.feed_forward.up", f"{theirs}.mlp.fc1")
        found |= both(f"{ours}.feed_forward.down", f"{theirs}.mlp.fc2")
    if config.pooler:
        found |= both("pooler", "pooler.dense")
    if config.classes is not None:
        found |= both("classifier", "classifier")
    return found
