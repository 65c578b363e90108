"""What of a mask a running sum can honour: causality, keys hidden from all rows, documents that come in runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.masks import Fused, Mask

_WAYS_OUT = "use regard.attention, or form='quadratic', which takes any mask in O(L·S)"


class Visible(NamedTuple):
    """Which keys a row sees, over T positions that queries and keys share (see ``aligned``)."""

    causal: bool
    hidden: Tensor | None = None  # [B or 1, T]: keys that no row sees
    runs: Tensor | None = None  # [B or 1, T]: number of the document a token is in; padding counts to the one before
    lost: Tensor | None = None  # [B or 1, T]: rows that are in no document


class Reading(NamedTuple):
    """A mask taken apart."""

    causal: bool
    key_masks: tuple[Mask, ...]
    documents: Any
    refusals: list[str]


def read(mask: Mask | None, L: int, S: int, offset: int | Tensor) -> Reading:
    """The parts of a mask that are joined by &, and why some of them cannot be honoured by a sum over keys."""
    causal, key_masks, documents, refusals = False, [], None, []
    for part in [] if mask is None else mask.conjuncts:
        flags, reached = part.flags, part.fused(L, S, offset)
        if flags == Fused():
            continue  # everything
        if part.heads == 1 and part.about_keys:
            key_masks.append(part)
        elif flags is None or reached is None or reached.left is not None or reached.right not in (None, 0):
            refusals.append(_why_not(part, reached))
        elif flags.documents is not None:
            if documents is not None:
                refusals.append(f"two masks of documents in one call: join them into one; {_WAYS_OUT}")
            elif part.readable() and flags.documents.runs(S) is None and flags.documents.comes_back():
                refusals.append(f"a document of {part!r} comes back after another, and its sum is gone; {_WAYS_OUT}")
            documents = flags.documents
        else:
            causal = causal or flags.right == 0
    return Reading(causal, tuple(key_masks), documents, refusals)


def _why_not(part: Mask, reached: Fused | None) -> str:
    if reached is not None:
        return f"{part!r} forgets a key that lies too far back, which a sum over keys cannot: use decay=, {_WAYS_OUT}"
    if part.heads != 1:
        return f"{part!r} differs from head to head, and heads share one sum per key; {_WAYS_OUT}"
    return f"{part!r} lets rows see different keys, and all rows read one sum over keys; {_WAYS_OUT}"


def visible(reading: Reading, L: int, S: int, first: int, device: torch.device) -> Visible:
    """For the keys from ``first`` on, of a call with S keys in all."""
    hidden = None
    for part in reading.key_masks:
        seen = part.tile(range(1), range(first, S), L, S, offset=0, device=device)[:, 0, 0]  # [B or 1, S − first]
        hidden = ~seen if hidden is None else hidden | ~seen
    if reading.documents is None:
        return Visible(reading.causal, hidden)
    ids = reading.documents.ids_of(S, device)
    padding = (ids < 0)[:, first:]
    return Visible(reading.causal, padding if hidden is None else hidden | padding, _runs(ids)[:, first:], padding)


def document_before(reading: Reading, S: int, first: int, device: torch.device) -> Tensor | None:
    """The number of the document that the key before ``first`` is in, [B or 1, 1]: what a state goes on with."""
    if reading.documents is None or first == 0:
        return None
    return _runs(reading.documents.ids_of(S, device))[:, first - 1 : first]


def _runs(ids: Tensor) -> Tensor:
    """Documents counted as they come. Padding between two halves of one document leaves it one."""
    places = torch.arange(ids.shape[1], device=ids.device)
    last_real = torch.where(ids >= 0, places, 0).cummax(1).values
    filled = ids.gather(1, last_real)
    changes = F.pad(filled[:, 1:] != filled[:, :-1], (1, 0))
    return changes.to(torch.int64).cumsum(1)


def clipped(offset: int, L: int, S: int) -> int:
    """An offset that means the same: a row beyond the keys sees what the row next to them sees."""
    return max(-L, min(offset, S))


def aligned(seen: Visible, L: int, S: int, offset: int, device: torch.device) -> Visible:
    """The same over the positions that queries and keys share: those outside the keys hold none."""
    before, after = max(0, -offset), max(0, offset + L - S)
    if before == after == 0:
        return seen
    hidden = torch.zeros(1, S, dtype=torch.bool, device=device) if seen.hidden is None else seen.hidden
    hidden = F.pad(hidden, (before, after), value=True)
    if seen.runs is None or seen.lost is None:
        return seen._replace(hidden=hidden)
    runs = F.pad(seen.runs, (before, after))
    return seen._replace(hidden=hidden, runs=runs, lost=F.pad(seen.lost, (before, after), value=True))
