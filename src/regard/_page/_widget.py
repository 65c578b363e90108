"""The page as a widget: the same module, given its data by the kernel."""

from __future__ import annotations

import anywidget
import traitlets

from regard._page import script


class Page(anywidget.AnyWidget):  # type: ignore[misc]
    _esm = script()
    data = traitlets.Bytes(b"").tag(sync=True)
