"""Draws the picture of the walkthrough's page: two of its steps, as a terminal shows them.

python docs/pictures/walk.py
"""

from __future__ import annotations

import io
import re
from functools import partial
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from regard._display.texts import text
from regard._walk import Settings, walk_text
from regard._walk._terminal import Page
from regard._walk._words import STEPS

HERE = Path(__file__).parent
COLUMNS = 112
SHOWN = ("scores", "weights")


def draw() -> str:
    console = Console(record=True, width=COLUMNS, force_terminal=True, color_system="truecolor", file=io.StringIO())
    page = Page(COLUMNS, True, partial(text, STEPS, "en"))
    for index, step in enumerate(walk_text("The cat sat on the mat.", Settings(causal=True)).steps, 1):
        if step.name in SHOWN:
            console.print(*page.step(index, step), sep="\n")
    # without the fonts that the template would fetch from elsewhere
    template = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    title = 'regard walk "The cat sat on the mat." --causal'
    drawn = console.export_svg(title=title, code_format=template, unique_id="walk")
    return "\n".join(line.rstrip() for line in drawn.splitlines() if line.strip()) + "\n"


if __name__ == "__main__":
    (HERE / "walk.svg").write_text(draw(), encoding="utf-8")
