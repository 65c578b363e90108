"""What `--out` writes: the numbers and the figure of each experiment, and one page that shows them all."""

from __future__ import annotations

import base64
import json
import re
from typing import TYPE_CHECKING

from regard._display.texts import Catalogue, text
from regard._files.write import write_atomically
from regard._page._document import as_text, document
from regard.lab._story import WORDS as SHARED

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from regard.lab._result import Result

TYPES = {"png": "image/png", "svg": "image/svg+xml"}
FORMATS = tuple(TYPES)
WORDS: Catalogue = {
    "title": ("The attention lab", "注意力实验室"),
    "numbers": ("All numbers", "全部数据"),
}
STYLE = """
:root { color-scheme: light dark; }
body { font: 1rem/1.6 system-ui, "Noto Sans SC", "PingFang SC", "Microsoft YaHei", sans-serif;
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
img { max-width: 100%; background: white; border-radius: 4px; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
caption { text-align: left; font-weight: 600; white-space: nowrap; }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
aside { border-left: 4px solid #D55E00; padding-left: 1rem; }
"""


def write(found: Result, folder: Path, kind: str = "png", lang: str = "en") -> None:
    """`E3.json` and `E3.png`, the same bytes every time."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = json.dumps(found.to_dict(lang), indent=2, ensure_ascii=False)
    write_atomically(folder / f"{found.name}.json", [numbers.encode(), b"\n"])
    draw(found, folder / f"{found.name}.{kind}", lang)


def draw(found: Result, file: Path, lang: str = "en") -> None:
    """The figure, without date and version, and with names inside that do not change from run to run."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": found.name}):
        nothing = {"Date": None} if file.suffix == ".svg" else {"Software": None}
        found.figure(lang).savefig(file, dpi=130, metadata=nothing)


def write_index(found: Iterable[Result], folder: Path, kind: str = "png", lang: str = "en") -> Path:
    """One page with all figures, tables and texts: the figures are inside, so that it can be sent on alone."""
    title = text(WORDS, lang, "title")
    parts = [f"<h1>{as_text(title)}</h1>", *(_section(one, folder, kind, lang) for one in found)]
    page = document(title, STYLE, parts, lang)
    file = folder / "index.html"
    write_atomically(file, [page.encode()])
    return file


def _section(found: Result, folder: Path, kind: str, lang: str) -> str:
    def say(key: str) -> str:
        return _with_code(found.say(key, lang))

    note = ""
    if "claim" in found.words():
        said = f"<p>{say('claim')}</p><p>{say('right')} {say('why')}</p>"
        note = f"<aside><p><b>{text(SHARED, lang, 'note')}</b></p>{said}</aside>"
    look = "".join(f"<p>{_with_code(paragraph)}</p>" for paragraph in found.say("look", lang).split("\n\n"))
    tables = "".join(table.html() for table in found.tables(lang))
    name = found.name
    picture = base64.b64encode((folder / f"{name}.{kind}").read_bytes()).decode()
    inside = f"data:{TYPES[kind]};base64,{picture}"
    return (
        f'<section id="{name}"><h2>{name} {say("title")}</h2><p>{say("question")}</p>'
        f'<img src="{inside}" alt="{say("title")}">{tables}{look}{note}'
        f'<p><a href="{name}.json">{text(WORDS, lang, "numbers")}</a></p></section>'
    )


def _with_code(line: str) -> str:
    """A text whose `quoted` parts are code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", as_text(line))
