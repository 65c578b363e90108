"""Other implementations behind `regard.attention`'s signature, so that the same suite can be run on them.

Every adapter translates in the peer's favour: masks are written out as the array the peer takes (aligned as
`query_offset` says), a bias is cast to the dtype the peer asks for. What a peer has no argument for is refused with
NotImplementedError. Nothing of what a peer then computes is corrected.
"""

from __future__ import annotations

import functools
import importlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.bias import Bias
from regard.masks import Mask
from regard.testing._calls import Attention

__all__ = ["PEERS", "Missing", "load"]


class Missing(ImportError):
    """The peer's package is not installed."""


def load(name: str) -> Attention:
    """The adapter of a peer by name; ValueError for an unknown name, Missing where its package is not installed."""
    if name not in PEERS:
        raise ValueError(f"unknown peer {name!r}; expected one of {', '.join(PEERS)}")
    return PEERS[name]()


class _Asked:
    """A call's keywords as peers take them. `lacking` are those that the peer has no argument for."""

    def __init__(self, query: Tensor, key: Tensor, given: dict[str, Any], *lacking: str) -> None:
        for name in lacking:
            if given.get(name) is not None and not (name == "dropout" and given[name] == 0.0):
                raise NotImplementedError(f"the peer has no {name}")
        self.query, self.key, self.given = query, key, given
        self.bias, self.dropout, self.scale = given.get("bias"), given.get("dropout", 0.0), given.get("scale")
        if isinstance(self.bias, Bias):
            raise NotImplementedError("the peer has no bias by rule")

    @functools.cached_property
    def pairs(self) -> Any:
        """The mask as a boolean array; what is not a Mask is handed to the peer as it is."""
        mask, query = self.given.get("mask"), self.query
        if not isinstance(mask, Mask):
            return mask
        B, H, L, S = *query.shape[:3], self.key.shape[2]
        mask.check(B, H, L, S)
        return mask.dense(L, S, query_offset=self.given.get("query_offset"), device=query.device)

    @property
    def added(self) -> Any:
        """Mask and bias as one array: boolean when there is no bias, else added to the logits."""
        if self.bias is None:
            return self.pairs
        added, never = self.bias.to(self.query.dtype), torch.tensor(-math.inf, dtype=self.query.dtype)
        return added if self.pairs is None else torch.where(self.pairs, added, never)


def _sdpa(flag: bool, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
    """torch's function; with `flag`, plain causal masks go to its `is_causal`."""
    asked, mask = _Asked(query, key, given, "softcap", "sinks"), given.get("mask")
    causal = flag and asked.bias is None and isinstance(mask, Mask) and repr(mask) == "causal()"
    grouped = query.ndim == 4 and key.ndim == 4 and query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if causal else asked.added,
        dropout_p=asked.dropout,
        is_causal=causal,
        scale=asked.scale,
        enable_gqa=grouped,
    )


def _sdpa_math(*tensors: Tensor, **given: Any) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return _sdpa(False, *tensors, **given)


def _module(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
    """`F.multi_head_attention_forward`, what `torch.nn.MultiheadAttention` runs, with identities as projections."""
    asked = _Asked(query, key, given, "softcap", "sinks", "scale")
    if query.ndim != 4 or key.shape[1] != query.shape[1] or value.shape[-1] != query.shape[-1]:
        raise NotImplementedError("nn.MultiheadAttention has no grouped heads, and one width for keys and values")
    B, H, L, D = query.shape
    added = asked.added
    if added is not None:
        added = added.expand(B, H, L, key.shape[2]).reshape(B * H, L, key.shape[2])
        added = ~added if added.dtype == torch.bool else added  # True means forbidden there
    q, k, v = (x.permute(2, 0, 1, 3).reshape(x.shape[2], x.shape[0], H * D) for x in (query, key, value))
    unit = torch.eye(H * D, dtype=query.dtype, device=query.device)
    out, _ = F.multi_head_attention_forward(
        q,
        k,
        v,
        embed_dim_to_check=H * D,
        num_heads=H,
        in_proj_weight=None,
        in_proj_bias=None,
        bias_k=None,
        bias_v=None,
        add_zero_attn=False,
        dropout_p=asked.dropout,
        out_proj_weight=unit,
        out_proj_bias=None,
        training=True,
        need_weights=False,
        attn_mask=added,
        use_separate_proj_weight=True,
        q_proj_weight=unit,
        k_proj_weight=unit,
        v_proj_weight=unit,
    )
    return out.reshape(L, B, H, D).permute(1, 2, 0, 3)


def _flex(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
    """FlexAttention, not compiled: the mask as its block mask, softcap and bias as its score_mod."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    asked = _Asked(query, key, given, "sinks", "dropout")
    pairs, bias, softcap, table = asked.pairs, asked.bias, given.get("softcap"), None
    if pairs is not None:
        B, H, L, S = *query.shape[:3], key.shape[2]
        whole = pairs.expand(B, H, L, S)
        table = create_block_mask(lambda b, h, i, j: whole[b, h, i, j], B, H, L, S, device=str(query.device))
    spread = None if bias is None else bias.expand(*query.shape[:3], key.shape[2])

    def score(logit: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        logit = logit if softcap is None else softcap * torch.tanh(logit / softcap)
        return logit if spread is None else logit + spread[b, h, i, j]

    out = _quietly(
        flex_attention,
        query,
        key,
        value,
        score_mod=None if softcap is None and spread is None else score,
        block_mask=table,
        scale=asked.scale,
        enable_gqa=query.ndim == 4 and query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)
    return out


def _quietly(fn: Callable[..., Any], *tensors: Tensor, **given: Any) -> Any:
    """Without FlexAttention's advice to compile it, which is a matter of speed."""
    if torch.compiler.is_compiling():
        return fn(*tensors, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fn(*tensors, **given)


def _x_transformers(Attend: Any, flash: bool, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
    asked = _Asked(query, key, given, "softcap", "sinks")
    attend = Attend(dropout=asked.dropout, scale=asked.scale, flash=flash, heads=query.shape[1])
    pairs, bias = asked.pairs, asked.bias
    if isinstance(pairs, Tensor) and pairs.ndim == 2:
        pairs = pairs.expand(query.shape[0], query.shape[1], *pairs.shape)  # of rank 2 it would be key padding
    if bias is not None:
        bias = bias.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    out, _ = attend(query, key, value, mask=pairs, attn_bias=bias)
    assert isinstance(out, Tensor)
    return out


class _Layer:
    """What Hugging Face's functions read of the module that calls them."""

    training = True
    is_causal = False

    def __init__(self, groups: int) -> None:
        self.num_key_value_groups = groups


def _transformers(fn: Any, eager: bool, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
    """Hugging Face's attention functions, in the calling convention of its models."""
    asked = _Asked(query, key, given, "softcap", "sinks")
    added = asked.added
    if isinstance(added, Tensor) and added.dtype == torch.bool and eager:
        added = torch.zeros_like(added, dtype=query.dtype).masked_fill(~added, torch.finfo(query.dtype).min)
    scaling = query.shape[-1] ** -0.5 if asked.scale is None else asked.scale
    module = _Layer(query.shape[1] // key.shape[1])
    found: Tensor = fn(module, query, key, value, added, scaling=scaling, dropout=asked.dropout)[0]
    return found.transpose(1, 2)


def _from(module: str, name: str) -> Any:
    """Something of an optional package; Missing says how to get it."""
    package = module.partition(".")[0].replace("_", "-")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise Missing(f"{package} is not installed here ({error}); install it with: pip install {package}") from None


def _load_x_transformers(flash: bool) -> Attention:
    return functools.partial(_x_transformers, _from("x_transformers.attend", "Attend"), flash)


def _load_transformers(eager: bool) -> Attention:
    if eager:
        fn = _from("transformers.models.llama.modeling_llama", "eager_attention_forward")
    else:
        fn = _from("transformers.integrations.sdpa_attention", "sdpa_attention_forward")
    return functools.partial(_transformers, fn, eager)


PEERS: dict[str, Callable[[], Attention]] = {
    "torch": lambda: functools.partial(_sdpa, False),
    "torch-math": lambda: _sdpa_math,
    "torch-is_causal": lambda: functools.partial(_sdpa, True),
    "nn.MultiheadAttention": lambda: _module,
    "flex": lambda: _flex,
    "x-transformers": functools.partial(_load_x_transformers, False),
    "x-transformers-flash": functools.partial(_load_x_transformers, True),
    "transformers-sdpa": functools.partial(_load_transformers, False),
    "transformers-eager": functools.partial(_load_transformers, True),
}
