"""`regard cost` and `regard info`: what they print, and that bad input gives one short line and status 2."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from tests.cost.small_bills import keep
from tests.cost.test_roofline import CPU
from typer.testing import CliRunner

from regard import cost, models
from regard.cli import app
from regard.cli.commands import cost as command

CALL = ["attention", "--length", "3", "--heads", "2", "--head-dim", "4"]
CUSTOM = ["--layers", "32", "--d-model", "4096", "--heads", "32", "--kv-heads", "8", "--length", "131072"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_a_named_configuration_is_printed_as_the_library_prints_it() -> None:
    result = run("cost", "gpt3-175b")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(cost.of("gpt3-175b"))
    assert "174 604 259 328 parameters, 325.2 GiB in bfloat16" in result.stdout


def test_the_json_is_the_librarys() -> None:
    found = json.loads(run("cost", "gpt2", "--length", "63", "--batch", "3", "--dtype", "fp32", "--json").stdout)
    assert found == json.loads(json.dumps(cost.of("gpt2", length=63, batch=3, dtype="fp32").to_dict()))


def test_options_describe_a_model_and_what_was_assumed_is_said() -> None:
    words = ["cost", *CUSTOM, "--batch", "4", "--dtype", "bf16"]
    found = json.loads(run(*words, "--json").stdout)
    config = models.DecoderConfig(**found["config"])
    built = models.build(config, device="meta")
    assert found["parameters"] == sum(parameter.numel() for parameter in built.parameters())
    assert (found["batch"], found["length"], config.num_kv_heads, config.ff_dim) == (4, 131072, 8, 16384)
    assert found["cache"]["total"] == 32 * 4 * 8 * 2 * 128 * 131072 * 2
    assert "assumed: 32000 words (--vocab); a feed-forward of 16384 (--ff-dim)" in found["notes"][0]
    text = run(*words).stdout
    assert "a decoder of 32 layers: " in text and "assumed" in text


def test_options_change_a_named_configuration() -> None:
    found = json.loads(run("cost", "llama-3-8b", "--layers", "3", "--vocab", "111", "--gated", "--json").stdout)
    assert found["parameters"] == cost.of(models.config("llama-3-8b", num_layers=3, vocab_size=111)).parameters
    assert found["name"] == "llama-3-8b with layers 3, vocab 111, gated"


def test_caches_by_option() -> None:
    sizes = ["--layers", "3", "--d-model", "768", "--heads", "6"]
    latent = json.loads(run("cost", *sizes, "--head-dim", "96", "--latent", "512", "--int8", "--json").stdout)
    assert latent["cache"]["kind"] == "MLA, latent 512 + 64, int8"
    assert latent["cache"]["token"] == 576 + 4 * 18 and latent["latent"]["nope_dim"] == 96
    rolling = json.loads(run("cost", "gpt2", "--window", "100", "--rolling", "--sinks", "4", "--json").stdout)
    assert rolling["cache"]["kind"] == "rolling, window 100, 4 sinks"
    assert rolling["cache"]["layer"] == 204 * 12 * 64 * 2 * 2


def test_a_plot_is_written(tmp_path: Path) -> None:
    file = tmp_path / "bill.svg"  # the manual's test writes a png
    result = run("cost", "gpt2", "--plot", str(file))
    assert result.exit_code == 0, result.output
    assert f"wrote {file}" in result.stdout and file.stat().st_size > 10_000


def test_the_least_time_of_a_model_is_its_flops_over_the_peak() -> None:
    found = json.loads(run("cost", "gpt2", "--on", "h200", "--json").stdout)
    assert found["times"]["forward"] == pytest.approx(cost.of("gpt2").kept_flops.forward / 989e12)
    assert "At the peak speed of h200: " in run("cost", "gpt2", "--on", "h200").stdout


def test_an_attention_call_on_a_named_device() -> None:
    words = ["cost", "attention", "--length", "4096", "--heads", "8", "--head-dim", "64", "--causal", "--on", "h200"]
    found = json.loads(run(*words, "--json").stdout)
    call = cost.AttentionCall(length=4096, heads=8, head_dim=64, causal=True, dtype="bf16")
    assert found["forward"]["seconds"] == cost.roofline(call, cost.device("h200")).seconds
    assert found["backward"]["flops"] == call.flops(backward=True) and "measured" not in found["forward"]
    text = run(*words).stdout
    assert "8 heads of 64, 4 096 tokens, causal, bfloat16" in text and "NVIDIA H200 datasheet" in text
    assert max(map(len, text.splitlines())) <= 80


def test_an_attention_call_on_several_gpus() -> None:
    words = "cost attention --length 1000000 --heads 32 --kv-heads 8 --head-dim 128 --causal --on h200 --gpus 8,64"
    table = CliRunner().invoke(app, words.split()).stdout
    lines = [line.split() for line in table.splitlines()]
    assert ["8", "1.04", "s", "4.438", "GiB", "0", "B", "10.6", "ms", "1.05", "s", "3.815", "GiB"] in lines
    found = json.loads(CliRunner().invoke(app, [*words.split(), "--json", "--link", "100"]).stdout)["spread"]
    assert [each["gpus"] for each in found] == [8, 64] and found[0]["from_machines"] == 0
    assert found[0]["receiving"] == pytest.approx(found[0]["received"] / 100e9)
    for extra, message in (
        (["--on", "h200", "--gpus", "8,x"], "--gpus is '8,x'; expected a number of GPUs"),
        (["--gpus", "8"], "--gpus 8 needs --on"),
        (["--on", "h200", "--gpus", "8", "--between", "0"], "between must be a number of bytes/s above 0"),
    ):
        done = CliRunner().invoke(app, ["cost", *CALL, *extra])
        assert done.exit_code == 2 and message in done.stderr


def test_an_attention_call_here_stands_beside_its_measured_time(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch, CPU)
    monkeypatch.setattr(cost, "measure_call", lambda call, threads: (0.5, 1.5))
    words = ["cost", "attention", "--length", "111", "--heads", "6", "--head-dim", "16", "--threads", "3", "--measure"]
    found = json.loads(run(*words, "--json").stdout)
    least = cost.roofline(cost.AttentionCall(length=111, heads=6, head_dim=16), CPU)
    assert found["forward"]["seconds"] == least.seconds and found["forward"]["ratio"] == 0.5 / least.seconds
    text = run(*words).stdout
    assert (
        "predicted" in text
        and "measured  ratio" in text
        and "500 ms" in text
        and "a CPU, 3 threads (made up, 2026-11-15)" in text
    )


def test_this_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def measure(where: str = "cpu", *, threads: int | None = None) -> cost.Device:
        asked.append(threads)
        return dataclasses.replace(CPU, threads=threads)

    monkeypatch.setattr(cost, "measure", measure)
    words = ["cost", "attention", "--length", "111", "--heads", "6", "--head-dim", "16", "--threads", "3"]
    assert run(*words).exit_code == run(*words).exit_code == 0
    assert asked == [3]
    found = json.loads(run("info", "--measure", "--threads", "3", "--json").stdout)
    assert asked == [3, 3] and found["measured"]["cpu"] == CPU.to_dict()
    assert (
        "3 threads: 1 GFLOP/s in float32, 10 M exponentials/s, 100 MB/s"
        in run("info", "--measure", "--threads", "3").stdout
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give the name of a configuration (regard models lists them), or --layers, --d-model, --heads too"),
        (["--layers", "3"], "or --d-model, --heads too"),
        (["gpt5"], "there is no configuration 'gpt5': did you mean gpt2? expected one of bert-base"),
        (["nosuch"], "there is no configuration 'nosuch': expected one of bert-base"),
        (["gpt2", "--dtype", "int4"], "--dtype must be one of"),
        (["gpt2", "--length", "0"], "--length must be at least 1"),
        (["gpt2", "--length", "many"], "--length"),
        (["gpt2", "--batch", "-3"], "--batch must be at least 1"),
        (["gpt2", "--heads", "7"], "--heads 7 must divide --d-model 768; give --head-dim otherwise"),
        (["gpt2", "--kv-heads", "24"], "--kv-heads 24 must divide --heads 12"),
        (["gpt2", "--heads", "2", "--kv-heads", "3"], "regard: --kv-heads 3 must divide --heads 2\n"),
        (["gpt2", "--link", "3"], "--link is for one call"),
        ([*CALL, "--on", "h200", "--between", "3"], "--between needs --gpus"),
        (["gpt2", "--layers", "0"], "--layers must be at least 1"),
        (["bert-base", "--kv-heads", "3"], "--kv-heads does not apply to bert-base"),
        (["gpt2", "--rolling"], "--rolling is a cache of a decoder's --window; give one"),
        (["gpt2", "--q-latent", "3"], "--q-latent needs --latent"),
        (["gpt2", "--rope-dim", "3"], "--rope-dim needs --latent"),
        (["gpt2", "--sinks", "3"], "--sinks 3 stay in a rolling cache; give --rolling"),
        ([*CALL, "--device", "cpu"], "--device is for models"),
        ([*CALL, "--on", "h200", "--layers", "0"], "--layers is for models, not for one attention call"),
        ([*CALL, "--on", "h200", "--between", "0"], "--between needs --gpus"),
        (["gpt2", "--q-latent", "0"], "--q-latent needs --latent"),
        (["gpt2", "--experts", "0"], "--experts must be at least 1, got 0"),
        (["gpt2", "--latent", "0"], "--latent must be at least 1"),
        (["bert-base", "--latent", "8"], "latent takes the place of a decoder's attention"),
        (["gpt2", "--device", "tpu"], "--device must be one of cuda, cpu"),
        (["gpt2", "--on", "abacus"], "--on is 'abacus'; expected one of h100"),
        ([*CALL, "--on", "abacus"], "--on is 'abacus'; expected one of h100"),
        (["gpt2", "--dtype", ""], "--dtype must be one of"),
        ([*CALL, "--dtype", ""], "--dtype must be one of"),
        (["gpt2", "--latent", "8", "--kv-heads", "3"], "--kv-heads does not go with --latent"),
        (["gpt2", "--latent", "8", "--rope-dim", "7"], "--rope-dim must be even, got 7"),
        (["bert-base", "--int8"], "--int8 is of a cache, and an encoder keeps none"),
        (["gpt2", "--plot", "x"], "--plot is 'x'; expected a name that ends with .png, .svg, .pdf"),
        ([*CALL, "--threads", "99999"], "--threads must be at most"),
        (["gpt2", "--measure"], "--measure is for one call: regard cost attention"),
        (["gpt2", "--causal"], "--causal is for one call"),
        (["vit-base", "--plot", "x.png"], "images have one length"),
        (["gpt2", "--plot", "nowhere/x.png"], "--plot names the folder nowhere, which is not there"),
        (["gpt2", "--plot", "x.abc"], "--plot is 'x.abc'; expected a name that ends with .png"),
        (["attention"], "an attention call needs --length, --heads, --head-dim"),
        ([*CALL, "--vocab", "3"], "--vocab is for models"),
        ([*CALL, "--on", "h200", "--measure"], "--measure is"),
        ([*CALL, "--threads", "0"], "--threads must be"),
        ([*CALL, "--kv-heads", "4", "--on", "h200"], "--kv-heads 4 must divide --heads 2"),
    ],
)  # fmt: skip
def test_bad_input_is_one_short_line_and_status_2(words: list[str], said: str) -> None:
    result = run("cost", *words)
    assert result.exit_code == 2, result.output
    assert said in result.stderr and result.stderr.startswith("regard: ")
    assert len(result.stderr.strip().splitlines()) == 1 and result.stdout == ""


def test_a_call_that_would_take_minutes_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch, dataclasses.replace(CPU, threads=1))
    words = ["cost", "attention", "--length", "1000000", "--heads", "8", "--head-dim", "64", "--threads", "1"]
    assert "give a shorter --length" in run(*words, "--measure").stderr
    assert run(*words).exit_code == 0


def test_completion_offers_what_there_is() -> None:
    assert set(command.NAMES) == {"attention", *models.names()}
    assert set(command.DEVICES) == set(cost.devices())


def test_a_narrow_terminal_and_ascii_lose_no_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "regard.cli", "cost", "gpt2"],
        capture_output=True,
        check=False,
        env={**os.environ, "COLUMNS": "20", "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0 and done.stderr == b""
    assert done.stdout.decode("ascii").strip() == str(cost.of("gpt2"))


def test_info_says_why_a_backend_cannot_run() -> None:
    found = json.loads(run("info", "--json").stdout)
    assert found["flex on cpu"].startswith("cannot run: ") and "CUDA" in found["triton on cpu"]
    assert "bfloat16 on cpu" in found and "cuda" in " ".join(found)
    assert run("info", "--threads", "3").stderr == "regard: --threads is for --measure; give both\n"
    assert run("info", "--measure", "--threads", "99999").stderr.startswith("regard: --threads must be at most ")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (0, "works"),
        (-signal.SIGILL, "WARNING: crashes. This CPU lists AMX and cannot use it; set ONEDNN_MAX_CPU_ISA="),
        (1, "WARNING: a small product ended with status 1"),
        (None, "not known: a small product took more than"),
    ],
)
def test_info_tries_bfloat16_in_another_process_once_where_amx_is_listed(
    monkeypatch: pytest.MonkeyPatch, status: int | None, said: str
) -> None:
    tried = []

    def process(words: list[str], **how: Any) -> Any:
        tried.append(words)
        if status is None:
            raise subprocess.TimeoutExpired(words, how["timeout"])
        return subprocess.CompletedProcess(words, status)

    lists_amx(monkeypatch, True)
    monkeypatch.setattr(subprocess, "run", process)
    assert bfloat16().startswith(said) and bfloat16().startswith(said)
    assert len(tried) == 1
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    bfloat16()
    assert len(tried) == 2


def bfloat16() -> str:
    return json.loads(run("info", "--json").stdout)["bfloat16 on cpu"]


def lists_amx(monkeypatch: pytest.MonkeyPatch, lists: bool) -> None:
    """What the system says of this CPU."""
    read = Path.read_text

    def read_text(self: Path, *given: Any, **how: Any) -> str:
        if self == Path("/proc/cpuinfo"):
            return "model name : a CPU\nflags : fpu sse" + " amx_bf16 amx_tile" * lists
        return read(self, *given, **how)

    monkeypatch.setattr(Path, "read_text", read_text)


def test_the_process_that_tries_bfloat16_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    lists_amx(monkeypatch, True)
    assert bfloat16() == "works"
    start = subprocess.run

    def killed(words: list[str], **how: Any) -> Any:
        return start([*words[:2], "import os, signal; os.kill(os.getpid(), signal.SIGILL)"], **how)

    monkeypatch.setattr(subprocess, "run", killed)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # or it would be known
    assert bfloat16().startswith("WARNING: crashes")


def test_without_amx_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    lists_amx(monkeypatch, False)
    monkeypatch.setattr(subprocess, "run", lambda *words, **how: pytest.fail("a process was started"))
    assert bfloat16().startswith("works")
