"""The page's own bars: how large files are, how soon the text is there, how long a click takes, in headless Chromium.

    python benchmarks/page.py

Statistics are random, so nothing in the files can be squeezed: real recordings make smaller ones. Times are medians of
three openings and of eight clicks; a click is measured from the event to the end of what it does.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from playwright.sync_api import sync_playwright
from tests._page.test_page_data import random_recording

CASES = [(6, 12, 12), (6, 12, 512), (30, 9, 8192), (2, 4, 131_072)]
CLICK = """() => {
  const tokens = [...document.querySelectorAll('.t')], times = [];
  for (let at = 0; at < 8; at++) {
    const before = performance.now();
    tokens[(3 + 2 * at) % tokens.length].click();
    document.body.getBoundingClientRect();
    times.push(performance.now() - before);
  }
  return times;
}"""


def opened(browser: Any, file: Path) -> tuple[float, float]:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(file.as_uri())
    page.wait_for_selector(".t")
    shown = page.evaluate("performance.getEntriesByName('regard-shown')[0].startTime")
    page.wait_for_timeout(800)
    clicks = page.evaluate(CLICK)
    page.close()
    return shown, statistics.median(clicks)


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    print("layers  heads   tokens   file (MB)   text shown (ms)   click (ms)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for layers, heads, length in CASES:
            file = folder / f"{layers}-{heads}-{length}.html"
            random_recording(layers, heads, length).to_html(file)
            runs = [opened(browser, file) for _ in range(3)]
            shown, click = (statistics.median(column) for column in zip(*runs, strict=True))
            size = file.stat().st_size / 1e6
            print(f"{layers:6d} {heads:6d} {length:8d} {size:11.2f} {shown:17.0f} {click:12.1f}", flush=True)
        browser.close()


if __name__ == "__main__":
    main()
