"""Pictures of a bill, with matplotlib: what it costs against the length."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from regard._display.texts import text
from regard._display.units import count, size, whole
from regard.cost._ops import ATTENTION, FEED_FORWARD, HEAD, PROJECTIONS
from regard.cost._words import BILL, named

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from regard.cost._cost import Cost

SHORTEST, LONGEST = 7, 40  # as powers of two
POINTS = 4  # for each doubling
COLOURS = {FEED_FORWARD: "C0", PROJECTIONS: "C2", HEAD: "C4", ATTENTION: "C3"}


def draw(cost: Cost, lang: str = "en") -> Figure:
    if getattr(cost.config, "image_size", None) is not None:
        raise ValueError("images have one length, and there is nothing to draw against it; change image_size")
    try:
        from regard._display.figures import Figure, lettered
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install matplotlib") from error
    panels = [_flops, _activations] + ([_caches] if cost.cache is not None else [])
    say = partial(text, BILL, lang)
    lengths = _lengths(cost)
    bills = [cost.at(length) for length in lengths]
    with lettered(lang):
        figure = Figure(figsize=(4.6 * len(panels), 4.4), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
            panel(axes, cost, lengths, bills, lang)
            axes.set_xscale("log", base=2)
            axes.set_xlabel(say("plot length"))
            axes.xaxis.set_major_formatter(_thousands)
            axes.grid(alpha=0.25)
            axes.axvline(cost.length, color="0.5", linewidth=0.8)
        items = say("item") if cost.batch == 1 else say("items", count=cost.batch)
        what = {"name": named(cost.name, lang), "items": items, "dtype": cost.dtype, "length": cost.length}
        figure.suptitle(say("plot", **what), fontsize=11)
    return figure


def _lengths(cost: Cost) -> list[int]:
    """Far enough to see every crossing."""
    found = cost.crossings
    far = (
        cost.length,
        found.kept_attention_over_feed_forward,
        found.kept_attention_over_rest,
        found.cache_over_weights,
    )
    most = max(math.log2(length) for length in far if length is not None) + 1.5
    last = max(min(most, LONGEST), SHORTEST + 4)
    return sorted({round(2 ** (SHORTEST + n / POINTS)) for n in range(round((last - SHORTEST) * POINTS) + 1)})


def _flops(axes: Axes, cost: Cost, lengths: list[int], bills: list[Cost], lang: str) -> None:
    """By token: what does not grow with the length is a level line."""

    def by_token(name: str, kept: bool = False) -> list[float]:
        parts = [bill.part(name) for bill in bills]
        return [
            (part.kept_flops if kept else part.flops).forward / (bill.batch * bill.length)
            for part, bill in zip(parts, bills, strict=True)
        ]

    there = [part.name for part in cost.parts]
    for name, colour in COLOURS.items():
        if name in there:
            label = text(BILL, lang, "head part" if name == HEAD else name)
            axes.plot(lengths, by_token(name), color=colour, label=label)
    kept = by_token(ATTENTION, kept=True)
    if kept != by_token(ATTENTION):
        axes.plot(lengths, kept, color=COLOURS[ATTENTION], linestyle="--", label=text(BILL, lang, "plot pairs"))
    if FEED_FORWARD in there:
        found = cost.crossings
        places = (found.attention_over_feed_forward, found.kept_attention_over_feed_forward)
        for length, above in zip(places, (True, False), strict=True):
            _mark(axes, cost, length, lambda at: at.part(FEED_FORWARD).flops.forward / (at.batch * at.length), above)
    _finish(axes, text(BILL, lang, "plot flops"), count, 10)


def _activations(axes: Axes, cost: Cost, lengths: list[int], bills: list[Cost], lang: str) -> None:
    acts, say = [bill.activations for bill in bills], partial(text, BILL, lang)
    axes.plot(lengths, [one.eager for one in acts], color="C3", label=say("plot eager"))
    axes.plot(lengths, [one.fused for one in acts], color="C0", label=say("plot fused"))
    if cost.flops.recomputed:
        axes.plot(lengths, [one.peak for one in acts], color="C2", label=say("plot again"))
    axes.axhline(cost.weight_bytes, color="0.3", linestyle=":", label=say("plot weights"))
    _finish(axes, say("plot kept"), size, 32)


def _caches(axes: Axes, cost: Cost, lengths: list[int], bills: list[Cost], lang: str) -> None:
    assert cost.cache is not None
    say = partial(text, BILL, lang)
    for number, kind in enumerate(cost.cache.kinds):
        found = [bill.cache.kinds[kind] for bill in bills if bill.cache is not None]
        own = cost.cache.kind.startswith(kind)
        colour, thick = f"C{number}", 2.2 if own else 1.2
        label = named(kind, lang)
        axes.plot(lengths, [plain for plain, _ in found], color=colour, label=label, linewidth=thick)
        if own:
            small = say("plot int8", kind=label)
            axes.plot(lengths, [less for _, less in found], color=colour, linestyle="--", label=small)
    axes.axhline(cost.weight_bytes, color="0.3", linestyle=":", label=say("plot weights"))
    _mark(axes, cost, cost.crossings.cache_over_weights, lambda at: at.weight_bytes)
    _finish(axes, say("plot cache"), size, 32)


def _mark(axes: Axes, cost: Cost, length: int | None, height: Callable[[Cost], float], above: bool = True) -> None:
    """A dot where two lines cross, with its length."""
    if length is None or length > 2**LONGEST:
        return
    y = height(cost.at(length))
    axes.plot([length], [y], "o", color="black", markersize=4, zorder=5)
    place, align = ((-4, 5), "right") if above else ((4, -11), "left")
    axes.annotate(whole(length), (length, y), xytext=place, textcoords="offset points", ha=align, fontsize=8)


def _finish(axes: Axes, title: str, unit: Callable[[float], str], base: int) -> None:
    axes.set_yscale("log", base=base)
    axes.set_title(title, fontsize=10)
    axes.yaxis.set_major_formatter(lambda value, _: unit(value))
    axes.legend(fontsize=7.5, loc="upper left")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.3)  # room for the legend


def _thousands(value: float, place: Any) -> str:
    for prefix in ("", "k", "M", "G"):
        if value < 1024:
            return f"{value:.0f}{prefix}"
        value /= 1024
    return f"{value:.0f}T"
