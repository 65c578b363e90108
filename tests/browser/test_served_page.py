"""The local page in a browser: it lists, opens, compares, looks and asks for exact detail."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from tests._serve.small import Looks, Small, looks_at, served
from tests.browser.conftest import Opened
from tests.browser.recordings import sentence

TEXT = " ".join(f"word{n}" for n in range(150))


@pytest.fixture
def small() -> Small:
    return Small()


@pytest.fixture
def page(tmp_path: Path, small: Small) -> Iterator[tuple[str, Looks]]:
    sentence(title="one").save(tmp_path / "one.regard")
    sentence(seed=1, title="two").save(tmp_path / "two.regard")
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    host = f"127.0.0.1:{listener.getsockname()[1]}"
    looks = looks_at(tmp_path, small)
    config = uvicorn.Config(served(looks, tmp_path, host), log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://{host}/", looks
    server.should_exit = True
    thread.join(10)


def test_the_local_page_lists_opens_compares_looks_and_asks_for_detail(
    browser: Any, page: tuple[str, Looks], tmp_path: Path
) -> None:
    address, looks = page
    (tmp_path / "\u202egnp.regard").write_bytes(b"")
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = Opened(context.new_page())
    page = opened.page
    page.goto(address)
    page.wait_for_selector(".recordings")
    assert sorted(page.eval_on_selector_all(".recordings .file", "all => all.map(one => one.textContent)")) == [
        "one.regard",
        "two.regard",
        "\ufffdgnp.regard",  # a name that would turn itself around is shown as it is
    ]
    # what it is of, where it says so; a file that is no recording has its name alone
    assert page.inner_text('[data-name="one.regard"] > bdi') == "one"
    assert page.inner_text('[data-name="\u202egnp.regard"] > bdi') == "\ufffdgnp.regard"
    for view, step in (("walk", '[data-step="normed"]'), ("cost", "[data-cost=cache]")):
        page.click(f"[data-learn={view}]")
        page.wait_for_selector(step)
        page.click("header > .chip")
        page.wait_for_selector(".recordings")
    page.click('[data-name="one.regard"]')
    page.wait_for_selector(".t")
    assert page.inner_text("h1") == "one"
    # the way back, also the browser's own, keeps language and theme
    page.click("text=中文")
    page.click("[aria-label=明暗]")
    page.click("header > .chip")
    page.wait_for_selector(".recordings")
    assert page.inner_text(".recordings .chip >> nth=0") == "对比"
    assert page.get_attribute(".regard", "data-theme") == "dark"
    page.click('[data-name="one.regard"]')
    page.wait_for_selector(".t")
    assert page.get_attribute(".regard", "data-theme") == "dark"
    page.go_back()
    page.wait_for_selector(".recordings")
    page.click("text=English")
    page.wait_for_selector("text=Look at a text")
    assert page.inner_text(".status") == ""
    page.click('[aria-label="compare one.regard"]')
    page.wait_for_selector('[aria-pressed="true"]')
    assert page.inner_text(".status") == "Choose another one to compare it with."
    page.click('[aria-label="compare two.regard"]')
    page.wait_for_selector(".three")
    assert "two" in page.inner_text(".three section:nth-child(2) h2")
    page.click("header > .chip")
    page.fill("#text", TEXT)
    page.click("#begin")
    page.wait_for_selector(".t", timeout=30000)
    assert page.eval_on_selector(".tokens", "one => one.textContent").split() == TEXT.split()
    opened.pick("head1") if page.get_attribute('[data-pick="head1"]', "aria-pressed") != "true" else None
    opened.view("head")
    for _ in range(4):
        page.click('[aria-label="Zoom in"]')
    page.wait_for_selector('.exactness:text-is("Exact weights")', timeout=30000)
    # what was saved has them too, in a page that is opened later, as long as the model is there
    looks._made.clear()
    page.goto(address)
    page.click('[data-name="small-1.regard"]')
    page.wait_for_selector(".t")
    opened.pick("head1") if page.get_attribute('[data-pick="head1"]', "aria-pressed") != "true" else None
    opened.view("head")
    assert "exact weights in view are computed" in page.inner_text(".panel")
    page.wait_for_selector('.exactness:text-is("Exact weights")', timeout=30000)
    # the scale goes up to the largest single weight, not to the largest mean of the stored map
    layer = int(re.findall(r"Layer (\d+)", page.inner_text(".panel h2"))[0])
    largest = looks._made["small-1.regard"][0][layer, 1].top_weights.max()
    assert float(page.inner_text(".scale").split()[-2]) == pytest.approx(100 * float(largest), rel=0.01)
    # and a recording of which nobody knows the model says what its zoom shows
    sentence([f"word{n}" for n in range(150)], title="long").save(looks._folder.root / "long.regard")
    page.goto(address)
    page.click('[data-name="long.regard"]')
    page.wait_for_selector(".t")
    opened.view("head")
    assert "each query's 8 largest weights and, behind them, means" in page.inner_text(".panel")
    assert all(url.startswith((address, "blob:")) for url in opened.asked)
    assert opened.said == []
    context.close()
    assert looks.state()["state"] == "done"


def test_a_look_shows_its_progress_and_can_be_cancelled(browser: Any, page: tuple[str, Looks], small: Small) -> None:
    address, looks = page
    context = browser.new_context()
    opened = Opened(context.new_page())
    page = opened.page
    page.goto(address)
    page.wait_for_selector("#begin")
    assert not page.is_visible("#cancel")  # there is nothing to cancel yet
    small.go.clear()
    page.click("#begin")
    page.wait_for_selector("progress")
    assert "layer 0 of 2" in page.inner_text(".status")
    page.reload()  # a page that is opened meanwhile follows it too
    page.wait_for_selector("progress")
    page.click("#cancel")
    page.wait_for_selector("text=Cancelled.")
    small.go.set()
    looks.wait(20)
    assert not page.is_visible("#cancel")
    assert page.eval_on_selector_all(".recordings .file", "all => all.length") == 2
    page.select_option("#model", "broken")
    page.click("#begin")
    page.wait_for_selector("text=no model can be loaded from it")
    assert opened.said == []
    # without a model too, a file that cannot be opened says why
    small.names = lambda folder: []  # type: ignore[method-assign]
    (looks._folder.root / "bad.regard").write_bytes(b"no")
    page.reload()
    page.click('[data-name="bad.regard"]')
    page.wait_for_selector("text=bad.regard is not a recording that can be read")
    context.close()
