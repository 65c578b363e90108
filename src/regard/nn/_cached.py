"""How modules use a cache: check the call, store the new tokens, attend to what the cache holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from regard import api, masks
from regard.masks import Mask
from regard.masks._arguments import plain
from regard.masks._joins import both
from regard.nn._checks import check_update
from regard.nn._heads import Call
from regard.nn._protocols import Cache
from regard.statistics import Want

Function = TypeVar("Function", bound=Callable[..., Any])
Heads = tuple[Tensor, Tensor, "Tensor | None"]  # query, key, value of the new tokens: [B, head, token, dim]


# The mask that was made last by `without_rows`, and what of: the layers of a model ask for the same one, and what is
# worked out about it for the first serves the others.
_last: dict[str, tuple[Mask | None, Tensor, Mask]] = {}


# Which module's tokens a cache holds. Not on the cache: a copy of it belongs to whoever uses it first.
_users: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def claim(cache: Any, module: Any) -> None:
    """Refuse a cache that holds tokens of another layer, whose keys this layer would read as its own."""
    if torch.compiler.is_compiling():
        return
    own = getattr(cache, "cache", cache)  # a padded call speaks for its cache
    try:
        user = _users.get(own)
        if user is not None and user() is module:
            return
        if user is not None and user() is not None and any(getattr(own, "lengths", ())):
            raise ValueError(
                f"cache holds {max(own.lengths)} tokens of another layer; every layer needs a cache of its own "
                "(cache.truncate(0) empties one that is done with)"
            )
        _users[own] = weakref.ref(module)
    except TypeError:  # a cache of somebody's own that cannot be remembered
        return


def aside(function: Function) -> Function:
    """The function for calls from compiled code: it runs outside the graph.

    A cache counts its tokens in Python. If the compiler traced these counts, every token would get a graph of its own.
    So attention with a cache runs between two graphs.
    """
    # torch's own way to say so of a function without loading its compiler: `torch.compiler.disable` loads it at once
    return cast(Function, _disable_dynamo(function))


def pads_of(cache: Cache, new: Tensor) -> Tensor | None:
    """`[batch, token]`, True at the new tokens `[batch, token, dim]` that the cache knows to be padding."""
    pads: Tensor | None = getattr(cache, "pads", None)
    if pads is None:
        return None
    if pads.shape != new.shape[:2]:
        raise ValueError(
            f"the cache is padded for {pads.shape[0]} items of {pads.shape[1]} tokens, got key {list(new.shape)}; give "
            "padded() one length per item, and tokens= where no item fills its row"
        )
    return pads.to(new.device)


def position_of(cache: Cache, new: Tensor) -> int | Tensor:
    """The position of the first new token `[batch, …]` of each item."""
    here = cache.position
    if isinstance(here, Tensor) and here.shape != new.shape[:1]:
        raise ValueError(f"key has {new.shape[0]} items, but this cache holds {here.numel()}")
    return here


def without_rows(mask: Mask | None, pads: Tensor | None) -> Mask | None:
    """The mask, in which rows of padding see nothing."""
    if pads is None or not (mask is None or isinstance(mask, Mask)):
        return mask
    if torch.compiler.is_compiling() or not plain(pads) or (mask is not None and mask.tensors):
        return _joined(mask, ~pads)
    with torch.inference_mode(False):  # what is worked out about the mask may be kept for calls outside of it
        real = ~pads
    last = _last.get("joined")  # once: another thread may put its own there
    if last is not None and last[0] is mask and torch.equal(last[1], real):
        return last[2]
    found = _joined(mask, real)
    if plain(real):
        _last["joined"] = (mask, real, found)
    return found


def _joined(mask: Mask | None, real: Tensor) -> Mask:
    rows = masks.keep(real[:, None, :, None])
    return rows if mask is None else mask & rows


def check_call(cache: Cache | None, tensors: Heads, keywords: dict[str, Any]) -> None:
    """Let the cache refuse the call before anything has changed."""
    check = getattr(cache, "check", None)
    if check is not None:
        check(*tensors, mask=keywords["mask"], bias=keywords["bias"])


def can_attend(cache: Cache, keywords: dict[str, Any]) -> bool:
    """Whether the cache itself attends. Not with dropout, which draws whole rows of weights; nor with a mask that
    marks keys as padding, because it marks rows too, and needs all keys to do so."""
    if not callable(getattr(cache, "attend", None)) or keywords["dropout"]:
        return False
    mask = keywords["mask"]
    return not (isinstance(mask, Mask) and mask.tensors and mask.marks_padding)  # what marks padding holds tensors


def update(
    cache: Cache, tensors: Heads, keywords: dict[str, Any]
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """The call over everything that the cache holds."""
    query, key, value = tensors
    key, value, offset = check_update(cache.update(key, value))  # type: ignore[arg-type]
    mask = both(keywords["mask"], getattr(cache, "filled", None))
    return (query, key, value), {**keywords, "mask": mask, "query_offset": offset}


def explain(cache: Any, call: Call, want: Want | None) -> Any:
    """The `regard.Plan` of the call, with tensors that stand for what the cache would give."""
    query, key, value = call.tensors
    if cache is None:
        return api.explain(query, key, value, want=want, **call.keywords)
    if not hasattr(cache, "preview"):
        raise TypeError(f"cache: {type(cache).__name__} has no preview(key, value), which explain needs")
    keys, values, offset, filled, pieces = cache.preview(key, value)
    values = values if value is not None or call.how is None else values[..., : call.how["value_dim"]]
    keywords = {**call.keywords, "mask": both(call.keywords["mask"], filled), "query_offset": offset}
    plan = api.explain(query, keys, values, want=want, **keywords)
    if pieces > 1 and want is None:
        plan.reason += f"; the cache is read in {pieces} pieces, each a call of its own"
    return plan
