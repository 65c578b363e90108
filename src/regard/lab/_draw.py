"""Pieces that the figures share. Matplotlib is loaded here, when the first figure is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from regard.lab._labels import translate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from regard._display.texts import Catalogue
    from regard.lab._result import Matrix

# Okabe and Ito's colours: people who cannot tell red from green can tell these.
BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#737373"


def drawn(draw: Callable[[], Figure], lang: str, words: Catalogue) -> Figure:
    """What `draw` makes, in a language. It draws in English; words are those of the experiment."""
    try:
        from regard._display.figures import lettered
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install matplotlib") from error
    with lettered(lang):
        made = draw()
        if lang == "zh":
            translate(made, dict(words.values()))
    return made


def figure(width: float, height: float, title: str) -> Figure:
    """An empty figure whose title says what was found."""
    from regard._display.figures import Figure

    made = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    made.suptitle(title, fontsize=12, fontweight="bold", parse_math=False)
    return made


def heatmap(
    axes: Axes,
    values: Matrix,
    title: str,
    *,
    columns: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    digits: int | None = 2,
    most: float = 1.0,
) -> Any:
    """Weights from 0 to `most`, written into their cells when `digits` are asked for.

    A weight of exactly 0 is a pair that a mask forbids: its cell stays grey.
    """
    import numpy as np

    shown = np.ma.masked_equal(values, 0.0)
    axes.set_facecolor("0.88")
    picture = axes.imshow(shown, cmap="viridis", vmin=0.0, vmax=most, aspect="auto")
    axes.set_title(title, fontsize=10)
    axes.set_xticks(range(len(values[0])), list(columns) if columns is not None else None)
    axes.set_yticks(range(len(values)), list(names) if names is not None else None)
    axes.tick_params(length=0, labelsize=9)
    for r, row in enumerate(values if digits is not None else ()):
        for c, value in enumerate(row):
            if value == 0.0:
                continue
            colour = "black" if value > 0.55 * most else "white"
            axes.text(c, r, f"{value:.{digits}f}", ha="center", va="center", color=colour, fontsize=9)
    return picture


def tidy(axes: Axes, *, x: str, y: str, title: str = "") -> None:
    """Names of the axes, and no frame where there is no axis."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
