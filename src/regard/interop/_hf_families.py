"""The families of Hugging Face models that can be converted."""

from __future__ import annotations

from regard.interop import _hf_decoders, _hf_deepseek, _hf_encoders, _hf_llamas, _hf_t5
from regard.interop._hf_family import Family

FAMILIES: dict[str, Family] = {
    "bert": _hf_encoders.BERT,
    "vit": _hf_encoders.VIT,
    "gpt2": _hf_decoders.GPT2,
    "llama": _hf_llamas.LLAMA,
    "whisper": _hf_decoders.WHISPER,
    "deepseek_v3": _hf_deepseek.WHOLE,
    "roberta": _hf_encoders.ROBERTA,
    "distilbert": _hf_encoders.DISTILBERT,
    "t5": _hf_t5.T5,
    "mistral": _hf_llamas.MISTRAL,
    "qwen2": _hf_llamas.QWEN2,
    "qwen3": _hf_llamas.QWEN3,
    "gemma": _hf_llamas.GEMMA,
    "gemma2": _hf_llamas.GEMMA2,
}
