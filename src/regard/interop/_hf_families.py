"""The families of Hugging Face models that can be converted."""

from __future__ import annotations

import dataclasses

from regard.interop._hf_decoders import (
    deepseek_config,
    deepseek_names,
    gpt2_config,
    gpt2_names,
    whisper_config,
    whisper_names,
)
from regard.interop._hf_encoders import (
    bert_config,
    bert_names,
    distilbert_config,
    distilbert_names,
    roberta_config,
    roberta_names,
    vit_config,
    vit_names,
)
from regard.interop._hf_family import Family
from regard.interop._hf_llamas import (
    gemma2_config,
    gemma_config,
    llama_config,
    llama_names,
    mistral_config,
    qwen2_config,
    qwen3_config,
)
from regard.interop._hf_t5 import t5_config, t5_names

LLAMA = Family(
    "model.",
    llama_config,
    llama_names,
    copies={"lm_head.weight": "embed_tokens.weight"},
    computed=r"rotary_emb\.(original_)?inv_freq$",
)
FAMILIES: dict[str, Family] = {
    "bert": Family(
        "bert.",
        bert_config,
        bert_names,
        renames=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
        copies={
            "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        computed=r"embeddings\.(position_ids|token_type_ids)$",
    ),
    "vit": Family(
        "vit.",
        vit_config,
        vit_names,
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
    ),
    "gpt2": Family(
        "transformer.",
        gpt2_config,
        gpt2_names,
        copies={"lm_head.weight": "wte.weight"},
        computed=r"\.attn\.(bias|masked_bias)$",
        transposed=("qkv_proj.weight", "out_proj.weight", "up.weight", "down.weight"),
    ),
    "llama": LLAMA,
    "whisper": Family(
        "model.",
        whisper_config,
        whisper_names,
        copies={"proj_out.weight": "decoder.embed_tokens.weight"},
    ),
    "deepseek_v3": Family("", deepseek_config, deepseek_names),
    "roberta": Family(
        "roberta.",
        roberta_config,
        roberta_names,
        copies={
            "lm_head.decoder.weight": "embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        computed=r"embeddings\.(position_ids|token_type_ids)$",
    ),
    "distilbert": Family(
        "distilbert.",
        distilbert_config,
        distilbert_names,
        copies={"vocab_projector.weight": "embeddings.word_embeddings.weight"},
        computed=r"embeddings\.position_ids$",
    ),
    "t5": Family(
        "",
        t5_config,
        t5_names,
        copies={
            "encoder.embed_tokens.weight": "shared.weight",
            "decoder.embed_tokens.weight": "shared.weight",
            "lm_head.weight": "shared.weight",
        },
    ),
    "mistral": dataclasses.replace(LLAMA, configure=mistral_config),
    "qwen2": dataclasses.replace(LLAMA, configure=qwen2_config),
    "qwen3": dataclasses.replace(LLAMA, configure=qwen3_config),
    "gemma": dataclasses.replace(LLAMA, configure=gemma_config),
    "gemma2": dataclasses.replace(LLAMA, configure=gemma2_config),
}
