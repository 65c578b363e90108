"""A program of one call of torch's CPU kernel: straight into it, with and without gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.backends import _guard, _kernels
from regard.backends._autograd import check_held, run_fused, saved_elsewhere, second_derivative
from regard.backends._base import Backend, Program, reads_values
from regard.masks import rebuild
from regard.masks._memo import versions
from regard.spec import Call, CallSpec, Result

# numbers of a tensor up to which a call's derivative is left to torch, which keeps its inputs alive
FEW = 1 << 15
# numbers of the largest mask that is kept for the next call
KEPT_NUMBERS = 1 << 18
# keys up to which the kernel may take a row of NaN for an empty one: a vector's worth
VECTOR = 64

_count_nonzero = torch.count_nonzero
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_derives = torch.is_grad_enabled
_is_batched, _was_batched = torch._C._functorch.is_batchedtensor, torch._C._functorch.is_legacy_batchedtensor
_make: Callable[..., Result] = tuple.__new__  # without the Python function of a named tuple


class KernelCall(Program):
    """No bias, no sinks, and a mask that is the causal flag or a small tensor in which every row sees something."""

    def __init__(self, backend: Backend, spec: CallSpec, *, named: bool, causal: bool, masked: bool) -> None:
        super().__init__(backend, spec, named=named)
        self.causal = causal
        self.masked = masked  # by a tensor, made when the program first runs
        self.added: Tensor | None = None
        self._general: Callable[..., Result] | None = None
        few = max(spec.queries * spec.heads * spec.head_dim, spec.keys * spec.kv_heads * spec.head_dim)
        self._by_torch = spec.grad and spec.batch * few <= FEW
        self._named = backend.name if named else None
        self._again = derived_again(spec, partial(second_derivative, self._named)) if self._by_torch else None
        self._may_hide_nan = not masked and spec.keys <= VECTOR

    def run(self, call: Call) -> Result:
        if self.masked and self.added is None:
            self._add(call)
        if self._general is not None:
            return self._general(call, named=self.named)
        if self.spec.grad:
            return self._recorded(call)
        out, lse = _kernels.cpu_forward(
            call.query, call.key, call.value, 0.0, self.causal, attn_mask=self.added, scale=self.spec.scale
        )
        if self._may_hide_nan and _count_nonzero(lse).item() != lse.numel():
            out, lse = show_nan(call, call.query, call.key, out, lse)
        return _make(Result, (out, lse, None, math.isfinite(out.sum().item()) if self.guarded else None))

    def _add(self, call: Call) -> None:
        """Make the mask; what has rows that see nothing goes the general way, which knows about them."""
        added, empty = whole_mask(call)
        if empty is not None:
            self._general = self.backend.run
        self.added = added

    def forward(self, call: Call) -> Result:
        out, lse = _kernels.forward(call.query, call.key, call.value, self.causal, self.added, self.spec.scale)
        return Result(*show_nan(call, call.query, call.key, out, lse)) if self._may_hide_nan else Result(out, lse)

    def backward(
        self, call: Call, grad_out: Tensor, out: Tensor, lse: Tensor, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        tensors = (call.query, call.key, call.value)
        grads = _kernels.backward(grad_out, *tensors, out, lse, self.causal, self.added, self.spec.scale)
        return (*grads, None, None)

    def _recorded(self, call: Call) -> Result:
        # where a block says how tensors are saved, inputs are saved once, asked for once, and nothing else holds them
        if not self._by_torch or saved_elsewhere(False) is not None:
            return run_fused(self, call, named=self._named)
        # at a few tokens, Python costs more than the kernel: its derivative is recorded by torch
        out, lse = _kernels.cpu_forward(
            call.query, call.key, call.value, 0.0, self.causal, attn_mask=self.added, scale=self.spec.scale
        )
        node: Any = out.grad_fn  # the kernel's own, before anything is made of its output
        if self._may_hide_nan and _count_nonzero(lse).item() != lse.numel():
            out, lse = show_nan(call, call.query, call.key, out, lse)
        if not self.guarded:
            node._register_hook_dict(self._again)
            return _make(Result, (out, lse, None, None))
        node.register_hook(OwnDerivative(call, self._derive))
        return _make(Result, (out, lse, None, math.isfinite(out.detach().sum().item())))

    def _derive(self, call: Call, grad_out: Tensor, needs: tuple[bool, ...]) -> Grads | None:
        again = torch.is_grad_enabled()
        if not (again and self.named) and not _guard.is_finite(call):
            return _guard.careful_gradients(self, call, grad_out, needs, again)
        return second_derivative(self._named, call, grad_out, needs) if again else None


Grads = tuple["Tensor | None", ...]
Derive = Callable[[Call, "Tensor", tuple[bool, ...]], Grads]


def derived_again(spec: CallSpec, derive: Derive) -> Tensor:
    """What gives torch's own derivatives of a kernel a second one: ``node._register_hook_dict(derived_again(…))``.

    Most backward passes are not differentiated. They find a hook that returns at once, and is the same for all calls
    of a program: it hangs on a tensor that is there for nothing else, because torch can add the hooks of one tensor to
    the node of another, in a tenth of the time that a hook of its own takes."""

    def ask(_: Tensor | None) -> None:
        if _derives():
            _replace_derivative(spec, derive)

    carrier = torch.empty(0, device="cpu", requires_grad=True)
    carrier._backward_hooks = {0: ask}
    return carrier


def _replace_derivative(spec: CallSpec, derive: Derive) -> None:
    """Before a derivative with create_graph=True: ``derive(call, grad_out, needs)`` is to take its place, for the
    inputs that autograd has saved."""
    node: Any = torch._C._current_autograd_node()
    try:
        tensors = node._saved_query, node._saved_key, node._saved_value
    except RuntimeError:  # the node says itself that they are gone or changed, if more than its hooks is run
        return
    mask = None if spec.mask is None else rebuild(repr(spec.mask))
    offset = 0 if spec.offset is None else spec.offset  # positions that are tensors say nothing where there is no mask
    # one program serves several numbers of keys
    call = Call(spec._replace(keys=tensors[1].shape[2]), *tensors, mask, None, None, offset)

    def instead(grads: Grads, grad_out: Grads) -> Grads | None:
        handle.remove()
        # no gradient at all may come, which stands for zeros
        if grad_out[0] is None or not _derives():
            return None
        return (*derive(call, grad_out[0], _needs(grads))[:3], *grads[3:])

    handle = node.register_hook(instead)


def _needs(grads: Grads) -> tuple[bool, ...]:
    """Of query, key, value, bias and sinks; a gradient is None where nobody asked for it."""
    return (*(grad is not None for grad in grads[:3]), False, False)


class OwnDerivative:
    """A hook on torch's own derivative of a call in which something is masked: ``derive(call, grad_out, needs)`` takes
    its place where it is to be differentiated again, and where numbers that are hidden have reached the gradients; in
    the call's result they may not show. It answers None where torch's own are right. The hook holds the inputs until
    the derivative has been taken, as torch does."""

    __slots__ = ("_call", "_derive", "_versions")

    def __init__(self, call: Call, derive: Callable[[Call, Tensor, tuple[bool, ...]], Grads | None]) -> None:
        self._call: Call | None = call
        self._derive = derive
        self._versions = None if call.mask is None or not call.mask.tensors else versions(call.mask.tensors)

    def __call__(self, grads: Grads, grad_out: Grads) -> Grads | None:
        call = self._call
        if not _keeps_graph():
            self._call = None
        # no gradient at all may come, which stands for zeros
        if grad_out[0] is None or call is None:
            return None
        if not _derives() and not _has_hidden(grads):
            return None
        if self._versions is not None:
            check_held(call, self._versions)
        made = self._derive(call, grad_out[0], _needs(grads))
        return None if made is None else (*made[:3], *grads[3:])


def _has_hidden(grads: Grads) -> bool:
    """Whether a number that is hidden may have reached gradients: 0 times what is not finite is in every sum over keys,
    which the gradients of the queries are; where nobody asked for these, the others tell."""
    if grads[0] is not None:
        return not _is_finite(grads[0])
    return any(grad is not None and not _is_finite(grad) for grad in grads[1:3])


def _is_finite(grad: Tensor) -> bool:
    if _is_batched(grad) or _was_batched(grad):  # several backward passes at once, whose numbers cannot be read
        return False
    return math.isfinite(grad.sum().item())


def show_nan(call: Call, query: Tensor, key: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """NaN for rows whose logits are all NaN. Without a mask to add, the CPU kernel takes those for empty rows: output
    0, and a lse of exactly 0. Every row sees the first key, so that its logit tells."""
    if lse.is_meta or (reads_values(call.spec) and torch.count_nonzero(lse).item() == lse.numel()):
        return out, lse
    first = key[:, :, :1].repeat_interleave(query.shape[1] // key.shape[1], 1)
    lost = (lse == 0) & (query * first).sum(-1).isnan()
    return out.masked_fill(lost.unsqueeze(-1), torch.nan), lse.masked_fill(lost, torch.nan)


def whole_mask(call: Call) -> tuple[Tensor, Tensor | None]:
    """The mask as one additive tensor, and its empty rows; kept with the mask while small, as small calls repeat."""
    spec, mask = call.spec, call.mask
    assert mask is not None

    def build() -> tuple[Tensor, Tensor | None]:
        tile = call.permitted(range(spec.queries), range(spec.keys))
        added = torch.zeros(tile.shape, dtype=spec.dtype, device=tile.device).masked_fill_(~tile, -torch.inf)
        empty = ~tile.any(-1)
        return added, empty if tile.is_meta or not reads_values(spec) or bool(empty.any()) else None

    if spec.mode == "fake" or call.query.is_meta or not is_small(call):
        return build()
    key = ("added", spec.queries, spec.keys, call.offset, spec.dtype, call.query.device)
    # it may be kept from inference mode to a call with gradients
    with torch.inference_mode(False):
        return mask.remember(key, call.offset, build)


def is_small(call: Call) -> bool:
    """Whether the whole mask is small enough to be kept."""
    mask = call.mask
    return mask is None or call.spec.queries * call.spec.keys * mask.batch * mask.heads <= KEPT_NUMBERS
