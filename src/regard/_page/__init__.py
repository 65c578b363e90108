"""The page that ``Recording.to_html`` writes: one file, no scripts, no requests."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from regard._page._document import as_text, document
from regard._page._png import heatmap

if TYPE_CHECKING:
    from regard.recording import Head, Recorded, Recording

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #8884; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.heads { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: 1rem; margin: 1rem 0; }
figure { margin: 0; min-width: 0; }
img { width: 100%; aspect-ratio: 1; image-rendering: pixelated; display: block; background: #440154; }
figcaption { font-size: .85em; overflow-wrap: anywhere; }
.label { font-weight: 600; }
bdi { font-family: ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; background: #8882; }
summary { cursor: pointer; font-weight: 600; padding: .4rem 0; overflow-wrap: anywhere; }
.note { opacity: .75; font-size: .9em; }
.wide { overflow-x: auto; }
"""


_LEGEND = (
    "A picture is a head: queries from top to bottom, keys from left to right, brighter where more weight lies. "
    "Brightness goes with the square root, and each picture's largest cell is the brightest."
)


def page(recording: Recording) -> str:
    """The recording as HTML. Tokens are text, and nothing but text: no element depends on what they say."""
    layers = [recording.at(layer) for layer in range(len(recording.sites))]
    body = [
        f"<h1>{as_text(recording.title)}</h1>",
        _summary(recording),
        f'<p class="note">{_LEGEND}</p>',
        *(_layer(recording, calls, index == 0) for index, calls in enumerate(layers) if calls),
    ]
    return document(recording.title, _STYLE, body)


def _summary(recording: Recording) -> str:
    summary = recording.summary()
    numbers = ("layer", "calls", "entropy", "first key", "≈ distance")
    head = "".join(f'<th class="n">{name}</th>' for name in numbers)
    rows = []
    for row in summary.rows:
        tokens = ", ".join(f"{_token(token)} {share:.0%}" for token, share in row["most_attended"])
        # equal tokens are added up: the places that this frees stay, so that the elements do not depend on the text
        tokens += _token("") * (3 - len(row["most_attended"]))
        heads = "; ".join(f"{name}: {', '.join(map(str, found))}" for name, found in row["heads"].items())
        cells = [row["layer"], row["calls"], *(_number(row[name], how) for name, how in _NUMBERS)]
        rows.append(
            "<tr>"
            + "".join(f'<td class="n">{cell}</td>' for cell in cells)
            + f"<td>{tokens}</td><td>{heads}</td><td>{as_text(row['path'])} ({row['kind']})</td></tr>"
        )
    notes = "".join(f'<p class="note">{as_text(note)}</p>' for note in [summary.thresholds, *summary.notes])
    return (
        f'<div class="wide"><table><thead><tr>{head}<th>most attended</th><th>heads</th><th>module</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{notes}"
    )


_NUMBERS = (("entropy", "{:.2f}"), ("first", "{:.0%}"), ("distance", "{:.1f}"))


def _layer(recording: Recording, calls: list[Recorded], is_open: bool) -> str:
    """The first call of a layer, for the first item of the batch: a picture a head."""
    call = calls[0]
    described = {row["head"]: row for row in recording.described(call) if row["item"] == 0}
    figures = "".join(_figure(recording.select(call.layer, head), described[head]) for head in call.heads)
    what = f"{call.kind} attention, {call.queries} queries, {call.keys} keys"
    more = [f"first of {n} {name}" for n, name in ((len(calls), "calls"), (call.batch, "items of the batch")) if n > 1]
    what = ", ".join([what, *more])
    return (
        f"<details{' open' if is_open else ''}><summary>Layer {call.layer}: {as_text(call.path)} ({what})</summary>"
        f'<div class="heads">{figures}</div></details>'
    )


def _figure(head: Head, row: dict[str, Any]) -> str:
    picture = ""
    if "map" in head.call.parts and head.map.numel():
        data = base64.b64encode(heatmap(head.map.cpu().numpy())).decode()
        picture = f'<img alt="map of head {head.head}" src="data:image/png;base64,{data}">'
    numbers = ", ".join(
        f"{name} {_number(row[key], how)}"
        for name, key, how in (("entropy", "entropy", "{:.2f}"), ("largest weight", "max_weight", "{:.2f}"))
    )
    tokens = ""
    if "key_mass" in head.call.parts:
        tokens = "<br>" + ", ".join(f"{_token(token)} {share:.0%}" for token, share in head.top_tokens(3))
    label = f' <span class="label">{row["label"]}</span>' if row["label"] else ""
    return f"<figure>{picture}<figcaption>head {head.head}{label}<br>{numbers}{tokens}</figcaption></figure>"


def _number(value: float | None, how: str) -> str:
    return "–" if value is None else how.format(value)


def _token(token: str) -> str:
    return f"<bdi>{as_text(token)}</bdi>"
