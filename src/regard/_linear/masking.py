"""What of a mask a running sum can honour: causality, keys hidden from all rows, documents that come in runs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.masks import Documents, Mask

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
    documents: Documents | None
    refusals: list[str]


def read(mask: Mask | None, L: int, S: int, offset: int | Tensor) -> Reading:
    """The parts of a mask that are joined by &, and why some of them cannot be honoured by a sum over keys."""
    causal, key_masks, documents, refusals = False, [], None, []
    for part in [] if mask is None else _conjuncts(mask):
        if part.kind == "everything":
            continue
        flags = part.fused(L, S, offset) if part.kind == "window" else None
        if part.kind == "causal" or (flags is not None and flags.left is None and flags.causal):
            causal = True
        elif flags is not None and flags.left is None and flags.right is None:
            continue  # a window that reaches over the whole call
        elif isinstance(part, Documents):
            if documents is not None:
                refusals.append(f"two masks of documents in one call: join them into one; {_WAYS_OUT}")
            elif part.readable() and part.runs(S) is None and _comes_back(part):
                refusals.append(f"a document of {part!r} comes back after another, and its sum is gone; {_WAYS_OUT}")
            documents = part
        elif part.heads == 1 and _about_keys(part):
            key_masks.append(part)
        else:
            refusals.append(_why_not(part))
    return Reading(causal, tuple(key_masks), documents, refusals)


def _comes_back(documents: Documents) -> bool:
    """Whether a document goes on after another one; padding is none, and between two halves leaves a document one."""
    ids = documents.ids
    if ids is None:
        return False

    def find() -> bool:
        rows = ids.detach().reshape(-1, ids.shape[-1])
        met = [torch.unique_consecutive(row[row >= 0]) for row in rows]
        return any(len(torch.unique(row)) < len(row) for row in met)

    return documents.remember("comes back", 0, find)


def _why_not(part: Mask) -> str:
    if part.kind == "window":
        return f"{part!r} forgets a key that lies too far back, which a sum over keys cannot: use decay=, {_WAYS_OUT}"
    if part.heads != 1:
        return f"{part!r} differs from head to head, and heads share one sum a key; {_WAYS_OUT}"
    return f"{part!r} lets rows see different keys, and all rows read one sum over keys; {_WAYS_OUT}"


def _conjuncts(mask: Mask) -> list[Mask]:
    if mask.kind != "and":
        return [mask]
    return [found for part in mask.parts for found in _conjuncts(part)]


def _about_keys(mask: Mask) -> bool:
    """Whether a mask permits a key to all rows of an item, or to none."""
    if mask.parts:
        return all(_about_keys(part) for part in mask.parts)
    if mask.kind in ("keep", "drop", "from_additive"):
        shape = mask.tensors[0].shape
        return len(shape) == 1 or (len(shape) == 4 and shape[2] == 1) or (len(shape) == 2 and shape[0] == 1)
    return mask.kind in ("everything", "padding", "columns")


def visible(reading: Reading, L: int, S: int, first: int, device: torch.device) -> Visible:
    """For the keys from ``first`` on, of a call with S keys in all."""
    hidden = None
    for part in reading.key_masks:
        seen = part.tile(range(1), range(first, S), L, S, offset=0, device=device)[:, 0, 0]  # [B or 1, S − first]
        hidden = ~seen if hidden is None else hidden | ~seen
    if reading.documents is None:
        return Visible(reading.causal, hidden)
    ids = _ids(reading.documents, S, device)
    padding = (ids < 0)[:, first:]
    return Visible(reading.causal, padding if hidden is None else hidden | padding, _runs(ids)[:, first:], padding)


def document_before(reading: Reading, S: int, first: int, device: torch.device) -> Tensor | None:
    """The number of the document that the key before ``first`` is in, [B or 1, 1]: what a state goes on with."""
    if reading.documents is None or first == 0:
        return None
    return _runs(_ids(reading.documents, S, device))[:, first - 1 : first]


def _ids(documents: Documents, S: int, device: torch.device) -> Tensor:
    """[B or 1, S], negative for padding."""
    if documents.lengths is not None:
        ends = documents.lengths.to(device=device, dtype=torch.int64).cumsum(0)
        return torch.searchsorted(ends, torch.arange(S, device=device), right=True).unsqueeze(0)
    assert documents.ids is not None
    ids = documents.ids.to(device)
    return ids if ids.dim() == 2 else ids.unsqueeze(0)


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
