"""How values show themselves in a notebook: a widget where there are widgets, a page in a frame elsewhere, and a
picture where neither runs, as in a notebook that is only read."""

from __future__ import annotations

import base64
import importlib.util
import sys
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regard._page import page
from regard._page._document import as_text
from regard._page._pack import pack
from regard._page._picture import sheet
from regard._page._png import heatmap

if TYPE_CHECKING:
    from regard.recording import Head, Recording

HEIGHT = 620
_MOST_KEYS = 4096  # of a mask that fits one size only
_MOST_CELLS = 32  # rows and columns of a mask that is drawn
_STATISTICS = ("entropy", "max_weight", "key_mass", "map", "top_keys", "top_weights", "distance", "first_mass")


def bundle(shown: Any) -> dict[str, Any]:
    """What a notebook may show for the value, by MIME type."""
    kind = type(shown).__name__
    if kind == "Plan":
        return {"text/plain": str(shown), "text/html": _plan(shown)}
    if kind not in ("Recording", "Head", "Observation"):
        drawn = _mask(shown)
        return {"text/plain": repr(shown), **({"text/html": drawn} if drawn else {})}
    recording, opening = _as_recording(shown)
    if not recording.calls:
        return {"text/plain": repr(shown)}
    picture = base64.b64encode(sheet(recording)).decode()
    html = framed(page(recording, opening=opening, home="cell"), picture)
    if kind == "Head" and "map" in shown.call.parts and shown.map.numel():
        picture = base64.b64encode(heatmap(shown.map.cpu().numpy(), 320)).decode()
    found = {"text/plain": repr(shown), "image/png": picture, "text/html": html}
    return found | _widget(recording, opening)


class Framed:
    """A page in a frame, as HTML."""

    def __init__(self, html: str) -> None:
        self.html = html

    def _repr_html_(self) -> str:
        return self.html


def displayed(shown: Any) -> Any:
    """The widget; where anywidget is not installed, or nothing was recorded, the page in a frame, or words."""
    recording, opening = _as_recording(shown)
    if recording.calls and importlib.util.find_spec("anywidget") is not None:
        return _page_widget(recording, opening)
    found = bundle(shown)
    return Framed(found["text/html"]) if "text/html" in found else found["text/plain"]


def _as_recording(shown: Any) -> tuple[Recording, dict[str, Any]]:
    """What is shown as a recording, on the CPU, and where its page opens."""
    if type(shown).__name__ == "Head":
        return _of_head(shown), {"layer": shown.call.layer, "head": shown.head, "view": "head"}
    if type(shown).__name__ == "Observation":
        return _of_observation(shown), {"view": "overview"}
    return shown.cpu(), {}


def _of_head(head: Head) -> Recording:
    """A recording of the head's call alone."""
    from regard.recording import Recording

    alone = Recording(f"layer {head.call.layer}, head {head.head}")
    call = head.call.cpu()
    alone.sites = [call.site] * (call.layer + 1)
    alone.calls = [call]
    if call.kind == "cross":
        alone.source_tokens, alone.tokens = head.key_tokens, head.query_tokens
    else:
        alone.tokens = head.key_tokens
    return alone


def framed(html: str, picture: str = "") -> str:
    """A page inside another page. Where frames are taken out, as on sites that only show notebooks, the picture that
    lies under it is seen."""
    under = (
        f'<img alt="maps of the heads" style="max-width:100%" src="data:image/png;base64,{picture}">' if picture else ""
    )
    return (
        f'<div style="position:relative;min-height:{HEIGHT}px">{under}'
        f'<iframe title="regard" sandbox="allow-scripts" style="position:absolute;inset:0;width:100%;height:{HEIGHT}px;'
        f'border:0;background:#fff" srcdoc="{escape(html)}"></iframe></div>'
    )


def _page_widget(recording: Recording, opening: dict[str, Any]) -> Any:
    from regard._page._widget import Page

    return Page(data=pack([recording], None, {"open": opening} if opening else None))


def _widget(recording: Recording, opening: dict[str, Any]) -> dict[str, Any]:
    """The widget's own MIME types; nothing outside a kernel, where anywidget is not installed, or in Colab: it shows
    an error in place of widgets that it does not know, where the frame works. Nor where a notebook is run without a
    person (nbconvert --execute, papermill), which nothing can be asked of: what is written then is read elsewhere,
    where a widget would fetch its scripts from a network, or be blank."""
    kernel = getattr(getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)(), "kernel", None)
    if kernel is None or not getattr(kernel, "_allow_stdin", True) or "google.colab" in sys.modules:
        return {}
    try:
        made = _page_widget(recording, opening)._repr_mimebundle_()
    except ImportError:
        return {}
    data: dict[str, Any] = made[0] if isinstance(made, tuple) else (made or {})
    return {name: value for name, value in data.items() if name != "text/plain"}


def _of_observation(observation: Any) -> Recording:
    """One observed call as a recording of one layer, so that it is shown as those are."""
    from regard.recording import Recorded, Recording, Site

    parts = {"lse": observation.lse} | {
        name: vars(observation)[name] for name in _STATISTICS if name in vars(observation)
    }
    parts = {name: part.detach().cpu() for name, part in parts.items()}
    spec, lse = observation.plan.spec, parts["lse"]
    if "top_keys" in parts:
        parts["top_keys"] = parts["top_keys"].to(torch.int32)
    recording = Recording(f"one call on {observation.plan.backend}")
    site = Site("observe", 0)
    recording.sites = [site]
    recording.calls = [
        Recorded(
            site=site,
            layer=0,
            number=0,
            kind="self",
            phase="prefill",
            keys=spec.keys,
            heads=tuple(range(lse.shape[1])),
            positions=torch.tensor([spec.keys - spec.queries]),
            permitted=torch.zeros(1, 1, 1, dtype=torch.int32),  # not known from an observation
            parts=parts,
        )
    ]
    return recording


def _plan(plan: Any) -> str:
    lines = []
    for line in str(plan).splitlines():
        if line[:1].strip():
            # HTML would run together what spaces hold apart
            lines.append([line[:15].strip(), line[15:].strip().replace("   ", " · ")])
        elif lines:
            lines[-1][1] += " " + line.strip()
    rows = "".join(
        f'<tr><th style="text-align:left;vertical-align:top;white-space:nowrap">{as_text(name)}</th>'
        f'<td style="text-align:left">{as_text(text)}</td></tr>'
        for name, text in lines
    )
    return f"<table>{rows}</table>"


def _mask(mask: Any) -> str:
    """The mask as a drawing of squares, for a size that it fits."""
    sizes = [int(tensor.shape[-1]) for tensor in mask.tensors if tensor.dim() and tensor.shape[-1] > 1]
    sums = [int(tensor.sum()) for tensor in mask.tensors if tensor.dtype == torch.int64]  # lengths of documents
    for keys in [12, *(size for size in sizes + sums if 0 < size <= _MOST_KEYS)]:
        rows = [int(t.shape[-2]) for t in mask.tensors if t.dim() > 1 and t.shape[-1] == keys and t.shape[-2] > 1]
        for queries in [*rows, keys]:
            try:
                dense = mask.dense(queries, keys)
            except (ValueError, IndexError, RuntimeError):
                continue
            grid = dense.reshape(-1, *dense.shape[-2:])[0]
            return _squares(grid[:_MOST_CELLS, :_MOST_CELLS].cpu().numpy(), repr(mask), queries, keys)
    return ""


def _squares(grid: np.ndarray[Any, Any], name: str, queries: int, keys: int) -> str:
    rows, columns = grid.shape
    size = 16 if max(rows, columns) <= 16 else 9
    cells = "".join(
        f'<rect x="{size * c}" y="{size * r}" width="{size - 1}" height="{size - 1}" '
        + ('fill="#0e7490"/>' if grid[r, c] else 'fill="none" stroke="#8886"/>')
        for r in range(rows)
        for c in range(columns)
    )
    note = f"{queries} queries from top to bottom, {keys} keys from left to right"
    if (rows, columns) != (queries, keys):
        note += f"; the first {rows} and {columns} are drawn"
    return (
        f"<div><code>{as_text(name)}</code><br>"
        f'<svg role="img" aria-label="{as_text(note)}" width="{size * columns}" height="{size * rows}">{cells}</svg>'
        f"<br><small>{as_text(note)}</small></div>"
    )
