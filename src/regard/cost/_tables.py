"""Text of a bill, for people: at most 80 columns, so that it fits every terminal and page."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from regard._display.texts import breaks, left, right, text, width
from regard._display.units import count, flop, size, whole
from regard.cost._words import BILL, named

if TYPE_CHECKING:
    from regard.cost._cost import Cost
    from regard.cost._sums import Part

WIDTH = 80


def columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows with the first column on the left and the others on the right."""
    rows = list(rows)
    widths = [max(width(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = [[left(row[0], widths[0]), *(right(row[n], widths[n]) for n in range(1, len(row)))] for row in rows]
    return ["  ".join(cells).rstrip() for cells in lines]


def cost_table(cost: Cost, lang: str = "en") -> str:
    return "\n".join(_Bill(cost, lang).lines())


class _Bill:
    """A bill in one language."""

    def __init__(self, cost: Cost, lang: str) -> None:
        self.cost, self.lang = cost, lang
        self.say = partial(text, BILL, lang)

    def lines(self) -> list[str]:
        cost, say = self.cost, self.say
        weights = {"parameters": whole(cost.parameters), "bytes": size(cost.weight_bytes), "dtype": cost.dtype}
        found = [say("head", name=named(cost.name, self.lang), **weights), *self._wrapped(self._what_runs())]
        if cost.experts is not None:
            count, some = cost.experts
            found += self._wrapped(say("active", active=whole(cost.active_parameters), some=some, count=count))
        found += ["", *self._parts(), "", *self._recomputation()]
        if cost.cache is not None:
            found += ["", *self._cache()]
        found += ["", *self._crossings()]
        return found + [
            line for note in cost.notes for line in self._wrapped(say("note", note=named(note, self.lang)), "      ")
        ]

    def _wrapped(self, line: str, indent: str = "") -> list[str]:
        if self.lang == "en":
            return textwrap.wrap(line, WIDTH, subsequent_indent=indent)
        places = [0, *breaks(line, WIDTH - len(indent)), len(line)]
        pieces = [line[start:stop].rstrip() for start, stop in itertools.pairwise(places)]
        return [pieces[0], *(indent + piece for piece in pieces[1:])]

    def _what_runs(self) -> str:
        cost, say = self.cost, self.say
        source = "" if cost.source_length is None else say("source", length=whole(cost.source_length))
        items = say("item") if cost.batch == 1 else say("items", count=whole(cost.batch))
        return say("runs", items=items, length=whole(cost.length), source=source, device=cost.device)

    def _row(self, name: str, parts: Sequence[Part]) -> tuple[str, ...]:
        flops = [part.flops for part in parts]
        return (
            name,
            count(sum(part.parameters for part in parts)),
            count(sum(one.forward for one in flops)),
            count(sum(one.backward for one in flops)),
            size(sum(part.eager for part in parts)),
            size(sum(part.fused for part in parts)),
        )

    def _named(self, part: str) -> str:
        return self.say("head part" if part == "head" else part)

    def _parts(self) -> list[str]:
        cost, say = self.cost, self.say
        rows = [
            ("", say("parameters"), say("forward"), say("backward"), say("kept"), say("kept")),
            ("", "", "FLOP", "FLOP", say("eager"), say("fused")),
            *(self._row(self._named(part.name), [part]) for part in cost.parts),
            self._row(say("in all"), cost.parts),
        ]
        rows += [self._row(say("one", layer=named(name, self.lang)), parts) for name, parts in cost.layers.items()]
        lines = columns(rows)
        rule = "-" * max(map(width, lines))
        parts = 2 + len(cost.parts)
        return [*lines[:2], rule, *lines[2:parts], rule, *lines[parts:]]

    def _recomputation(self) -> list[str]:
        kept, flops, acts = self.cost.kept_flops, self.cost.flops, self.cost.activations
        found = []
        if acts.textbook is not None:
            found.append(self.say("whose", textbook=size(acts.textbook)))
        if kept != flops:
            found.append(self.say("pairs", forward=flop(kept.forward), backward=flop(kept.backward)))
        if flops.recomputed:
            again = {"flops": flop(flops.recomputed), "kept": size(acts.recomputed), "peak": size(acts.peak)}
            found.append(self.say("again", **again))
        return [line for one in found for line in self._wrapped(one, "  ")]

    def _cache(self) -> list[str]:
        own, say = self.cost.cache, self.say
        assert own is not None
        rows: list[Sequence[str]] = [
            [say(key) for key in ("cache", "per layer", "in all", "in int8", "of the weights")]
        ]
        for kind, (plain, small) in own.kinds.items():
            share = _percent(plain / self.cost.weight_bytes)
            rows.append((named(kind, self.lang), size(plain // own.layers), size(plain), size(small), share))
        lines = columns(rows)
        each = {"token": size(own.token), "layer": size(own.layer), "total": size(own.total)}
        said = self._wrapped(say("own", kind=named(own.kind, self.lang), **each), "  ")
        return [lines[0], "-" * max(map(width, lines)), *lines[1:], *said]

    def _crossings(self) -> list[str]:
        found, say = self.cost.crossings, self.say
        attention = (
            ("feed-forward", found.attention_over_feed_forward, found.kept_attention_over_feed_forward),
            ("everything else", found.attention_over_rest, found.kept_attention_over_rest),
        )
        rows: list[tuple[str, int | None, str]] = []
        for other, dense, kept in attention:
            if dense is not None or kept is not None:
                pairs = "" if dense == kept else say("by pairs", length=self._at(kept))
                rows.append((say("more", other=say(other)), dense, pairs))
        if self.cost.cache is not None:
            rows.append((say("larger"), found.cache_over_weights, ""))
        lines = []
        for what, where, pairs in rows:
            never = where is None and not pairs
            said = say("never", what=what) if never else say("from", where=f"{self._at(where)}{pairs}", what=what)
            lines += self._wrapped(said.replace("） ", "）"))
        return lines

    def _at(self, length: int | None) -> str:
        return self.say("never length") if length is None else whole(length)


def _percent(share: float) -> str:
    if 100 * share > 1e9:
        return f"{100 * share:.1e} %"
    return f"{100 * share:.3g} %" if share < 10 else f"{whole(round(100 * share))} %"
