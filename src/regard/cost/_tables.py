"""Text of a bill, for people: at most 80 columns, so that it fits every terminal and page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.cost._cost import Cost
    from regard.cost._sums import Part

WIDTH = 80
PARTS = ("", "parameters", "forward", "backward", "kept", "kept")
UNITS = ("", "", "FLOP", "FLOP", "eager", "fused")
CACHES = ("cache", "a layer", "in all", "in int8", "of the weights")


def count(number: float) -> str:
    """With a prefix of thousands: 174.6 G."""
    return _prefixed(number, 1000, ("", "k", "M", "G", "T", "P", "E", "Z", "Y"), "")


def size(number: float) -> str:
    """Bytes, with a prefix of 1024s: 325.2 GiB."""
    return _prefixed(number, 1024, ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei", "Zi", "Yi"), "B")


def seconds(time: float) -> str:
    for unit, step in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if time >= step:
            return f"{time / step:.3g} {unit}" if time < 1000 * step else f"{time:.3g} s"
    return f"{time * 1e9:.3g} ns"


def flop(number: float) -> str:
    return f"{count(number)}FLOP" if count(number)[-1].isalpha() else f"{count(number)} FLOP"


def _prefixed(number: float, step: int, prefixes: Sequence[str], unit: str) -> str:
    left = number
    for prefix in prefixes:
        if left < step - 0.05:
            return f"{left:.4g} {prefix}{unit}".rstrip()
        left /= step
    return f"{number:.1e}"


def whole(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows with the first column on the left and the others on the right."""
    rows = list(rows)
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = [[row[0].ljust(widths[0]), *(row[n].rjust(widths[n]) for n in range(1, len(row)))] for row in rows]
    return ["  ".join(cells).rstrip() for cells in lines]


def cost_table(cost: Cost) -> str:
    lines = [
        f"{cost.name}: {whole(cost.parameters)} parameters, {size(cost.weight_bytes)} in {cost.dtype}",
        *textwrap.wrap(_what_runs(cost), WIDTH),
        "",
        *_parts(cost),
        "",
        *_recomputation(cost),
    ]
    if cost.cache is not None:
        lines += ["", *_cache(cost)]
    lines += ["", *_crossings(cost)]
    for note in cost.notes:
        lines += textwrap.wrap(f"Note: {note}.", WIDTH, subsequent_indent="      ")
    return "\n".join(lines)


def _what_runs(cost: Cost) -> str:
    source = "" if cost.source_length is None else f" from {whole(cost.source_length)}"
    items = "1 item" if cost.batch == 1 else f"{whole(cost.batch)} items"
    return f"{items} of {whole(cost.length)} tokens{source}; kept for the backward pass on {cost.device}"


def _row(name: str, parts: Sequence[Part]) -> tuple[str, ...]:
    flops = [part.flops for part in parts]
    return (
        name,
        count(sum(part.parameters for part in parts)),
        count(sum(one.forward for one in flops)),
        count(sum(one.backward for one in flops)),
        size(sum(part.eager for part in parts)),
        size(sum(part.fused for part in parts)),
    )


def _parts(cost: Cost) -> list[str]:
    rows = [PARTS, UNITS, *(_row(part.name, [part]) for part in cost.parts), _row("in all", cost.parts)]
    rows += [_row(f"one {name}", parts) for name, parts in cost.layers.items()]
    lines = columns(rows)
    rule = "-" * max(map(len, lines))
    parts = 2 + len(cost.parts)
    return [*lines[:2], rule, *lines[2:parts], rule, *lines[parts:]]


def _recomputation(cost: Cost) -> list[str]:
    kept, flops, acts = cost.kept_flops, cost.flops, cost.activations
    found = []
    if kept != flops:
        found.append(f"Pairs that the mask keeps only: {flop(kept.forward)} forward, {flop(kept.backward)} backward.")
    if flops.recomputed:
        found.append(
            f"Layers computed again: {flop(flops.recomputed)} more, {size(acts.recomputed)} kept, "
            f"{size(acts.peak)} at the peak."
        )
    return [line for text in found for line in textwrap.wrap(text, WIDTH, subsequent_indent="  ")]


def _cache(cost: Cost) -> list[str]:
    assert cost.cache is not None
    weights = cost.weight_bytes
    rows: list[Sequence[str]] = [CACHES]
    own = cost.cache
    for kind, (plain, small) in own.kinds.items():
        rows.append((kind, size(plain // own.layers), size(plain), size(small), _percent(plain / weights)))
    lines = columns(rows)
    each = f"{size(own.token)} a token and layer, {size(own.layer)} a layer, {size(own.total)} in all"
    said = textwrap.wrap(f"This one ({own.kind}): {each}.", WIDTH, subsequent_indent="  ")
    return [lines[0], "-" * max(map(len, lines)), *lines[1:], *said]


def _percent(share: float) -> str:
    if 100 * share > 1e9:
        return f"{100 * share:.1e} %"
    return f"{100 * share:.3g} %" if share < 10 else f"{whole(round(100 * share))} %"


def _crossings(cost: Cost) -> list[str]:
    found = cost.crossings
    attention = (
        ("feed-forward", found.attention_over_feed_forward, found.kept_attention_over_feed_forward),
        ("everything else", found.attention_over_rest, found.kept_attention_over_rest),
    )
    rows = []
    for other, dense, kept in attention:
        if dense is None and kept is None:
            continue
        pairs = "" if dense == kept else f" ({_at(kept)} by the pairs that the mask keeps)"
        rows.append((f"attention costs more FLOPs than {other}", f"{_at(dense)}{pairs}"))
    if cost.cache is not None:
        rows.append(("the cache is larger than the weights", _at(found.cache_over_weights)))
    lines = []
    for what, where in rows:
        lines += textwrap.wrap(f"From length {where}: {what}." if where != "never" else f"Never: {what}.", WIDTH)
    return lines


def _at(length: int | None) -> str:
    return "never" if length is None else whole(length)
