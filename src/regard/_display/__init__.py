"""How values display themselves: in a notebook, and as text.

Plans, masks and observations lie below the page and must not import it; it is imported by name, while they are shown.
"""

from __future__ import annotations

import importlib
import io
from typing import Any


class Displayed:
    """Shows itself in a notebook: text, picture, HTML and widget, by MIME type."""

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        notebook: Any = importlib.import_module("regard._page._notebook")
        found: dict[str, Any] = notebook.bundle(self)
        return found


class Widget(Displayed):
    """Has a widget, which marimo asks for."""

    def _display_(self) -> Any:
        return importlib.import_module("regard._page._notebook").displayed(self)


class Printed:
    """What rich draws, as text: 120 columns, no colours."""

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=120, no_color=True, force_jupyter=False).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines()).strip("\n")

    def __repr__(self) -> str:
        return str(self)
