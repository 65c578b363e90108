"""A page as a string that shows itself, and ways to show it."""

from __future__ import annotations

import re
import sys
import tempfile
import webbrowser
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard._display.texts import LANGUAGES
from regard._files.write import write_atomically
from regard._page import page

if TYPE_CHECKING:
    from regard.recording import Recording


class Page(str):
    """The HTML of a page. It shows itself in a notebook, and as one line elsewhere; ``print`` gives the source."""

    __slots__ = ()

    def __repr__(self) -> str:
        title = re.search(r"<title>(.*?)</title>", self, re.DOTALL)
        name = unescape(title[1]) if title else "page"
        return f"<Page of {name}: {len(self) / 1000:.0f} kB; .show() opens it>"

    def _repr_html_(self) -> str:
        from regard._page._notebook import framed

        return framed(self.replace('data-home="file"', 'data-home="cell"', 1))

    def show(self) -> None:
        """In the notebook's cell, or in the browser."""
        show(self)


def written(
    recording: Recording,
    path: str | Path | None,
    against: Recording | None,
    opening: dict[str, Any],
    picture: Any = None,
    patches: tuple[int, int] | None = None,
) -> Page:
    """The page of a recording, checked and written where a path is given."""
    if opening["lang"] not in LANGUAGES:
        raise ValueError(f"lang is {opening['lang']!r}; expected one of {', '.join(LANGUAGES)}")
    layer, head = opening["layer"], opening["head"]
    if layer is not None:
        opening["layer"] = layer = recording._layer(layer)
    if head is not None:
        recording.select(0 if layer is None else layer, head)
    if opening["lang"] == "en":
        opening = {name: value for name, value in opening.items() if name != "lang"}
    other = None if against is None else against.cpu()
    made = Page(page(recording.cpu(), against=other, opening=opening, picture=picture, patches=patches))
    if path is not None:
        write_atomically(Path(path), [made.encode("utf-8")])
    return made


def show(made: Page) -> None:
    """Show a page where its reader is: in a notebook's cell, else in a browser."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and hasattr(shell, "kernel"):
        from IPython.display import display

        display(made)
        return
    folder = Path(tempfile.mkdtemp(prefix="regard-"))
    file = folder / "page.html"
    file.write_text(made, encoding="utf-8")
    if not open_in_browser(file):
        sys.stderr.write(f"no browser could be opened; open {file} in one\n")


def open_in_browser(file: Path) -> bool:
    """Open a file in the reader's browser; False where there is none."""
    return webbrowser.open(file.resolve().as_uri())
