"""The page of a recording: one HTML file with everything in it.

``frontend/`` holds its sources; they are built into ``page.js``, which ships with the package. Python writes the data
and the frame around it, and a table that readers without scripts see.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from regard._page._document import as_text, document

if TYPE_CHECKING:
    from regard.recording import Recording

# What can be seen before the script has run, and without it.
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0; background: #fff; color: #1c1e26; }
@media (prefers-color-scheme: dark) { body { background: #14161b; color: #e8eaf0; } }
.plain { max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
.plain table { border-collapse: collapse; width: 100%; }
.plain th, .plain td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #8884; vertical-align: top; }
bdi { overflow-wrap: anywhere; }
.plain bdi { font-family: ui-monospace, monospace; white-space: pre-wrap; background: #8882; }
.wide { overflow-x: auto; }
"""


def page(
    recording: Recording,
    *,
    against: Recording | None = None,
    opening: dict[str, Any] | None = None,
    home: str = "file",
    picture: Any = None,
    patches: tuple[int, int] | None = None,
) -> str:
    """The recording as HTML. Tokens are data, and nothing but data: no element of the file depends on what they say.

    Args:
        against: a second recording, to compare with.
        opening: where the page opens: ``layer``, ``head``, ``view``, ``lang``, ``theme``.
        home: "file", or "cell" inside a notebook.
        picture, patches: what a vision model was given, and how many rows and columns of patches it was cut into.
    """
    from regard._page._pack import pack  # reads tensors: the walkthrough uses this package without torch

    extra: dict[str, Any] = {}
    if picture is not None:
        from regard._page._image import with_picture

        recording, extra = with_picture(recording, picture, patches)
    recordings = [recording, *([against] if against is not None else [])]
    wanted = {name: value for name, value in (opening or {}).items() if value is not None}
    if wanted:
        extra["open"] = wanted
    packed = pack(recordings, None, extra)
    place = f'id="regard" data-home="{home}"'
    return stand_alone(recording.title, [_summary(recording)], "regard-data", packed, wanted.get("lang", "en"), place)


def stand_alone(title: str, plain: Iterable[str], name: str, data: bytes, lang: str, place: str = 'id="regard"') -> str:
    """The file of a page: data that the front end looks for under a name, and what readers without scripts see."""
    body = [
        f'<div {place}><noscript><div class="plain">',
        f"<h1>{as_text(title)}</h1>",
        *plain,
        "</div></noscript></div>",
        f'<script type="text/plain" id="{name}">{base64.b64encode(data).decode()}</script>',
    ]
    return document(title, STYLE, body, lang, script())


@cache
def script() -> str:
    """The front end: one module, without a line that could end the element it stands in."""
    return files("regard._page").joinpath("page.js").read_text(encoding="utf-8")


def _summary(recording: Recording) -> str:
    """One row per layer, as the terminal shows it."""
    from regard.recording._summary import short

    summary = recording.summary()
    numbers = ("layer", "calls", "entropy", "first key", "≈ distance")
    rows = []
    for row in summary.rows:
        tokens = ", ".join(f"{_token(token)} {share:.0%}" for token, share in row["most_attended"])
        # equal tokens are added up: the places that this frees stay, so that the elements do not depend on the text
        tokens += _token("") * (3 - len(row["most_attended"]))
        heads = "; ".join(f"{name}: {', '.join(map(str, found))}" for name, found in row["heads"].items())
        cells = short(row, with_value=False)
        rows.append(
            "<tr>"
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + f"<td>{tokens}</td><td>{heads}</td><td>{as_text(row['path'])} ({row['kind']})</td></tr>"
        )
    notes = "".join(f"<p>{as_text(note)}</p>" for note in [summary.thresholds, *summary.notes])
    return (
        f'<div class="wide"><table><thead><tr>{"".join(f"<th>{name}</th>" for name in numbers)}'
        "<th>most attended</th><th>heads</th><th>module</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>{notes}"
    )


def _token(token: str) -> str:
    return f"<bdi>{as_text(token if len(token) <= 200 else token[:199] + '…')}</bdi>"
