"""Named configurations have the published sizes and start from the published distributions."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from tests.models import peers  # noqa: F401  (quiet transformers)
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from regard import models

TRUNCATED = 0.8796256610342398  # standard deviation of a normal distribution that ends at two of its deviations


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "changes", "parameters"),
    [
        ("bert-base", {}, 109_482_240),
        ("gpt3-175b", {}, 174_604_259_328),
        ("vit-base", {}, 86_389_248),
        ("vit-base", {"pooler": False}, 85_798_656),
        ("transformer-base", {}, 63_045_632),
        ("transformer-big", {}, 214_171_648),
    ],
)
def test_a_named_model_has_the_published_number_of_parameters(name: str, changes: Any, parameters: int) -> None:
    model = models.build(models.config(name, **changes), device="meta")
    assert count(model) == parameters
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def _gpt2(**sizes: Any) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def _llama(**sizes: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


HUGGING_FACE: dict[str, Any] = {
    "bert-base": lambda: transformers.BertModel(transformers.BertConfig()),
    "bert-large": lambda: transformers.BertModel(
        transformers.BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    ),
    "vit-base": lambda: transformers.ViTModel(transformers.ViTConfig()),
    "gpt2": _gpt2,
    "gpt2-medium": lambda: _gpt2(n_embd=1024, n_layer=24, n_head=16),
    "gpt2-large": lambda: _gpt2(n_embd=1280, n_layer=36, n_head=20),
    "gpt2-xl": lambda: _gpt2(n_embd=1600, n_layer=48, n_head=25),
    "llama-2-7b": lambda: _llama(vocab_size=32_000),
    "llama-3-8b": lambda: _llama(vocab_size=128_256, intermediate_size=14_336, num_key_value_heads=8),
    "whisper-tiny": lambda: transformers.WhisperModel(
        transformers.WhisperConfig(
            d_model=384,
            encoder_layers=4,
            decoder_layers=4,
            encoder_attention_heads=6,
            decoder_attention_heads=6,
            encoder_ffn_dim=1536,
            decoder_ffn_dim=1536,
        )
    ),
    "deepseek-v3-attention": lambda: DeepseekV3Attention(transformers.DeepseekV3Config(), 0),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_named_model_has_as_many_parameters_as_hugging_faces(name: str) -> None:
    with torch.device("meta"):
        theirs = HUGGING_FACE[name]()
    assert count(models.build(name, device="meta")) == count(theirs)


def test_every_name_builds_and_names_are_listed() -> None:
    assert set(models.names()) == {*HUGGING_FACE, "gpt3-175b", "transformer-base", "transformer-big"}
    for name in models.names():
        config = models.config(name)
        assert dataclasses.replace(config) == config and hash(config) == hash(models.config(name))


def check_std(weight: Tensor, wanted: float) -> None:
    """Within five standard errors of a sample's deviation."""
    assert weight.numel() > 1000
    assert abs(weight.std().item() / wanted - 1) < 5 / (2 * weight.numel()) ** 0.5


def test_gpt2_starts_as_published() -> None:
    model = models.Decoder(models.config("gpt2", num_layers=8, embed_dim=96, ff_dim=320, vocab_size=211, max_tokens=77))
    layer = model.layers[3]
    for matrix in (model.token_embedding, layer.attention.qkv_proj, layer.feed_forward.up):
        check_std(matrix.weight, 0.02)
    for matrix in (layer.attention.out_proj, layer.feed_forward.down):
        check_std(matrix.weight, 0.02 / 4)  # √(2 · 8 layers)
    check_std(model.position_embedding.weight, 0.01)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif "norm" in name:
            assert (parameter == 1).all()


def test_llama_starts_as_published() -> None:
    changes = {"num_layers": 2, "embed_dim": 96, "num_heads": 6, "num_kv_heads": 2, "ff_dim": 320, "vocab_size": 211}
    model = models.Decoder(models.config("llama-3-8b", **changes))
    layer = model.layers[1]
    for matrix in (model.token_embedding, model.head, layer.attention.out_proj, layer.feed_forward.down):
        check_std(matrix.weight, 0.02)


def test_bert_starts_from_a_truncated_normal_distribution() -> None:
    changes = {"num_layers": 2, "embed_dim": 96, "ff_dim": 320, "vocab_size": 211, "max_tokens": 77}
    model = models.Encoder(models.config("bert-base", masked_lm=True, **changes))
    layer = model.layers[1]
    modules = (layer.attention.q_proj, layer.attention.out_proj, layer.feed_forward.up, model.pooler)
    for module in (*modules, model.embedding.token_embedding, model.masked_lm.dense):
        check_std(module.weight, 0.02 * TRUNCATED)
        assert module.weight.abs().max() <= 0.04
    assert not model.masked_lm.bias.any() and not layer.feed_forward.up.bias.any()


def test_vit_starts_as_its_released_code_does() -> None:
    changes = {"num_layers": 2, "embed_dim": 96, "ff_dim": 320, "image_size": 60, "patch_size": 5, "classes": 11}
    model = models.Encoder(models.config("vit-base", **changes))
    layer = model.layers[1]
    check_std(layer.attention.q_proj.weight, (2 / (96 + 96)) ** 0.5)
    check_std(layer.feed_forward.up.weight, (2 / (96 + 320)) ** 0.5)
    check_std(model.embedding.patch_embedding.weight, 75**-0.5)
    check_std(model.embedding.position_embedding.weight, 0.02)
    assert 0 < layer.feed_forward.up.bias.abs().max() < 1e-5
    assert not model.embedding.first_token.any() and not model.classifier.weight.any()


@pytest.mark.parametrize("tied", [True, False])
def test_the_transformer_starts_as_its_released_code_does(tied: bool) -> None:
    changes = {"num_layers": 2, "embed_dim": 96, "ff_dim": 320, "vocab_size": 211}
    model = models.Transformer(models.config("transformer-base", tied=tied, **changes))
    check_std(model.token_embedding.weight, 96**-0.5)
    check_std(model.decoder_layers[1].cross_attention.k_proj.weight, (2 / (96 + 96)) ** 0.5)
    check_std(model.encoder_layers[0].feed_forward.down.weight, (2 / (96 + 320)) ** 0.5)
    if not tied:
        check_std(model.head.weight, 96**-0.5)


def test_whisper_starts_with_sinusoidal_frames_that_are_not_trained() -> None:
    model = models.Whisper(models.config("whisper-tiny", embed_dim=36, num_layers=1, max_frames=15))
    theirs = transformers.WhisperModel(
        transformers.WhisperConfig(
            d_model=36, encoder_layers=1, decoder_layers=1, max_source_positions=15,
            encoder_attention_heads=6, decoder_attention_heads=6,
        )
    )  # fmt: skip
    torch.testing.assert_close(model.source_positions.weight, theirs.encoder.embed_positions.weight)
    assert not model.source_positions.weight.requires_grad
    check_std(model.token_embedding.weight, 0.02)


def test_latent_attention_starts_with_the_published_deviation() -> None:
    changes = {"embed_dim": 96, "num_heads": 6, "kv_lora_rank": 32, "q_lora_rank": 48, "nope_dim": 16, "rope_dim": 8}
    model = models.build(models.config("deepseek-v3-attention", value_head_dim=16, **changes))
    check_std(model.kv_up_proj.weight, 0.006)
    assert model.scale == pytest.approx((16 + 8) ** -0.5 * 1.3688879**2)  # 0.1 · ln 40 + 1


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2", {"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ("gpt2", {"embed_dim": 1.5}, "embed_dim must be an int, got 1.5"),
        ("gpt2", {"positions": "sinusoidal"}, "positions must be one of learned, rotary, got 'sinusoidal'"),
        ("gpt2", {"activation": "swish"}, "activation must be one of relu, gelu, gelu_tanh, silu, got 'swish'"),
        ("gpt2", {"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ("gpt2", {"rotary_scaling": 3}, "rotary_scaling is given, but positions are 'learned'"),
        ("gpt2", {"depth": 3}, "DecoderConfig has no depth; it has vocab_size"),
        ("gpt5", {}, "name must be one of bert-base"),
        ("bert-base", {"image_size": 3, "patch_size": 3}, "give vocab_size and max_tokens"),
        ("vit-base", {"patch_size": 15}, "patch_size=15 must divide image_size=224"),
        ("vit-base", {"masked_lm": True}, "this configuration is for images"),
        ("whisper-tiny", {"embed_dim": 33}, "embed_dim must be even"),
        ("whisper-tiny", {"target_vocab_size": 33}, "target_vocab_size is for a source of words"),
        ("transformer-base", {"norm": "rms"}, "norm must be one of post, pre, got 'rms'"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(name: str, changes: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        models.config(name, **changes)


def test_building_refuses_what_is_no_configuration() -> None:
    with pytest.raises(ValueError, match=r"config must be a configuration or one of .*, got 'gpt5'"):
        models.build("gpt5")
    with pytest.raises(TypeError, match="config must be a configuration of regard.models or a name, got dict"):
        models.build({"embed_dim": 3})  # type: ignore[arg-type]
