"""Matplotlib's figure, which a notebook shows without being told to (``%matplotlib inline`` is not needed).

Loads matplotlib: imported where a figure is made.
"""

from __future__ import annotations

import io

from matplotlib.figure import Figure as Base


class Figure(Base):
    def _repr_png_(self) -> bytes:
        made = io.BytesIO()
        self.savefig(made, format="png", dpi=self.dpi)
        return made.getvalue()
