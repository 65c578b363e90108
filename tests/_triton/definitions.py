"""Every statistic by its definition, from the whole matrix of weights in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.spec import Call
from regard.statistics import BUCKETS, Want


def whole(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(lse, weights, permitted) [B, H, L, S] of a call."""
    spec = call.spec
    sizes = spec.batch, spec.heads, spec.queries, spec.keys
    key = call.key.double().repeat_interleave(spec.heads // spec.kv_heads, 1)
    logits = call.query.double() @ key.transpose(-1, -2) * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    seen = torch.ones(sizes, dtype=torch.bool, device=key.device)
    if call.bias is not None:
        logits, seen = logits + call.bias.double(), seen & (call.bias != -torch.inf)
    if call.mask is not None:
        seen = seen & call.mask.tile(
            range(sizes[2]), range(sizes[3]), *sizes[2:], offset=call.offset, device=key.device
        )
    logits = logits.masked_fill(~seen, -torch.inf)
    lse = logits.logsumexp(-1)
    if call.sinks is not None:
        lse = torch.logaddexp(lse, call.sinks.double().view(1, -1, 1)).masked_fill(lse == -torch.inf, -torch.inf)
    empty = (lse == -torch.inf).unsqueeze(-1)
    weights = (logits - lse.unsqueeze(-1)).exp().masked_fill(empty, 0.0).masked_fill(~seen, 0.0)
    return lse, weights, seen


def statistics(call: Call, want: Want) -> tuple[Tensor, dict[str, Tensor]]:
    """(lse, wanted statistics); sums over permitted pairs only, so that nothing hidden is counted."""
    lse, p, seen = whole(call)
    L, S = p.shape[2:]
    missing = lse == -torch.inf
    found = {}
    if want.rows:
        found["entropy"] = -torch.special.xlogy(p, p).sum(-1).masked_fill(missing, torch.nan)
        found["max_weight"] = p.amax(-1).masked_fill(missing, torch.nan)
    rows = range(L)[want.queries or slice(None)]
    some = p[:, :, rows.start : rows.stop]
    if want.key_mass:
        found["key_mass"] = some.sum(2)
    if want.map is not None:
        found["map"] = _pooled(some, min(want.map[0], len(rows)), min(want.map[1], S))
    if want.top_k:
        ranked = p.float().masked_fill(~seen, -1.0)
        values, keys = torch.sort(ranked, dim=-1, descending=True, stable=True)
        pad = (0, max(0, want.top_k - S))
        values = torch.nn.functional.pad(values[..., : want.top_k], pad, value=-1.0)
        keys = torch.nn.functional.pad(keys[..., : want.top_k], pad)
        found["top_weights"], found["top_keys"] = values.clamp_min(0.0), keys.masked_fill(values < 0, -1)
    if want.distance:
        offset = call.offset.view(-1, 1) if isinstance(call.offset, Tensor) else call.offset
        i = (torch.arange(L, device=p.device) + offset).view(-1, 1, L, 1)
        far = (i - torch.arange(S, device=p.device)).abs()
        found["distance"] = torch.stack([(p * _in_bucket(far, b)).sum((2, 3)) for b in range(BUCKETS)], -1)
    if want.first:
        found["first_mass"] = p[..., : want.first].sum(-1)
    if want.weights is not None:
        found["weights"] = p[:, :, want.weights[0], want.weights[1]]
    return lse, found


def _in_bucket(distance: Tensor, bucket: int) -> Tensor:
    return distance == 0 if bucket == 0 else (distance >= 2 ** (bucket - 1)) & (distance < 2**bucket)


def _pooled(p: Tensor, rows: int, cols: int) -> Tensor:
    L, S = p.shape[2:]
    cells = [
        p[:, :, r * L // rows : (r + 1) * L // rows, c * S // cols : (c + 1) * S // cols].mean((2, 3))
        for r in range(rows)
        for c in range(cols)
    ]
    return torch.stack(cells, -1).unflatten(-1, (rows, cols)) if cells else p.new_zeros(*p.shape[:2], rows, cols)


def wrong(found: dict[str, Tensor], exact: dict[str, Tensor], tolerance: float = 2e-5) -> list[str]:
    """What is not as it should be: names, shapes, missing rows, values. Keys may differ where weights agree."""
    if set(found) != set(exact):
        return [f"names {sorted(set(found) ^ set(exact))}"]
    bad = []
    for name, want in exact.items():
        got = found[name]
        if got.shape != want.shape or got.dtype != (torch.int64 if name == "top_keys" else torch.float32):
            bad.append(f"{name}: {got.dtype} {tuple(got.shape)} for {tuple(want.shape)}")
            continue
        if name == "top_keys":
            close = (found["top_weights"] - exact["top_weights"]).abs() <= tolerance
            tied = _tied(exact["top_weights"], tolerance)
            if not ((got == want) | (close & tied)).all() or not ((got < 0) == (want < 0)).all():
                bad.append(f"{name}: {int((got != want).sum())} of {got.numel()} differ")
            continue
        same = (got == want) | (got.isnan() & want.isnan())
        error = torch.where(same, 0.0, got.double() - want.double()).abs() / (1 + want.double().abs().nan_to_num())
        if not (error <= tolerance).all():
            bad.append(f"{name}: off by {error.max():.2e}")
    return bad


def _tied(weights: Tensor, tolerance: float) -> Tensor:
    """Where a neighbour in the order is as large, within rounding; the last place may always have an unseen one."""
    gap = weights[..., :-1] - weights[..., 1:] <= tolerance
    tied = torch.zeros_like(weights, dtype=torch.bool)
    tied[..., :-1] |= gap
    tied[..., 1:] |= gap
    tied[..., -1] = True
    return tied
