"""What a walkthrough is made of: a story, its steps, and the matrices that a step shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from regard._walk._table import Table

Numbers = NDArray[Any]


@dataclass(frozen=True)
class Panel:
    """A matrix with a name for every row and column. How it is drawn depends on its kind and its size.

    kind: "signed" (any numbers), "weights" (0 to 1), "mask" (True = may look), "plain" (numbers without colour).
    """

    name: str
    values: Numbers  # [row, column]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    kind: str = "signed"
    top: float | None = None  # what gets the strongest colour: matrices that share it can be compared; its own largest


@dataclass(frozen=True)
class Step:
    """One step: what happens and why, the formula, the shapes before and after, and the numbers."""

    name: str
    title: str
    says: str
    formula: str = ""
    shape: str = ""
    panels: tuple[Panel, ...] = ()
    first: int = 1  # how many of them show one head: all that is shown where there are too many heads
    worked: tuple[str, ...] = ()  # single numbers, worked out by hand
    arrays: Mapping[str, Numbers] = field(default_factory=dict)  # the whole of what was computed, by name
    links: tuple[Panel, ...] = ()  # weights to be drawn as lines from token to token
    tables: tuple[Table, ...] = ()  # of the lab, shown as the lab shows them


@dataclass(frozen=True)
class Story:
    title: str
    intro: tuple[str, ...]
    steps: tuple[Step, ...]
    settings: Mapping[str, object]
    numbers: Mapping[str, Any] | None = None  # all that an experiment of the lab found

    def data(self) -> dict[str, Any]:
        """All of it as what JSON holds: −∞, which JSON has not, is null."""
        found = {} if self.numbers is None else {"numbers": dict(self.numbers)}
        return {
            "title": self.title,
            "intro": list(self.intro),
            "settings": dict(self.settings),
            "steps": [
                {
                    **{name: getattr(step, name) for name in ("name", "title", "says", "formula", "shape")},
                    "worked": list(step.worked),
                    "arrays": {name: _array(values) for name, values in step.arrays.items()},
                }
                for step in self.steps
            ],
            **found,
        }


def _array(values: Numbers) -> dict[str, Any]:
    held = values
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        held = values.astype(object)
        held[~np.isfinite(values)] = None
    return {"shape": list(values.shape), "values": held.tolist()}


def number(value: float, decimals: int) -> str:
    """A number as it is printed in a cell; forbidden scores are -∞."""
    if not np.isfinite(value):
        return "-∞" if value < 0 else "∞" if value > 0 else "NaN"
    if abs(value) >= 1e6:
        return f"{value:.1e}"
    shown = f"{value:.{decimals}f}"
    return shown.removeprefix("-") if float(shown) == 0 else shown


def shown(value: float, kind: str, digits: int) -> tuple[str, bool]:
    """What a cell says, and whether it is nothing at all: a score or a share that a mask took away."""
    if kind == "mask":
        return ("■", False) if value else ("·", True)
    if kind == "weights" and value == 0:
        return "0", True
    return (plain(value) if kind == "plain" else number(float(value), digits)), not np.isfinite(value)


def plain(value: float) -> str:
    """A number of a table that has no colours: whole where it is whole."""
    return f"{value:.0f}" if float(value).is_integer() else number(float(value), 4)


def decimals(values: Numbers, kind: str = "signed") -> int:
    """How many digits after the point a matrix is printed with: more where there is room for them."""
    finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    largest = float(np.abs(finite).max(initial=0.0))
    if largest >= 1000 or bool((finite == np.rint(finite)).all()):
        return 0
    if largest >= 100:
        return 1
    if values.shape[-1] <= 4 and largest < 10:
        return 4
    return 3 if kind == "weights" else 2
