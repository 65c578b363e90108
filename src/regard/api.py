"""The public calls: check the arguments, choose a backend, run it."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.forward_ad as forward_ad

from regard import _guard
from regard._arguments import prepare
from regard._errors import Refused
from regard._observing import observe_rows, observing_bytes
from regard.backends._base import accumulation, reads_values
from regard.observation import Observation
from regard.plan import Choice, Cost, Plan, choose
from regard.statistics import Want

if TYPE_CHECKING:
    from torch import Tensor

    from regard.bias import Bias
    from regard.masks import Mask
    from regard.spec import Call, CallSpec


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | None = None,
    bias: Tensor | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    query_offset: int | Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """softmax(softcap(scale·q·kᵀ) + bias)·v over the keys that the mask permits.

    Shapes: query [batch, head, L, dim]; key [batch, kv head, S, dim]; value [batch, kv head, S, value dim];
    result [batch, head, L, value dim]. Query head h uses kv head ⌊h·Hkv/H⌋.

    Args:
        mask: a value of ``regard.masks``; True means may attend. A row that may attend to nothing gives zeros.
        bias: added to the logits, broadcastable to [batch, head, L, S]; may require grad. -inf hides a pair. Or a rule
            of ``regard.bias`` (``alibi``, ``T5Bias``), for which no [L, S] tensor is made.
        scale: 1/sqrt(dim) when None; may be 0 or negative.
        softcap: c > 0 replaces each scaled product s by c·tanh(s/c).
        sinks: [head], one logit a head that joins the denominator only.
        dropout: probability of dropping a weight, applied as given (modules pass 0 in eval).
        query_offset: position of the first query among the keys, an int or one per item; S - L when None.
        backend: "auto", or a name: then that backend runs or ``regard.Refused`` is raised.

    Raises:
        TypeError: wrong kinds: a bare tensor as mask, mixed dtypes or devices, a nested tensor.
        ValueError: wrong shapes or numbers; ``regard.Refused`` when a named backend cannot do the call.

    >>> q, k, v = torch.ones(1, 2, 1, 4), torch.ones(1, 2, 3, 4), torch.arange(3.0).view(1, 1, 3, 1).expand(1, 2, 3, 4)
    >>> attention(q, k, v)[0, 0]
    tensor([[1., 1., 1., 1.]])
    """
    if torch.compiler.is_compiling():
        from regard._compiled import attention as compiled

        return compiled(query, key, value, mask, bias, scale, softcap, sinks, dropout, query_offset, backend)
    call = prepare(query, key, value, mask, bias, scale, softcap, sinks, dropout, query_offset)
    choice = choose(call.spec, backend)
    if dropout:
        call.seed = draw_seed(query)
    return _guard.run(choice.backend, call, named=choice.named)[0]


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kind: str = "softmax",
    want: Want | None = None,
    mask: Mask | None = None,
    bias: Tensor | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    query_offset: int | Tensor | None = None,
    backend: str = "auto",
    **linear: Any,
) -> Plan:
    """How ``attention`` (or ``observe``, with ``want``) would run this call; runs nothing.

    Only shapes, dtypes and devices are looked at: tensors on the device "meta" will do. Print the plan for a table, or
    read ``plan.backend``, ``plan.reason``, ``plan.refusals`` and ``plan.cost``.

    ``kind="linear"`` asks about ``linear_attention`` in its place: with that call's keywords, its form as ``backend``.

    Raises:
        TypeError, ValueError: as ``attention`` does, for a call that could not run.
        Refused: ``backend`` names one that cannot do the call; the message says why.
    """
    if kind != "softmax":
        softmax_only = {"want": want, "bias": bias, "softcap": softcap, "sinks": sinks, "dropout": dropout or None}
        given = {"mask": mask, "scale": scale, "query_offset": query_offset, "form": backend, **linear}
        return _explain_linear(kind, (query, key, value), softmax_only, given)
    if linear:
        raise TypeError(f"attention has no argument {', '.join(linear)}; explain linear attention with kind='linear'")
    check_want(want)
    call = prepare(query, key, value, mask, bias, scale, softcap, sinks, dropout, query_offset)
    return make_plan(call, choose(call.spec, backend), want)


def _explain_linear(
    kind: object, tensors: tuple[Tensor, Tensor, Tensor], softmax_only: dict[str, Any], given: dict[str, Any]
) -> Plan:
    if kind != "linear":
        raise ValueError(f"kind must be 'softmax' or 'linear', got {kind!r}")
    if extra := [name for name, value in softmax_only.items() if value is not None]:
        raise TypeError(f"linear attention has no {' and no '.join(extra)}: leave out, or explain kind='softmax'")
    from regard._linear.call import explain_linear

    return explain_linear(*tensors, **given)


def make_plan(call: Call, choice: Choice, want: Want | None = None) -> Plan:
    """The plan of a call; with ``want``, its cost includes the observation after the forward pass."""
    spec, mask, offset = call.spec, call.mask, call.offset

    def cost() -> Cost:
        kept, exact = spec.pairs, True
        if mask is not None:
            kept, exact = mask.kept_pairs(spec.queries, spec.keys, offset, spec.batch, spec.heads)
        moved = (
            spec.batch * spec.heads * spec.queries * (spec.head_dim + spec.value_dim)
            + spec.batch * spec.kv_heads * spec.keys * (spec.head_dim + spec.value_dim)
        ) * spec.dtype.itemsize
        if spec.bias is not None:
            moved += spec.bias.dtype.itemsize * torch.Size(spec.bias.shape).numel()
        flops = 2 * kept * (spec.head_dim + spec.value_dim)
        table = None if mask is None else mask.unlisted_bytes(spec.queries, spec.keys, offset, spec.batch)
        peak = choice.backend.workspace(spec, kept) + (choice.backend.mask_bytes(call) if table is None else table)
        if want is not None and want.asks:
            flops += 2 * kept * spec.head_dim
            peak += _observing_bytes(call, want)
        return Cost(flops, moved, kept, peak, exact)

    observer = None
    if want is not None:
        refusals = _kernel_refusals(spec, want)
        observer = f"torch operations: {'; '.join(refusals)}" if refusals else "triton kernels"
        spec = spec._replace(want=want.key)
    return Plan(spec, choice, cost, observer)


def draw_seed(query: Tensor) -> Tensor:
    """The number a call's dropout is derived from; drawn from torch's generator, so that manual_seed governs it."""
    return torch.randint(0, 2**31 - 1, (), device=query.device)


def observe(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    want: Want | None = None,
    mask: Mask | None = None,
    bias: Tensor | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    query_offset: int | Tensor | None = None,
    backend: str = "auto",
) -> Observation:
    """``attention`` that also returns exact statistics of its weights (before dropout).

    ``.out`` is what ``attention`` gives for the same call: the same backend and the same random draw. The matrix of
    weights is never held: memory grows with the length, not with its square.

    Args:
        want: which statistics, ``regard.Want()`` when None. The other arguments are those of ``attention``.

    Raises:
        TypeError, ValueError: as ``attention`` does.
        Refused: under torch.compile, vmap and other transforms, which give no numbers to look at.
    """
    want = Want() if want is None else want
    check_want(want)
    if torch.compiler.is_compiling():
        raise Refused("regard.observe cannot be compiled: call it outside torch.compile, or compile regard.attention")
    call = prepare(query, key, value, mask, bias, scale, softcap, sinks, dropout, query_offset)
    if call.spec.mode in ("transform", "fake"):
        raise Refused("regard.observe needs tensors with values: it cannot run under vmap, torch.func or fake tensors")
    choice = choose(call.spec, backend)
    if dropout:
        call.seed = draw_seed(query)
    if want.rows and not want.asks_more and not reads_values(call.spec):
        call.rows = {}
    out, lse = _guard.run(choice.backend, call, named=choice.named)
    lse = lse.detach().to(accumulation(call.spec.dtype))
    found = call.rows or (_observe(_plain(call), lse, want) if want.asks else {})
    return Observation(out, lse, make_plan(call, choice, want), want, found)


def _observe(call: Call, lse: Tensor, want: Want) -> dict[str, Tensor]:
    if not _kernel_refusals(call.spec, want):
        from regard._triton.launch import observe as by_kernels

        return by_kernels(call, lse, want)
    return observe_rows(call, lse, want)


def _observing_bytes(call: Call, want: Want) -> int:
    if not _kernel_refusals(call.spec, want):
        from regard._triton.launch import observing_bytes as by_kernels

        return by_kernels(call.spec, want)
    return observing_bytes(call, want)


def _kernel_refusals(spec: CallSpec, want: Want) -> list[str]:
    """Why the statistics are not folded by the observation kernels, but by torch operations, tile by tile."""
    if spec.device != "cuda":
        return ["the observation kernels run on CUDA devices"]
    if not _has_triton():
        return ["triton is not installed"]
    from regard._triton.launch import refuse

    return refuse(spec, want)


@lru_cache(1)
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _plain(call: Call) -> Call:
    """The call without forward-mode tangents: statistics are detached."""
    if call.spec.mode != "dual":
        return call
    names = ("query", "key", "value", "bias", "sinks")
    tensors = {name: getattr(call, name) for name in names}
    primal = {n: None if t is None else forward_ad.unpack_dual(t).primal for n, t in tensors.items()}  # type: ignore[no-untyped-call]
    return call.replace(**primal)


def check_want(want: object) -> None:
    if want is not None and not isinstance(want, Want):
        raise TypeError(f"want must be a regard.Want, such as Want(top_k=4), got {type(want).__name__}")
