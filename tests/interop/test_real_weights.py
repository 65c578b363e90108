"""Weights that people have: SmolLM2-135M and Whisper tiny.en write the same tokens here as in Hugging Face's code."""

from __future__ import annotations

import importlib.util
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests import packaged
from tests.interop.hub import check_as_good_as, exactly
from tests.watching.test_whisper import chirps, whisper  # noqa: F401 (a fixture)
from transformers import GenerationMixin
from typer.testing import CliRunner

import regard
from regard.cli import app
from regard.interop import from_hf

pytestmark = pytest.mark.models

PROMPT = "The capital of France is Paris. The capital of Italy is"
NEW = 64


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    model, tokenizer = packaged.smollm2()
    model.generation_config.eos_token_id = None  # all 64 tokens, whatever they are
    return model, tokenizer


@pytest.fixture(scope="module")
def written(smollm2: tuple[Any, Any]) -> list[int]:
    model, tokenizer = smollm2
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    how = {"max_new_tokens": NEW, "do_sample": False}
    with torch.no_grad():
        found: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, ids.shape[1] :].tolist()
    return found


def test_smollm2_writes_the_same_64_tokens(smollm2: tuple[Any, Any], written: list[int]) -> None:
    model, tokenizer = smollm2
    ids = tokenizer(PROMPT)["input_ids"]
    other = tokenizer("Once upon a time there was")["input_ids"]
    ours = from_hf(model)
    assert "Rome" in tokenizer.decode(written)
    assert len(set(written)) > 10
    assert ours.generate([ids], max_new_tokens=NEW) == [written]
    assert ours.generate([other, ids], max_new_tokens=NEW)[1] == written
    with torch.no_grad():
        expected = model(torch.tensor([ids]), output_hidden_states=True)
        logits, hidden = ours(torch.tensor([ids]), hidden_states=True)
        exact = exactly(model, {"input_ids": torch.tensor([ids])}, output_hidden_states=True)
    for mine, peer, double in zip(
        (*hidden[:-1], logits),
        (*expected.hidden_states[:-1], expected.logits),
        (*exact.hidden_states[:-1], exact.logits),
        strict=True,
    ):
        check_as_good_as([mine], [peer], [double], times=2)


def test_smollm2_inside_hugging_face_writes_the_same_64_tokens(smollm2: tuple[Any, Any], written: list[int]) -> None:
    model, tokenizer = smollm2
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    regard.interop.register_hf()
    model.set_attn_implementation("regard")
    try:
        for more in ({}, {"cache_implementation": "static"}):
            how = {"max_new_tokens": NEW, "do_sample": False, **more}
            with torch.no_grad():
                found = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
            assert found[0, ids.shape[1] :].tolist() == written
    finally:
        model.set_attn_implementation("sdpa")


def test_the_command_writes_the_same_text(smollm2: tuple[Any, Any], written: list[int], tmp_path: Path) -> None:
    _, tokenizer = smollm2
    text = tokenizer.decode(written[:20], skip_special_tokens=True)
    out = tmp_path / "smollm2"
    converted = CliRunner().invoke(app, ["convert", "smollm2", str(out)])
    assert converted.exit_code == 0, converted.output
    result = CliRunner().invoke(app, ["generate", "--model", str(out), PROMPT, "--max-new-tokens", "20"])
    assert result.exit_code == 0, result.output
    assert result.stdout == text + "\n"


def speech() -> torch.Tensor:
    """Thirty seconds of a conversation, which a package carries as its sample, as log-mel frames."""
    spec = importlib.util.find_spec("pyannote.audio")
    assert spec is not None and spec.origin is not None
    with wave.open(str(Path(spec.origin).parent / "sample" / "sample.wav")) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 16_000)
        sound = np.frombuffer(file.readframes(file.getnframes()), dtype=np.int16) / 2.0**15
    made = transformers.WhisperFeatureExtractor()(sound, sampling_rate=16_000, return_tensors="pt")
    features: torch.Tensor = made["input_features"]
    return features


def test_whisper_transcribes_the_same(whisper: Any) -> None:  # noqa: F811
    model = whisper
    ours = from_hf(model)
    features = torch.cat([speech(), chirps()])
    start, stop, most = [50257, 50362], 50256, 120
    with torch.no_grad():
        memory = model.model.encoder(features)
        expected = GenerationMixin.generate(
            model,
            encoder_outputs=memory,
            decoder_input_ids=torch.tensor([start] * 2),
            generation_config=transformers.GenerationConfig(
                max_new_tokens=most, do_sample=False, eos_token_id=stop, pad_token_id=stop
            ),
        )
        exact = exactly(model.model.encoder, {"input_features": features[:1]}).last_hidden_state
        check_as_good_as([ours.encode(features[:1])], [memory.last_hidden_state[:1]], [exact], times=2)
        found = ours.generate(features, start=start, stop=stop, max_new_tokens=most)
    for row, hypotheses in zip(expected[:, 2:].tolist(), found, strict=True):
        assert hypotheses[0].tokens == (row[: row.index(stop)] if stop in row else row)
    assert found[0][0].finished and len(found[0][0].tokens) > 100
    said = ",".join(map(str, found[0][0].tokens))
    assert "314,1422,470,760,345,547,612,13" in said  # " I didn't know you were there."
