"""What values show in a notebook: text, HTML, a picture, and a widget where there is a kernel."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.browser.recordings import WORDS, sentence, translation
from tests.page_tree import Tree

import regard
from regard import masks, reference
from regard.recording import Recording


def bundle(shown: Any) -> dict[str, Any]:
    found: dict[str, Any] = shown._repr_mimebundle_(include=None, exclude=None)
    return found


def is_png(data: str) -> bool:
    return base64.b64decode(data).startswith(b"\x89PNG")


SHOWN = [
    pytest.param(sentence(), id="recording"),
    pytest.param(sentence()[1, 2], id="head"),
    pytest.param(translation(WORDS[:5], WORDS[3:9])[2, 1], id="cross"),
]


@pytest.mark.parametrize("shown", SHOWN)
def test_recordings_and_heads_are_a_page_in_a_frame_with_a_picture_under_it(shown: Any) -> None:
    found = bundle(shown)
    assert found["text/plain"] == repr(shown)
    assert is_png(found["image/png"])
    tree = Tree(found["text/html"])
    assert [tag for tag, _ in tree.elements] == ["div", "img", "iframe", "/iframe", "/div"]
    attributes = dict(tree.attributes)
    assert attributes["sandbox"] == "allow-scripts"
    page = attributes["srcdoc"]
    assert page is not None and page.startswith("<!doctype html>") and 'data-home="cell"' in page


def test_an_observation_is_shown_as_a_recording_of_one_call() -> None:
    x = torch.randn(2, 3, 11, 8)
    seen = regard.observe(x, x, x, mask=masks.causal())
    found = bundle(seen)
    assert found["text/plain"] == repr(seen) and "iframe" in found["text/html"] and is_png(found["image/png"])
    assert "text/html" in bundle(regard.observe(x, x, x, want=regard.Want.none()))


def test_a_plan_is_a_table_of_what_it_prints() -> None:
    x = torch.randn(1, 2, 7, 8)
    plan = regard.explain(x, x, x)
    found = bundle(plan)
    assert found["text/plain"] == str(plan)
    said = "".join(Tree(found["text/html"]).text)
    assert plan.backend in said and "not reference" in said
    assert "FLOP · bytes" in said and "B · peak memory" in said


@pytest.mark.parametrize(
    ("mask", "kept"),
    [
        (masks.causal(), 78),
        (masks.window(left=1), 23),
        (masks.documents(lengths=[3, 2]), 13),
        (masks.keep(torch.eye(5, dtype=torch.bool)), 5),
        (masks.padding(torch.tensor([4, 7])), 48),
        (masks.everything() & masks.columns(2), 24),
    ],
    ids=["causal", "window", "documents", "keep", "padding", "joined"],
)
def test_a_mask_is_drawn_square_by_square(mask: Any, kept: int) -> None:
    found = bundle(mask)
    assert found["text/plain"] == repr(mask)
    assert found["text/html"].count('fill="#0e7490"') == kept


def test_a_trace_lists_its_steps_with_their_shapes() -> None:
    x = [[[1, 0, 1, 0], [0, 1, 0, 1]]]
    steps = reference.trace(x, x, x, {name: torch.eye(4).numpy() for name in ("q", "k", "v", "out")}, num_heads=2)
    said = steps._repr_html_()
    assert all(name in said for name in steps) and "[1, 2, 2, 2]" in said


def test_an_empty_recording_is_its_line() -> None:
    assert bundle(Recording("nothing")) == {"text/plain": repr(Recording("nothing"))}


@pytest.mark.parametrize("shown", SHOWN)
def test_marimo_is_given_the_widget_and_without_anywidget_the_frame(
    shown: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import anywidget

    widget = shown._display_()
    assert isinstance(widget, anywidget.AnyWidget) and len(widget.data) > 1000
    monkeypatch.setitem(sys.modules, "anywidget", None)
    assert "<iframe" in shown._display_()._repr_html_()


def test_marimo_is_given_the_line_of_an_empty_recording() -> None:
    assert Recording("nothing")._display_() == repr(Recording("nothing"))


def test_a_figure_shows_itself_without_any_magic() -> None:
    figure = sentence().plot(layer=0, head=1)
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_in_a_kernel_the_recording_is_a_widget_that_gets_its_data() -> None:
    code = """
import types
import IPython
from tests.browser.recordings import sentence
shell = types.SimpleNamespace(kernel=object())
IPython.get_ipython = lambda: shell
print(sorted(sentence()._repr_mimebundle_()))
from regard._page import script
from regard._page._widget import Page
widget = Page(data=b"abc")
print(len(widget.data), str(widget._esm) == script())
import sys
sys.modules["google.colab"] = types.ModuleType("colab")  # which shows an error in place of foreign widgets
print(sorted(sentence()._repr_mimebundle_()))
del sys.modules["google.colab"]
shell.kernel = types.SimpleNamespace(_allow_stdin=False)  # nbconvert --execute, whose output is read without a kernel
print(sorted(sentence()._repr_mimebundle_()))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    first, second, colab, exported = run.stdout.strip().splitlines()
    assert "application/vnd.jupyter.widget-view+json" in first and "image/png" in first and "text/html" in first
    assert second == "3 True"
    assert colab == exported == "['image/png', 'text/html', 'text/plain']"


def test_a_notebook_that_is_executed_and_exported_shows_the_page_without_a_network(tmp_path: Path) -> None:
    for needed in ("nbconvert", "ipykernel", "anywidget"):
        pytest.importorskip(needed, reason=f"this test needs {needed}")
    notebook = tmp_path / "look.ipynb"
    source = (
        "from tests.browser.recordings import sentence\nrecording = sentence()\nprint(recording.summary())\nrecording"
    )
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "source": source, "outputs": [], "execution_count": None}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.write_text(
        json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": [cell]})
    )
    own = {f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    code = [sys.executable, "-m", "nbconvert", "--execute", "--to", "html", str(notebook)]
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]), "IPYTHONDIR": str(tmp_path)}
    run = subprocess.run(code, capture_output=True, text=True, check=False, env={**os.environ, **own, **paths})
    assert run.returncode == 0, run.stderr
    page = (tmp_path / "look.html").read_text(encoding="utf-8")
    assert "srcdoc=" in page and "data:image/png;base64," in page and "widget-view+json" not in page
    assert "layers.0.attention (self)" in page  # the summary is text, wherever it is printed


def test_importing_regard_loads_nothing_of_the_page() -> None:
    names = "('regard._page', 'regard._serve', 'anywidget', 'starlette', 'matplotlib')"
    code = f"import sys, regard; regard.Recording; print([name for name in {names} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "[]", run.stderr
