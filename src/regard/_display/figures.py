"""Matplotlib's figure, which a notebook shows without being told to (``%matplotlib inline`` is not needed).

Loads matplotlib: imported where a figure is made.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

from matplotlib import font_manager, rc_context
from matplotlib.figure import Figure as Base

# Fonts that have Chinese letters: Linux, macOS, Windows
_CHINESE = (
    "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "PingFang SC",
    "Heiti SC", "STHeiti", "Hiragino Sans GB", "Microsoft YaHei", "SimHei", "Noto Sans CJK JP",
)  # fmt: skip


@contextlib.contextmanager
def lettered(lang: str) -> Iterator[None]:
    """While the block draws, labels have a font with the letters of the language; matplotlib's own has no Chinese."""
    if lang != "zh":
        yield
        return
    if not (found := _there()):
        for file in font_manager.findSystemFonts():  # installed since matplotlib made its list
            if re.search(r"cjk|wqy|hei|notosanssc|sourcehan|pingfang|hiragino|msyh", Path(file).name, re.IGNORECASE):
                with contextlib.suppress(RuntimeError, OSError):
                    font_manager.fontManager.addfont(file)
        found = _there()
    if not found:
        raise ValueError(
            "figures in Chinese need a font that has its letters, and matplotlib finds none here: install one "
            "(apt install fonts-noto-cjk), or draw them in English"
        )
    with rc_context({"font.family": [found[0], "DejaVu Sans"]}):
        yield


def _there() -> list[str]:
    known = {font.name for font in font_manager.fontManager.ttflist}
    return [name for name in _CHINESE if name in known]


class Figure(Base):
    def _repr_png_(self) -> bytes:
        made = io.BytesIO()
        self.savefig(made, format="png", dpi=self.dpi)
        return made.getvalue()
