"""`to_hf`: a model of `regard.models` as one of Hugging Face's."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from regard.interop._hf_deepseek import WHOLE, to_deepseek, together
from regard.interop._hf_export_llamas import ACTIVATIONS as _ACTIVATIONS
from regard.interop._hf_export_llamas import refuse, to_llama_or_like
from regard.interop._hf_families import FAMILIES
from regard.interop._hf_family import Family
from regard.interop._hf_t5 import to_t5
from regard.interop._single import to_single
from regard.models import T5, Decoder, DecoderConfig, DeepSeek, Encoder, EncoderConfig
from regard.nn import MultiHeadAttention


def to_hf(model: nn.Module) -> Any:
    """The same model, of transformers, with a copy of its weights, in the same mode.

    A `T5` stays one; an `Encoder` becomes a BERT, RoBERTa or DistilBERT; a `Decoder` a GPT-2, Llama, Mistral, Qwen2,
    Qwen3, Gemma or Gemma 2: the first of them that has all that its configuration says; a `DeepSeek` a DeepSeek-V3.

    A single `regard.nn.MultiHeadAttention` becomes a `ViTAttention`, or a `BertSelfAttention` if it has no output
    projection, as `from_hf` leaves it.

    What comes back from `from_hf` is bitwise what was given. Token numbers with a meaning (padding, start, end) are not
    part of our configurations: set them in the result's `config` and `generation_config`.

    Raises:
        TypeError: `model` is no `Encoder`, `Decoder`, `T5`, `DeepSeek` or `MultiHeadAttention`.
        ValueError: it does what none of them can, by name.
    """
    try:
        import transformers
    except ImportError:
        raise ImportError("to_hf needs Hugging Face's transformers: pip install transformers") from None
    if type(model) is MultiHeadAttention:
        return to_single(transformers, model)
    first = next(model.parameters(), None)
    made: dict[str, Any] = {"dtype": None if first is None else first.dtype}
    with torch.device("cpu" if first is None else first.device):
        if isinstance(model, Encoder):
            kind, built = _encoder(transformers, model.config, **made)
        elif type(model) is T5:
            kind, built = "t5", to_t5(transformers, model.config, **made)
        elif isinstance(model, DeepSeek):
            kind, built = "deepseek_v3", to_deepseek(transformers, model.config, **made)
        elif isinstance(model, Decoder) and model.config.positions == "learned":
            kind, built = "gpt2", _gpt2(transformers, model.config, **made)
        elif isinstance(model, Decoder):
            kind, built = to_llama_or_like(transformers, model.config, **made)
        else:
            raise TypeError(
                "to_hf takes a regard.models.Encoder, Decoder, T5 or DeepSeek, or a regard.nn.MultiHeadAttention, got "
                f"{type(model).__name__}"
            )
    family = WHOLE if kind == "deepseek_v3" else FAMILIES[kind]
    state = _state(family, model)
    if isinstance(model, DeepSeek):
        state = together(state, model.config)
    with torch.no_grad():
        for name, weight in built.state_dict().items():
            inside = name.removeprefix(family.prefix)
            weight.copy_(state[inside if inside in state else (family.copies or {})[inside]])
    return built.train(model.training)


def _state(family: Family, model: Encoder | Decoder | T5) -> dict[str, Tensor]:
    """The weights under their names."""
    held: nn.Module = model
    if isinstance(model, DeepSeek):
        pass  # it has no such matrices
    elif isinstance(model, Decoder) and model.config.packed != (family is FAMILIES["gpt2"]):
        # attention converts between one matrix and three when it loads
        held = Decoder(dataclasses.replace(model.config, packed=not model.config.packed), device="meta")
        held.load_state_dict(model.state_dict(), assign=True)
    names = family.names(model.config)
    return {
        names[ours]: weight.t().contiguous() if ours.endswith(family.transposed) else weight
        for ours, weight in held.state_dict().items()
    }


def _encoder(transformers: Any, config: EncoderConfig, **made: Any) -> tuple[str, Any]:
    if config.position_offset:
        return "roberta", _bert(transformers, config, "roberta", **made)
    if config.image_size is None and not config.token_types:
        return "distilbert", _distilbert(transformers, config, **made)
    return "bert", _bert(transformers, config, "bert", **made)


def _bert(transformers: Any, config: EncoderConfig, kind: str, **made: Any) -> Any:
    roberta = kind == "roberta"
    refuse(
        "RoBERTa" if roberta else "BERT",
        {
            "pooler_activation='relu'": config.pooler_activation != "tanh",
            f"head_dropout={config.head_dropout}": not roberta and config.head_dropout not in (None, config.dropout),
            f"activation={config.activation!r} with masked_lm=True": roberta
            and config.masked_lm
            and config.activation != "gelu",
            f"image_size={config.image_size}": config.image_size is not None,
            f"norm={config.norm!r}": config.norm != "post",
            "qkv_bias=False": not config.qkv_bias,
            "token_types=0": not config.token_types,
            "masked_lm=True with pooler=True": config.masked_lm and config.pooler,
            "masked_lm=True with classes": config.masked_lm and config.classes is not None,
            "classes without pooler=True": config.classes is not None and not config.pooler,
        },
    )
    more = {"pad_token_id": config.position_offset - 1, "classifier_dropout": config.head_dropout} if roberta else {}
    theirs = (transformers.RobertaConfig if roberta else transformers.BertConfig)(
        vocab_size=config.vocab_size,
        hidden_size=config.embed_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=config.ff_dim,
        hidden_act=_ACTIVATIONS[config.activation],
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.attention_dropout,
        max_position_embeddings=(config.max_tokens or 0) + config.position_offset,
        type_vocab_size=config.token_types,
        layer_norm_eps=config.norm_eps,
        initializer_range=config.init_std,
        num_labels=2 if config.classes is None else config.classes,
        **more,
    )
    return _with_head(transformers, config, theirs, made, add_pooling_layer=config.pooler)


def _distilbert(transformers: Any, config: EncoderConfig, **made: Any) -> Any:
    classified = config.classes is not None
    refuse(
        "an encoder without token types (DistilBERT)",
        {
            f"norm={config.norm!r}": config.norm != "post",
            "qkv_bias=False": not config.qkv_bias,
            f"norm_eps={config.norm_eps}": config.norm_eps != 1e-12,
            "pooler=True without classes": config.pooler and not classified,
            "classes without pooler=True": classified and not config.pooler,
            "pooler_activation='tanh'": config.pooler and config.pooler_activation != "relu",
            "masked_lm=True with classes": config.masked_lm and classified,
        },
    )
    theirs = transformers.DistilBertConfig(
        vocab_size=config.vocab_size,
        dim=config.embed_dim,
        n_layers=config.num_layers,
        n_heads=config.num_heads,
        hidden_dim=config.ff_dim,
        max_position_embeddings=config.max_tokens,
        activation=_ACTIVATIONS[config.activation],
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        seq_classif_dropout=config.dropout if config.head_dropout is None else config.head_dropout,
        initializer_range=config.init_std,
        num_labels=config.classes or 2,
    )
    return _with_head(transformers, config, theirs, made)


def _with_head(transformers: Any, config: EncoderConfig, theirs: Any, made: dict[str, Any], **bare: Any) -> Any:
    if config.masked_lm:
        return transformers.AutoModelForMaskedLM.from_config(theirs, **made)
    if config.classes is not None:
        return transformers.AutoModelForSequenceClassification.from_config(theirs, **made)
    return transformers.AutoModel.from_config(theirs, **bare, **made)


def _gpt2(transformers: Any, config: DecoderConfig, **made: Any) -> Any:
    refuse(
        "GPT-2",
        {
            f"num_kv_heads={config.num_kv_heads}": config.num_kv_heads not in (None, config.num_heads),
            f"head_dim={config.head_dim}": config.head_dim not in (None, config.embed_dim // config.num_heads),
            f"window={config.window}": config.window is not None,
            f"norm={config.norm!r}": config.norm != "layer",
            "gated=True": config.gated,
            "qk_norm=True": config.qk_norm,
            f"attention_scale={config.attention_scale}": config.attention_scale is not None,
            f"attention_softcap={config.attention_softcap}": config.attention_softcap is not None,
            f"logit_softcap={config.logit_softcap}": config.logit_softcap is not None,
            "scaled_embedding=True": config.scaled_embedding,
            "post_norms=True": config.post_norms,
            "a projection without bias": not (config.qkv_bias and config.out_bias and config.ff_bias),
        },
    )
    theirs = transformers.GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.max_tokens,
        n_embd=config.embed_dim,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        n_inner=config.ff_dim,
        activation_function=_ACTIVATIONS[config.activation],
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.attention_dropout,
        layer_norm_epsilon=config.norm_eps,
        initializer_range=config.init_std,
        tie_word_embeddings=config.tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    auto = transformers.AutoModelForCausalLM if config.head else transformers.AutoModel
    return auto.from_config(theirs, **made)
