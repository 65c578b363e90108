"""The page's own bars: how large files are, how soon the text is there, how long a click takes, in headless Chromium.

python benchmarks/page.py [--quick] [--save]

Statistics are random, so nothing in the files can be squeezed: real recordings make smaller ones. The text is there
when the browser has painted it, counted from the start of the navigation. A click counts from the event to the end of
the frame that draws its lines, so it includes the wait for that frame. Times are medians of five openings, and of eight
clicks in each. They are wall-clock times: a busy machine needs a quiet moment, or priority for the browser.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from playwright.sync_api import sync_playwright
from tests._page.test_page_data import random_recording

from _harness import RESULTS, Row, main

# layers, heads of each, tokens, and the bar of the file in MB
CASES = [(6, 12, 12, 0.4), (6, 12, 512, 2.0), (30, 9, 8192, 6.0), (2, 4, 131_072, 6.0)]
SHOWN = """async () => {
  for (;;) {
    const marks = ['regard-shown', 'first-contentful-paint'].map(name => performance.getEntriesByName(name)[0]);
    if (marks.every(Boolean)) return Math.max(...marks.map(mark => mark.startTime));
    await new Promise(done => setTimeout(done, 20));
  }
}"""
CLICKS = """async () => {
  const tokens = [...document.querySelectorAll('.t')], times = [];
  for (let at = 0; at < 8; at++) {
    const before = performance.now();
    tokens[(3 + 2 * at) % tokens.length].click();
    // the page draws in the next frame; what is asked for later in that frame runs after it
    await new Promise(done => requestAnimationFrame(done));
    times.push(performance.now() - before);
  }
  return times;
}"""


class Sizes:
    """What a full run measures, and what --quick makes of it."""

    def __init__(self, quick: bool) -> None:
        self.rounds = 1 if quick else 5
        self.cases = CASES[:2] if quick else CASES


def opened(browser: Any, file: Path) -> tuple[float, list[float]]:
    """Milliseconds until the text is there, and of each click."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(file.as_uri())
    shown = page.evaluate(SHOWN)
    page.wait_for_timeout(800)
    clicks = page.evaluate(CLICKS)
    page.close()
    return shown, clicks


def measured(sizes: Sizes) -> Iterator[Row]:
    folder = Path(tempfile.mkdtemp())
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for layers, heads, length, bar in sizes.cases:
            name = f"{layers} × {heads} heads, {length} tokens"
            file = folder / "page.html"
            random_recording(layers, heads, length).to_html(file)
            yield Row("page", f"{name}: file", file.stat().st_size / 1e6, "MB", bar)
            runs = [opened(browser, file) for _ in range(sizes.rounds)]
            shown = [first for first, _ in runs]
            yield Row("page", f"{name}: text is there", statistics.median(shown), "ms", 1000, samples={"ours": shown})
            clicks = [time for _, times in runs for time in times]
            yield Row("page", f"{name}: click", statistics.median(clicks), "ms", 50, samples={"ours": clicks})
        browser.close()
    shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main(__doc__, {"page": measured}, Sizes, RESULTS / "page.json", {"browser": "headless Chromium"}))
