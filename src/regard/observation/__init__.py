"""The result of ``regard.observe``: the output and the statistics that were asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regard._display import Widget

if TYPE_CHECKING:
    from torch import Tensor

    from regard.plan import Plan
    from regard.statistics import Want

_ASK = {
    "entropy": "rows=True",
    "max_weight": "rows=True",
    "key_mass": "key_mass=True",
    "map": "map=(64, 64)",
    "top_keys": "top_k=8",
    "top_weights": "top_k=8",
    "distance": "distance=True",
    "first_mass": "first=4",
    "weights": "weights=(slice(0, 64), slice(0, 64))) or, for a short input, regard.Want(weights='all'",
    "pairs": "pairs=[(5, 0), (5, 4)]",
    "relations": "scores=True",
    "value_length": "value_mass=True",
    "value_mass": "value_mass=True",
    "value_sum": "value_mass=True",
    "value_map": "value_mass=True, map=(64, 64)",
    "value_top_keys": "value_mass=True, top_k=8",
    "value_top_lengths": "value_mass=True, top_k=8",
}


class Observation(Widget):
    """Output and statistics of one attention call.

    ``out`` carries gradients; the statistics are detached (but for those of ``observe(differentiable=True)``), float32
    (float64 for float64 input). What was not asked for is absent: reading it is an AttributeError that says how to ask.

    - ``out`` [B, H, L, value dim] and ``lse`` [B, H, L], the log-sum-exp of each row (−inf for an empty one), are there
      always; so are ``plan`` and ``want``.
    - ``entropy``, ``max_weight`` [B, H, L]: of each row; NaN, which means missing, for an empty one.
    - ``key_mass`` [B, H, S]: what each key receives, added over the queries.
    - ``map`` [B, H, rows, columns]: mean weight of the pairs in each cell of a coarse grid.
    - ``top_keys``, ``top_weights`` [B, H, L, k]: largest first, ties to the lower key; −1 and 0 where there are fewer.
    - ``distance`` [B, H, 32]: total weight at distance 0, 1, 2–3, 4–7 and so on.
    - ``first_mass`` [B, H, L]: the weight on the first keys.
    - ``weights`` [B, H, queries, keys]: of the rectangle that was asked for.
    - ``pairs`` [B, H, n]: the weights of single pairs.
    - ``relations`` [B, H, L, 2 or 6]: the weight on keys in each relation of ``regard.statistics.RELATIONS``; NaN where
      a query sees none such.
    - ``value_length`` [B, H, S], the length of each value; ``value_mass`` [B, H, S], ``value_sum`` [B, H, L],
      ``value_map``, ``value_top_keys``, ``value_top_lengths``: as above, of weights times lengths.
    """

    out: Tensor
    lse: Tensor
    entropy: Tensor
    max_weight: Tensor
    key_mass: Tensor
    map: Tensor
    top_keys: Tensor
    top_weights: Tensor
    distance: Tensor
    first_mass: Tensor
    weights: Tensor
    pairs: Tensor
    relations: Tensor
    value_length: Tensor
    value_mass: Tensor
    value_sum: Tensor
    value_map: Tensor
    value_top_keys: Tensor
    value_top_lengths: Tensor

    def __init__(self, out: Tensor, lse: Tensor, plan: Plan, want: Want, found: dict[str, Tensor]) -> None:
        self.out = out
        self.lse = lse
        self.plan = plan
        self.want = want
        self.__dict__.update(found)

    def __getattr__(self, name: str) -> Tensor:
        if name in _ASK:
            raise AttributeError(f"{name} was not asked for: pass want=regard.Want({_ASK[name]}) to observe")
        raise AttributeError(f"'Observation' object has no attribute {name!r}")

    def __repr__(self) -> str:
        has = [name for name in _ASK if name in self.__dict__]
        return f"Observation(out {list(self.out.shape)}, lse{''.join(', ' + name for name in has)})"
