"""A model's folder while somebody saves into it: kills, full disks, several writers (rule 65)."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.interop.hub import gpt2

from regard import interop, models
from regard.cli import folders
from regard.recording import Recording

SIZES: dict[str, Any] = {"vocab_size": 31, "embed_dim": 64, "num_layers": 2, "ff_dim": 700, "max_tokens": 11}
# The shapes agree, so that nothing but the configuration tells the two apart; and a third of another shape.
TWO, FOUR, OTHER = (
    models.config("gpt2", **SIZES, num_heads=2),
    models.config("gpt2", **SIZES, num_heads=4, activation="relu"),
    models.config("gpt2", **{**SIZES, "num_layers": 3}, num_heads=8),
)
CONFIGS = {config.num_heads: config for config in (TWO, FOUR, OTHER)}

# A process that has everything loaded, and forks one that saves model after model whenever it is asked to. Given a
# number, the fork kills itself when it is about to make that call to the system.
FORKS = """
import itertools, os, signal, sys
from tests.interop.test_saving import CONFIGS, made
from regard import interop
ready = [made(heads) for heads in CONFIGS]

def die_at(last):
    calls = itertools.count(1)
    def counted(call):
        def count(*given):
            if next(calls) == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*given)
        return count
    for name in ("open", "fsync", "chmod", "replace", "unlink", "close"):
        setattr(os, name, counted(getattr(os, name)))

for line in sys.stdin:
    child = os.fork()
    if not child:
        die_at(int(line))
        for model in itertools.cycle(ready):
            interop.save(model, sys.argv[1], stop=[model.config.num_heads])
    print(child, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


def made(heads: int) -> models.Decoder:
    """A model all of whose weights say which it is."""
    model = models.Decoder(CONFIGS[heads])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(heads))
    return model.eval()


def check_whole(folder: Path) -> int:
    """The folder holds exactly one of the three models: weights, configuration and stop tokens of the same save."""
    found = folders.load(str(folder))
    heads = found.model.config.num_heads
    assert found.model.config == CONFIGS[heads]
    assert all(bool((weight == heads).all()) for weight in found.model.parameters())
    assert found.stop == [heads]
    return heads


class Killer:
    """Runs saves that are killed, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORKS, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Killer:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def start(self, last_call: int = 0) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{last_call}\n")
        self._process.stdin.flush()
        return int(self._line())

    def wait(self) -> None:
        assert self._line() == "ended\n"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def test_a_folder_holds_one_model_whole_whenever_a_save_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    interop.save(made(2), folder, stop=[2])
    began = time.perf_counter()
    interop.save(made(2), folder, stop=[2])
    one = time.perf_counter() - began
    draw, seen = random.Random(0), [2]
    with Killer(folder) as killer:
        while len(seen) <= 40 or (len(set(seen)) == 1 and len(seen) < 400):  # a busy machine may save nothing in 40
            child = killer.start()
            time.sleep(6 * one * draw.random())
            os.kill(child, signal.SIGKILL)
            killer.wait()
            seen.append(check_whole(folder))
    assert len(set(seen)) > 1
    interop.save(made(4), folder, stop=[4])
    assert check_whole(folder) == 4
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]


def test_no_call_to_the_system_is_a_bad_moment_to_be_killed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    seen, shown = [], []
    with Killer(folder) as killer:
        for last in range(1, 40):
            interop.save(made(8), folder, stop=[8])
            assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
            killer.start(last)  # saves 2 first, then 4
            killer.wait()
            seen.append(check_whole(folder))
            shown += json.loads((folder / "config.json").read_text())["stop"]
            if seen[-1] == 4:
                break
    assert seen == sorted(seen, key=[8, 2, 4].index) and set(seen) == {8, 2, 4}
    assert seen != shown  # one kill was between the weights and config.json, which is the case in question


def test_a_full_disk_leaves_the_model_that_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    interop.save(made(2), folder, stop=[2])
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in (0, 8, 1000, 300_000, 500_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            with pytest.raises(OSError, match="the weights cannot be written: File too large"):
                interop.save(made(8), folder, stop=[8])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert check_whole(folder) == 2
        assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]


def test_a_disk_that_is_full_when_only_the_configuration_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interop.save(made(2), tmp_path, stop=[2])
    sync = os.fsync

    def fails(handle: int) -> None:
        if "config.json" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(28, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        interop.save(made(8), tmp_path, stop=[8])
    assert check_whole(tmp_path) == 2
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_a_folder_of_hugging_face_s_becomes_ours_at_one_instant(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    gpt2().save_pretrained(theirs)
    interop.save(made(2), ours, stop=[2])
    assert type(folders.load(str(theirs)).model) is models.Decoder
    (ours / "model.safetensors").replace(theirs / "model.safetensors")  # killed before config.json took its place
    assert check_whole(theirs) == 2
    (theirs / "config.json").unlink()
    assert check_whole(theirs) == 2


def test_folders_without_a_header_load_as_before(tmp_path: Path) -> None:
    interop.save(made(2), tmp_path, stop=[2])
    held = interop.load(tmp_path).state_dict()
    described = json.loads((tmp_path / "config.json").read_text())
    del described["save"]
    safetensors.torch.save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert check_whole(tmp_path) == 2


def test_what_others_write_at_this_moment_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, left = tmp_path / "run.regard", tmp_path / ".run.regard.abcd1234.partial"
    left.write_text("of a process that was killed, which holds no lock")
    (tmp_path / ".run.regard.mine.partial").write_text("not ours")
    begun, go_on, sync = threading.Event(), threading.Event(), os.fsync

    def slowly(handle: int) -> None:
        if threading.current_thread() is other:
            begun.set()
            go_on.wait(20)
        sync(handle)

    monkeypatch.setattr(os, "fsync", slowly)
    other = threading.Thread(target=Recording("later").save, args=(file,))
    other.start()
    assert begun.wait(20)
    Recording("one").save(file)
    assert not left.exists() and Recording.load(file).title == "one"
    go_on.set()
    other.join(20)
    assert Recording.load(file).title == "later"
    assert sorted(os.listdir(tmp_path)) == [".run.regard.mine.partial", "run.regard"]


SMALL: dict[str, Any] = {"vocab_size": 11, "embed_dim": 8, "num_layers": 1, "num_heads": 2, "ff_dim": 12}


@pytest.mark.parametrize(
    "config",
    [
        models.DecoderConfig(**SMALL, max_tokens=64, positions="rotary", rotary_base=1_000_000),
        models.DecoderConfig(**SMALL, max_tokens=10**7, positions="rotary", window=10**6),
        models.T5Config(**SMALL, max_distance=100_000),
    ],
)
def test_large_numbers_that_need_no_weights_do_not_hinder_loading(config: Any, tmp_path: Path) -> None:
    """A rotary base is often written as a whole number; it is no size."""
    interop.save(models.build(config), tmp_path)
    assert interop.load(tmp_path).config == config


def test_sizes_that_the_weights_cannot_have_are_refused(tmp_path: Path) -> None:
    interop.save(models.build(models.DecoderConfig(**SMALL, max_tokens=64)), tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    for name, size in (("num_layers", 10**6), ("ff_dim", 10**9), ("num_kv_heads", 10**9)):
        changed = {**described, "config": {**described["config"], name: size}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=f"the configuration says {name} = {size}, and there are"):
            interop.load(tmp_path)
