"""How values display themselves in a notebook; the page is imported by name, and only then.

Plans, masks and observations lie below the page and must not import it; this one line up exists while they are shown.
"""

from __future__ import annotations

import importlib
from typing import Any


def mimebundle(shown: object) -> dict[str, Any]:
    """Text, picture, HTML and widget of a value, by MIME type: what ``_repr_mimebundle_`` gives."""
    notebook: Any = importlib.import_module("regard._page._notebook")
    found: dict[str, Any] = notebook.bundle(shown)
    return found


def displayed(shown: object) -> Any:
    """The widget of a value, which marimo asks for by ``_display_``."""
    return importlib.import_module("regard._page._notebook").displayed(shown)
