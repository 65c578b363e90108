"""Keeps what is masked from leaking: NaN, inf and overflow in keys and values that a query may not see.

On CPU in plain mode the data is looked at: a sum over the result, or, where gradients may be asked for, over keys and
values. If all is well, that was it. If not, the bad keys are replaced by zeros, the backend runs on the clean tensors
(so clean rows keep their bits), and the rows that may see something bad are computed one by one on exactly the keys
they may see.

Elsewhere nothing is read (it would wait for the device, or break a trace). On eager and blockwise the bad rows are
found without a branch and set to NaN; on the fused kernels, keys that a whole item hides are zeroed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard._hash import uniform
from regard.backends._base import Backend, Program, accumulation, no_autocast, norm_of
from regard.backends._bias import bias_over, may_hide
from regard.backends._dropout import kept_scale
from regard.backends.eager import softmax_with_sinks
from regard.spec import Call, Result

# rows times keys times dim that are gathered at once on the careful path
_CHUNK = 1 << 22


def run(program: Program, call: Call) -> Result:
    """The call, by its program; then, where something is masked, nothing that is masked has reached the result."""
    if not program.guarded:
        return program.run(call)
    spec = call.spec
    if not program.reads:
        if program.hides_nothing:
            return program.run(call)
        clean, lost = cleaned(program.backend, call)
        # of a mask that hides no key from a whole item, or a backend that leaves those out: so it is for all calls
        program.hides_nothing = clean is call and call.bias is None
        return with_nan(program.run(clean), lost)
    if call.bias is not None:
        if spec.bias is not None and spec.bias.rule is not None:
            spec.bias.rule.check_values(call.bias)
        else:
            check_bias(call.bias)
    result = program.run(call)
    if result.finite or (result.finite is None and _looks_clean(call, result)):
        return result
    with no_autocast(spec.device):
        return _careful(program, call)


def with_nan(result: Result, lost: Tensor | None) -> Result:
    """The result, with NaN in the rows [B, H, L] that see something bad."""
    if lost is None:
        return result
    out, lse = result.out.masked_fill(lost.unsqueeze(-1), torch.nan), result.lse.masked_fill(lost, torch.nan)
    return result._replace(out=out, lse=lse)


def _looks_clean(call: Call, result: Result) -> bool:
    # -inf is an empty row; NaN or +inf comes from a bad query, or from a logit that overflowed
    total = result.lse.sum().item()
    if not total < math.inf:
        return False
    if call.spec.grad:
        # a bad key that is hidden shows only in gradients, and so does a bad query that sees nothing
        return is_finite(call) and (total > -math.inf or math.isfinite(norm_of(call.query)))
    return math.isfinite(_sum(result.out))


def is_finite(call: Call) -> bool:
    """Whether keys and values are all numbers, and none is huge."""
    return math.isfinite(norm_of(call.key)) and math.isfinite(norm_of(call.value))


def cleaned(backend: Backend, call: Call) -> tuple[Call, Tensor | None]:
    """A clean call, made without reading a value, and the rows [B, H, L] whose output must become NaN (None: none)."""
    if (call.mask is None and call.bias is None) or call.spec.pairs == 0:
        return call, None
    if backend.name not in ("eager", "blockwise"):
        return (call if backend.leaves_out_padding(call.spec) else _neutralised(call)), None
    group = call.spec.heads // call.spec.kv_heads
    bad_query = ~torch.isfinite(call.query.detach()).all(-1)
    bad_key = ~(torch.isfinite(call.key.detach()).all(-1) & torch.isfinite(call.value.detach()).all(-1))
    at_once = call.spec.queries if backend.name == "eager" else 256
    lost = bad_query | _sees(call, bad_key.repeat_interleave(group, 1), at_once)
    return _without(call, lost, bad_key), lost


def _without(call: Call, rows: Tensor, keys: Tensor) -> Call:
    """The call with zeros in place of some query rows [B, H, L] and some keys [B, Hkv, S] with their values."""
    return call.replace(
        query=call.query.masked_fill(rows.unsqueeze(-1), 0.0),
        key=call.key.masked_fill(keys.unsqueeze(-1), 0.0),
        value=call.value.masked_fill(keys.unsqueeze(-1), 0.0),
    )


def _neutralised(call: Call) -> Call:
    """The call with keys and values that no query of an item may see set to zero."""
    hidden = None if call.mask is None else call.mask.hidden_keys(call.spec.keys, call.key.device)
    bias, spec = call.bias, call.spec
    plain = bias is not None and spec.bias is not None and spec.bias.rule is None
    if bias is not None and plain and bias.shape[2] == 1:  # alike for every row
        by_bias = (bias.detach() == -torch.inf).all(1).squeeze(1).expand(-1, spec.keys)  # [B or 1, S]
        hidden = by_bias if hidden is None else hidden | by_bias
    if hidden is None:
        return call
    hidden = hidden[:, None, :, None]
    return call.replace(key=call.key.masked_fill(hidden, 0.0), value=call.value.masked_fill(hidden, 0.0))


def check_bias(bias: Tensor) -> None:
    """NaN and +inf have no meaning in a bias; -inf hides a pair."""
    if not bias.numel():
        return
    top = bias.detach().amax().item()
    if math.isnan(top) or top == math.inf:
        what = "NaN" if math.isnan(top) else "+inf"
        raise ValueError(f"bias holds {what}; it must hold finite numbers, or -inf to hide a pair")


def _sum(out: Tensor) -> float:
    return float((out.sum(dtype=torch.float32) if out.dtype.itemsize == 2 else out.sum()).item())


def _careful(program: Program, call: Call) -> Result:
    spec = call.spec
    group = spec.heads // spec.kv_heads
    bad_query = _unusable(call.query, spec.scale)  # [B, H, L]
    # a huge value that is hidden meets weights of 0 in a gradient, and may be infinite by then
    bad_key = _unusable(call.key, spec.scale) | _unusable(call.value, 1.0)  # [B, Hkv, S]
    # an empty row is 0 whatever its query is
    used = _sees(call, torch.ones_like(bad_key).repeat_interleave(group, 1))
    touched = bad_query | _sees(call, bad_key.repeat_interleave(group, 1))
    out, lse, *_ = program.run(_without(call, touched, bad_key))
    nan_key = _has_nan(call.key) | _has_nan(call.value)
    lost = used & touched & (_has_nan(call.query) | _sees(call, nan_key.repeat_interleave(group, 1)))
    out = _Lost.apply(out, call.query, lost)  # type: ignore[no-untyped-call]
    lse = lse.masked_fill(lost, torch.nan)
    index = (used & touched & ~lost).nonzero(as_tuple=True)
    rows, rows_lse = _ExactRows.apply(call, index, *call.tensors)  # type: ignore[no-untyped-call]
    return Result(out.index_put(index, rows), lse.index_put(index, rows_lse.to(lse.dtype)), finite=False)


def careful_gradients(
    program: Program, call: Call, grad_out: Tensor, needs: tuple[bool, ...], again: bool
) -> tuple[Tensor | None, ...]:
    """Of query, key and value, for a call whose forward pass was clean. ``again``: to be differentiated once more."""
    inputs = [_detached(tensor, again) for tensor in (call.query, call.key, call.value)]
    query, key, value = inputs
    assert query is not None and key is not None and value is not None
    with torch.enable_grad(), no_autocast(call.spec.device):
        out = _careful(program, call.replace(query=query, key=key, value=value)).out
        wanted = [tensor for tensor, need in zip(inputs, needs, strict=False) if need and tensor is not None]
        made = iter(torch.autograd.grad(out, wanted, grad_out, create_graph=again, allow_unused=True))
    return tuple(next(made) if need else None for need in needs[:3])


def _has_nan(tensor: Tensor) -> Tensor:
    return torch.isnan(tensor.detach()).any(-1)


class _Lost(torch.autograd.Function):
    """NaN in the rows that see a NaN; where such a row is used, its query's gradient is NaN too, and no other's."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, query: Tensor, lost: Tensor) -> Tensor:
        ctx.save_for_backward(lost)
        ctx.dim = query.shape[-1]
        return out.masked_fill(lost.unsqueeze(-1), torch.nan)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None]:
        (lost,) = ctx.saved_tensors
        used = lost & (grad_out != 0).any(-1)
        grad_query = grad_out.new_zeros(*lost.shape, ctx.dim).masked_fill(used.unsqueeze(-1), torch.nan)
        return grad_out.masked_fill(lost.unsqueeze(-1), 0.0), grad_query, None


class _ExactRows(torch.autograd.Function):
    """``_exact_rows`` in chunks, recomputed for the gradients, so that memory stays bounded.

    A row whose output nobody uses passes no gradient on: 0·NaN would otherwise reach every key it sees.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, index: tuple[Tensor, ...], *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.call = call.without_tensors()
        ctx.index = index
        ctx.save_for_backward(*tensors)
        parts = [_exact_rows(call, chunk) for chunk in _chunks(call, index)]
        if not parts:
            work = accumulation(call.spec.dtype)
            parts = [(call.value.new_empty(0, call.spec.value_dim), call.value.new_empty(0, dtype=work))]
        out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        twice = torch.is_grad_enabled()
        # apart from each other and from the caller's graph: where one is made from another, gradients stay apart
        tensors: list[Any] = [_detached(tensor, twice) for tensor in ctx.saved_tensors]
        call = ctx.call.of(*tensors)
        used = (grad_out != 0).any(-1)
        wanted = [n for n, need in enumerate(ctx.needs_input_grad[2:]) if need]
        grads: dict[int, Tensor] = {n: torch.zeros_like(ctx.saved_tensors[n]) for n in wanted}
        at = 0
        grad_out = grad_out[used]
        for chunk in _chunks(call, tuple(axis[used] for axis in ctx.index)):
            size = len(chunk[0])
            with torch.enable_grad(), no_autocast(call.spec.device):
                out, _ = _exact_rows(call, chunk)
                inputs = [tensors[n] for n in wanted]
                some = grad_out[at : at + size]
                parts = torch.autograd.grad(out, inputs, some, create_graph=twice, allow_unused=True)
            for n, part in zip(wanted, parts, strict=True):
                if part is not None:
                    grads[n] = grads[n] + part
            at += size
        return (None, None, *(grads.get(n) for n in range(5)))


def _detached(tensor: Tensor | None, twice: bool) -> Tensor | None:
    if tensor is None or twice:
        return None if tensor is None else tensor.view_as(tensor)
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _chunks(call: Call, index: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    spec = call.spec
    at_once = max(1, _CHUNK // (spec.keys * max(spec.head_dim, spec.value_dim)))
    for start in range(0, len(index[0]), at_once):
        yield tuple(axis[start : start + at_once] for axis in index)


def _unusable(tensor: Tensor, scale: float) -> Tensor:
    """Rows that hold a non-finite number, or one whose square could overflow a logit."""
    work = accumulation(tensor.dtype)
    limit = math.sqrt(torch.finfo(work).max / (tensor.shape[-1] * max(1.0, abs(scale))))
    return ~(tensor.detach().abs().to(work) <= limit).all(-1)


def _permitted(call: Call, rows: range) -> Tensor:
    """What some rows may see, by mask and by -inf in the bias: bool, broadcastable to [B, H, rows, S]."""
    spec = call.spec
    seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=call.query.device)
    if call.mask is not None:
        seen = call.permitted(rows, range(spec.keys))
    if call.bias is not None and may_hide(call):
        bias = bias_over(call.replace(bias=call.bias.detach()), rows, range(spec.keys))
        assert bias is not None
        seen = seen & (bias != -torch.inf)
    return seen


def _sees(call: Call, bad: Tensor, at_once: int | torch.SymInt = 256) -> Tensor:
    """Rows that may see a bad key, [B, H, L]; ``bad`` is [B, H, S]."""
    spec = call.spec
    found = []
    for start in range(0, spec.queries, at_once):
        rows = range(start, min(start + at_once, spec.queries))
        seen = (_permitted(call, rows) & bad.unsqueeze(2)).any(-1)
        found.append(seen.expand(spec.batch, spec.heads, len(rows)))
    return torch.cat(found, 2)


def _exact_rows(call: Call, index: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Attention of single rows (b, h, r), each on a copy of its keys in which what it may not see is zero."""
    spec = call.spec
    work = accumulation(spec.dtype)
    b, h, r = index
    kv = h * spec.kv_heads // spec.heads
    low, high = int(r.min()), int(r.max()) + 1
    seen = _permitted(call, range(low, high)).expand(spec.batch, spec.heads, high - low, spec.keys)[b, h, r - low]
    hidden = ~seen.unsqueeze(-1)
    key = call.key[b, kv].to(work).masked_fill(hidden, 0.0)  # [n, S, D]
    value = call.value[b, kv].to(work).masked_fill(hidden, 0.0)
    logits = (key @ (call.query[b, h, r].to(work) * spec.scale).unsqueeze(-1)).squeeze(-1)
    if spec.softcap is not None:
        logits = torch.tanh(logits / spec.softcap) * spec.softcap
    if call.bias is not None and spec.bias is not None and spec.bias.rule is not None:
        first = call.offset[b] if isinstance(call.offset, torch.Tensor) else call.offset
        distance = torch.arange(spec.keys) - (r + first).unsqueeze(-1)
        logits = logits + spec.bias.rule.pairs(call.bias, h, distance).to(work)
    elif call.bias is not None:
        logits = logits + call.bias.expand(spec.batch, spec.heads, spec.queries, spec.keys)[b, h, r].to(work)
    sinks = None if call.sinks is None else call.sinks[h]
    weights, lse = softmax_with_sinks(logits[None, :, None], seen[None, :, None], sinks)
    weights = weights[0, :, 0]
    if spec.dropout:
        assert call.seed is not None
        element = ((b * spec.heads + h) * spec.queries + r)[:, None] * spec.keys + torch.arange(spec.keys)
        kept = (uniform(call.seed, element) >= spec.dropout).to(work)
        weights = weights * kept * kept_scale(spec)
    out = (weights.unsqueeze(1) @ value).squeeze(1)
    return out.to(spec.dtype), lse[0, :, 0]
