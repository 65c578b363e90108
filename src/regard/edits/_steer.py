"""`steer`: a number added to the logits of some edges."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from regard.edits import _places
from regard.edits._edit import Added, Change, Edit, Place
from regard.edits._places import Where


@dataclass(frozen=True, repr=False)
class Steer(Edit):
    keys: Any
    amount: float
    queries: Any
    by_numbers = True
    adds_edges = True  # a weight that was too small for its precision
    when_idle = "no call had these queries and keys"

    @property
    def counts_queries(self) -> bool:  # type: ignore[override]
        return self.queries is not None

    def change(self, place: Place) -> Change | None:
        change: Change | None = place.once("change", lambda: self._change(place))
        return change

    def _change(self, place: Place) -> Change | None:
        rows, columns = _places.queries(self.queries, place), _places.keys(self.keys, place)
        if not rows.any() or not columns.any():
            return None
        return Change(add=Added(rows, columns, self.amount))

    def __repr__(self) -> str:
        more = "" if self.queries is None else f", queries={_places.shown(self.queries)}"
        return f"steer(keys={_places.shown(self.keys)}, amount={self.amount!r}{more})"


def steer(keys: Where, amount: float, *, queries: Where | None = None) -> Steer:
    """Attention steering: ``amount`` is added to the logits of these edges, so their weights grow by e^amount before
    each row is made to add up to 1 again.

        steer(keys=[3, 4], amount=2.0)            # look more at tokens 3 and 4
        steer(keys=0, amount=-4.0, queries=slice(8, None))

    Exact in a fused kernel: what is added is u_i · b_j, which is one more dim of query and key (on a CPU, where all
    queries are steered, one number for each key; in long calls on a GPU, the steered edges are a call of their own, and
    join the others by their log-sum-exp). No matrix is made.

    Args:
        keys: positions, a slice, token texts, as in ``cut``.
        amount: in nats, positive or negative; to take edges away use ``cut``.
        queries: only these tokens' looks; all when None.
    """
    if isinstance(amount, bool) or not isinstance(amount, Real):
        raise TypeError(f"amount must be a number, got {amount!r}")
    if not math.isfinite(amount):
        raise ValueError(f"amount must be finite, got {amount}; to take edges away use edits.cut")
    if amount == 0:
        raise ValueError("amount is 0, which changes nothing")
    if keys is None:
        raise ValueError("keys must name some tokens: the same number on all keys of a row changes nothing")
    return Steer(_places.checked("keys", keys), float(amount), _places.checked("queries", queries))
