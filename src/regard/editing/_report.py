"""What an edit changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from regard._display.units import ranges


class Changed(NamedTuple):
    """A call that was changed."""

    layer: int
    path: str
    heads: tuple[int, ...]
    number: int  # of the forward pass
    kind: str


class Report:
    """What ``regard.edit`` changed: ``report.calls``, ``.layers``, ``.heads``; printed, it is a sentence."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.calls: list[Changed] = []

    @property
    def layers(self) -> list[int]:
        """The layers of which a call was changed, by their numbers."""
        return sorted({call.layer for call in self.calls})

    @property
    def heads(self) -> list[tuple[int, int]]:
        """(layer, head) of every head that was changed."""
        return sorted({(call.layer, head) for call in self.calls for head in call.heads})

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[Changed]:
        return iter(self.calls)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        if not self.calls:
            return f"{self.what}: changed nothing yet"
        calls = f"{len(self.calls)} call{'s' * (len(self.calls) > 1)}"
        heads = f"{len(self.heads)} head{'s' * (len(self.heads) > 1)}"
        return f"{self.what}: changed {calls}, layer{'s' * (len(self.layers) > 1)} {ranges(self.layers)}, {heads}"
