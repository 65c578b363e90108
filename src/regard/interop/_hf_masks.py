"""Hugging Face's masks as rules: what a model says about its mask, kept as a `regard.masks` value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from regard import masks
from regard.masks import Mask


class RuleMask(Tensor):
    """A boolean mask [batch, 1, query, key] that is not in memory: a rule, and where the first query stands.

    Models hand masks on as tensors, and a few look into them: any operation on this one makes the dense tensor first.
    """

    rule: Mask
    offset: int

    @staticmethod
    def __new__(cls, rule: Mask, offset: int, shape: tuple[int, int, int, int], device: torch.device | str) -> RuleMask:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=torch.device(device))
        made.rule, made.offset = rule, offset
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = torch.utils._pytree.tree_map_only(RuleMask, RuleMask.whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def whole(self) -> Tensor:
        """The dense tensor."""
        _, _, queries, keys = self.shape
        return self.rule.dense(queries, keys, query_offset=self.offset, device=self.device).expand(self.shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RuleMask({self.rule!r}, offset={self.offset}, shape={tuple(self.shape)})"


def rule_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **more: Any,
) -> Tensor | None:
    """Hugging Face's mask interface. Causal, windowed, packed and padded masks stay rules; others become dense tensors.

    While a model is traced, and for the single query of a cache that is allocated whole (which Hugging Face compiles),
    the mask is a plain tensor: one row of it is small, and nothing waits for the device.
    """
    from transformers import masking_utils

    function = masking_utils.causal_mask_function if mask_function is None else mask_function
    rule = None
    if not torch.compiler.is_compiling() and not (isinstance(q_offset, Tensor) and q_length == 1):
        offset = int(q_offset) - kv_offset
        rule = _rule(function, masking_utils.__name__, offset, q_length, kv_length)
    if rule is None:
        return masking_utils.sdpa_mask(  # type: ignore[no-any-return]
            batch_size,
            q_length,
            kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=function,
            attention_mask=attention_mask,
            device=device,
            **{**more, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )
    if attention_mask is not None:
        real = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        missing = kv_length - real.shape[1]
        real = torch.nn.functional.pad(real, (0, missing)) if missing else real
        padded = _padding(real)
        rule = rule if padded is None else padded if rule == masks.everything() else rule & padded
    return RuleMask(rule, offset, (batch_size, 1, q_length, kv_length), device)


def _rule(function: Callable[..., Any], module: str, offset: int, queries: int, keys: int) -> Mask | None:
    """The function that says which pairs may attend, as a rule; None for one that is not known here."""
    left, right = None, None
    others: list[Mask] = []
    for part in _parts(function, module):
        name, inside = _named(part, module)
        if name == "causal_mask_function":
            right = 0
        elif name == "sliding_window_overlay":
            left = int(inside["sliding_window"]) - 1
        elif name == "sliding_window_bidirectional_overlay":
            left = right = int(inside["sliding_window"])
        elif name == "packed_sequence_mask_function":
            ids = inside["packed_sequence_mask"]
            if offset != 0 or ids.shape[-1] != keys:
                return None
            others.append(masks.documents(ids=ids))
        elif name != "bidirectional_mask_function":
            return None
    if left is not None and left < 0:
        return ~masks.everything()  # a window of no keys, as configurations have that never use it
    if left is not None:
        # without a limit on the right, one that no pair reaches
        others.append(masks.window(left=left, right=queries + keys + abs(offset) if right is None else right))
    elif right is not None:
        others.append(masks.causal())
    rule = masks.everything() if not others else others[0]
    for other in others[1:]:
        rule = rule & other
    return rule


def _parts(function: Callable[..., Any], module: str) -> Iterator[Callable[..., Any]]:
    """What is joined by "and"."""
    name, inside = _named(function, module)
    if name == "and_masks":
        for part in inside["mask_functions"]:
            yield from _parts(part, module)
    elif name == "remap_positions_for_packed_sequence":
        # counts positions anew in each packed sequence, and is joined with what keeps these apart: distances stay
        yield from _parts(inside["mask_function"], module)
    else:
        yield function


def _named(function: Callable[..., Any], module: str) -> tuple[str, dict[str, Any]]:
    """Which of Hugging Face's functions this is, and the numbers and tensors it was made with."""
    if getattr(function, "__module__", None) != module:
        return "", {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return function.__qualname__.split(".")[0], {name: cell.cell_contents for name, cell in cells}


def _padding(real: Tensor) -> Mask | None:
    """bool [batch, key], True at tokens, as lengths where the padding is all on one side; None without padding."""
    lengths = real.sum(-1)
    at = torch.arange(real.shape[1], device=real.device)
    right = (real == (at < lengths[:, None])).all()
    left = (real == (at >= real.shape[1] - lengths[:, None])).all()
    on_right, on_left = torch.stack([right, left]).tolist()
    if on_right and on_left and bool(real.all()):
        return None
    if on_right:
        return masks.padding(lengths)
    return masks.padding(lengths, side="left") if on_left else masks.keep(real[:, None, None])
