"""Small Hugging Face models of random weights and odd sizes, and inputs for them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

transformers.utils.logging.set_verbosity_error()

IDS = torch.randint(5, 90, (3, 23), generator=torch.Generator().manual_seed(0))
LENGTHS = [23, 17, 9]
RIGHT = torch.arange(23) < torch.tensor(LENGTHS)[:, None]
LEFT = RIGHT.flip(1)
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 42,
    "intermediate_size": 55,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, **TOKENS}
ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 3.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 5.0, "original_max_position_embeddings": 12},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 12,
    },
}


def _made(kind: Any, config: Any, seed: int = 0) -> Any:
    """Weights well away from the small ones that models start with, so that mistakes show."""
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() or "ln_" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=0.3 if parameter.dim() == 1 else 0.2)
    return model


def bert(**more: Any) -> Any:
    config = transformers.BertConfig(**SMALL, max_position_embeddings=31, **more)
    return _made(transformers.BertForMaskedLM, config)


def gpt2(**more: Any) -> Any:
    config = transformers.GPT2Config(vocab_size=97, n_embd=42, n_layer=3, n_head=6, n_positions=63, **TOKENS, **more)
    return _made(transformers.GPT2LMHeadModel, config)


def llama(**more: Any) -> Any:
    return _made(transformers.LlamaForCausalLM, transformers.LlamaConfig(**{**GROUPED, **more}))


def mistral(**more: Any) -> Any:
    config = transformers.MistralConfig(**GROUPED, sliding_window=7, **more)
    return _made(transformers.MistralForCausalLM, config)


def gemma2(**more: Any) -> Any:
    config = transformers.Gemma2Config(**GROUPED, sliding_window=7, attn_logit_softcapping=3.0, **more)
    return _made(transformers.Gemma2ForCausalLM, config)


def gpt_oss(**more: Any) -> Any:
    # torch's grouped products of experts have no float64
    sizes = {**GROUPED, "num_local_experts": 3, "num_experts_per_tok": 2, "experts_implementation": "eager", **more}
    return _made(transformers.GptOssForCausalLM, transformers.GptOssConfig(**sizes, sliding_window=7))


def t5(**more: Any) -> Any:
    sizes = {
        "d_model": 42,
        "d_kv": 9,
        "num_heads": 6,
        "d_ff": 55,
        "num_layers": 3,
        "relative_attention_num_buckets": 10,
    }
    config = transformers.T5Config(
        vocab_size=97, **sizes, relative_attention_max_distance=17, decoder_start_token_id=0, **more
    )
    return _made(transformers.T5ForConditionalGeneration, config)


def whisper(**more: Any) -> Any:
    sizes = {
        "vocab_size": 97,
        "d_model": 42,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 3,
        "decoder_attention_heads": 6,
        "encoder_ffn_dim": 55,
        "decoder_ffn_dim": 51,
        "num_mel_bins": 11,
        "max_source_positions": 35,
        "max_target_positions": 63,
        "decoder_start_token_id": 1,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
    config = transformers.WhisperConfig(**{**sizes, **TOKENS, **more})
    return _made(transformers.WhisperForConditionalGeneration, config)


def qwen2(**more: Any) -> Any:
    sizes = {**GROUPED, "hidden_size": 48}
    del sizes["head_dim"]
    return _made(transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**{**sizes, **more}))


def qwen3(**more: Any) -> Any:
    return _made(transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**{**GROUPED, "rms_norm_eps": 1e-3, **more}))


def gemma(**more: Any) -> Any:
    return _made(transformers.GemmaForCausalLM, transformers.GemmaConfig(**{**GROUPED, **more}))


def roberta(**more: Any) -> Any:
    config = transformers.RobertaConfig(**SMALL, max_position_embeddings=33, **more)
    return _made(transformers.RobertaForMaskedLM, config)


def distilbert(**more: Any) -> Any:
    sizes = {"vocab_size": 97, "dim": 42, "hidden_dim": 55, "n_layers": 3, "n_heads": 6, "max_position_embeddings": 31}
    return _made(transformers.DistilBertForMaskedLM, transformers.DistilBertConfig(**sizes, **more))


def vit(**more: Any) -> Any:
    config = transformers.ViTConfig(
        hidden_size=42,
        num_hidden_layers=3,
        num_attention_heads=6,
        intermediate_size=55,
        image_size=21,
        patch_size=7,
        num_channels=3,
        **more,
    )
    return _made(transformers.ViTModel, config)


def inputs(name: str) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(1)
    if name == "whisper":
        return {"input_features": torch.randn(3, 11, 70, generator=made), "decoder_input_ids": IDS}
    if name == "vit":
        return {"pixel_values": torch.randn(3, 3, 21, 21, generator=made)}
    if name == "t5":
        return {"input_ids": IDS, "attention_mask": RIGHT.long(), "decoder_input_ids": IDS[:, :11].flip(1)}
    return {"input_ids": IDS}


MODELS: dict[str, Callable[..., Any]] = {
    "bert": bert,
    "gpt2": gpt2,
    "llama": llama,
    "mistral": mistral,
    "gemma2": gemma2,
    "gpt_oss": gpt_oss,
    "t5": t5,
    "whisper": whisper,
    "vit": vit,
}
# transformers' own table: these have no fused implementation to be compared with
PEER = {"gemma2": "eager", "gpt_oss": "eager"}


class Unrounded(TorchDispatchMode):
    """Models of float64 stay there: what they cast to float32 (norms, softmax, rotary angles) becomes float64 instead.

    Without it, most of Hugging Face's models in float64 are as far from exact as in float32.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def in_double(given: Any) -> Any:
    """A model, or the inputs of one, in float64."""
    if isinstance(given, torch.nn.Module):
        return copy.deepcopy(given).double()
    return {name: part.double() if part.is_floating_point() else part for name, part in given.items()}


def exactly(model: Any, given: dict[str, Any], **more: Any) -> Any:
    """What the model means: its output in float64, without any rounding to float32 inside."""
    with Unrounded(), torch.no_grad():
        return in_double(model)(**in_double(given), **more)


def check_as_good_as(
    found: list[Tensor], peer: list[Tensor], exact: list[Tensor], *, times: int, largest: float | None = None
) -> None:
    """No further from float64 than the peer is, up to a factor and one rounding of the largest number on the way."""
    most = max(float(one.abs().max()) for one in exact) if largest is None else largest
    for ours, theirs, double in zip(found, peer, exact, strict=True):
        assert ours.shape == theirs.shape == double.shape and double.dtype == torch.float64
        error, allowed = (ours - double).abs().max(), times * (theirs - double).abs().max() + 2.0**-23 * most
        assert error <= allowed, (float(error), float(allowed))


class Plain(nn.Module):
    """Written out as the notes have it: mask 0 = forbidden, scores filled with −1e9."""

    def __init__(self, heads: int, d_model: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.d_model, self.d_k, self.h = d_model, d_model // heads, heads
        self.q_linear, self.k_linear, self.v_linear = (nn.Linear(d_model, d_model) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        given = ((self.q_linear, q), (self.k_linear, k), (self.v_linear, v))
        q, k, v = (line(x).view(x.shape[0], -1, self.h, self.d_k).transpose(1, 2) for line, x in given)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        heads = self.dropout(scores.softmax(-1)) @ v
        return self.out(heads.transpose(1, 2).reshape(q.shape[0], -1, self.d_model))
