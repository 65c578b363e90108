"""Attention whose weights somebody has, as a recorded call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.recording._calls import KINDS, Recorded, Site
from regard.recording._weights import statistics_of
from regard.statistics import Want

if TYPE_CHECKING:
    from regard.recording import Recording


def added(
    recording: Recording, weights: Tensor, name: str, kind: str, want: Want | None, query_offset: int | None
) -> Recorded:
    _check(weights, name, kind, want)
    site = Site(name, 0)
    if site not in recording.sites:
        recording.sites.append(site)
    _, heads, queries, keys = weights.shape
    offset = query_offset if query_offset is not None else 0 if kind == "cross" else keys - queries
    with torch.no_grad():
        p = weights.detach()
        exact = torch.float64 if p.dtype == torch.float64 else torch.float32
        # the logits are not known: of their log-sum-exp only which rows are empty
        lse = torch.zeros(p.shape[:3], dtype=exact).masked_fill((p.amax(-1) == 0).cpu(), -torch.inf)
        parts = {"lse": lse, **{name: part.cpu() for name, part in statistics_of(p, want or Want(), offset).items()}}
        for where in {"top_keys", "value_top_keys"} & set(parts):
            parts[where] = parts[where].to(torch.int32)
        permitted = (p > 0).sum(-1, dtype=torch.int32).cpu()
    layer = recording.sites.index(site)
    call = Recorded(
        site=site,
        layer=layer,
        number=sum(call.layer == layer for call in recording.calls),
        kind=kind,
        phase="prefill",
        keys=keys,
        heads=tuple(range(heads)),
        positions=torch.tensor([offset]),
        permitted=permitted,
        parts={name: part.contiguous() for name, part in parts.items()},
        written_out=True,
    )
    recording.calls.append(call)
    return call


def _check(weights: object, name: object, kind: object, want: object) -> None:
    if not isinstance(weights, Tensor) or not weights.is_floating_point() or weights.dim() != 4 or not weights.numel():
        what = list(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(
            f"weights must be a floating-point tensor [batch, head, query, key] that is not empty, got {what}"
        )
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be text, such as a module's path, got {name!r}")
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if want is not None and not isinstance(want, Want):
        raise TypeError(f"want must be a regard.Want, such as Want(top_k=4), got {type(want).__name__}")
    if want is not None and want.value_mass:
        raise ValueError("want asks for value_mass, and weights alone do not say how long the values are")
    sums = weights.detach().sum(-1)
    if not bool(((weights >= 0).all(-1) & (sums <= 1.01)).all()):
        raise ValueError(
            "weights must be at least 0, and at most 1 in sum over the keys: pass them as the softmax gave them"
        )
