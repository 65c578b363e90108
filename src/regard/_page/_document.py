"""An HTML file that stands alone: its own style and script, no requests, and text that is only ever text."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape

from regard._display.texts import visible


def document(
    title: str, style: str, body: Iterable[str], lang: str = "en", script: str = "", sources: Sequence[str] = ()
) -> str:
    """The whole file. Its policy lets this one style sheet, this one script (where there is one), pictures inside the
    file and these `sources` through, and nothing else."""
    allowed = [f"style-src '{_digest(style)}'", "img-src data:", "base-uri 'none'", "form-action 'none'"]
    if script:
        allowed.insert(0, f"script-src '{_digest(script)}'")
    policy = "; ".join(["default-src 'none'", *sources, *allowed])
    parts = [
        f'<!doctype html><html lang="{"zh-CN" if lang == "zh" else "en"}"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        f"<title>{as_text(title)}</title><style>{style}</style></head><body>",
        *body,
        *([f'<script type="module">{script}</script>'] if script else []),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def served(title: str, lang: str) -> str:
    """The frame of the local page: its script and its data come from the server that gave it."""
    frame = f'<div id="regard-server" data-lang="{escape(lang)}"></div><script type="module" src="/page.js"></script>'
    return document(title, "body { margin: 0 }", [frame], lang, sources=("script-src 'self'", "connect-src 'self'"))


def as_text(given: str) -> str:
    """Text as data: markup is escaped, control characters become visible, halves of surrogate pairs are replaced."""
    return escape(visible(given))


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
