"""Chinese wherever `--lang zh` is taken: help, bills, the time of a call, figures."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import typer
from rich.cells import cell_len
from typer.testing import CliRunner

import regard
import regard.cost
from regard.cli import app, chinese

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
# names, units and abbreviations that Chinese texts keep
KEPT = {
    "FLOP", "TFLOP", "PFLOP", "GFLOP", "MFLOP", "GiB", "MiB", "KiB", "MHA", "MQA", "GQA", "MLA", "eager", "regard",
    "backend", "dropout", "RMS", "sink", "cuda", "int", "bfloat", "float", "gpt", "bert", "base", "tiny", "whisper",
    "NVIDIA", "max_tokens", "datasheet", "SXM", "GPU", "max_frames", "kv", "heads", "llama", "window", "softmax",
}  # fmt: skip


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", [name for name, one in COMMANDS.items() if any(p.name == "lang" for p in one.params)])
def test_the_help_of_a_command_that_speaks_chinese_is_chinese(name: str) -> None:
    for words in ((name, "--lang", "zh", "--help"), (name, "--help", "--lang=zh"), ("--lang", "zh", name, "--help")):
        said = run(*words)
        assert said.startswith(f"用法：regard {name}") and chinese.texts()["about"][name].split("\n")[
            0
        ] in said.replace("\n", "")
        assert max(map(cell_len, said.splitlines())) <= 80 or name == "cost"  # some of its examples are longer
    for param in COMMANDS[name].params:  # every option, also those to come
        assert param.name in chinese.texts()["options"][name] or param.name in chinese.texts()["common"], param.name
    assert "Show this message and exit." in run(name, "--help")


@pytest.mark.parametrize("name", chinese.texts()["options"])
def test_what_is_meant_without_an_option_is_said_in_both_languages(name: str) -> None:
    for param in COMMANDS[name].params:
        english = re.search(r"\(default: (.*?)\)", getattr(param, "help", None) or "")
        texts = chinese.texts()
        said = texts["options"][name].get(param.name) or texts["common"].get(param.name, "")
        if english:
            assert "默认" in said, param.name
            assert all(number in said for number in re.findall(r"\d+", english[1])), param.name


def test_the_list_of_commands_is_chinese_too() -> None:
    said = run("--lang", "zh", "--help")
    assert set(chinese.texts()["about"]) == {"regard", *COMMANDS} and all(f"\n  {name} " in said for name in COMMANDS)
    assert {one.rich_help_panel for one in COMMANDS.values()} == set(chinese.texts()["panels"])
    assert "Computes nothing" in run("--lang", "zh", "explain", "--help")  # has no Chinese, and says all in English


@pytest.mark.parametrize(
    "words",
    [
        ("gpt3-175b", "--on", "h200"),
        ("bert-base",),
        ("whisper-tiny", "--source-length", "3000"),
        ("gpt2", "--length", "2000", "--kv-heads", "4"),
        ("llama-3-8b", "--length", "9000", "--window", "63", "--rolling", "--sinks", "3"),
        ("--layers", "3", "--d-model", "48", "--heads", "4", "--latent", "16", "--int8"),
        ("--layers", "3", "--d-model", "48", "--heads", "4", "--gated", "--experts", "8"),
        ("attention", "--length", "999", "--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--on", "h200",
         "--gpus", "8,64"),
        ("attention", "--length", "999", "--heads", "8", "--head-dim", "64", "--window", "63", "--on", "h200"),
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_bill_in_chinese_has_no_english_words(words: tuple[str, ...]) -> None:
    said = re.sub(r"--[\w-]+", "", run("cost", *words, "--lang", "zh"))
    assert [word for word in re.findall(r"[A-Za-z_]{3,}", said) if word not in KEPT] == []
    assert re.search("[\u4e00-\u9fff]", said) and not re.search("[\u4e00-\u9fff]", run("cost", *words))


def test_a_figure_in_chinese_needs_a_font_and_has_chinese_labels(fonts: Any) -> None:
    bill = regard.cost.of("gpt2", length=111)
    fonts(chinese=True)
    axes = bill.plot("zh").axes
    assert [one.get_title() for one in axes] == ["每个词元的前向 FLOP", "为反向传播保留的字节", "缓存的字节"]
    labels = [text.get_text() for one in axes for text in one.get_legend().get_texts()]
    assert "MHA，12 个头" in labels and "前馈" in labels
    assert bill.plot().axes[0].get_title() == "forward FLOPs of a token"
    module = torch.nn.MultiheadAttention(12, 3, batch_first=True).eval()
    with torch.no_grad(), regard.watch(module) as recording:
        module(*(torch.randn(1, 7, 12),) * 3)
    assert recording.plot(layer=0, head=1, lang="zh").axes[0].get_title() == "头 1：广泛"
    assert recording.plot("keys", layer=0, lang="zh").axes[0].get_ylabel() == "得到的权重占比"
    assert recording.plot("entropy", lang="zh").axes[0].get_ylabel() == "熵（nat）"
    fonts(chinese=False)
    with pytest.raises(ValueError, match="figures in Chinese need a font"):
        bill.plot("zh")
