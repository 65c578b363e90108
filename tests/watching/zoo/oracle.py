"""What a model's softmaxes gave, collected in another way than `regard.watch` does: by replacing torch's functions.

For each softmax and each call of torch's attention function it keeps the entropies of all rows, in float64, sorted: two
calls of attention on random numbers have the same ones only if they have the same weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor


class Rows(NamedTuple):
    what: str
    shape: tuple[int, ...]
    entropies: tuple[Tensor, ...]  # of the rows that see something, sorted; with and without a last key that is a sink

    def fits(self, other: Tensor) -> bool:
        theirs = other.double().flatten()
        theirs = theirs[~theirs.isnan()].sort().values
        return any(
            ours.shape == theirs.shape and bool(((ours - theirs).abs() < 2e-4 * (1 + ours)).all())
            for ours in self.entropies
        )


@contextlib.contextmanager
def collected() -> Iterator[list[Rows]]:
    """Replaces torch's softmax and attention functions while the block runs; they compute what they always do."""
    found: list[Rows] = []
    inside = [0]

    def note(what: str, weights: Tensor, axis: int) -> None:
        p = weights.detach().double().movedim(axis, -1)
        found.append(Rows(what, tuple(weights.shape), (_entropies(p), _entropies(p[..., :-1]))))

    def softmax(real: Any) -> Any:
        def run(*args: Any, **given: Any) -> Any:
            inside[0] += 1
            try:
                out = real(*args, **given)
            finally:
                inside[0] -= 1
            axis = given.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else -1)
            axis = -1 if axis is None else axis
            if (
                not inside[0]
                and isinstance(out, Tensor)
                and out.dim() >= 2
                and not out.is_nested
                and out.shape[axis] > 1
            ):
                note("softmax", out, axis)
            return out

        return run

    def logsumexp(real: Any) -> Any:
        def run(given: Tensor, dim: Any, *rest: Any, **more: Any) -> Any:
            inside[0] += 1
            try:
                out = real(given, dim, *rest, **more)
                if inside[0] == 1 and isinstance(dim, int) and given.dim() >= 2 and given.shape[dim] > 1:
                    note("logsumexp", given.detach().double().softmax(dim), dim)
            finally:
                inside[0] -= 1
            return out

        return run

    def division(real: Any) -> Any:
        """Weights that a model made by dividing, by a number for each row: fits are looked for, none is required."""

        def run(given: Tensor, by: Any) -> Any:
            out = real(given, by)
            if not inside[0] and isinstance(by, Tensor) and isinstance(out, Tensor) and by.dim() == out.dim() >= 2:
                axes = [axis for axis in range(out.dim()) if by.shape[axis] == 1 < out.shape[axis]]
                inside[0] += 1
                if len(axes) == 1 and out.is_floating_point() and bool((out >= 0).all()):
                    note("division", out, axes[0])
                inside[0] -= 1
            return out

        return run

    def attention(real: Any) -> Any:
        def run(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *rest: Any, **given: Any) -> Any:
            inside[0] += 1
            try:
                out = real(query, key, value, attn_mask, *rest, **given)
                if not query.is_nested and type(attn_mask) in (Tensor, type(None)):
                    note("attention", _weights(query, key, attn_mask, rest, given), -1)
            finally:
                inside[0] -= 1
            return out

        return run

    function, fast = torch.nn.functional, torch.backends.mha.get_fastpath_enabled()
    with contextlib.ExitStack() as patches:
        torch.backends.mha.set_fastpath_enabled(False)  # the fused operator shows no weights
        patches.callback(torch.backends.mha.set_fastpath_enabled, fast)
        for owner in (function, torch, torch.Tensor):
            patches.enter_context(mock.patch.object(owner, "softmax", softmax(owner.softmax)))
        patches.enter_context(mock.patch.object(torch, "logsumexp", logsumexp(torch.logsumexp)))
        patches.enter_context(mock.patch.object(torch.Tensor, "__truediv__", division(torch.Tensor.__truediv__)))
        real = function.scaled_dot_product_attention
        patches.enter_context(mock.patch.object(function, "scaled_dot_product_attention", attention(real)))
        yield found


def _entropies(p: Tensor) -> Tensor:
    entropy = -torch.special.xlogy(p, p).sum(-1).flatten()
    kept = entropy[(p.sum(-1).flatten() > 0) & ~entropy.isnan()]
    return kept.sort().values


def _weights(query: Tensor, key: Tensor, attn_mask: Tensor | None, rest: Any, given: dict[str, Any]) -> Tensor:
    q, k = query.detach().double(), key.detach().double()
    if given.get("enable_gqa") and q.dim() > 2:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scale = given.get("scale") or q.shape[-1] ** -0.5
    logits = q @ k.transpose(-1, -2) * scale
    if given.get("is_causal", rest[1] if len(rest) > 1 else False):
        logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        hidden = attn_mask <= torch.finfo(attn_mask.dtype).min / 2
        logits = (logits + attn_mask.double()).masked_fill(hidden, -torch.inf)
    weights: Tensor = logits.softmax(-1)
    return weights.nan_to_num(0.0)
