"""Causal linear attention in chunks: a matrix product inside a chunk, a sum over keys between chunks.

Legend: B batch, K state heads, G query heads that share a state, N chunks of C tokens, m features, e value dim.

  inside    out_i += Σ_{j ≤ i, same chunk} (φ(q_i)·φ(k_j)) exp(c_i − c_j) v_j     c: sums of log gates within the chunk
  between   out_i += exp(c_i) φ(q_i)·S_n,  S_n = Σ_{n' < n} exp(gates between) Σ_{j in n'} exp(c_end − c_j) φ(k_j)ᵀ v_j

All exponents are ≤ 0, so nothing overflows, however strong the gates. Documents cut the sums: S_n holds the keys of the
document that is open where chunk n begins, and only its tokens read it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Sums(NamedTuple):
    """What is carried from token to token."""

    values: Tensor  # [B, K, m, e]
    norms: Tensor  # [B, K, m]
    run: Tensor | None = None  # [B or 1, 1]: the document of the last token, where there are documents


class Part(NamedTuple):
    """Neighbouring tokens, their features computed."""

    query: Tensor  # [B, K·G, T, m]
    key: Tensor  # [B, K, T, m]
    value: Tensor  # [B, K, T, e]
    gates: Tensor | None = None  # [B or 1, K, T] logs of what remains of the sum when a token comes
    runs: Tensor | None = None  # [B or 1, T]


def attend(part: Part, before: Sums, chunk: int, strict: bool = False) -> tuple[Tensor, Tensor, Sums]:
    """Weighted values [B, K·G, T, e], total weights [B, K·G, T] and the sums behind the last token.

    ``strict``: a token does not see itself.
    """
    tokens = part.query.shape[2]
    chunk = min(chunk, tokens)
    query, key, value = _in_chunks(part, chunk)  # [B, K, N, G, C, m], [B, K, N, C, m], [B, K, N, C, e]
    runs = None if part.runs is None else _cut(_padded(part.runs, chunk, "replicate"), -1, chunk)[:, None]
    # c: [B or 1, K, N, C]
    gates = None if part.gates is None else _cut(_padded(part.gates, chunk, "zeros"), -1, chunk).cumsum(-1)

    inside = _inside(query, key, gates, runs, strict)  # [B, K, N, G, C, C]
    states, norms, after = _between(key, value, gates, runs, before)
    reading = query if gates is None else query * gates.to(query.dtype).exp()[:, :, :, None, :, None]
    if runs is not None:
        opening = _opening(runs, before)[..., None]  # [B or 1, 1, N, 1]
        reading = reading * (runs == opening)[:, :, :, None, :, None]
    rows = reading.flatten(3, 4)  # [B, K, N, G·C, m]
    found = rows @ states + inside.flatten(3, 4) @ value
    weight = (rows @ norms.unsqueeze(-1)).squeeze(-1) + inside.flatten(3, 4).sum(-1)
    out = _rejoined(_cut(found, 3, chunk), tokens)
    return out, _rejoined(_cut(weight, 3, chunk).unsqueeze(-1), tokens).squeeze(-1), after


def _in_chunks(part: Part, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros after the last token add nothing."""
    heads, state_heads = part.query.shape[1], part.key.shape[1]
    over = -part.query.shape[2] % chunk
    query, key, value = (F.pad(t, (0, 0, 0, over)) if over else t for t in part[:3])
    query = _cut(_cut(query, 2, chunk), 1, heads // state_heads).transpose(2, 3)
    return query, _cut(key, 2, chunk), _cut(value, 2, chunk)


def _cut(x: Tensor, dim: int, size: int) -> Tensor:
    """One dim in pieces of ``size``."""
    return torch.unflatten(x, dim, (-1, size))


def _padded(x: Tensor, chunk: int, how: str) -> Tensor:
    over = -x.shape[-1] % chunk
    if not over:
        return x
    return torch.cat([x, x[..., -1:].expand(*x.shape[:-1], over)], -1) if how == "replicate" else F.pad(x, (0, over))


def _inside(query: Tensor, key: Tensor, gates: Tensor | None, runs: Tensor | None, strict: bool) -> Tensor:
    """Weights of the pairs in each chunk: [B, K, N, G, C, C]."""
    chunk = key.shape[3]
    weights = _cut(query.flatten(3, 4) @ key.transpose(-1, -2), 3, chunk)
    unseen = torch.ones(chunk, chunk, dtype=torch.bool, device=key.device).triu(0 if strict else 1)
    if runs is not None:
        unseen = unseen | (runs.unsqueeze(-1) != runs.unsqueeze(-2)).unsqueeze(3)
    if gates is not None:
        remains: Tensor = (gates.unsqueeze(-1) - gates.unsqueeze(-2)).unsqueeze(3)
        weights = weights * remains.masked_fill(unseen, 0.0).to(weights.dtype).exp()
    # filled rather than multiplied by 0: a product with a key that is not seen may have overflown
    return weights.masked_fill(unseen, 0.0)


def _opening(runs: Tensor, before: Sums) -> Tensor:
    """The document that is open where each chunk begins: [B or 1, 1, N]."""
    first = runs[:, :, :1, 0] if before.run is None else before.run.unsqueeze(1).expand(runs.shape[0], 1, 1)
    return torch.cat([first, runs[:, :, :-1, -1]], 2)


def _between(
    key: Tensor, value: Tensor, gates: Tensor | None, runs: Tensor | None, before: Sums
) -> tuple[Tensor, Tensor, Sums]:
    """The sums where each chunk begins, [B, K, N, m, e] and [B, K, N, m], and those behind the last one."""
    if gates is not None:
        key = key * (gates[..., -1:] - gates).to(key.dtype).exp().unsqueeze(-1)
    if runs is not None:
        key = key * (runs == runs[..., -1:]).unsqueeze(-1)
    own = key.transpose(-1, -2) @ value
    own_norms = key.sum(3)
    carried = _carried(key.shape[2], gates, runs, before, key)  # [B or 1, K or 1, N + 1, N + 1]
    values = carried @ torch.cat([before.values.unsqueeze(2), own], 2).flatten(3)
    norms = carried @ torch.cat([before.norms.unsqueeze(2), own_norms], 2)
    values = _cut(values, -1, own.shape[4])
    run = None if runs is None else runs[:, 0, -1, -1:]
    return values[:, :, :-1], norms[:, :, :-1], Sums(values[:, :, -1], norms[:, :, -1], run)


def _carried(chunks: int, gates: Tensor | None, runs: Tensor | None, before: Sums, like: Tensor) -> Tensor:
    """What is left, where chunk n begins (n = N: behind the last), of the sums before the call (column 0) and of those
    of chunk n' (column n' + 1)."""
    remains = torch.ones(chunks + 1, chunks + 1, dtype=like.dtype, device=like.device).tril()[None, None]
    if gates is not None:
        ends = F.pad(gates[..., -1].expand(*gates.shape[:2], chunks).cumsum(-1), (1, 0))
        steps = ends.unsqueeze(-1) - ends.unsqueeze(-2)
        remains = steps.masked_fill(remains == 0, -torch.inf).to(like.dtype).exp()
    if runs is not None:
        # the document that each of the sums is of
        of = torch.cat([_opening(runs, before)[:, :, :1], runs[..., -1]], 2)
        remains = remains * (of.unsqueeze(-1) == of.unsqueeze(-2))
    return remains


def _rejoined(x: Tensor, tokens: int) -> Tensor:
    """[B, K, N, G, C, e] to [B, K·G, T, e]."""
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :, :tokens]
