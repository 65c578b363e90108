"""The public calls: check the arguments, choose a backend, run it."""

from __future__ import annotations

from functools import partial
from typing import Any, Never, NoReturn

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nn import functional

from regard import _sharded
from regard._arguments import prepare
from regard._checks import refuse_names
from regard.backends import _guard
from regard.backends._base import Program, accumulation, reads_values
from regard.bias import Bias
from regard.masks import Mask
from regard.masks._flags import Fused
from regard.observation import Observation
from regard.observation._gradients import with_gradients
from regard.observation._lengths import value_lengths
from regard.observation._memory import check_weights_fit
from regard.observation._observe import observe_call, observer_of, observing_peak
from regard.plan import Choice, Cost, Plan, choose, program_of, programs, recall, size_kind
from regard.spec import Call, CallSpec, OfOtherCall, Refused
from regard.statistics import Want

_SDPA = _sharded.SDPA
_described_before: dict[Any, CallSpec] = {}
_make: Any = tuple.__new__  # a named tuple without the Python function that makes one
_KEYS, _OFFSET = CallSpec._fields.index("keys"), CallSpec._fields.index("offset")
_NO_LIMITS = Fused()
_transforms = torch._C._functorch.peek_interpreter_stack
_autocasts = torch._C._is_any_autocast_enabled
_derives = torch.is_grad_enabled
_STRIDED = torch.strided
_TAKES = "it takes mask, bias, scale, softcap, sinks, dropout, query_offset and backend"
_WHOLE, _REAL = (type(None), int), (type(None), float)


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
    **others: Never,
) -> Tensor:
    """Attention: softmax(softcap(scale·q·kᵀ) + bias)·v over the keys that the mask permits.

    Shapes: query [batch, head, L, dim]; key [batch, kv head, S, dim]; value [batch, kv head, S, value dim];
    result [batch, head, L, value dim]. Query head h uses kv head ⌊h·Hkv/H⌋.

    Args:
        mask: a value of ``regard.masks``; True means may attend. A row that may attend to nothing gives zeros.
        bias: added to the logits, broadcastable to [batch, head, L, S]; may require grad. -inf hides a pair. Or a rule
            of ``regard.bias`` (``alibi``, ``T5Bias``), for which no [L, S] tensor is made.
        scale: 1/sqrt(dim) when None; may be 0 or negative.
        softcap: c > 0 replaces each scaled product s by c·tanh(s/c).
        sinks: [head], one logit per head that joins the softmax's denominator only.
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
    if others:
        refuse_names("attention", others, _TAKES)
    given = (query, key, value, mask, bias, scale, softcap, sinks, dropout, query_offset)
    if torch.compiler.is_compiling():
        from regard._compiled import attention as compiled

        if functional.scaled_dot_product_attention is not _SDPA and _sharded.is_torchs_block():
            _sharded.refuse_compiled()
        return compiled(given, backend)
    if _tracing_state() is not None:
        _refuse_tracing()
    usual = type(query) is type(key) is type(value) is Tensor and functional.scaled_dot_product_attention is _SDPA
    if not usual and (spread := _sharded.of(query, key, value)) is not None:
        out: Tensor = spread.attention(attention, given[:3], _keywords(given, backend))
        return out
    program, call = _prepared(given, backend)
    return _guard.run(program, call).out


def _keywords(given: tuple[Any, ...], backend: str) -> dict[str, Any]:
    """The keywords of a call by name, from all that `prepare` takes."""
    names = ("mask", "bias", "scale", "softcap", "sinks", "dropout", "query_offset", "backend")
    return dict(zip(names, (*given[3:], backend), strict=True))


# torch.jit.trace, which torch has deprecated: lengths are tensors in it, and a plan is made for numbers
_tracing_state = torch._C._get_tracing_state


def _refuse_tracing() -> NoReturn:
    raise RuntimeError(
        "torch.jit.trace cannot record regard's calls, because a plan is made for the lengths of a call; use "
        "torch.export.export or torch.compile, or regard.interop.to_onnx for an ONNX file"
    )


def _prepared(given: tuple[Any, ...], backend: str) -> tuple[Program, Call]:
    """A call, and what runs it: remembered for calls that are described alike, so that only the first of them is
    checked, planned and prepared."""
    query, key, value, mask, bias, scale, softcap, sinks, dropout, query_offset = given
    if not (
        bias is None
        and sinks is None
        and type(query) is type(key) is type(value) is Tensor
        and (mask is None or isinstance(mask, Mask))
        and is_plain()
        and (known := _described(given, backend)) is not None
    ):
        call = prepare(*given)
        if call.spec.dropout:
            call = call.replace(seed=draw_seed(query))
        return program_of(call, backend), call
    rows, keys, heads, grad, rest = known
    if mask is not None and mask.is_open:
        mask = mask.sized(query.shape[0], query.shape[1])
    offset = keys - rows if query_offset is None else query_offset
    if rows == 1 and mask is not None and mask.fused(1, keys, offset) == _NO_LIMITS:
        mask, given = None, (query, key, value, None, *given[4:])  # a last query sees everything
    if mask is not None:
        kind: tuple[Any, ...] = (keys, offset, rest)
        program = mask.recalled(kind)
        if program is None:
            program = mask.remember(kind, 0, partial(_program_of, given, backend), reads=False)
        spec = program.spec
    else:
        # nothing depends on the number of keys but for what ``sizes`` says: a text is decoded by one program
        kind = (size_kind(query, grad, heads, rows, keys), rest)
        program = programs.get(kind)
        if program is None:
            program = recall(programs, kind, partial(_program_of, given, backend))
        spec = program.spec
        if spec.keys != keys or spec.offset != offset:
            spec = _make(CallSpec, (*spec[:_KEYS], keys, *spec[_KEYS + 1 : _OFFSET], offset, *spec[_OFFSET + 1 :]))
    seed = draw_seed(query) if dropout else None
    return program, _make(Call, (spec, query, key, value, mask, None, None, offset, seed, False))


def kind_of(given: tuple[Any, ...]) -> Any:
    """What decides, next to its mask, how a call runs, hashable; None for one that is out of the ordinary. ``given``:
    all that `prepare` takes, in its order."""
    query, key, value, _, bias, _, _, sinks, _, _ = given
    usual = type(query) is type(key) is type(value) is Tensor and functional.scaled_dot_product_attention is _SDPA
    if not usual or bias is not None or sinks is not None or not is_plain() or _tracing_state() is not None:
        return None
    return _described(given, "auto")


def described(given: tuple[Any, ...]) -> Call:
    """The call, without what runs it; as ``prepare``, but that its description is remembered for calls alike."""
    query, key, value, mask = given[:4]
    known = None if mask is not None and (mask.tensors or mask.is_open) else kind_of(given)
    if known is None:
        return prepare(*given)
    rows, keys, _, _, rest = known
    offset = keys - rows if given[-1] is None else given[-1]
    spec = recall(_described_before, (mask, keys, offset, rest), lambda: prepare(*given).spec)
    made: Call = _make(Call, (spec, query, key, value, mask, None, None, offset, None, False))
    return made


def prepared(given: tuple[Any, ...]) -> tuple[Program, Call]:
    """What runs a call, and the call as it is described."""
    return _prepared(given, "auto")


def _program_of(given: tuple[Any, ...], backend: str) -> Program:
    return program_of(prepare(*given), backend)


def _described(given: tuple[Any, ...], backend: str) -> tuple[Any, ...] | None:
    """All that checks, plan and program depend on, next to the mask: first the numbers of queries, of keys and of all
    items' heads, and whether there may be gradients, then the rest. None where it cannot be written down shortly, or
    is not right."""
    query, key, value, _, _, scale, softcap, _, dropout, query_offset = given
    if type(query_offset) not in _WHOLE or type(scale) not in _REAL or type(softcap) not in _REAL:
        return None
    if type(dropout) is not float or type(backend) is not str:
        return None
    try:
        batch, heads, rows, dim = query.shape
        key_batch, key_heads, keys, key_dim = key.shape
        value_batch, value_heads, values, value_dim = value.shape
        contiguous = query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
    except (ValueError, RuntimeError):  # not of four dimensions, nested, or of a layout without strides
        return None
    # on CUDA, nothing says that it is contiguous that has another layout
    if not ((contiguous and query.is_cuda) or query.layout is key.layout is value.layout is _STRIDED):
        return None
    dtype, device = query.dtype, query.device
    if not (
        batch == key_batch == value_batch
        and key_heads == value_heads
        and keys == values
        and dim == key_dim
        and key.dtype is dtype is value.dtype
        and key.device == device == value.device
    ):
        return None
    grad = _derives() and (query.requires_grad or key.requires_grad or value.requires_grad)
    # a dim of size 1 may have any stride
    strides = None
    if not contiguous or dim == 1 or value_dim == 1:
        strides = (query.stride(3), key.stride(3), value.stride(3))
    rest = (
        rows, batch, heads, dim, key_heads, value_dim, dtype, device, strides, grad, scale, softcap, dropout, backend,
    )  # fmt: skip
    return rows, keys, batch * heads, grad, rest


def is_plain() -> bool:
    """No transform, no forward-mode derivative, no autocast is in force."""
    return _transforms() is None and forward_ad._current_level < 0 and not _autocasts()


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
    """Say how ``attention`` (or ``observe``, with ``want``) would run this call, without running it.

    Only shapes, dtypes and devices matter: tensors on the device "meta" are enough. Print the plan to get a table, or
    read ``plan.backend``, ``plan.reason``, ``plan.refusals`` and ``plan.cost``.

    ``kind="linear"`` explains ``linear_attention`` instead, with that call's keywords; ``backend`` is then its form.

    Raises:
        TypeError, ValueError: as ``attention`` does, for a call that could not run.
        Refused: the backend named by ``backend`` cannot do the call; the message says why.
    """
    if kind != "softmax":
        softmax_only = {"want": want, "bias": bias, "softcap": softcap, "sinks": sinks, "dropout": dropout or None}
        given = {"mask": mask, "scale": scale, "query_offset": query_offset, "form": backend, **linear}
        return _explain_linear(kind, (query, key, value), softmax_only, given)
    if linear:
        refuse_names("attention", linear, "explain linear attention with kind='linear'")
    check_want(want)
    softmax = (query, key, value, mask, bias, scale, softcap, sinks, dropout, query_offset)
    if (spread := _sharded.of(query, key, value)) is not None:
        plan: Plan = spread.explain(explain, softmax[:3], {**_keywords(softmax, backend), "want": want})
        return plan
    call = prepare(*softmax)
    return make_plan(call, choose(call.spec, backend), want)


def _explain_linear(
    kind: object, tensors: tuple[Tensor, Tensor, Tensor], softmax_only: dict[str, Any], given: dict[str, Any]
) -> Plan:
    if kind != "linear":
        raise ValueError(f"kind must be 'softmax' or 'linear', got {kind!r}")
    if extra := [name for name, value in softmax_only.items() if value is not None]:
        raise TypeError(f"linear attention has no {' and no '.join(extra)}: leave out, or explain kind='softmax'")
    from regard.linear._call import explain_linear

    return explain_linear(*tensors, **given)


def make_plan(call: Call, choice: Choice, want: Want | None = None) -> Plan:
    """The plan of a call; with ``want``, its cost includes the observation after the forward pass. If a table of
    blocks is too large to build for the cost alone, the cost adds the most bytes that it can take."""
    spec, mask, offset = call.spec, call.mask, call.offset

    def cost() -> Cost:
        kept, exact = spec.pairs, True
        if mask is not None:
            kept, exact = mask.kept_pairs(spec.queries, spec.keys, offset, spec.batch, spec.heads)
        lines = spec.batch * (spec.heads * spec.queries + spec.kv_heads * spec.keys)
        moved = lines * (spec.head_dim + spec.value_dim) * spec.dtype.itemsize
        if spec.bias is not None:
            moved += spec.bias.dtype.itemsize * torch.Size(spec.bias.shape).numel()
        flops = 2 * kept * (spec.head_dim + spec.value_dim)
        table = None if mask is None else mask.unlisted_bytes(spec.queries, spec.keys, offset, spec.batch)
        if table is None:
            peak = choice.backend.peak_bytes(call)
        else:
            unmasked = call.replace(spec=spec._replace(mask=None, flags=None, areas=None), mask=None)
            peak = choice.backend.peak_bytes(unmasked) + table
        if want is not None and want.asks:
            flops += 2 * kept * spec.head_dim
            # the result is there, and what it was computed in no more
            peak = max(peak, choice.backend.result_bytes(spec) + observing_peak(call, want))
        return Cost(flops, moved, kept, peak, exact)

    observer = None
    if want is not None:
        observer = observer_of(spec, want)
        spec = spec._replace(want=want.key)
    return Plan(spec, choice, cost, observer)


def draw_seed(query: Tensor) -> Tensor:
    """The seed of a call's dropout, drawn from torch's generator: torch.manual_seed sets it."""
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
    value_norms: Tensor | None = None,
    output: Tensor | None = None,
    differentiable: bool = False,
    **others: Never,
) -> Observation:
    """Compute ``attention``, and exact statistics of its weights (before dropout).

    ``.out`` equals what ``attention`` returns for the same call: the same backend and the same random draw. regard
    never stores the matrix of weights: memory grows with the length, not with its square.

    Args:
        want: which statistics, ``regard.Want()`` when None. The other arguments are those of ``attention``.
        value_norms: for ``Want(value_mass=True)``, the length of each value, [batch, head, key]; ‖v‖ when None.
        output: instead of ``value_norms``, the weight [model dim, heads · value dim] of the output projection that
            follows. The length of each value is then ‖v W_O‖, as it enters the residual stream.
        differentiable: ``entropy``, ``key_mass`` and ``first_mass`` carry gradients (first derivatives only) to query,
            key, bias and sinks, in O(L) memory: for an entropy or sink penalty. Other statistics stay detached.

    Raises:
        TypeError, ValueError: as ``attention`` does.
        Refused: under torch.compile, vmap and other transforms, where the numbers cannot be read.
    """
    if others:
        refuse_names("observe", others, _TAKES)
    want = Want() if want is None else want
    check_want(want)
    if torch.compiler.is_compiling():
        raise Refused("regard.observe cannot be compiled: call it outside torch.compile, or compile regard.attention")
    given = (query, key, value, mask, bias, scale, softcap, sinks, dropout, query_offset)
    if (spread := _sharded.of(query, key, value)) is not None:
        more = {"value_norms": value_norms, "output": output, "differentiable": differentiable or None}
        if extra := [name for name, value in more.items() if value is not None]:
            raise Refused(f"{', '.join(extra)} cannot be used where tokens lie on several processes: leave out")
        seen: Observation = spread.observe(observe, given[:3], {**_keywords(given, backend), "want": want})
        return seen
    program, call = _prepared(given, backend)
    if call.spec.mode in ("transform", "fake"):
        raise Refused(
            "regard.observe needs tensors with values: it cannot run under torch.compile, vmap, torch.func or with "
            "fake tensors; call it outside of them"
        )
    check_weights_fit(want, call.spec)
    lengths = _lengths(call, want, value_norms, output)
    if want.rows and not want.asks_more and not reads_values(call.spec) and not differentiable:
        call = call.replace(wants_rows=True)
    result = _guard.run(program, call)
    call = result.ran if isinstance(result, OfOtherCall) else call
    lse = result.lse.detach().to(accumulation(call.spec.dtype))
    found = result.rows or (observe_call(_plain(call), lse, want, lengths) if want.asks else {})
    if differentiable:
        found |= with_gradients(call, lse, want, found)
    return Observation(result.out, lse, make_plan(call, choose(call.spec, backend), want), want, found)


def _lengths(call: Call, want: Want, given: Any, output: Any) -> Tensor | None:
    if (given is not None or output is not None) and not want.value_mass:
        raise ValueError("value_norms and output are for the statistic that want=regard.Want(value_mass=True) asks for")
    if given is not None and output is not None:
        raise ValueError("give value_norms, or output to compute them from, not both")
    return value_lengths(_plain(call), given, output) if want.value_mass else None


def _plain(call: Call) -> Call:
    """The call without forward-mode tangents: statistics are detached."""
    if call.spec.mode != "dual":
        return call
    return call.of(*(None if t is None else forward_ad.unpack_dual(t).primal for t in call.tensors))  # type: ignore[no-untyped-call]


def check_want(want: object) -> None:
    if want is not None and not isinstance(want, Want):
        raise TypeError(f"want must be a regard.Want, such as Want(top_k=4), got {type(want).__name__}")
