"""Where calls are changed: at torch's functions, above its derivatives, so that gradients pass through an edit."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional
from torch import Tensor

from regard import masks
from regard.compat import _attention as compat
from regard.editing._again import HIDDEN
from regard.editing._flex import is_flex, seen_of
from regard.editing._plain import APART, ASKS, is_plain
from regard.editing._written import Written
from regard.edits._edit import CannotEdit
from regard.watching._layout import number_of_heads
from regard.watching._modules import frames
from regard.watching._operators import ListeningToFunctions, never_compiled
from regard.watching._packed import packed_heads, unpacked, unpacked_mask
from regard.watching._seen import Seen
from regard.watching._silence import silent

if TYPE_CHECKING:
    from collections.abc import Callable

    from regard.editing._editor import Editor, Met

# in a fraction of the time that torch's own functions around them take
_pop, _push = torch._C._pop_torch_dispatch_stack, torch._C._push_on_torch_dispatch_stack
_depth = torch._C._len_torch_dispatch_stack
_FUSED = torch._C._nn.scaled_dot_product_attention
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class Functions(ListeningToFunctions):
    """Shows an editor the functions that run on its thread.

    While it is open torch's modules leave their fused path, which has no place for an edit."""

    def __init__(self, editor: Editor, others_listen: Callable[[], bool]) -> None:
        super().__init__()
        self.editor, self.written, self.others_listen = editor, Written(editor), others_listen
        chain = self.written.chain
        self._chained, self._aside, self._tracked = chain.nodes, chain.aside, editor.tracker.known

    @never_compiled
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in ASKS:
            return func(*args, **kwargs) if kwargs else func(*args)
        editor = self.editor
        nothing_known = not (self._tracked or self._chained or self._aside)
        if editor.trouble is None and is_plain(func, args) and (nothing_known or self._knows_none(func, args, kwargs)):
            if _depth() != 1:  # where others listen too, they are shown what they always are
                return func(*args, **kwargs) if kwargs else func(*args)
            mode = _pop(None)
            if mode is not editor.listening:
                _push(mode)
                return func(*args, **kwargs) if kwargs else func(*args)
            try:
                return func(*args, **kwargs) if kwargs else func(*args)
            finally:
                _push(mode)
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and _in_operator():
            return func(*args, **kwargs)
        if silent():  # something is being looked at: an error raised there would be taken for one of the look
            return func(*args, **kwargs)
        if editor.trouble is not None:
            editor.raise_trouble()
        if editor.busy:
            return func(*args, **kwargs)
        if func is _FUSED:
            return self._attend(args, kwargs)
        if is_flex(func):
            return self._flex(func, args, kwargs)
        if func is torch.nn.functional.multi_head_attention_forward:
            with self:
                return _opened(func)(*args, **kwargs)
        return self.written.step(func, args, kwargs, self.others_listen)

    def _knows_none(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Whether a plain function has nothing to do with any tensor that is followed."""
        tracked, chained, aside = self._tracked, self._chained, self._aside
        if func not in APART or (kwargs and "out" in kwargs):
            return False
        left = [*args, *kwargs.values()] if kwargs else list(args)
        for given in left:
            if isinstance(given, (tuple, list)):
                left.extend(given)
            elif id(given) in tracked or id(given) in chained or id(given) in aside:
                return False
        return True

    def _attend(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch.nn.functional.scaled_dot_product_attention."""
        editor = self.editor
        met = editor.meet()

        def plain() -> Tensor:
            return _FUSED(*args, **kwargs)

        if met is None:
            with editor.running():
                return plain()
        given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        three: list[Tensor] = [given[name] for name in _ARGUMENTS[:3]]
        q, k, v = three
        if q.is_nested or k.is_nested or v.is_nested:
            raise editor._refuse(met.site, met.layer, "its tensors are nested")
        q, k, v, batch = _in_four_dims(three, bool(given.get("enable_gqa")), met)
        full = (*batch, q.shape[2], k.shape[2])
        causal = bool(given.get("is_causal"))
        mask, bias, offset = compat._mask(given.get("attn_mask"), causal, full, q)
        if bias is not None and len(batch) != 2:
            bias = bias.reshape(-1, *bias.shape[1:])
        if bias is not None or (mask is not None and mask.tensors):
            mask, bias = _of_heads(mask, bias, q)
        if heads := packed_heads(*q.shape[1:3]):
            mask, bias, q = _unpacked_heads(mask, bias, q, heads)
        scale = given.get("scale")
        seen = Seen(q, k, v, mask, _hiding(bias), None if scale is None else float(scale), offset=offset, placed=causal)
        shape = (*q.shape[:3], v.shape[3])
        out = editor.attend(seen, float(given.get("dropout_p") or 0.0), lambda: _shaped(plain(), shape), met)
        return _shaped(out, (*full[:-1], out.shape[3]))

    def _flex(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """FlexAttention's operator, which gives the output, its log-sum-exp and its largest scores."""
        editor = self.editor
        met = editor.meet()
        if met is None:
            with editor.running():
                return func(*args, **kwargs)
        try:
            seen = seen_of(args, kwargs)
        except CannotEdit as reason:
            why = f"it is {reason}; a Hugging Face model can be loaded with attn_implementation='sdpa' or 'eager'"
            raise editor._refuse(met.site, met.layer, why) from None
        out = editor.attend(seen, 0.0, lambda: func(*args, **kwargs)[0], met)
        none = out.new_empty(0, dtype=torch.float32)  # nobody asked for the others
        return out, none, none


def _shaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return tensor if tensor.shape == shape else tensor.reshape(shape)


def _in_four_dims(three: list[Tensor], grouped: bool, met: Met) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    q, k, v = three
    if q.dim() == k.dim() == v.dim() == 4 and q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1] == v.shape[1]:
        return q, k, v, tuple(q.shape[:2])
    q, k, v, batch = compat._four_dims(q, k, v, grouped)
    if len(batch) == 1:  # [batch · head, token, dim]: how many heads, the module says
        heads = number_of_heads([frame.module for frame in met.stack]) or 1
        heads = heads if batch[0] % heads == 0 else 1
        q, k, v = (x.expand(1, batch[0], -1, -1).reshape(-1, heads, *x.shape[2:]) for x in (q, k, v))
    return q, k, v, batch


def _hiding(bias: Tensor | None) -> Tensor | None:
    """Models write some large negative number where they mean "hidden": a row that is then cut must not look there. A
    row in which all is hidden looks everywhere, as the model has it."""
    if bias is None or not bias.numel():
        return bias
    return bias.masked_fill(bias < bias.detach().amax(-1, keepdim=True) - HIDDEN, -torch.inf)


def _of_heads(mask: Any, bias: Tensor | None, q: Tensor) -> tuple[Any, Tensor | None]:
    """A mask [1, batch · head, …] of three dims, for [batch, head, …]."""

    def split(x: Tensor) -> Tensor:
        fits = x.shape[0] in (1, q.shape[0]) and x.shape[1] in (1, q.shape[1])
        return x if fits else x.reshape(*q.shape[:2], *x.shape[2:])

    if mask is not None and mask.tensors:
        mask = masks.keep(split(mask.tensors[0]))
    return mask, None if bias is None else split(bias)


def _unpacked_heads(mask: Any, bias: Tensor | None, q: Tensor, heads: int) -> tuple[Any, Tensor | None, Tensor]:
    """Heads that were handed over as queries, as heads."""
    if mask is not None and mask.tensors:
        mask = masks.keep(unpacked_mask(mask.tensors[0], q.shape, heads))
    return mask, None if bias is None else unpacked_mask(bias, q.shape, heads), unpacked(q, heads)


def _in_operator() -> bool:
    """Whether an operator is under way, which TorchScript runs with the functions' mode on: below the derivatives."""
    return any(frame.f_code.co_name == "__torch_dispatch__" for frame in frames())


@functools.lru_cache(4)
def _opened(func: Any) -> Any:
    """A function of torch's that is written in Python, for which nobody is asked whether another one is to run in its
    place: what it calls is then shown, one by one."""
    names = {**func.__globals__, "has_torch_function": lambda _: False}
    made = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made
