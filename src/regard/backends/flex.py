"""FlexAttention on CUDA: masks, softcaps and biases that no ready-made kernel takes, compiled into one.

Compiling takes some seconds, once for each kind of call: the rules of its mask with their numbers, its modifiers,
heads, dims and dtype. Offsets and contents are not part of the kind, nor are lengths: the second length that comes
compiles once more, for all others.
"""

from __future__ import annotations

import inspect
import threading
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from regard.backends._autograd import save, saved, second_derivative
from regard.backends._base import Backend, has_triton, refuse_transforms
from regard.backends._flex_rules import BLOCK, blocks_of, score_of
from regard.masks._flex import Frame
from regard.spec import Call, CallSpec, Result

_MOST_KINDS = 128

_kinds: dict[tuple[Any, ...], Callable[..., Any]] = {}
_lock = threading.Lock()


class Flex(Backend):
    name = "flex"
    about = "FlexAttention, compiled for the call's mask and modifiers: the first call of a kind takes some seconds"

    def refuse(self, spec: CallSpec) -> list[str]:
        if spec.device != "cuda":
            return [f"FlexAttention's kernels are for CUDA, the call is on {spec.device}"]
        if reasons := refuse_transforms(spec):
            return reasons
        if spec.mode == "compile":
            return ["it compiles its own kernels, which cannot happen inside torch.compile"]
        if not has_triton():
            reasons.append("triton is not installed")
        if spec.dtype == torch.float64:
            reasons.append("FlexAttention does not take float64")
        if spec.dropout:
            reasons.append("FlexAttention has no dropout")
        for what, dim in (("head", spec.head_dim), ("value", spec.value_dim)):
            if not 16 <= dim <= 256:
                reasons.append(f"{what} dim {dim} is not in 16 … 256")
        if spec.queries < BLOCK or spec.empty:
            reasons.append(f"{spec.queries} queries over {spec.keys} keys: it takes {BLOCK} queries or more")
        if spec.bias is not None and spec.bias.needs_grad and spec.grad:
            reasons.append("the bias requires grad, which it does not give")
        if not spec.unit_stride:
            reasons.append("the last dim of query, key or value is strided: call .contiguous()")
        return reasons

    def peak_bytes(self, call: Call) -> int:
        # compiled when it first runs: what it will allocate is results, and with sinks those before and after
        return self.result_bytes(call.spec) * (3 if call.spec.sinks else 1)

    def run(self, call: Call, *, named: bool) -> Result:
        if not call.spec.grad:
            with torch.no_grad():
                return Result(*_attention(call))
        out, lse = _Flex.apply(call, named, *call.tensors)  # type: ignore[no-untyped-call]
        return Result(out, lse)


class _Flex(torch.autograd.Function):
    """The compiled kernel with its own compiled backward pass; second derivatives go through eager."""

    @staticmethod
    def forward(ctx: Any, call: Call, named: bool, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        needs = ctx.needs_input_grad[2:]
        leaves = [t if t is None else t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
        with torch.enable_grad():
            out, lse = _attention(call.of(*leaves))
        ctx.graph, ctx.named = (out, leaves), named
        ctx.call = call.without_tensors()
        # saving the inputs too makes torch refuse a backward pass after one was changed in place
        save(ctx, call, *tensors)
        lse = lse.detach()
        ctx.mark_non_differentiable(lse)
        return out.detach(), lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors, needs = saved(ctx)[:5], ctx.needs_input_grad[2:]
        if grad_out is None:
            return (None,) * 7
        if torch.is_grad_enabled():
            call = ctx.call.of(*tensors)
            return (None, None, *second_derivative("flex" if ctx.named else None, call, grad_out, needs))
        out, leaves = ctx.graph
        # the inner graph lives as long as the outer one: freed with it, unless the caller retains it
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        if not keep:
            ctx.graph = None
        wanted = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
        with _repeatable():
            grads = iter(torch.autograd.grad(out, wanted, grad_out, retain_graph=keep))
        return (None, None, *(next(grads) if need else None for need in needs))


def _attention(call: Call) -> tuple[Tensor, Tensor]:
    """(out, lse), recorded by autograd where grad mode is on."""
    spec, mask = call.spec, call.mask
    score_mod, score_kind = score_of(call.bias, spec.softcap)
    rule_kind, table = None, None
    if mask is not None:
        blocks = blocks_of(mask, Frame(spec.queries, spec.keys, spec.batch, call.offset, call.query.device))
        rule_kind, table = blocks.rule.kind, blocks.table
    tensors = (call.query, call.key, call.value)
    wants = tuple(t.requires_grad and torch.is_grad_enabled() for t in tensors)
    numbers = (spec.heads, spec.kv_heads, spec.head_dim, spec.value_dim, spec.scale, spec.dtype, call.query.device)
    kernel = _compiled((rule_kind, score_kind, numbers, wants))
    with torch.autocast(spec.device, enabled=False), _repeatable():
        out, aux = kernel(*tensors, score_mod, table, spec.scale, _options(call))
        if call.sinks is None:
            return out, aux.lse
        return _with_sinks(out, aux.lse, call.sinks)


def _repeatable() -> AbstractContextManager[Any]:
    """Compiled backward passes reuse what they were given, and then refuse retain_graph=True, unless told not to."""
    import torch._functorch.config

    return torch._functorch.config.patch(donated_buffer=False)  # type: ignore[no-any-return]


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    sink = sinks.to(lse.dtype).view(1, -1, 1)
    empty = lse == -torch.inf
    # an empty row's output is 0 whatever its share; -inf there would make the share's gradient NaN
    share = torch.sigmoid(lse.masked_fill(empty, 0.0) - sink).unsqueeze(-1)
    return (out * share).to(out.dtype), torch.logaddexp(lse, sink).masked_fill(empty, -torch.inf)


def _options(call: Call) -> dict[str, int] | None:
    # tiles of a bias, loaded some stages ahead, would not fit into shared memory with keys and values
    return None if call.bias is None else {"num_stages": 1}


def _attend(query, key, value, score_mod, block_mask, scale, options):  # type: ignore[no-untyped-def]
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    grouped = query.shape[1] != key.shape[1]
    aux = AuxRequest(lse=True)
    return flex_attention(
        query, key, value, score_mod, block_mask, scale, grouped, kernel_options=options, return_aux=aux
    )


def _compiled(kind: tuple[Any, ...]) -> Callable[..., Any]:
    """The compiled function of a kind of call; compiling itself happens when it is first called with a new layout."""
    found = _kinds.get(kind)
    if found is None:
        # A function of its own, by code and by name: dynamo counts recompilations by code, gives up after a few, and
        # takes numbers that differ between two functions of one name for variables.
        name = f"flex_{zlib.crc32(repr(kind).encode()):08x}"
        bare = inspect.unwrap(_attend)  # checks of annotations, as in the tests, cannot be compiled
        function = FunctionType(bare.__code__.replace(co_name=name, co_qualname=name), globals(), name)
        found = torch.compile(function, fullgraph=True)
        with _lock:
            found = _kinds.setdefault(kind, found)
            while len(_kinds) > _MOST_KINDS:
                del _kinds[next(iter(_kinds))]
    return found
