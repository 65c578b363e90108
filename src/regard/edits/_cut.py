"""`cut`: attention edges that do not exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard import masks
from regard.edits import _places
from regard.edits._edit import Change, Edit, Place
from regard.edits._places import Chosen, Where
from regard.masks import Mask
from regard.masks._rectangle import rectangle

# gaps between keys up to which a cut is a rule: a row then sees no more intervals of keys than kernels take
_MOST_HOLES = 3
_FEW = 4096  # pairs that may be looked at, to see whether the call has an edge among them


class Cut(Edit):
    """Edges that are taken away; ``a & b``, ``a | b`` and ``~a`` are cuts too."""

    when_idle = "no call had these queries and keys, with an edge between them"

    def edges(self, place: Place) -> Mask | None:
        """True at the edges that go; None where the call has none of them."""
        raise NotImplementedError

    def change(self, place: Place) -> Change | None:
        edges = self.edges(place)
        return None if edges is None else Change(hide=edges)

    def __and__(self, other: Cut) -> Cut:
        return _Joined("&", (self, _cut(other, "&")))

    def __or__(self, other: Cut) -> Cut:
        return _Joined("|", (self, _cut(other, "|")))

    def __invert__(self) -> Cut:
        return _Not(self)


@dataclass(frozen=True)
class _Between(Cut):
    queries: Any
    keys: Any
    by_numbers = True

    @property
    def counts_queries(self) -> bool:  # type: ignore[override]
        return self.queries is not None

    def change(self, place: Place) -> Change | None:
        change: Change | None = place.once("change", lambda: self._change(place))
        if change is None or place.has_edges is None:
            return change
        if place.edges is None:
            return change if self._has_any(place) else None
        there = place.once(("edges", place.edges), lambda: self._has_any(place))
        return change if there else None

    def _change(self, place: Place) -> Change | None:
        edges = self.edges(place)
        return None if edges is None else Change(hide=edges)

    def _has_any(self, place: Place) -> bool:
        rows, columns = self._chosen(place)
        return has_any(rows, columns, place)

    def edges(self, place: Place) -> Mask | None:
        return self._rule(*self._chosen(place), place)

    def _chosen(self, place: Place) -> tuple[Chosen, Chosen]:
        found: tuple[Chosen, Chosen] = place.once(
            ("chosen", self), lambda: (_places.queries(self.queries, place), _places.keys(self.keys, place))
        )
        return found

    def _rule(self, rows: Chosen, columns: Chosen, place: Place) -> Mask | None:
        if not rows.any() or not columns.any():
            return None
        alike = len(rows) == 1 and len(columns) == 1
        rule = rectangle(rows[0], columns[0], _MOST_HOLES) if alike else None
        if rule is not None:
            return rule
        down, across = (torch.from_numpy(chosen).to(place.device) for chosen in (rows, columns))
        of_keys = masks.keep(across[:, None, None])
        return of_keys if self.queries is None else masks.keep(down[:, None, :, None]) & of_keys

    def __repr__(self) -> str:
        given = {"queries": self.queries, "keys": self.keys}
        return f"cut({', '.join(f'{name}={_places.shown(at)}' for name, at in given.items() if at is not None)})"


@dataclass(frozen=True)
class _ByMask(Cut):
    mask: Mask

    @property
    def by_numbers(self) -> bool:  # type: ignore[override]
        return not self.mask.tensors

    @property
    def counts_queries(self) -> bool:  # type: ignore[override]
        return not self.mask.placeless

    def edges(self, place: Place) -> Mask | None:
        mask = self.mask.sized(place.batch, place.count)
        if place.kind == "cross" and not mask.placeless and not _aligned(place):
            raise place.refuse(
                "in cross attention with a cache it is not known which tokens its queries are, so the mask's positions "
                "are not either: run without a cache, or cut by queries= and keys="
            )
        if not place.dropped or all(leaf.by_call for leaf in mask.leaves):
            return mask
        if place.misplaced or mask.by_call or not isinstance(place.first, int):
            raise place.refuse(f"its cache has forgotten {place.forgotten}, so the mask's positions are not tokens")
        total = place.dropped + place.keys
        mask.check(place.batch, place.count, place.queries, total)
        rows, columns = range(place.queries), range(place.dropped, total)
        return masks.keep(mask.tile(rows, columns, place.queries, total, offset=place.first, device=place.device))

    def __repr__(self) -> str:
        return f"cut({self.mask!r})"


@dataclass(frozen=True)
class _Joined(Cut):
    sign: str
    parts: tuple[Cut, Cut]

    @property
    def by_numbers(self) -> bool:  # type: ignore[override]
        return all(part.by_numbers for part in self.parts)

    @property
    def counts_queries(self) -> bool:  # type: ignore[override]
        return any(part.counts_queries for part in self.parts)

    def edges(self, place: Place) -> Mask | None:
        one, other = (part.edges(place) for part in self.parts)
        if one is None or other is None:
            return None if self.sign == "&" else (one if other is None else other)
        return one & other if self.sign == "&" else one | other

    def __repr__(self) -> str:
        return f"({self.parts[0]!r} {self.sign} {self.parts[1]!r})"


@dataclass(frozen=True)
class _Not(Cut):
    part: Cut

    @property
    def by_numbers(self) -> bool:  # type: ignore[override]
        return self.part.by_numbers

    @property
    def counts_queries(self) -> bool:  # type: ignore[override]
        return self.part.counts_queries

    def edges(self, place: Place) -> Mask | None:
        edges = self.part.edges(place)
        return masks.everything() if edges is None else ~edges

    def __repr__(self) -> str:
        return f"~{self.part!r}"


def has_any(rows: Chosen, columns: Chosen, place: Place) -> bool:
    """Whether the call has one of the edges, where a look at a few tells: a causal mask may hide them already."""
    if place.has_edges is None:
        return True
    down, across = _span(rows), _span(columns)
    if len(down) * len(across) > _FEW:
        return True
    there = place.has_edges(down, across)
    if there.shape[1] > 1:
        there = there[:, list(place.heads)]
    chosen = rows[:, None, down.start : down.stop, None] & columns[:, None, None, across.start : across.stop]
    return bool((there & torch.from_numpy(chosen).to(there.device)).any())


def _span(chosen: Chosen) -> range:
    """From the first to the last of those that are chosen, [items, count]."""
    at = np.flatnonzero(chosen.any(0))
    return range(int(at[0]), int(at[-1]) + 1)


def cut(mask: Mask | None = None, *, queries: Where | None = None, keys: Where | None = None) -> Cut:
    """Attention knockout: edges from these queries to these keys do not exist; the other weights grow to make up.

        cut(keys=slice(0, 4))                     # nobody looks at the first four tokens
        cut(queries=-1, keys=" cat")              # the last token does not look at " cat"
        cut(masks.window(left=8)) & cut(keys="the")
        ~cut(keys=[0, 7])                         # nobody looks at anything else

    The edges become a mask of the call, exactly: no matrix is made of a rule, nor of positions where these are up to
    three runs of tokens. A query that loses all of its keys gets
    zeros. A call that has none of the edges (its own mask hides them already) is not counted as changed, if queries and
    keys span at most 4096 pairs; masks, cuts that are joined, larger spans and blocks around others always count.

    Args:
        mask: any rule of ``regard.masks``; True at the edges that are cut.
        queries: positions of the tokens that look (negative ones count from the end of what the call has read), a
            slice, a token's text, or a list; all when None.
        keys: likewise, the tokens that are looked at.
    """
    if mask is not None:
        if isinstance(mask, Tensor) or not isinstance(mask, Mask):
            raise TypeError(
                f"cut takes a mask of regard.masks, True at the edges to cut, got {type(mask).__name__}; "
                "a tensor goes in by cut(masks.keep(tensor)), positions by cut(queries=…, keys=…)"
            )
        if queries is not None or keys is not None:
            raise ValueError("cut takes a mask, or queries= and keys=; join both by cut(mask) & cut(queries=…, keys=…)")
        return _ByMask(mask)
    if queries is None and keys is None:
        raise ValueError("cut() names no edges: give queries=, keys= or a mask; cut(masks.everything()) cuts all")
    return _Between(_places.checked("queries", queries), _places.checked("keys", keys))


def _aligned(place: Place) -> bool:
    """Whether a rule finds a query of cross attention where it would without a cache."""
    first, offset = place.first, place.offset
    return isinstance(first, int) and (first == 0 or (isinstance(offset, int) and offset == first))


def _cut(other: object, sign: str) -> Cut:
    if not isinstance(other, Cut):
        raise TypeError(f"a cut joins by {sign} with another cut, got {type(other).__name__}")
    return other
