"""The pictures of docs/train.md come from the folder of a run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tests.train.small import DATA, trainer

SCRIPT = Path(__file__).parents[2] / "docs" / "pictures" / "translator.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("translator_pictures", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_run_gives_its_alignments_heads_and_curves(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trainer(tmp_path / "run", with_bleu=True)
    run.run()
    lines = tmp_path / "lines.txt"
    lines.write_text("".join(f"{line}\n" for line in DATA.valid.source[:3]))
    script.main([str(run.out), "--lines", str(lines), "--count", "2", "--out", str(tmp_path / "out")])
    names = {"translator-alignment.png", "translator-heads.png", "translator-curves.png"}
    assert {each.name for each in (tmp_path / "out").iterdir()} == names
    assert all(each.read_bytes().startswith(b"\x89PNG") for each in (tmp_path / "out").iterdir())
    (run.out / "metrics.jsonl").unlink()  # as in an unpacked best.tar: no empty axes
    script.main([str(run.out), "--lines", str(lines), "--count", "1", "--out", str(tmp_path / "fewer")])
    assert {each.name for each in (tmp_path / "fewer").iterdir()} == names - {"translator-curves.png"}
    assert "no curves are drawn; --report draws those" in capsys.readouterr().out


def test_heads_stand_by_kind_and_layer(script: Any, tmp_path: Path) -> None:
    run = trainer(tmp_path / "run")
    pairs = list(zip(DATA.valid.source[:2], DATA.valid.target[:2], strict=True))
    recording = script.recorded(run.model, run.words, pairs)
    assert [script._kind(call) for call in recording.calls] == [*script.KINDS] * 2
    figure = script.heads(recording, recording)
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert len(titles) == 6 and "encoder, before training" in titles and "decoder, source, after training" in titles
