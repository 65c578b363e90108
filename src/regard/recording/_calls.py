"""One attention call as it was recorded, and one head of it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from regard._checks import check_count
from regard._display import Widget
from regard._display.units import ranges

if TYPE_CHECKING:
    from torch import Tensor

# What follows [batch, head] in each statistic: L queries, S keys, anything else a size of its own.
AXES: dict[str, tuple[str, ...]] = {
    "lse": ("L",),
    "entropy": ("L",),
    "max_weight": ("L",),
    "key_mass": ("S",),
    "map": ("rows", "cols"),
    "top_keys": ("L", "k"),
    "top_weights": ("L", "k"),
    "distance": ("buckets",),
    "first_mass": ("L",),
    "weights": ("rectangle rows", "rectangle keys"),
    "pairs": ("pairs",),
    "relations": ("L", "relations"),
    "value_length": ("S",),
    "value_mass": ("S",),
    "value_sum": ("L",),
    "value_map": ("rows", "cols"),
    "value_top_keys": ("L", "k"),
    "value_top_lengths": ("L", "k"),
}
# How each is asked for, where it was not recorded: by these arguments of a Want.
_ASK = {
    **dict.fromkeys(("entropy", "max_weight"), "rows=True"),
    **dict.fromkeys(("top_keys", "top_weights"), "top_k=8"),
    **dict.fromkeys((name for name in AXES if name.startswith("value_")), "value_mass=True"),
    "key_mass": "key_mass=True",
    "map": "map=(64, 64)",
    "distance": "distance=True",
    "first_mass": "first=4",
    "pairs": "pairs=[(5, 0), (5, 4)]",
    "relations": "scores=True",
}
ASK: dict[str, str] = {name: f"regard.Want({how})" for name, how in _ASK.items()}
ASK["weights"] = (
    'regard.Want(weights="all")) for short inputs, or for a part of them with '
    "regard.watch(model, want=regard.Want(weights=(slice(0, 64), slice(0, 64)))"
)
KINDS = ("self", "cross")
PHASES = ("prefill", "decode")


class Site(NamedTuple):
    """A place in the model that attends: a module, or one of several calls that a module makes in a pass."""

    path: str
    turn: int  # 0 for the first call of that module in a pass, 1 for the second …

    def __str__(self) -> str:
        path = self.path or "(root)"
        return path if self.turn == 0 else f"{path} #{self.turn + 1}"


@dataclass(kw_only=True, eq=False, repr=False)
class Recorded:
    """The statistics of one attention call.

    ``layer`` counts the places that attend, in the order in which they were first met; ``path`` is the module's.
    ``number`` counts the forward passes. Each statistic is a tensor [batch, head, …] under its name.
    """

    site: Site
    layer: int
    number: int
    kind: str
    phase: str
    keys: int
    heads: tuple[int, ...]  # the heads kept, by their index in the model
    positions: Tensor  # [batch or 1]: position of the first query among the keys
    permitted: Tensor  # [batch or 1, head or 1, L or 1]: how many keys each query may see
    parts: dict[str, Tensor]
    written_out: bool = False  # whether the model's own code took the softmax and multiplied the values
    first_key: int = 0  # which token the first key is: a cache may have dropped those before
    # the output projection, by its path, through which the lengths of values were taken; None: of the values alone
    projection: str | None = None
    of_text: bool = True  # False in the part of a model that reads an image or a sound, which tokens do not name

    @property
    def path(self) -> str:
        """The module's, such as `encoder.layer.3.attention.self`."""
        return str(self.site)

    @property
    def batch(self) -> int:
        """Items."""
        return self.parts["lse"].shape[0]

    @property
    def queries(self) -> int:
        """How many tokens looked."""
        return self.parts["lse"].shape[2]

    @property
    def bytes(self) -> int:
        """Memory that its statistics take."""
        return sum(part.nbytes for part in (*self.parts.values(), self.permitted, self.positions))

    def __getattr__(self, name: str) -> Tensor:
        if name in AXES:
            parts: dict[str, Tensor] = self.__dict__.get("parts", {})
            if name in parts:
                return parts[name]
            more = ""
            if name.startswith("value_") and self.__dict__.get("written_out"):
                more = "; of attention that a model writes out it is known where a matrix product shows the values"
            raise AttributeError(
                f"{name} was not recorded: ask for it with regard.watch(model, want={ASK[name]}){more}"
            )
        raise AttributeError(f"'{type(self).__name__}' object has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.parts})

    def cpu(self) -> Recorded:
        """The same with its statistics on the CPU; itself when they are there."""
        if all(part.device.type == "cpu" for part in self.parts.values()):
            return self
        moved = copy.copy(self)
        moved.parts = {name: part.cpu() for name, part in self.parts.items()}
        return moved

    def row(self, head: int) -> int:
        """Where a head of the model stands among the heads kept."""
        if head not in self.heads:
            raise IndexError(f"head {head} of {self.path} was not recorded; there are heads {ranges(self.heads)}")
        return self.heads.index(head)

    def counts(self) -> Tensor:
        """How many keys each query may see, [batch, head, L]."""
        permitted = self.permitted
        if permitted.shape[1] > 1 and permitted.shape[1] != len(self.heads):
            raise ValueError("permitted must have one row a kept head")
        return permitted.expand(self.batch, len(self.heads), self.queries)

    def __repr__(self) -> str:
        return (
            f"<{self.kind} attention{', written out,' if self.written_out else ''} of layer {self.layer} "
            f"({self.path}), {self.phase} {self.number}: "
            f"batch {self.batch}, {len(self.heads)} heads, {self.queries} queries, {self.keys} keys>"
        )


class Head(Widget):
    """One head of one recorded call, for one item of the batch: every statistic without its [batch, head]."""

    def __init__(self, call: Recorded, head: int, item: int, query_tokens: list[str], key_tokens: list[str]) -> None:
        self.call, self.head, self.item = call, head, item
        self.query_tokens, self.key_tokens = query_tokens, key_tokens
        self._at = call.row(head)

    def __getattr__(self, name: str) -> Any:
        if name in AXES:
            return getattr(self.call, name)[self.item, self._at]
        raise AttributeError(f"'Head' object has no attribute {name!r}; it has {', '.join(self.call.parts)}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.call.parts})

    @property
    def permitted(self) -> Tensor:
        """How many keys each query may see, [L]."""
        return self.call.counts()[self.item, self._at]

    @property
    def position(self) -> int:
        """Position of the first query among the keys."""
        positions = self.call.positions
        return int(positions[self.item if len(positions) > 1 else 0])

    def top_tokens(self, count: int = 5) -> list[tuple[str, float]]:
        """The keys that receive most, as (token, share of all the weight given)."""
        check_count("count", count)
        mass = self.key_mass
        total = float(mass.sum()) or 1.0
        best = torch.topk(mass, min(count, len(mass)))
        return [
            (self.key_tokens[at], value / total)
            for at, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def __repr__(self) -> str:
        return f"<head {self.head}, item {self.item} of {self.call!r}>"
