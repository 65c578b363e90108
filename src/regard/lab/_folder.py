"""What `--out` writes: the numbers and the figure of each experiment, and one page that shows them all."""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING

from regard._text import Catalogue, text

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from regard.lab._result import Result, Table

FORMATS = ("png", "svg")
WORDS: Catalogue = {
    "title": ("The attention lab", "注意力实验室"),
    "note": ("What a widely copied note gets wrong", "流传笔记中的错误"),
    "numbers": ("All numbers", "全部数据"),
}
STYLE = """
:root { color-scheme: light dark; }
body { font: 1rem/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
img { max-width: 100%; background: white; border-radius: 4px; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
caption { text-align: left; font-weight: 600; }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
aside { border-left: 4px solid #D55E00; padding-left: 1rem; }
"""


def write(found: Result, folder: Path, kind: str = "png") -> None:
    """`E3.json` and `E3.png`, the same bytes every time."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = json.dumps(found.to_dict(), indent=2, ensure_ascii=False)
    (folder / f"{found.name}.json").write_text(numbers + "\n", encoding="utf-8")
    draw(found, folder / f"{found.name}.{kind}")


def draw(found: Result, file: Path) -> None:
    """The figure, without date and version, and with names inside that do not change from run to run."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": found.name}):
        nothing = {"Date": None} if file.suffix == ".svg" else {"Software": None}
        found.figure().savefig(file, dpi=130, metadata=nothing)


def write_index(found: Iterable[Result], folder: Path, kind: str = "png", lang: str = "en") -> Path:
    """One page with all figures, tables and texts, beside the files it shows."""
    title = text(WORDS, lang, "title")
    parts = [_section(one, kind, lang) for one in found]
    head = f'<meta charset="utf-8"><title>{title}</title><meta name="viewport" content="width=device-width">'
    page = f'<!doctype html><html lang="{lang}"><head>{head}<style>{STYLE}</style></head><body><h1>{title}</h1>'
    file = folder / "index.html"
    file.write_text(page + "\n".join(parts) + "</body></html>\n", encoding="utf-8")
    return file


def _section(found: Result, kind: str, lang: str) -> str:
    def say(key: str) -> str:
        return escape(found.say(key, lang))

    note = ""
    if "claim" in found.words():
        said = f"<p>{say('claim')}</p><p>{say('right')} {say('why')}</p>"
        note = f"<aside><p><b>{text(WORDS, lang, 'note')}</b></p>{said}</aside>"
    tables = "".join(_table(table) for table in found.tables(lang))
    name = found.name
    return (
        f'<section id="{name}"><h2>{name} {say("title")}</h2><p>{say("question")}</p>'
        f'<img src="{name}.{kind}" alt="{say("title")}">{tables}<p>{say("look")}</p>{note}'
        f'<p><a href="{name}.json">{text(WORDS, lang, "numbers")}</a></p></section>'
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.columns) if any(table.columns) else ""
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f"<table><caption>{escape(table.title)}</caption><tr>{head}</tr>{body}</table>"
