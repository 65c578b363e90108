"""Attention as one custom op: torch.compile and torch.export see a single node with known shapes and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard import masks
from regard._arguments import prepare
from regard.backends import ALL, _guard
from regard.backends._autograd import FusedBackend
from regard.backends._base import accumulation, no_autocast
from regard.bias import TableBias, rebuild
from regard.plan import choose
from regard.spec import Call, Refused, Result

_TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? sinks, Tensor? offset, Tensor? seed, Tensor[] mask"
)
_NUMBERS = (
    "str code, SymInt start, float scale, float? softcap, float dropout, str backend, bool grad, bool bias_grad, "
    "str rule"
)


def attention(given: tuple[Any, ...], backend: str) -> Tensor:
    """``regard.attention``, of all that ``prepare`` takes, as a compiler traces it: the same checks, then one node."""
    query, _, _, mask, _, _, softcap, _, dropout, _ = given
    call = prepare(*given, mode="compile")  # type: ignore[misc]  # there are ten
    seed = torch.randint(0, 2**31 - 1, (), device=query.device) if dropout else None
    if backend == "eager" or (backend == "auto" and torch._C._are_functorch_transforms_active()):
        # plain operations: the compiler and torch.func see through them, and derivatives of any order remain
        return _by_eager(call.replace(seed=seed)).out
    spec = call.spec
    start, offset = (0, call.offset) if isinstance(call.offset, Tensor) else (call.offset, None)
    tensors = [] if mask is None else list(mask.tensors)
    code = "" if mask is None else mask.code
    bias_grad = spec.bias is not None and spec.bias.needs_grad
    rule = "" if spec.bias is None or spec.bias.rule is None else spec.bias.rule.code
    out: Tensor = torch.ops.regard.attention(
        call.query, call.key, call.value, call.bias, call.sinks, offset, seed, tensors,
        code, start, spec.scale, softcap, dropout, backend, spec.grad, bias_grad, rule,
    )[0]  # fmt: skip
    return out


def _described(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, sinks: Tensor | None, offset: Tensor | None,
    seed: Tensor | None, mask: list[Tensor], code: str, start: int, scale: float, softcap: float | None, dropout: float,
    backend: str, grad: bool, bias_grad: bool, bias_rule: str,
) -> tuple[Call, str]:  # fmt: skip
    """The call of an op's arguments, and the backend that was asked for."""
    rule = masks.rebuild(code, tuple(mask)) if code else None
    table = TableBias(rebuild(bias_rule), bias) if bias_rule and bias is not None else bias
    place = start if offset is None else offset
    call = prepare(query, key, value, rule, table, scale, softcap, sinks, dropout, place, mode="compile")
    described = call.spec.bias
    spec = call.spec._replace(grad=grad, bias=described and described._replace(needs_grad=bias_grad))
    return call.replace(spec=spec, seed=seed), backend


def _rebuild(*arguments: Any) -> tuple[FusedBackend, Call, Tensor | None]:
    call, backend = _described(*arguments)
    chosen = choose(call.spec, backend).backend
    if not isinstance(chosen, FusedBackend):
        # eager is chosen for tiny calls only; inside an opaque node a hand-written backward pass is needed
        chosen = choose(call.spec, "blockwise").backend
    assert isinstance(chosen, FusedBackend)
    return chosen, *_guard.cleaned(chosen, call)


def plain(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The op in operations of torch's, for graphs that go where the op does not exist."""
    found = _by_eager(_described(*arguments)[0])
    return found.out, found.lse


def _by_eager(call: Call) -> Result:
    call, lost = _guard.cleaned(ALL["eager"], call)
    return _guard.with_nan(ALL["eager"].run(call, named=True), lost)


@torch.library.custom_op("regard::attention", mutates_args=(), schema=f"({_TENSORS}, {_NUMBERS}) -> (Tensor, Tensor)")
def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    backend, call, lost = _rebuild(*arguments)
    with no_autocast(call.spec.device):
        found = backend.forward(call)
    out, lse, *_ = _guard.with_nan(found, lost)
    return out.to(call.spec.dtype).contiguous(), lse.contiguous()


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    if torch.onnx.is_in_onnx_export():
        raise Refused("torch.onnx.export does not know regard's attention: use regard.interop.to_onnx, which does")
    batch, heads, rows, _ = query.shape
    lse = query.new_empty(batch, heads, rows, dtype=accumulation(query.dtype))
    return query.new_empty(batch, heads, rows, value.shape[3]), lse


@torch.library.custom_op(
    "regard::attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor out, Tensor lse, bool[] needs, {_TENSORS}, {_NUMBERS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(grad_out: Tensor, out: Tensor, lse: Tensor, needs: list[bool], *arguments: Any) -> tuple[Tensor, ...]:
    backend, call, lost = _rebuild(*arguments)
    if lost is not None:
        grad_out, lse = grad_out.masked_fill(lost.unsqueeze(-1), 0.0), lse.masked_fill(lost, 0.0)
        out = out.masked_fill(lost.unsqueeze(-1), 0.0)
    with no_autocast(call.spec.device):
        grads = backend.backward(call, grad_out, out, lse, tuple(needs))
    return tuple(out.new_empty(0) if grad is None else grad.contiguous() for grad in grads)


@_backward.register_fake
def _(grad_out: Tensor, out: Tensor, lse: Tensor, needs: list[bool], *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(
        out.new_empty(0) if not need or tensor is None else tensor.new_empty(tensor.shape)
        for need, tensor in zip(needs, arguments[:5], strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, held, numbers = inputs[:7], inputs[7], inputs[8:]
    ctx.save_for_backward(*tensors, *held, *output)
    ctx.numbers, ctx.held = numbers, len(held)


def _autograd(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    tensors, held, (out, lse) = saved[:7], list(saved[7 : 7 + ctx.held]), saved[-2:]
    needs = [bool(need) for need in ctx.needs_input_grad[:5]]
    made = torch.ops.regard.attention_backward(grad_out, out, lse, needs, *tensors, held, *ctx.numbers)
    grads = tuple(grad if need else None for grad, need in zip(made, needs, strict=True))
    return (*grads, None, None, [None] * ctx.held, *(None for _ in ctx.numbers))


def _one_by_one(op: Any) -> Any:
    """A vmap rule that calls the op for each slice: always right, and rarely needed, as vmap alone goes to eager."""

    def rule(info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        results = [
            op(*(_slice(argument, dim, n) for argument, dim in zip(arguments, dims, strict=True)))
            for n in range(info.batch_size)
        ]
        stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    return rule


def _slice(argument: Any, dim: Any, n: int) -> Any:
    if isinstance(argument, (list, tuple)) and isinstance(dim, (list, tuple)):
        return [_slice(part, each, n) for part, each in zip(argument, dim, strict=True)]
    return argument if dim is None else argument.select(dim, n)


_forward.register_vmap(_one_by_one(torch.ops.regard.attention))
_backward.register_vmap(_one_by_one(torch.ops.regard.attention_backward))
_forward.register_autograd(_autograd, setup_context=_setup_context)
