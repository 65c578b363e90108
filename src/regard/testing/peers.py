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


def _pairs(mask: Any, query: Tensor, key: Tensor, offset: Any) -> Any:
    """The mask as a boolean array; what is not a Mask is handed to the peer as it is."""
    if not isinstance(mask, Mask):
        return mask
    B, H, L, S = *query.shape[:3], key.shape[2]
    mask.check(B, H, L, S)
    return mask.dense(L, S, query_offset=offset, device=query.device)


def _added(pairs: Any, bias: Any, query: Tensor) -> Any:
    """Mask and bias as one array: boolean when there is no bias, else added to the logits."""
    if bias is None:
        return pairs
    added = bias.to(query.dtype)
    return added if pairs is None else torch.where(pairs, added, torch.tensor(-math.inf, dtype=query.dtype))


def _bias(given: dict[str, Any]) -> Any:
    """The bias, which the peers take as a tensor."""
    bias = given.get("bias")
    if isinstance(bias, Bias):
        raise NotImplementedError("the peer has no bias by rule")
    return bias


def _without(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"the peer has no {name}")


def _sdpa(flag: bool, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
    """torch's function; with `flag`, plain causal masks go to its `is_causal`."""
    _without(softcap=given.get("softcap"), sinks=given.get("sinks"))
    mask, bias = given.get("mask"), _bias(given)
    causal = flag and bias is None and isinstance(mask, Mask) and repr(mask) == "causal()"
    pairs = None if causal else _pairs(mask, query, key, given.get("query_offset"))
    grouped = query.ndim == 4 and key.ndim == 4 and query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=_added(pairs, bias, query),
        dropout_p=given.get("dropout", 0.0),
        is_causal=causal,
        scale=given.get("scale"),
        enable_gqa=grouped,
    )


def _sdpa_math(*tensors: Tensor, **given: Any) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return _sdpa(False, *tensors, **given)


def _module(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
    """`F.multi_head_attention_forward`, what `torch.nn.MultiheadAttention` runs, with identities as projections."""
    _without(softcap=given.get("softcap"), sinks=given.get("sinks"), scale=given.get("scale"))
    if query.ndim != 4 or key.shape[1] != query.shape[1] or value.shape[-1] != query.shape[-1]:
        raise NotImplementedError("nn.MultiheadAttention has no grouped heads, and one width for keys and values")
    B, H, L, D = query.shape
    pairs = _pairs(given.get("mask"), query, key, given.get("query_offset"))
    added = _added(pairs, _bias(given), query)
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
        dropout_p=given.get("dropout", 0.0),
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

    _without(sinks=given.get("sinks"), dropout=given.get("dropout", 0.0) or None)
    bias, softcap, table = _bias(given), given.get("softcap"), None
    pairs = _pairs(given.get("mask"), query, key, given.get("query_offset"))
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
        scale=given.get("scale"),
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
    _without(softcap=given.get("softcap"), sinks=given.get("sinks"))
    attend = Attend(dropout=given.get("dropout", 0.0), scale=given.get("scale"), flash=flash, heads=query.shape[1])
    pairs = _pairs(given.get("mask"), query, key, given.get("query_offset"))
    if isinstance(pairs, Tensor) and pairs.ndim == 2:
        pairs = pairs.expand(query.shape[0], query.shape[1], *pairs.shape)  # of rank 2 it would be key padding
    bias = _bias(given)
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
    _without(softcap=given.get("softcap"), sinks=given.get("sinks"))
    pairs = _pairs(given.get("mask"), query, key, given.get("query_offset"))
    added = _added(pairs, _bias(given), query)
    if isinstance(added, Tensor) and added.dtype == torch.bool and eager:
        added = torch.zeros_like(added, dtype=query.dtype).masked_fill(~added, torch.finfo(query.dtype).min)
    scaling = query.shape[-1] ** -0.5 if given.get("scale") is None else given["scale"]
    module = _Layer(query.shape[1] // key.shape[1])
    found: Tensor = fn(module, query, key, value, added, scaling=scaling, dropout=given.get("dropout", 0.0))[0]
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
