"""What a watch keeps of a run in addition to statistics: outputs of heads, and what their patterns come from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.editing._block import acting
from regard.editing._fused import Pattern
from regard.editing._report import Report
from regard.edits._edit import Edit, Place
from regard.recording import Recording
from regard.watching._follower import Asked

KINDS = ("output", "pattern")


class Kept(NamedTuple):
    """Of one call."""

    output: Tensor | None  # [batch, head, query, dim]
    pattern: Pattern | None
    real: Tensor | None  # bool [batch, query]: False where a query is padding


class _Keeper(Edit):
    """An edit that changes nothing, and writes down what it meets."""

    acts_on_output = only_looks = True

    def __init__(self, recording: Recording, what: Sequence[str]) -> None:
        self.recording, self.what = recording, what

    def output(self, out: Tensor, place: Place) -> Tensor | None:
        if "output" in self.what:
            self._put(place, output=out.detach().clone())
        return None

    def saw(self, pattern: Any, place: Place) -> None:
        if "pattern" in self.what:
            self._put(place, pattern=pattern)

    def _put(self, place: Place, **what: Any) -> None:
        calls = self.recording.kept.setdefault(place.site, [])
        while len(calls) <= place.turn:
            calls.append(Kept(None, None, place.real))
        calls[place.turn] = calls[place.turn]._replace(**what)


@contextlib.contextmanager
def keeping(
    model: nn.Module, recording: Recording, what: Sequence[str], layers: Sequence[int | str] | None, heads_dim: Any
) -> Iterator[None]:
    """Keep, in ``recording.kept``, what edits of other runs take from this one."""
    with acting(model, [_Keeper(recording, what)], Report("keep"), Asked(layers, heads_dim=heads_dim)):
        yield
