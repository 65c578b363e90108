"""A real browser for the page's tests: Chromium, through Playwright.

Where there is none, the tests say so and are skipped: `apt-get install chromium`, or `playwright install chromium`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from regard.recording import Recording

AXE = Path(__file__).parents[2] / "frontend" / "node_modules" / "axe-core" / "axe.min.js"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="the page's tests need Playwright: pip install playwright"
    )
    found = (
        os.environ.get("CHROMIUM")
        or shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    with sync_api.sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path=found, args=FLAGS)
        except sync_api.Error as error:
            pytest.skip(f"no Chromium could be started (apt-get install chromium): {str(error).splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture(scope="session")
def axe() -> str:
    if not AXE.is_file():
        pytest.skip("axe-core is not installed: npm ci in frontend/ (make does it where there is npm)")
    return AXE.read_text()


class Opened:
    """A page in the browser, and everything it said or asked for."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: None if _of_the_test(message.text) else self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("dialog", lambda dialog: (self.said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: self.asked.append(request.url))

    def view(self, name: str) -> None:
        self.page.click(f"[data-view={name}]")
        self.settle()

    def settle(self) -> None:
        """Two frames: what was asked for is drawn."""
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def wait_until(self, condition: str) -> None:
        """Until an expression is true. Playwright's own way evaluates text in the page, which the policy forbids."""
        self.page.evaluate(
            f"""() => new Promise(done => {{
              const look = () => ({condition}) ? done() : requestAnimationFrame(look);
              look();
            }})"""
        )

    def pick(self, name: str) -> None:
        self.page.click(f'[data-pick="{name}"]')
        self.settle()

    def word(self, at: int, side: str = "query") -> None:
        self.page.click(f'.pane.{side} .t[data-at="{at}"]')
        self.settle()

    def listed(self, which: str = "out") -> list[tuple[int, float]]:
        """What the panel lists: places and weights."""
        rows = self.page.eval_on_selector_all(
            f".looks.{which} li[data-at]", "all => all.map(li => [li.dataset.at, li.dataset.weight])"
        )
        return [(int(at), float(weight)) for at, weight in rows]

    def pixels(self, selector: str) -> list[list[int]]:
        """The colours of a canvas, each once, most frequent first: [red, green, blue, alpha, how many]."""
        return self.page.eval_on_selector(selector, COUNT)


def _of_the_test(message: str) -> bool:
    """Chromium remarks on pixels being read, which only these tests do."""
    return message.startswith("Canvas2D: Multiple readback operations")


COUNT = """canvas => {
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data, found = new Map();
  for (let at = 0; at < data.length; at += 4) {
    const key = data[at] + ',' + data[at + 1] + ',' + data[at + 2] + ',' + data[at + 3];
    found.set(key, (found.get(key) ?? 0) + 1);
  }
  return [...found].sort((a, b) => b[1] - a[1]).map(([key, count]) => [...key.split(',').map(Number), count]);
}"""


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Write a recording's page, open it from the disk, and see that it said nothing and asked for nothing."""
    contexts, opened = [], []

    def opener(
        recording: Recording,
        *,
        size: tuple[int, int] = (1280, 900),
        dark: bool = False,
        touch: bool = False,
        **options: Any,
    ) -> Opened:
        file = tmp_path / f"page{len(opened)}.html"
        recording.to_html(file, **options)
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if dark else "light",
            has_touch=touch,
        )
        contexts.append(context)
        found = Opened(context.new_page())
        opened.append(found)
        found.page.goto(file.as_uri())
        found.page.wait_for_selector(".regard main > *")
        found.settle()
        return found

    yield opener
    for found in opened:
        assert found.said == []
        assert [url for url in found.asked if not url.startswith("file:")] == []
        assert len(found.asked) == 1
    for context in contexts:
        context.close()
