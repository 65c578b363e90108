"""Torch's fused kernels on CUDA, chosen from the spec alone, each with its log-sum-exp.

  cudnn      half precision; everything or square causal, a bias tensor, dropout: the fastest on Hopper
  areas      half precision; masks that are a few rectangles and triangles of pairs: calls of cuDNN (see ``_areas``)
  flash      half precision; causal, windows and packed documents as flags, aligned to the last key
  efficient  float32; everything or square causal

lse is [B, H, L] float32, and -inf for an empty row, in both directions.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from regard.backends import _areas
from regard.backends._autograd import save, saved, saved_elsewhere, second_derivative
from regard.backends._base import Program, no_autocast
from regard.backends._kernel_call import derived_again
from regard.backends._kernels import aligned
from regard.spec import Refused, Result

if TYPE_CHECKING:
    from torch import Tensor

    from regard.backends._base import Backend
    from regard.spec import Call, CallSpec

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_make: Any = tuple.__new__  # a named tuple without the Python function that makes one


class Flags(NamedTuple):
    """A mask as a kernel's flags, resolved for one call. ``used_keys``: later keys are beyond every query's reach."""

    causal: bool
    left: int
    right: int
    documents: bool
    used_keys: int


def refuse(spec: CallSpec) -> list[str]:
    reasons = []
    if spec.dtype == torch.float64:
        reasons.append("no fused CUDA kernel takes float64")
    if spec.scale <= 0:
        reasons.append("the CUDA kernels take positive scales only")
    for what, dim in (("head", spec.head_dim), ("value", spec.value_dim)):
        if dim % 8 or dim > 256:
            reasons.append(f"{what} dim {dim} is not a multiple of 8 up to 256")
    if spec.dropout == 1:
        reasons.append("the CUDA kernels cannot drop every weight")
    if spec.dropout and spec.mode == "compile":
        reasons.append("their random draw cannot be repeated for the gradients of a compiled call")
    if spec.areas is not None:
        return reasons + _refuse_areas(spec)
    flags = flags_of(spec)
    if flags is None:
        reasons.append("no fused CUDA kernel takes this mask as flags, nor is it a few rectangles and triangles")
        return reasons + _refuse_bias(spec)
    if spec.dtype == torch.float32:
        if not _plain(spec, flags):
            reasons.append("in float32 only unmasked and square causal calls have a fused CUDA kernel")
        if spec.kv_heads != spec.heads:
            reasons.append("the float32 CUDA kernel would need the grouped keys repeated in memory")
    if spec.value_dim != spec.head_dim and not _takes_cudnn(spec, flags):
        reasons.append(f"with value dim {spec.value_dim} and head dim {spec.head_dim} only plain calls have a kernel")
    return reasons + _refuse_bias(spec)


def _refuse_areas(spec: CallSpec) -> list[str]:
    reasons = []
    if not _fits_cudnn(spec):
        reasons.append(
            f"this mask is several calls of cuDNN, which does not take heads of {spec.head_dim} in {spec.dtype}"
        )
    if spec.bias is not None or spec.dropout:
        reasons.append("this mask is several calls of cuDNN, which take no bias and no dropout")
    return reasons


def _refuse_bias(spec: CallSpec) -> list[str]:
    if spec.bias is None or spec.bias.rule is not None:
        return []  # of rules, see ``takes_rules``
    if spec.mask is not None:
        return ["no fused CUDA kernel takes a bias and a mask together"]
    if spec.bias.dtype != spec.dtype or spec.dtype not in _HALF:
        return [f"a bias of {spec.bias.dtype} next to {spec.dtype}: cuDNN takes both in one half precision"]
    if not _fits_cudnn(spec):
        return ["cuDNN, which takes a bias, does not take these heads"]
    if spec.grad and spec.bias.needs_grad:
        return ["cuDNN gives no gradient of the bias"]
    return []


def flags_of(spec: CallSpec) -> Flags | None:
    """The kernel flags that mean the same as the mask at this offset; None when there are none."""
    if spec.mask is None:
        return Flags(False, -1, -1, False, spec.keys)
    if spec.flags is None or spec.offset is None:
        return None
    causal, left, right, padding, documents = spec.flags
    if padding:
        return None
    keys = spec.keys
    if documents:
        # packed documents restart at each boundary: only when rows and keys are the same tokens
        if spec.queries != keys or spec.offset != 0 or documents != "lengths":
            return None
    elif right == 0 and spec.queries <= spec.offset + spec.queries <= keys:
        keys = spec.offset + spec.queries
    if spec.offset != keys - spec.queries and (left is not None or right is not None):
        return None
    return Flags(
        causal and left is None, -1 if left is None else left, -1 if right is None else right, bool(documents), keys
    )


def _plain(spec: CallSpec, flags: Flags) -> bool:
    """Nothing but an optional square causal triangle: what the kernels without flags for more can do."""
    if flags.documents or flags.left >= 0 or flags.right > 0:
        return False
    return not flags.causal or flags.used_keys == spec.queries


def _fits_cudnn(spec: CallSpec) -> bool:
    """Whether cuDNN takes heads of these sizes; in its backward pass it has heads above 128 on Hopper alone."""
    if spec.dtype not in _HALF:
        return False
    return max(spec.head_dim, spec.value_dim) <= 128 or is_hopper()


def _takes_cudnn(spec: CallSpec, flags: Flags) -> bool:
    return _fits_cudnn(spec) and _plain(spec, flags)


@lru_cache(4096)
def recipe(spec: CallSpec) -> tuple[str, Flags]:
    """The kernel of a call that is not refused, and its flags."""
    flags = flags_of(spec)
    if spec.areas is not None:
        return "areas", flags or Flags(False, -1, -1, False, spec.keys)
    assert flags is not None
    if spec.dtype == torch.float32:
        return "efficient", flags
    return "cudnn" if _takes_cudnn(spec, flags) else "flash", flags


# Pairs of a call and rows from which areas are faster than our kernel, which is one launch and copies nothing: 16 heads
# of 8192 tokens, and of 4096 where there is one area and no backward pass (benchmarks/gpu.py --only gaps)
AREA_PAIRS, AREA_ROWS = 1 << 30, 1024


def is_worth_areas(spec: CallSpec) -> bool:
    alone = spec.areas is not None and len(spec.areas) == 1 and not spec.grad
    return spec.pairs >= (AREA_PAIRS >> 2 if alone else AREA_PAIRS) and spec.queries >= AREA_ROWS


def is_banded(spec: CallSpec) -> bool:
    """Whether FlashAttention would be given a window or documents, in half precision."""
    flags = flags_of(spec)
    return flags is not None and spec.dtype in _HALF and (flags.documents or flags.left >= 0)


@lru_cache(1)
def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


# what a kernel's backward pass needs to repeat its random draw
Draw = tuple["Tensor", "Tensor"]


class CudnnCall(Program):
    """One call of cuDNN and nothing else: no bias, no sinks, no mask but the causal flag. Torch records its derivative
    itself, which costs the host 100 µs less than a record of ours."""

    def __init__(self, backend: Backend, spec: CallSpec, *, named: bool) -> None:
        super().__init__(backend, spec, named=named)
        self._causal, self._dropout, self._scale = recipe(spec)[1].causal, spec.dropout, spec.scale
        self._again = derived_again(spec, partial(_differentiable, named)) if spec.grad else None

    def run(self, call: Call) -> Result:
        again = self._again
        if again is not None and saved_elsewhere(False) is not None:
            return Result(*run(call, self.named))
        query, key, value = call.query, call.key, call.value
        if not (
            (query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16 == 0
            and query.is_contiguous()
            and key.is_contiguous()
            and value.is_contiguous()
        ):
            query, key, value = aligned(query), aligned(key), aligned(value)
        # of the same names in torch.ops and torch, the second has less overhead
        made = torch._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, self._dropout, self._causal, False, scale=self._scale
        )
        if again is not None:
            made[0].grad_fn._register_hook_dict(again)  # type: ignore[union-attr]
        return _make(_OfCudnn, (made[0], made[1], None, None))  # type: ignore[no-any-return]


class _OfCudnn(Result):
    """A result whose log-sum-exp is put into shape when somebody reads it: cuDNN's is [B, H, L, 1]."""

    @property
    def lse(self) -> Tensor:
        lse: Tensor = self[1].detach()
        return lse if lse.dim() == 3 else lse.squeeze(3)


def is_one_call(spec: CallSpec) -> bool:
    """Whether ``CudnnCall`` runs a call that is not refused."""
    if spec.mode != "plain" or spec.empty or spec.bias is not None or spec.sinks:
        return False
    kernel, flags = recipe(spec)
    return kernel == "cudnn" and flags.used_keys == spec.keys


def run(call: Call, named: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call with gradients; without sinks, which join later."""
    with no_autocast("cuda"):
        out, lse = _Kernel.apply(call, named, call.query, call.key, call.value, call.bias, call.sinks)  # type: ignore[no-untyped-call]
    return out, lse


def _differentiable(named: bool, call: Call, grad_out: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    if call.spec.dropout:
        raise Refused(
            "the fused CUDA kernels draw dropout themselves, and their second derivative (create_graph=True) would "
            'need the same draw: use backend="eager" or "blockwise"'
        )
    return second_derivative("sdpa" if named else None, _areas.with_shifts_as_bias(call), grad_out, needs)


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, named: bool, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        from regard.backends._tiled import add_sinks

        out, lse, draw = forward_with_draw(call)
        if call.sinks is not None:
            out, lse = add_sinks(out, lse, call.sinks)
        ctx.call, ctx.named, ctx.draw = call.without_tensors(), named, draw
        save(ctx, call, *tensors, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        from regard.backends._tiled import sink_gradient

        if grad_out is None:
            return (None,) * 7
        *tensors, out, lse = saved(ctx)[:7]
        call = ctx.call.of(*tensors)
        needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            return (None, None, *_differentiable(ctx.named, call, grad_out, needs))
        with no_autocast("cuda"):
            grads = backward(call, grad_out, out, lse, ctx.draw)
            of_sinks = sink_gradient(call, grad_out, out, lse) if needs[4] else None
        return (
            None,
            None,
            *(grad if need else None for grad, need in zip(grads, needs, strict=False)),
            None,
            of_sinks,
        )


def forward(call: Call) -> tuple[Tensor, Tensor]:
    return forward_with_draw(call)[:2]


def forward_with_draw(call: Call) -> tuple[Tensor, Tensor, Draw | None]:
    spec = call.spec
    kernel, flags = recipe(spec)
    if kernel == "areas":
        return (*_areas.forward(call), None)
    query, key, value = _inputs(call, flags)
    if kernel == "cudnn":
        bias = None if call.bias is None else _whole_bias(call)
        out, lse, *_, seed, at, _ = torch._scaled_dot_product_cudnn_attention(
            query, key, value, bias, True, spec.dropout, flags.causal, False, scale=spec.scale
        )
        return out, lse.reshape(lse.shape[:3]), (seed, at) if spec.dropout else None
    if kernel == "efficient":
        out, lse, seed, at = _aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, spec.dropout, flags.causal, scale=spec.scale
        )
        return out, lse[:, :, : spec.queries], (seed, at) if spec.dropout else None
    starts, longest = _starts(call) if flags.documents else (None, 0)
    q, k, v = (_tokens_first(t, flags.documents) for t in (query, key, value))
    out, lse, seed, at, _ = _aten._flash_attention_forward(
        q, k, v, starts, starts, longest or q.shape[-3], longest or k.shape[-3], spec.dropout, flags.causal, False,
        scale=spec.scale, window_size_left=flags.left, window_size_right=_right(flags),
    )  # fmt: skip
    if flags.documents:
        out = out.view(spec.batch, spec.queries, spec.heads, -1)
        lse = lse.view(spec.heads, spec.batch, spec.queries).transpose(0, 1)
    # flash marks a row without keys by +inf
    out, lse = out.transpose(1, 2), lse.masked_fill(lse == torch.inf, -torch.inf)
    return out, lse, (seed, at) if spec.dropout else None


def backward(
    call: Call, grad_out: Tensor, out: Tensor, lse: Tensor, draw: Draw | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    spec = call.spec
    kernel, flags = recipe(spec)
    if kernel == "areas":
        return _areas.backward(call, grad_out, out, lse)
    query, key, value = _inputs(call, flags)
    grad_out, out, used = aligned(grad_out), aligned(out), flags.used_keys
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    if draw is None:
        none = torch.zeros((), dtype=torch.uint64 if kernel == "flash" else torch.int64, device=query.device)
        draw = (none.new_zeros(2) if kernel == "flash" else none, none)
    if kernel == "cudnn":
        bias = None if call.bias is None else _whole_bias(call)
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            grad_out, query, key, value, out, lse.unsqueeze(-1).contiguous(), *draw, bias, None, None,
            spec.queries, used, spec.dropout, flags.causal, scale=spec.scale,
        )  # fmt: skip
    elif kernel == "efficient":
        padded = torch.nn.functional.pad(lse, (0, -spec.queries % 32), value=torch.inf)
        grads = _aten._scaled_dot_product_efficient_attention_backward(
            grad_out, query, key, value, None, out, padded, *draw, spec.dropout, [True, True, True, False],
            flags.causal, scale=spec.scale,
        )[:3]  # fmt: skip
    else:
        grads = _flash_backward(call, flags, grad_out, query, key, value, out, lse, draw)
    if used < spec.keys:
        pad = (0, 0, 0, spec.keys - used)
        grads = (grads[0], *(torch.nn.functional.pad(grad, pad) for grad in grads[1:]))
    return grads  # type: ignore[no-any-return]


def _whole_bias(call: Call) -> Tensor:
    spec = call.spec
    assert call.bias is not None
    return call.bias.detach().expand(spec.batch, spec.heads, spec.queries, spec.keys)


def _flash_backward(
    call: Call,
    flags: Flags,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    draw: Draw,
) -> tuple[Tensor, ...]:
    spec = call.spec
    starts, longest = _starts(call) if flags.documents else (None, 0)
    packed = [_tokens_first(t, flags.documents) for t in (grad_out, query, key, value, out)]
    if flags.documents:
        lse = lse.transpose(0, 1).reshape(spec.heads, -1)
    grads = _aten._flash_attention_backward(
        *packed, lse.contiguous(), starts, starts, longest or packed[1].shape[-3], longest or packed[2].shape[-3],
        spec.dropout, flags.causal, *draw, scale=spec.scale, window_size_left=flags.left,
        window_size_right=_right(flags),
    )  # fmt: skip
    if flags.documents:
        grads = tuple(grad.view(spec.batch, -1, *grad.shape[1:]) for grad in grads)
    return tuple(grad.transpose(1, 2) for grad in grads)


def _inputs(call: Call, flags: Flags) -> tuple[Tensor, Tensor, Tensor]:
    key, value = call.key, call.value
    if flags.used_keys != call.spec.keys:
        key, value = key[:, :, : flags.used_keys], value[:, :, : flags.used_keys]
    return aligned(call.query), aligned(key), aligned(value)


def _right(flags: Flags) -> int:
    return 0 if flags.causal else flags.right


def _tokens_first(tensor: Tensor, packed: bool) -> Tensor:
    """[B, H, L, D] to flash's [B, L, H, D], or [B·L, H, D] for packed documents."""
    tensor = tensor.transpose(1, 2)
    return tensor.reshape(-1, *tensor.shape[2:]) if packed else tensor


def _starts(call: Call) -> tuple[Tensor, int]:
    """Where each document starts among the packed tokens, as flash wants it, and the longest document's length."""
    mask, spec = call.mask, call.spec
    assert mask is not None
    found = mask.fused(spec.queries, spec.keys, call.offset)
    assert found is not None and found.documents is not None and found.documents.lengths is not None
    lengths = found.documents.lengths

    def build() -> tuple[Tensor, int]:
        repeated = lengths.to(torch.int64).repeat(spec.batch)
        starts = torch.nn.functional.pad(repeated.cumsum(0), (1, 0)).to(torch.int32)
        return starts.to(call.query.device), int(lengths.max())

    return mask.remember(("flash starts", spec.batch, call.query.device), 0, build)
