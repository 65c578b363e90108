"""The page in JupyterLab: a notebook runs there, and its outputs are clicked, typed into and saved."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.browser.conftest import Opened

CELLS = [
    """import sys
import torch, regard
from regard import masks
torch.manual_seed(0)
layer = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
words = "The cat sat on the mat because it was tired .".split()
x = torch.randn(1, len(words), 16)
with torch.no_grad(), regard.watch(layer, tokens=words) as recording:
    layer(x, x, x)
recording""",
    "regard.explain(x[:, None], x[:, None], x[:, None])",
    "masks.causal() & masks.window(left=3)",
    "recording.plot(layer=0, head=1)",
    "one = recording[0, 1]\nprint(one.top_keys[4].tolist(), one.top_weights[4].tolist())",
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A JupyterLab with one notebook: its address, and the notebook's file."""
    pytest.importorskip("jupyterlab", reason="this test needs JupyterLab")
    pytest.importorskip("ipykernel", reason="this test needs a kernel")
    folder = tmp_path_factory.mktemp("lab")
    cells = [
        {"cell_type": "code", "id": f"cell{at}", "metadata": {}, "source": text, "outputs": [], "execution_count": None}
        for at, text in enumerate(CELLS)
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = folder / "work" / "look.ipynb"
    notebook.parent.mkdir()
    notebook.write_text(
        json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells})
    )
    own = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    # all cells are drawn, and nobody outside is asked for news
    for name, said in {
        "notebook-extension/tracker": {"windowingMode": "none"},
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    }.items():
        file = folder / "config" / "lab" / "user-settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(said))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(
            [
                *(sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser", "--ip=127.0.0.1"),
                *(f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=look"),
            ],
            cwd=notebook.parent,
            env={**os.environ, **own, "IPYTHONDIR": str(folder / "ipython")},
            stdout=log,
            stderr=log,
        )
    try:
        _wait_for(port, running, folder / "log")
        yield f"http://127.0.0.1:{port}/lab/tree/look.ipynb?token=look", notebook
    finally:
        running.terminate()
        running.wait(30)


def _wait_for(port: int, running: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert running.poll() is None, log.read_text()[-2000:]
        with socket.socket() as asked:
            if asked.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(log.read_text()[-2000:])


def _wait_for_the_kernel(page: Any, address: str) -> None:
    """Wait until the server says that the notebook's kernel is idle and that the page listens to it."""
    server, token = address.split("/lab/")[0], address.split("token=")[1]
    kernels: list[Any] = []
    for _ in range(900):
        kernels = page.request.get(f"{server}/api/kernels?token={token}").json()
        if kernels and kernels[0]["connections"] and kernels[0]["execution_state"] == "idle":
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"no kernel is idle: {kernels}")


def _run_the_first_cell(page: Any, address: str) -> str:
    """Open the notebook and run its first cell, and return what JupyterLab asks instead where it cannot do so yet.

    On a busy machine JupyterLab now and then asks for a kernel although one runs; a page opened anew finds it.
    """
    page.goto(address)
    page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=90000)
    _wait_for_the_kernel(page, address)
    prompt = page.locator(".jp-Notebook .jp-Cell .jp-InputPrompt").first
    question = page.locator("dialog.jp-Dialog")
    for _ in range(30):  # what is run before the kernel listens is lost
        if question.count():
            return str(question.first.inner_text())
        page.locator(".jp-Notebook .jp-Cell .jp-InputArea-editor").first.click(force=True)
        page.keyboard.press("Shift+Enter")
        page.wait_for_timeout(1000)
        if prompt.inner_text() != "[ ]:":
            return ""
    return "the first cell does not run"


def test_a_notebook_runs_in_jupyterlab_and_what_it_shows_can_be_used(browser: Any, lab: tuple[str, Path]) -> None:
    address, notebook = lab
    context = browser.new_context(viewport={"width": 1300, "height": 1000})
    asked: list[str] = []
    for _ in range(3):
        opened = Opened(context.new_page())
        asked.append(_run_the_first_cell(opened.page, address))
        if not asked[-1]:
            break
        opened.page.close()
    assert not asked[-1], asked
    page = opened.page
    outputs = page.locator(".jp-Notebook .jp-Cell")
    for _ in CELLS[1:]:
        page.keyboard.press("Shift+Enter")
    printed = outputs.nth(4).locator(".jp-OutputArea-output pre", has_text="] [")  # all of it
    printed.wait_for(timeout=60000)

    # the recording is a widget, and what a click shows are the kernel's numbers
    cell = outputs.nth(0)
    cell.locator(".regard .t").first.wait_for(timeout=60000)
    assert cell.locator("iframe").count() == 0
    cell.locator('[data-pick="head1"]').click()
    cell.locator('.pane.query .t[data-at="4"]').click()
    opened.settle()
    rows = cell.locator(".looks.out li[data-at]").evaluate_all(
        "all => all.map(li => [li.dataset.at, li.dataset.weight])"
    )
    keys, weights = (json.loads(f"[{part}]") for part in printed.inner_text().strip("[]\n ").split("] ["))
    assert [int(at) for at, _ in rows[: len(keys)]] == keys
    assert [float(weight) for _, weight in rows[: len(keys)]] == pytest.approx(weights, abs=2e-5)

    # letters typed in the page are not commands of the notebook
    cell.locator("[data-view=walk]").click()
    cell.locator("#walk-text").fill("")
    cell.locator("#walk-text").press_sequentially("add bad words")
    cell.locator('[data-step="tokens"] th', has_text="words").first.wait_for()
    assert cell.locator("#walk-text").input_value() == "add bad words"
    assert outputs.count() == len(CELLS) + 1  # Shift+Enter in the last cell made one

    # plans, masks and figures show themselves
    assert "backend" in outputs.nth(1).locator("table").inner_text()
    assert outputs.nth(2).locator("svg rect").count() == 144
    assert outputs.nth(3).locator(".jp-RenderedImage img, .jp-RenderedSVG img").count() == 1
    if shot := os.environ.get("REGARD_SHOT"):
        page.screenshot(path=shot)

    # saved, the recording is a page and a picture for readers without a kernel
    page.keyboard.press("Escape")
    page.click(".jp-Notebook .jp-Cell .jp-InputArea-editor")
    page.keyboard.press("Control+s")
    saved: list[Any] = []
    for _ in range(100):
        saved = json.loads(notebook.read_text())["cells"][0]["outputs"]
        if saved:
            break
        time.sleep(0.1)
    kinds = set(saved[-1]["data"])
    assert {"text/plain", "text/html", "image/png", "application/vnd.jupyter.widget-view+json"} <= kinds
    local = ("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:")
    assert [url for url in opened.asked if not url.startswith(local)] == []
    context.close()
