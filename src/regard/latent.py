"""Latent attention: keys and values of all heads are made from one small vector per token (DeepSeek's MLA).

Legend: H heads, L queries, S keys, r the latent's width, n and p widths of the plain and the rotary part of a query or
key, v the width of a value. With latents c [S, r], rotary keys k [S, p] and a head's matrices Uk [n, r], Uv [v, r],

  expanded   keys [c Ukᵀ, k], values c Uvᵀ:             L·S·(n + p + v) multiplications, and S·r·(n + v) to expand
  absorbed   queries [q Uk, q_rope], keys [c, k],
             values c, and Uv after the sum:             L·S·(2r + p), and L·r·(n + v); c is one head for all

are the same numbers, because q·(Uk c) = (Ukᵀ q)·c. Many queries are cheaper expanded, few absorbed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard import api
from regard._checks import autocasts, check_choice
from regard.masks import Mask

FORMS = ("auto", "expand", "absorb")


def latent_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    mask: Mask | None = None,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    query_offset: int | Tensor | None = None,
    backend: str = "auto",
    form: str = "auto",
) -> Tensor:
    """Attention whose keys and values are made from `latent`; [batch, head, L, v].

    Args:
        q_nope: [batch, head, L, n], the part of the queries without positions.
        q_rope: [batch, head, L, p], the rotary part, turned already.
        latent: [batch, S, r], normed already.
        k_rope: [batch, S, p], the rotary key that all heads share, turned already.
        w_uk: [head, n, r], makes a head's keys from latents.
        w_uv: [head, v, r], makes a head's values from latents.
        scale: 1/sqrt(n + p) when None.
        form: "expand" makes keys and values, "absorb" moves both matrices to the side of the queries, "auto" takes the
            one with fewer multiplications. The result is the same.
        mask, bias, softcap, sinks, dropout, query_offset, backend: as in `regard.attention`.
    """
    check_latent(q_nope, q_rope, latent, k_rope, w_uk, w_uv)
    check_choice("form", form, FORMS)
    how: dict[str, Any] = {
        "mask": mask, "bias": bias, "softcap": softcap, "sinks": sinks, "dropout": dropout,
        "query_offset": query_offset, "backend": backend,
        "scale": (q_nope.shape[3] + q_rope.shape[3]) ** -0.5 if scale is None else scale,
    }  # fmt: skip
    absorbs = absorbing_is_cheaper(q_nope, q_rope, latent, w_uv) if form == "auto" else form == "absorb"
    if absorbs:
        key = torch.cat([latent, k_rope], -1).unsqueeze(1)
        query = absorb(q_nope, q_rope, w_uk)
        return raise_values(api.attention(query, key, key[..., : latent.shape[2]], **how), w_uv)
    key, value = expand(latent, k_rope, w_uk, w_uv)
    return api.attention(torch.cat([q_nope, q_rope], -1), key, value, **how)


def expand(latent: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [batch, head, S, n + p] and values [batch, head, S, v]."""
    plain = torch.einsum("bsr,hnr->bhsn", latent, w_uk)
    rotary = k_rope.unsqueeze(1).expand(-1, w_uk.shape[0], -1, -1).to(plain.dtype)
    return torch.cat([plain, rotary], -1), torch.einsum("bsr,hvr->bhsv", latent, w_uv)


def absorb(q_nope: Tensor, q_rope: Tensor, w_uk: Tensor) -> Tensor:
    """Queries [batch, head, L, r + p] that meet the latents themselves."""
    inward = torch.einsum("bhln,hnr->bhlr", q_nope, w_uk)
    return torch.cat([inward, q_rope.to(inward.dtype)], -1)


def raise_values(out: Tensor, w_uv: Tensor) -> Tensor:
    """From weighted latents [batch, head, L, r] to weighted values [batch, head, L, v]."""
    return torch.einsum("bhlr,hvr->bhlv", out, w_uv)


def absorbing_is_cheaper(q_nope: Tensor, q_rope: Tensor, latent: Tensor, w_uv: Tensor) -> bool:
    """Compares multiplications per head, by the table above."""
    rows, plain, rotary = q_nope.shape[2], q_nope.shape[3], q_rope.shape[3]
    keys, rank, wide = latent.shape[1], latent.shape[2], w_uv.shape[1]
    absorbed = rows * keys * (2 * rank + rotary) + rows * rank * (plain + wide)
    return absorbed < rows * keys * (plain + rotary + wide) + keys * rank * (plain + wide)


def _check_kinds(given: dict[str, Tensor]) -> None:
    """One dtype, unless autocast makes it one, and one device."""
    first = given["q_nope"]
    for name, tensor in given.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {tensor.dtype}")
        if tensor.device != first.device or (tensor.dtype != first.dtype and not autocasts(first.device.type)):
            raise TypeError(
                f"{name} is {tensor.dtype} on {tensor.device} but q_nope is {first.dtype} on {first.device}; "
                "convert one with .to"
            )


def check_latent(q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor) -> None:
    """Name the argument whose shape does not fit the others."""
    given = {"q_nope": q_nope, "q_rope": q_rope, "latent": latent, "k_rope": k_rope, "w_uk": w_uk, "w_uv": w_uv}
    ranks = {"q_nope": "batch, head, L, n", "q_rope": "batch, head, L, p", "latent": "batch, S, r",
             "k_rope": "batch, S, p", "w_uk": "head, n, r", "w_uv": "head, v, r"}  # fmt: skip
    sizes: dict[str, tuple[int, str]] = {}
    for name, tensor in given.items():
        axes = ranks[name].split(", ")
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor [{ranks[name]}], got {type(tensor).__name__}")
        if tensor.dim() != len(axes):
            raise ValueError(f"{name} must be [{ranks[name]}], got shape {list(tensor.shape)}")
        for axis, size in zip(axes, tensor.shape, strict=True):
            known, where = sizes.setdefault(axis, (size, name))
            if known != size:
                raise ValueError(
                    f"{name} {list(tensor.shape)} is [{ranks[name]}] with {axis} = {size}, but {where} has "
                    f"{axis} = {known}"
                )
    _check_kinds(given)
