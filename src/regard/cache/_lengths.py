"""The number of tokens of each batch item, kept on the host so that no call waits for a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._checks import check_count


class Lengths:
    """A count for each item; becomes a tensor on the device only where items differ. Never changed in place."""

    def __init__(self, counts: Sequence[int], device: torch.device, tensor: Tensor | None = None) -> None:
        self.counts = tuple(counts)
        self.device = device
        self._tensor = tensor
        first = self.counts[0] if self.counts else 0
        # the count, where all items have the same
        self.same: int | None = first if self.counts == (first,) * len(self.counts) else None

    @property
    def longest(self) -> int:
        return max(self.counts, default=0)

    @property
    def tensor(self) -> Tensor:
        """[batch], int64."""
        if self._tensor is None:
            with torch.inference_mode(False):
                # from pinned memory the device copies without the host waiting for it
                pinned = self.device.type == "cuda"
                counts = torch.tensor(self.counts, dtype=torch.int64, pin_memory=pinned)
                self._tensor = counts.to(self.device, non_blocking=pinned)
        return self._tensor

    def plus(self, more: int | Sequence[int] | Lengths) -> Lengths:
        """Added item by item; what the device knows is added there, and not sent to it again."""
        if isinstance(more, int):
            added: Sequence[int] = (more,) * len(self.counts)
        else:
            added = more.counts if isinstance(more, Lengths) else more
        counts = [a + b for a, b in zip(self.counts, added, strict=True)]
        moved: Tensor | None = None
        if self._tensor is not None and isinstance(more, (int, Lengths)):
            with torch.inference_mode(False):  # a later call may have gradients
                moved = self._tensor + (more if isinstance(more, int) else more.tensor)
        return Lengths(counts, self.device, moved)

    def cut(self, limit: int) -> tuple[Lengths, Lengths]:
        """What is below a limit, and what is beyond it."""
        below = beyond = None
        if self._tensor is not None:
            with torch.inference_mode(False):
                below, beyond = self._tensor.clamp_max(limit), (self._tensor - limit).clamp_min(0)
        return (
            Lengths([min(count, limit) for count in self.counts], self.device, below),
            Lengths([max(count - limit, 0) for count in self.counts], self.device, beyond),
        )

    def on(self, device: torch.device) -> Lengths:
        return Lengths(self.counts, device)

    def pick(self, index: Sequence[int]) -> Lengths:
        return Lengths([self.counts[i] for i in index], self.device)

    @property
    def place(self) -> int | Tensor:
        """As a position: an int, or [batch] where items differ."""
        same = self.same
        return self.tensor if same is None else same


class Fresh(NamedTuple):
    """Which of the new tokens are tokens."""

    tokens: int
    counts: tuple[int, ...] | None = None  # real ones of each item; None: all
    side: str = "right"  # where the padding stands

    @property
    def one(self) -> bool:
        """Whether every item has one new token."""
        return self.tokens == 1 and self.counts is None

    def of(self, batch: int) -> tuple[int, ...]:
        return (self.tokens,) * batch if self.counts is None else self.counts

    @property
    def before(self) -> int | tuple[int, ...]:
        """Padding in front of the first real token."""
        if self.counts is None or self.side == "right":
            return 0
        return tuple(self.tokens - count for count in self.counts)

    def places(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Of every real token: its item, its place among the item's real ones, its place among all new ones."""
        assert self.counts is not None
        found = []
        for item, count in enumerate(self.counts):
            skipped = self.tokens - count if self.side == "left" else 0
            found += [(item, t, skipped + t) for t in range(count)]
        table = torch.tensor(found, dtype=torch.int64).reshape(-1, 3).to(device)
        return table[:, 0], table[:, 1], table[:, 2]

    def pads(self, device: torch.device) -> Tensor:
        """[batch, tokens], True at padding."""
        assert self.counts is not None
        at = torch.arange(self.tokens)
        counts = torch.tensor(self.counts).unsqueeze(1)
        return (at >= counts if self.side == "right" else at < self.tokens - counts).to(device)


def first_row(fresh: Fresh, start: Lengths) -> int | Tensor:
    """Where the first row of each item stands; padding on the left stands before the first token."""
    before = fresh.before
    if isinstance(before, int):
        return start.place
    return start.plus([-skipped for skipped in before]).place


def places_of(fresh: Fresh, start: Lengths, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every real new token: its item, its slot, and its place among the new ones."""
    if fresh.counts is not None:
        items, nth, sources = fresh.places(new.device)
        return items, start.tensor[items] + nth, sources
    batch, tokens = new.shape[0], new.shape[2]
    steps = torch.arange(tokens, device=new.device).expand(batch, tokens)
    items = torch.arange(batch, device=new.device).unsqueeze(1).expand(batch, tokens)
    first = start.tensor.unsqueeze(1) if start.same is None else start.same
    return items.flatten(), (first + steps).flatten(), steps.flatten()


def order_of(index: Any, batch: int) -> list[int]:
    """Which of the `batch` items that are held each new item becomes."""
    order = counts_of("index", index)
    if order and max(order) >= batch:
        raise ValueError(f"index holds {max(order)}, but the cache holds {batch} items")
    return order


def counts_of(name: str, given: Any) -> list[int]:
    """A list of ints from what a caller gave: a sequence of ints, or an integer tensor [batch]."""
    if isinstance(given, Tensor):
        if given.dim() != 1 or given.is_floating_point() or given.dtype == torch.bool:
            raise TypeError(f"{name} must be one int for each item, got a {given.dtype} tensor {list(given.shape)}")
        given = given.tolist()
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise TypeError(f"{name} must be one int for each item, got {type(given).__name__}")
    if given and set(map(type, given)) == {int} and min(given) >= 0:
        return list(given)  # thousands of rows in each step of a beam search
    for number in given:
        check_count(f"each of {name}", number, 0)
    return [int(number) for number in given]
