"""Keeps a NaN or inf in a key from rows that do not see it: inside a chunk, 0 · NaN would carry it to earlier rows.

As for softmax attention, values are read on CPU in plain mode only, and cheaply. Elsewhere keys that a mask hides from
all rows are neutralised all the same; ``form="recurrent"`` never touches what comes later.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard.backends._base import norm_of, reads_values
from regard.linear import _masking
from regard.linear._request import Request


def guarded(request: Request, compute: Callable[[Request], Tensor]) -> Tensor:
    """``compute(request)``; where that may have leaked, the same on clean tensors, with NaN in the rows concerned."""
    state = request.state
    kept = None if state is None else state.fork()
    out = compute(request)
    ordered = request.reading.causal or request.reading.documents is not None or request.reading.refusals
    if not reads_values(request.spec) or not ordered or _clean(request):
        return out
    bad_query, bad_key = _bad(request.query), _bad(request.key) | _bad(request.value)
    if not bool(bad_query.any()) and not bool(bad_key.any()):
        return out
    seen = _sees(request, bad_key)  # [B, H or Hkv, L]
    lost = bad_query | seen.repeat_interleave(request.spec.heads // seen.shape[1], 1)
    if state is not None and kept is not None:
        state.sums, state.norms, state.position = kept.sums, kept.norms, kept.position
    clean = request._replace(
        query=request.query.masked_fill(lost.unsqueeze(-1), 0.0),
        key=request.key.masked_fill(bad_key.unsqueeze(-1), 0.0),
        value=request.value.masked_fill(bad_key.unsqueeze(-1), 0.0),
    )
    out = compute(clean).masked_fill(lost.unsqueeze(-1), torch.nan)
    if state is not None and state.sums is not None and state.norms is not None and seen.shape[2]:
        spoilt = seen[:, :, -1].repeat_interleave(state.sums.shape[1] // seen.shape[1], 1)[..., None]
        state.norms = state.norms.masked_fill(spoilt, torch.nan)
        state.sums = state.sums.masked_fill(spoilt[..., None], torch.nan)
    return out


def _clean(request: Request) -> bool:
    # the inputs, not the result: what is hidden may show in gradients only, and elu(-inf) is finite
    return all(math.isfinite(norm_of(t)) for t in (request.query, request.key, request.value))


def _bad(tensor: Tensor) -> Tensor:
    return ~torch.isfinite(tensor.detach()).all(-1)


def _sees(request: Request, bad: Tensor) -> Tensor:
    """Which rows see one of the bad keys [B, Hkv, S]: bool [B, Hkv, L], or [B, H, L] where the mask asks for heads."""
    spec, device = request.spec, bad.device
    L, S = spec.queries, spec.keys
    if request.reading.refusals:  # any mask at all, whose form has L × S numbers anyway
        assert request.mask is not None
        tile = request.mask.tile(range(L), range(S), L, S, offset=request.offset, device=device)
        if tile.shape[1] > 1:  # heads that share a key may see it or not, each for itself
            bad = bad.repeat_interleave(tile.shape[1] // spec.kv_heads, 1)
        return (tile & bad.unsqueeze(2)).any(-1)
    seen = _masking.visible(request.reading, L, request.total, request.first, device)
    if seen.hidden is not None:
        bad = bad & ~seen.hidden[:, None]
    places = torch.arange(S, device=device)
    start = torch.zeros(1, 1, S, dtype=torch.int64)
    if seen.runs is not None:
        changes = torch.nn.functional.pad(seen.runs[:, 1:] != seen.runs[:, :-1], (1, 0))
        start = torch.where(changes, places, 0).cummax(1).values[:, None]
    reached = torch.where(bad, places, -1).cummax(2).values >= start
    if not seen.causal:  # to the end of the document, and back over all of it
        assert seen.runs is not None
        runs = seen.runs[:, None].expand(*bad.shape)
        spoilt = torch.zeros(*bad.shape[:2], S, dtype=torch.int64).scatter_add(2, runs, bad.to(torch.int64))
        reached = spoilt.gather(2, runs) > 0
    if seen.lost is not None:
        reached = reached & ~seen.lost[:, None]
    rows = torch.arange(request.offset, request.offset + L, device=device)
    inside = rows >= 0 if seen.runs is None else (rows >= 0) & (rows < S)
    return reached[:, :, rows.clamp(0, S - 1)] & inside
