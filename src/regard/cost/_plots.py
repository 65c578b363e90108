"""Pictures of a bill, with matplotlib: what it costs against the length."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from regard._display.units import count, size
from regard.cost._ops import ATTENTION, FEED_FORWARD, HEAD, PROJECTIONS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from regard.cost._cost import Cost

SHORTEST, LONGEST = 7, 40  # as powers of two
POINTS = 4  # for each doubling
COLOURS = {FEED_FORWARD: "C0", PROJECTIONS: "C2", HEAD: "C4", ATTENTION: "C3"}


def draw(cost: Cost) -> Figure:
    if getattr(cost.config, "image_size", None) is not None:
        raise ValueError("images have one length, and there is nothing to draw against it; change image_size")
    try:
        from regard._display.figures import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install matplotlib") from error
    panels = [_flops, _activations] + ([_caches] if cost.cache is not None else [])
    figure = Figure(figsize=(4.6 * len(panels), 4.4), layout="constrained")
    lengths = _lengths(cost)
    bills = [cost.at(length) for length in lengths]
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        panel(axes, cost, lengths, bills)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("length, in tokens")
        axes.xaxis.set_major_formatter(_thousands)
        axes.grid(alpha=0.25)
        axes.axvline(cost.length, color="0.5", linewidth=0.8)
    items = "1 item" if cost.batch == 1 else f"{cost.batch} items"
    figure.suptitle(f"{cost.name}, {items}, {cost.dtype}; the grey line is length {cost.length}", fontsize=11)
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


def _flops(axes: Axes, cost: Cost, lengths: list[int], bills: list[Cost]) -> None:
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
            axes.plot(lengths, by_token(name), color=colour, label=name)
    kept = by_token(ATTENTION, kept=True)
    if kept != by_token(ATTENTION):
        axes.plot(lengths, kept, color=COLOURS[ATTENTION], linestyle="--", label="attention, pairs that the mask keeps")
    if FEED_FORWARD in there:
        found = cost.crossings
        places = (found.attention_over_feed_forward, found.kept_attention_over_feed_forward)
        for length, above in zip(places, (True, False), strict=True):
            _mark(axes, cost, length, lambda at: at.part(FEED_FORWARD).flops.forward / (at.batch * at.length), above)
    _finish(axes, "forward FLOPs of a token", count, 10)


def _activations(axes: Axes, cost: Cost, lengths: list[int], bills: list[Cost]) -> None:
    acts = [bill.activations for bill in bills]
    axes.plot(lengths, [one.eager for one in acts], color="C3", label="eager attention")
    axes.plot(lengths, [one.fused for one in acts], color="C0", label="fused attention")
    if cost.flops.recomputed:
        axes.plot(lengths, [one.peak for one in acts], color="C2", label="layers computed again, at the peak")
    axes.axhline(cost.weight_bytes, color="0.3", linestyle=":", label="weights")
    _finish(axes, "bytes kept for the backward pass", size, 32)


def _caches(axes: Axes, cost: Cost, lengths: list[int], bills: list[Cost]) -> None:
    assert cost.cache is not None
    for number, kind in enumerate(cost.cache.kinds):
        found = [bill.cache.kinds[kind] for bill in bills if bill.cache is not None]
        own = cost.cache.kind.startswith(kind)
        colour, thick = f"C{number}", 2.2 if own else 1.2
        axes.plot(lengths, [plain for plain, _ in found], color=colour, label=kind, linewidth=thick)
        if own:
            axes.plot(lengths, [small for _, small in found], color=colour, linestyle="--", label=f"{kind}, int8")
    axes.axhline(cost.weight_bytes, color="0.3", linestyle=":", label="weights")
    _mark(axes, cost, cost.crossings.cache_over_weights, lambda at: at.weight_bytes)
    _finish(axes, "bytes of the cache", size, 32)


def _mark(axes: Axes, cost: Cost, length: int | None, height: Callable[[Cost], float], above: bool = True) -> None:
    """A dot where two lines cross, with its length."""
    if length is None or length > 2**LONGEST:
        return
    y = height(cost.at(length))
    axes.plot([length], [y], "o", color="black", markersize=4, zorder=5)
    place, align = ((-4, 5), "right") if above else ((4, -11), "left")
    label = f"{length:,}".replace(",", " ")
    axes.annotate(label, (length, y), xytext=place, textcoords="offset points", ha=align, fontsize=8)


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
