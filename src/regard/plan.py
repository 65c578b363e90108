"""Chooses the backend of a call from its spec alone, keeps the choice, and tells it in words."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from regard import backends
from regard._display import mimebundle
from regard._errors import Refused

if TYPE_CHECKING:
    from regard.backends import Backend
    from regard.spec import CallSpec

_LIMIT = 4096


class Choice(NamedTuple):
    """What runs, and why not something else. Holds no tensors and no sizes of its own: kept for equal specs."""

    backend: Backend
    named: bool
    reason: str
    refusals: Mapping[str, list[str]]


class Cost(NamedTuple):
    """What the forward pass of a call costs. ``kept_exact`` is False when kept_pairs is only an upper bound."""

    flops: int
    bytes: int
    kept_pairs: int
    peak_bytes: int
    kept_exact: bool


class Plan:
    """How a call runs: ``print`` it for the table.

    ``backend`` is the name of the one that runs, ``reason`` why it was chosen, ``refusals`` why each of the others
    cannot (name to reasons), and ``spec`` the description of the call that was looked at; ``cost`` says what it takes.
    """

    def __init__(self, spec: CallSpec, choice: Choice, cost: Callable[[], Cost], observer: str | None = None) -> None:
        self.spec = spec
        self.backend = choice.backend.name
        self.reason = choice.reason
        self.refusals = dict(choice.refusals)
        self.observer = observer  # what folds the statistics, where some are wanted
        self._make_cost: Callable[[], Cost] | None = cost
        self._cost: Cost | None = None

    @property
    def cost(self) -> Cost:
        """``flops``, ``bytes`` read and written, ``kept_pairs`` that the mask permits, ``peak_bytes`` of memory.

        Counted on first use: it may have to look at the mask's contents."""
        if self._cost is None:
            assert self._make_cost is not None
            self._cost = self._make_cost()
        return self._cost

    def __getstate__(self) -> dict[str, object]:
        # what counts the cost may hold tensors: counted now, so that only numbers travel
        return {**self.__dict__, "_cost": self.cost, "_make_cost": None}

    def __repr__(self) -> str:
        return f"Plan(backend={self.backend!r}, reason={self.reason!r})"

    def __str__(self) -> str:
        from regard._tables import plan_table

        return plan_table(self)

    def _repr_mimebundle_(self, **_: object) -> dict[str, object]:
        return mimebundle(self)


_chosen: dict[tuple[CallSpec, str], Choice] = {}
_lock = threading.Lock()


def choose(spec: CallSpec, name: object) -> Choice:
    """The backend of a call: the one named, or under "auto" the fastest that does not refuse."""
    if not isinstance(name, str):
        raise TypeError(f'backend must be "auto" or the name of a backend, got {type(name).__name__}')
    found = _chosen.get((spec, name))
    if found is None:
        found = _choose(spec, name)
        with _lock:
            if len(_chosen) >= _LIMIT:
                _chosen.clear()
            _chosen[spec, name] = found
    return found


def _refusals(backend: Backend, spec: CallSpec) -> list[str]:
    reasons = backend.refuse(spec)
    if spec.bias is not None and spec.bias.rule is not None and not backend.takes_rules(spec):
        rule = f"the bias is a rule, {spec.bias.rule}, and it takes tensors: blockwise evaluates rules in the tile"
        return [*reasons, rule]
    return reasons


def _choose(spec: CallSpec, name: str) -> Choice:
    if name != "auto" and name not in backends.ALL:
        raise ValueError(f'backend must be "auto" or one of {", ".join(backends.ALL)}, got {name!r}')
    answers = {other: _refusals(backend, spec) for other, backend in backends.ALL.items()}
    refusals = {other: reasons for other, reasons in answers.items() if reasons}
    if name != "auto":
        if name in refusals:
            able = ", ".join(other for other in backends.ALL if other not in refusals) or "none"
            raise Refused(f"backend {name!r} cannot run this call: {'; '.join(refusals[name])}. Able: {able}")
        return Choice(backends.ALL[name], True, "it was named", refusals)
    able_ones = [backend for other, backend in backends.ALL.items() if other not in refusals]
    best = min(able_ones, key=lambda backend: backend.seconds(spec))
    others = [
        f"{backend.name} ~{backend.seconds(spec) / best.seconds(spec):.3g}x"
        for backend in able_ones
        if backend is not best
    ]
    others = [other for other in others if "inf" not in other]
    reason = f"the fastest that can: {best.about}"
    if others:
        reason += f" (estimated against it: {', '.join(others)})"
    return Choice(best, False, reason, refusals)
