"""`regard generate` and `regard convert`, and the folders they read and write."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from tests.interop.hub import IDS, bert, gpt2, inputs, llama, vit, whisper
from typer.testing import CliRunner

from regard import interop, models, nn, positions
from regard.cli import app

transformers.utils.logging.disable_progress_bar()
LETTERS = [chr(97 + n % 26) * (1 + n // 26) for n in range(97)]  # a … z, aa … zz, aaa …


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama with a tokenizer of words."""
    model = llama(eos_token_id=[2, 4])
    model.generation_config.eos_token_id = [2, 4]
    model.save_pretrained(tmp_path / "llama")
    write_tokenizer(tmp_path / "llama")
    return tmp_path / "llama"


def write_tokenizer(folder: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(LETTERS)}, "a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))


def expected(folder: Path, prompt: list[int], count: int) -> str:
    (tokens,) = interop.from_hf(folder).generate([prompt], max_new_tokens=count, stop=[2, 4])
    return " ".join(LETTERS[token] for token in tokens if token not in (2, 4))


def test_generate_writes_what_the_model_generates(folder: Path) -> None:
    result = run("generate", "--model", str(folder), "h e l l o", "--max-new-tokens", "11")
    assert result.exit_code == 0, result.output
    assert result.stdout == expected(folder, [7, 4, 11, 11, 14], 11) + "\n"
    how = ("--temperature", "5", "--top-k", "50", "--top-p", "0.99", "--seed", "3")
    drawn = [run("generate", "--model", str(folder), "h e l l o", *how).stdout for _ in range(2)]
    assert drawn[0] == drawn[1] != result.stdout


def test_converted_models_generate_the_same(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "ours"
    result = run("convert", str(folder), str(out))
    assert result.exit_code == 0, result.output
    assert "Decoder" in result.stdout and "tokenizer" in result.stdout
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert json.loads((out / "config.json").read_text())["stop"] == [2, 4]
    ours, theirs = (run("generate", "--model", str(name), "w o r d", "--max-new-tokens", "7") for name in (out, folder))
    assert ours.stdout == theirs.stdout
    again = run("convert", str(folder), str(out))
    assert again.exit_code == 2 and "holds a model already" in again.stderr
    half = run("convert", str(folder), str(tmp_path / "half"), "--dtype", "bfloat16")
    assert half.exit_code == 0
    assert next(interop.load(tmp_path / "half").parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("generate", "--model", "FOLDER", ""), "the prompt is empty"),
        (("generate", "--model", "FOLDER", "caf\udce9"), "the prompt has bytes that are no UTF-8"),
        (("generate", "--model", "FOLDER", "a", "--max-new-tokens", "0"), "--max-new-tokens is 0"),
        (("generate", "--model", "FOLDER", "a", "--temperature", "-1"), "temperature"),
        (("generate", "--model", "FOLDER", "a", "--dtype", "int8"), "--dtype holds 'int8'"),
        (("generate", "--model", "FOLDER", "a", "--device", "nowhere"), "--device 'nowhere'"),
        (("generate", "--model", "FOLDER/no", "a"), "is neither a folder nor one of"),
        (("generate", "--model", "gpt2", "a"), "gpt2 is a configuration, and has no weights"),
        (("convert", "FOLDER/..", "OUT"), "config.json is missing"),
        (("convert", "gpt2", "OUT"), "no weights"),
    ],
)
def test_bad_input_is_one_line_and_status_2(folder: Path, words: tuple[str, ...], complaint: str) -> None:
    result = run(*(word.replace("FOLDER", str(folder)).replace("OUT", str(folder / "out")) for word in words))
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert "Traceback" not in result.output and len(result.stderr.splitlines()) == 1


def test_models_that_do_not_write_and_texts_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path / "bert")
    write_tokenizer(tmp_path / "bert")
    result = run("generate", "--model", str(tmp_path / "bert"), "a")
    assert result.exit_code == 2 and "of kind Encoder; a Decoder (GPT-2, Llama) continues a text" in result.stderr
    gpt2().save_pretrained(tmp_path / "gpt2")
    result = run("generate", "--model", str(tmp_path / "gpt2"), "a")
    assert result.exit_code == 2 and "has no tokenizer.json" in result.stderr
    write_tokenizer(tmp_path / "gpt2")
    result = run("generate", "--model", str(tmp_path / "gpt2"), "a b c", "--max-new-tokens", "62")
    assert result.exit_code == 2 and "beyond the 63 positions" in result.stderr
    assert run("generate", "--model", str(tmp_path / "gpt2"), "a b c", "--max-new-tokens", "61").exit_code == 0
    (folder / "tokenizer.json").write_text("{}")
    result = run("generate", "--model", str(folder), "a")
    assert result.exit_code == 2 and "tokenizer.json cannot be read" in result.stderr


MADE = {
    "Decoder": lambda: interop.from_hf(
        llama(rope_parameters={"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0})
    ),
    "Encoder": lambda: interop.from_hf(vit()),
    "Whisper": lambda: interop.from_hf(whisper(encoder_attention_heads=6, encoder_ffn_dim=51)),
    "Transformer": lambda: models.Transformer(
        models.config("transformer-base", vocab_size=31, embed_dim=12, num_layers=1, num_heads=3, ff_dim=7)
    ).eval(),
}


@pytest.fixture
def deepseek(tmp_path: Path) -> Any:
    """A small DeepSeek-V3 in a folder."""
    sizes = {
        "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 22, "kv_lora_rank": 13,
        "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 7, "num_hidden_layers": 2, "vocab_size": 31,
        "moe_intermediate_size": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
        "intermediate_size": 21,
    }  # fmt: skip
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 16}
    config = transformers.DeepseekV3Config(**sizes, rope_parameters={**rope, "mscale": 1.0, "mscale_all_dim": 0.7})
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "deepseek")
    return model


def test_attention_of_deepseek_v3_is_converted_and_loaded(deepseek: Any, tmp_path: Path) -> None:
    source, out = str(tmp_path / "deepseek"), tmp_path / "ours"
    result = run("convert", source, str(out), "--layer", "1")
    assert result.exit_code == 0, result.output
    assert "LatentAttention" in result.stdout
    found, wanted = interop.load(out), interop.from_hf(deepseek.model.layers[1].self_attn)
    x = torch.randn(2, 11, 36)
    assert torch.equal(found(x), wanted(x)) and found.scale == wanted.scale
    whole = run("convert", source, str(tmp_path / "whole"))
    assert whole.exit_code == 0 and "DeepSeek" in whole.stdout, whole.output
    ids = torch.randint(9, (1, 7))
    with torch.no_grad():
        found = interop.load(tmp_path / "whole")(ids)
        torch.testing.assert_close(found, deepseek(ids).logits, rtol=0, atol=1e-5)
    for words, complaint in (
        (("convert", source, str(tmp_path / "other"), "--layer", "2"), "layer 2 has no attention weights"),
        (("convert", str(out), str(tmp_path / "other"), "--layer", "1"), "--ignore and --layer are for folders of"),
        (("convert", str(out), str(tmp_path / "other"), "--ignore", "x"), "--ignore and --layer are for folders of"),
        (("generate", "--model", str(out), "a"), "of kind LatentAttention; a Decoder (GPT-2, Llama) continues"),
    ):
        refused = run(*words)
        assert refused.exit_code == 2 and complaint in refused.stderr, refused.stderr


def test_latent_attention_that_a_configuration_does_not_say_is_refused(tmp_path: Path) -> None:
    sizes = {"kv_lora_rank": 7, "nope_dim": 5, "rope_dim": 6}
    for changes, complaint in (
        ({"scale": 0.3}, "scale=0.3"),
        ({"out_dropout": 0.1}, "out_dropout=0.1"),
        ({"positions": lambda query, key, query_offset: (query, key)}, "only positions.Rotary can be written"),
    ):
        with pytest.raises(ValueError, match=complaint):
            interop.save(nn.LatentAttention(21, 3, **sizes, **changes), tmp_path)
    assert list(tmp_path.iterdir()) == []
    plain = nn.LatentAttention(21, 3, **sizes, bias=True, positions=positions.Rotary(6, base=500.0)).eval()
    interop.save(plain, tmp_path)
    x = torch.randn(2, 11, 21)
    assert torch.equal(interop.load(tmp_path)(x), plain(x))


@pytest.mark.parametrize("kind", MADE)
def test_what_is_saved_is_loaded(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MADE[kind]()
    interop.save(model, tmp_path / "new" / "folder")
    found = interop.load(tmp_path / "new" / "folder")
    assert type(found).__name__ == kind and found.config == model.config
    given = {
        "Decoder": (IDS,),
        "Encoder": (inputs("vit")["pixel_values"],),
        "Whisper": (inputs("whisper")["input_features"], IDS),
        "Transformer": (IDS % 31, IDS % 29),
    }[kind]
    assert torch.equal(found(*given), model(*given))
    interop.save(model, tmp_path / "new" / "folder")  # over itself, as a checkpoint is
    assert sorted(file.name for file in (tmp_path / "new" / "folder").iterdir()) == ["config.json", "model.safetensors"]


def test_a_folder_that_is_damaged_or_another_s_is_refused(tmp_path: Path) -> None:
    model = MADE["Decoder"]()
    assert isinstance(model.config.rotary_scaling, positions.Linear)
    interop.save(model, tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    good, held = json.loads(config.read_text()), safetensors.torch.load_file(weights)
    for changes, complaint in (
        ({"format": "other"}, "was not written by regard"),
        ({"kind": "Oracle"}, "was not written by regard"),
        ({"kind": ["Decoder"]}, "was not written by regard"),
        ({"config": {**good["config"], "norm": ["rms"]}}, "kind Decoder: norm must be one of layer, rms, got"),
        ({"version": 2}, "version 2; this regard reads version 1"),
        ({"config": [1]}, "config is a list"),
        ({"config": {**good["config"], "odd": 1}}, "odd"),
        ({"config": {**good["config"], "num_layers": 2}}, "do not fit its config: layers.2"),
        ({"config": {**good["config"], "num_layers": 10**9}}, "says num_layers = 1000000000"),
        ({"config": {**good["config"], "head_dim": 2 * 10**11}}, "says head_dim = 200000000000"),
        ({"config": {**good["config"], "rotary_scaling": {"kind": "Odd"}}}, "rotary_scaling must name one of Linear"),
    ):
        config.write_text(json.dumps({**good, **changes}))
        with pytest.raises(ValueError, match=complaint):
            interop.load(tmp_path)
    config.write_text(json.dumps(good))
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        interop.load(tmp_path)
    safetensors.torch.save_file({**held, "odd": torch.zeros(3)}, weights)
    with pytest.raises(ValueError, match="do not fit its config: odd"):
        interop.load(tmp_path)
    safetensors.torch.save_file({**held, "norm.weight": held["norm.weight"].to(torch.int8)}, weights)
    with pytest.raises(ValueError, match="norm.weight holds torch.int8"):
        interop.load(tmp_path)
    with pytest.raises(TypeError, match="got Linear"):
        interop.save(torch.nn.Linear(3, 5), tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        interop.load(tmp_path / "nowhere")


def test_a_write_that_fails_leaves_the_folder_as_it_was(folder: Path, tmp_path: Path) -> None:
    model, out = MADE["Transformer"](), tmp_path / "ours"
    interop.save(model, out)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # a disk that is full after so many bytes
    try:
        with pytest.raises(OSError, match="the weights cannot be written: .*File too large"):
            interop.save(model, out)
        result = run("convert", str(folder), str(tmp_path / "new"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert result.exit_code == 2 and "the weights cannot be written" in result.stderr
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(TypeError, match=r"stop must be token numbers \(a list of ints\), got \['a'\]"):
        interop.save(model, out, stop=["a"])
