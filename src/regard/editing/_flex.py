"""FlexAttention as a call of query, key and value: its function of scores becomes a bias, that of pairs a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard import masks
from regard.edits._edit import CannotEdit
from regard.watching._operators import unheard
from regard.watching._seen import Seen, recognised

_ARGUMENTS = ("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options",
              "score_mod_other_buffers", "mask_mod_other_buffers")  # fmt: skip


def is_flex(func: Any) -> bool:
    return isinstance(func, torch._ops.HigherOrderOperator) and func._name == "flex_attention"


def seen_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Seen:
    given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
    query, key, value = (given[name] for name in _ARGUMENTS[:3])
    if query.device.type != "cpu":
        raise CannotEdit("FlexAttention off the CPU")
    if any(given["kernel_options"].get(name) for name in ("OUTPUT_LOGSUMEXP", "OUTPUT_MAX")):
        raise CannotEdit("FlexAttention that returns more than its output")
    if len(key) != len(query):
        key, value = (x.expand(len(query), -1, -1, -1) for x in (key, value))
    with unheard():
        if _gives_back(given["score_mod"], given.get("score_mod_other_buffers", ())):
            return Seen(query, key, value, _mask(given, query, key), None, float(given["scale"]))
        return Seen(query, key, value, None, _scores({**given, "query": query, "key": key, "value": value}), 0.0)


def _gives_back(function: Any, more: tuple[Any, ...]) -> bool:
    """Whether a function of scores leaves them as they are."""
    score, at = torch.zeros(()), torch.zeros((), dtype=torch.int64)
    try:
        return function(score, at, at, at, at, *more) is score
    except Exception:  # one that wants other arguments than these is one that reads them
        return False


def _mask(given: dict[str, Any], query: Tensor, key: Tensor) -> masks.Mask | None:
    from torch.nn.attention.flex_attention import create_mask, noop_mask

    function, more = given["block_mask"][-1], given.get("mask_mod_other_buffers", ())
    if function is noop_mask:
        return None

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        found: Tensor = function(b, h, i, j, *more)
        return found

    batch, heads, queries = query.shape[:3]
    dense = create_mask(allowed, batch, heads, queries, key.shape[2], device="cpu")
    if bool((dense == dense[:, :1]).all()):
        dense = dense[:, :1]
    return recognised(masks.keep(dense), queries, key.shape[2], query.device)


def _scores(given: dict[str, Any]) -> Tensor:
    """[batch, head, query, key], −inf where a pair is hidden. They stand for query and key: such a function may do
    anything with a score."""
    from torch._higher_order_ops.flex_attention import _math_attention_inner

    heads = given["query"].shape[1]
    spread = {name: given[name].repeat_interleave(heads // given[name].shape[1], 1) for name in ("key", "value")}
    found: Tensor = _math_attention_inner(**{**given, **spread})[1]
    return found
