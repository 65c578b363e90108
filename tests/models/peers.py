"""Small Hugging Face models with random weights, and ours with the same weights: renamed, by tables for these tests."""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from regard import models

transformers.utils.logging.set_verbosity_error()

Pair = tuple[Any, Any]  # theirs, ours: both float64 and in eval


def rename(state: dict[str, Tensor], table: dict[str, str], dropped: str = "$^") -> dict[str, Tensor]:
    """Every name must be found in the table or be dropped: nothing is left out by accident."""
    found = {}
    for name, tensor in state.items():
        if re.search(dropped, name):
            continue
        for theirs, ours in table.items():
            name, times = re.subn(theirs, ours, name)
            if times and "!" not in ours:
                break
        else:
            raise AssertionError(f"no place for {name}")
        found[name] = tensor
    return found


def _spread(model: nn.Module) -> Any:
    """Norms and biases start as ones and zeros, which would hide where they go."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.double().eval()


def bert() -> Pair:
    theirs = _spread(
        transformers.BertForPreTraining(
            transformers.BertConfig(
                vocab_size=37,
                hidden_size=21,
                num_hidden_layers=3,
                num_attention_heads=3,
                intermediate_size=35,
                max_position_embeddings=19,
                type_vocab_size=3,
            )
        )
    )
    ours = models.Encoder(
        models.EncoderConfig(
            embed_dim=21,
            num_layers=3,
            num_heads=3,
            ff_dim=35,
            vocab_size=37,
            max_tokens=19,
            token_types=3,
            pooler=True,
            masked_lm=True,
            classes=2,
        ),
        dtype=torch.float64,
    )
    table = {
        r"bert\.embeddings\.word_embeddings": "embedding.token_embedding",
        r"bert\.embeddings\.position_embeddings": "embedding.position_embedding",
        r"bert\.embeddings\.token_type_embeddings": "embedding.type_embedding",
        r"bert\.embeddings\.LayerNorm": "norm",
        r"bert\.encoder\.layer\.(\d+)\.attention\.self\.(q|k|v)(uery|ey|alue)": r"layers.\1.attention.\2_proj",
        r"bert\.encoder\.layer\.(\d+)\.attention\.output\.dense": r"layers.\1.attention.out_proj",
        r"bert\.encoder\.layer\.(\d+)\.attention\.output\.LayerNorm": r"layers.\1.attention_norm",
        r"bert\.encoder\.layer\.(\d+)\.intermediate\.dense": r"layers.\1.feed_forward.up",
        r"bert\.encoder\.layer\.(\d+)\.output\.dense": r"layers.\1.feed_forward.down",
        r"bert\.encoder\.layer\.(\d+)\.output\.LayerNorm": r"layers.\1.feed_forward_norm",
        r"bert\.pooler\.dense": "pooler",
        r"cls\.predictions\.bias": "masked_lm.bias",
        r"cls\.predictions\.transform\.dense": "masked_lm.dense",
        r"cls\.predictions\.transform\.LayerNorm": "masked_lm.norm",
        r"cls\.seq_relationship": "classifier",
    }
    ours.load_state_dict(rename(theirs.state_dict(), table, dropped=r"predictions\.decoder"))
    return theirs, ours.eval()


def vit() -> Pair:
    theirs = _spread(
        transformers.ViTModel(
            transformers.ViTConfig(
                hidden_size=21,
                num_hidden_layers=3,
                num_attention_heads=3,
                intermediate_size=35,
                image_size=15,
                patch_size=5,
            )
        )
    )
    ours = models.Encoder(
        models.config(
            "vit-base",
            embed_dim=21,
            num_layers=3,
            num_heads=3,
            ff_dim=35,
            image_size=15,
            patch_size=5,
            norm_eps=1e-12,
        ),
        dtype=torch.float64,
    )
    table = {
        r"embeddings\.cls_token": "embedding.first_token",
        r"embeddings\.position_embeddings": "embedding.position_embedding.weight",
        r"embeddings\.patch_embeddings\.projection": "embedding.patch_embedding",
        r"layers\.(\d+)\.attention\.(q|k|v)_proj": r"layers.\1.attention.\2_proj",
        r"layers\.(\d+)\.attention\.o_proj": r"layers.\1.attention.out_proj",
        r"layernorm_before": "attention_norm",
        r"layernorm_after": "feed_forward_norm",
        r"mlp\.fc1": "feed_forward.up",
        r"mlp\.fc2": "feed_forward.down",
        r"^layernorm": "norm",
        r"pooler\.dense": "pooler",
    }
    state = rename(theirs.state_dict(), table)
    state["embedding.position_embedding.weight"] = state["embedding.position_embedding.weight"].squeeze(0)
    ours.load_state_dict(state)
    return theirs, ours.eval()


def gpt2() -> Pair:
    theirs = _spread(
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=37, n_embd=21, n_layer=3, n_head=3, n_positions=29, bos_token_id=1, eos_token_id=2
            )
        )
    )
    ours = models.Decoder(
        models.config("gpt2", vocab_size=37, embed_dim=21, num_layers=3, num_heads=3, ff_dim=84, max_tokens=29),
        dtype=torch.float64,
    )
    table = {
        r"transformer\.wte": "token_embedding",
        r"transformer\.wpe": "position_embedding",
        r"transformer\.h\.(\d+)\.ln_1": r"layers.\1.attention_norm",
        r"transformer\.h\.(\d+)\.attn\.c_attn": r"layers.\1.attention.qkv_proj",
        r"transformer\.h\.(\d+)\.attn\.c_proj": r"layers.\1.attention.out_proj",
        r"transformer\.h\.(\d+)\.ln_2": r"layers.\1.feed_forward_norm",
        r"transformer\.h\.(\d+)\.mlp\.c_fc": r"layers.\1.feed_forward.up",
        r"transformer\.h\.(\d+)\.mlp\.c_proj": r"layers.\1.feed_forward.down",
        r"transformer\.ln_f": "norm",
    }
    state = rename(theirs.state_dict(), table, dropped="lm_head")
    ours.load_state_dict({n: t.T if "layers" in n and t.dim() == 2 else t for n, t in state.items()})
    return theirs, ours.eval()


def llama() -> Pair:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
        "rope_theta": 500.0,
    }
    theirs = _spread(
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=37,
                hidden_size=36,
                num_hidden_layers=3,
                num_attention_heads=6,
                num_key_value_heads=2,
                intermediate_size=35,
                max_position_embeddings=64,
                rope_parameters=scaling,
                tie_word_embeddings=False,
                rms_norm_eps=1e-5,
            )
        )
    )
    from regard.positions import Llama3

    ours = models.Decoder(
        models.config(
            "llama-3-8b",
            vocab_size=37,
            embed_dim=36,
            num_layers=3,
            num_heads=6,
            num_kv_heads=2,
            ff_dim=35,
            max_tokens=64,
            rotary_base=500.0,
            rotary_scaling=Llama3(8.0, 8),
        ),
        dtype=torch.float64,
    )
    table = {
        r"model\.embed_tokens": "token_embedding",
        r"model\.layers\.(\d+)\.self_attn\.(q|k|v)_proj": r"layers.\1.attention.\2_proj",
        r"model\.layers\.(\d+)\.self_attn\.o_proj": r"layers.\1.attention.out_proj",
        r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj": r"layers.\1.feed_forward.\2",
        r"model\.layers\.(\d+)\.input_layernorm": r"layers.\1.attention_norm",
        r"model\.layers\.(\d+)\.post_attention_layernorm": r"layers.\1.feed_forward_norm",
        r"model\.norm": "norm",
        r"lm_head": "head",
    }
    ours.load_state_dict(rename(theirs.state_dict(), table))
    return theirs, ours.eval()


def whisper() -> Pair:
    theirs = _spread(
        transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(
                vocab_size=61,
                d_model=36,
                encoder_layers=2,
                decoder_layers=3,
                encoder_attention_heads=6,
                decoder_attention_heads=6,
                encoder_ffn_dim=35,
                decoder_ffn_dim=35,
                num_mel_bins=7,
                max_source_positions=15,
                max_target_positions=23,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
            )
        )
    )
    ours = models.Whisper(
        models.WhisperConfig(
            vocab_size=61,
            embed_dim=36,
            num_layers=2,
            decoder_layers=3,
            num_heads=6,
            ff_dim=35,
            mel_bins=7,
            max_frames=15,
            max_tokens=23,
        ),
        dtype=torch.float64,
    )
    table = {
        r"model\.encoder\.conv": "conv",
        r"model\.encoder\.embed_positions": "source_positions",
        r"model\.decoder\.embed_tokens": "token_embedding",
        r"model\.decoder\.embed_positions": "target_positions",
        r"model\.(encoder|decoder)\.layers\.(\d+)\.": r"\1_layers!.\2.",
        r"self_attn_layer_norm": "attention_norm",
        r"encoder_attn_layer_norm": "cross_attention_norm",
        r"self_attn\.": "attention.",
        r"encoder_attn\.": "cross_attention.",
        r"fc1": "feed_forward.up",
        r"fc2": "feed_forward.down",
        r"final_layer_norm": "feed_forward_norm",
        r"model\.(encoder|decoder)\.layer_norm": r"\1_norm",
    }
    state = rename(theirs.state_dict(), table, dropped="proj_out")
    ours.load_state_dict({name.replace("!", ""): tensor for name, tensor in state.items()})
    return theirs, ours.eval()
