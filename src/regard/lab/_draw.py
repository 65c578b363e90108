"""Pieces that the figures share. Matplotlib is loaded here, when the first figure is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.lab._labels import translate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Figure

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


def subplots(width: float, height: float, title: str, columns: int = 1, **grid: Any) -> tuple[Figure, Any]:
    """A figure whose title says what was found, and its axes: one, or an array where there are several columns."""
    from regard._display.figures import Figure

    made = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    made.suptitle(title, fontsize=12, fontweight="bold", parse_math=False)
    return made, made.subplots(ncols=columns, **grid)


def heatmap(
    axes: Axes,
    values: Matrix,
    title: str,
    *,
    tokens: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    digits: int | None = 2,
    most: float = 1.0,
    x: str = "key",
    y: str = "",
) -> None:
    """Weights from 0 to `most`, written into their cells when `digits` are asked for.

    A weight of exactly 0 is a pair that a mask forbids: its cell stays grey. `tokens` name the rows, and the columns
    too unless these have names of their own.
    """
    import numpy as np

    columns = tokens if columns is None else columns
    axes.set_facecolor("0.88")
    axes.imshow(np.ma.masked_equal(values, 0.0), cmap="viridis", vmin=0.0, vmax=most, aspect="auto")
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, fontsize=10)
    axes.set_xticks(range(len(values[0])), columns)
    axes.set_yticks(range(len(values)), tokens)
    axes.tick_params(length=0, labelsize=9)
    for r, row in enumerate(values if digits is not None else ()):
        for c, value in enumerate(row):
            if value == 0.0:
                continue
            colour = "black" if value > 0.55 * most else "white"
            axes.text(c, r, f"{value:.{digits}f}", ha="center", va="center", color=colour, fontsize=9)


class Bars(NamedTuple):
    """One bar of every group: what the legend calls it, how high it is in each group (None: there is none)."""

    label: str
    heights: Sequence[float | None]
    colour: str
    hatch: str = ""


def bars(
    axes: Axes, groups: Sequence[Bars], *, gap: float, width: float, written: str = "", fontsize: float = 9
) -> None:
    """Groups of bars, `gap` apart inside a group; their heights above them in the format `written`."""
    edge: Any = {"edgecolor": "white"} if any(one.hatch for one in groups) else {}
    for at, one in enumerate(groups):
        places = [place + gap * (at - (len(groups) - 1) / 2) for place in range(len(one.heights))]
        heights = [height or 0.0 for height in one.heights]
        drawn = axes.bar(places, heights, width, color=one.colour, hatch=one.hatch, label=one.label, **edge)
        if written:
            names = ["" if height is None else format(height, written) for height in one.heights]
            axes.bar_label(drawn, names, padding=2, fontsize=fontsize)


def log_ticks(axes: Axes, values: Sequence[int], base: int = 10, **look: Any) -> None:
    """A logarithmic axis that has these values written at it, and no others."""
    axes.set_xscale("log", base=base)
    axes.set_xticks(values, [str(value) for value in values], **look)
    axes.minorticks_off()


def tidy(axes: Axes, *, x: str, y: str, title: str = "", legend: str = "", **legend_look: Any) -> None:
    """Names of the axes, a legend where one has a place, and no frame where there is no axis."""
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(**{"fontsize": 9, "loc": legend} | legend_look)
