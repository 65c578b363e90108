"""Rules 34 to 39 and 71: layouts, backends, modes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from regard.testing._calls import FLOOR, Call, expect
from regard.testing._suite import DOUBLE, WIDE, Trial, rule, within


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _strided(x: Tensor) -> Tensor:
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"), dtype=x.dtype, device=x.device)
    wide[..., ::2] = x
    return wide[..., ::2]


def _offset(x: Tensor) -> Tensor:
    wide = torch.full((x.shape[0] + 2, *x.shape[1:-1], x.shape[-1] + 3), float("nan"), dtype=x.dtype, device=x.device)
    wide[1:-1, ..., 2:-1] = x
    return wide[1:-1, ..., 2:-1]


def _expanded(x: Tensor) -> Tensor:
    return x[:1, :1].expand(x.shape)


def _last_dim_first(x: Tensor) -> Tensor:
    return x.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": _transposed,
    "strided": _strided,
    "offset": _offset,
    "expanded": _expanded,
    "last dim first": _last_dim_first,
}


@rule(34, "transposed, strided, expanded and offset inputs give the contiguous result", VIEWS)
def layout(t: Trial, case: str) -> str:
    call = t.call(2, 4, 5, 7, 8)
    view = VIEWS[case]
    return t.agrees(call.but(query=view(call.query), key=view(call.key), value=view(call.value)))


@rule(34, "transposed, strided, expanded and offset inputs give the contiguous result", VIEWS)
def layout_with_bias(t: Trial, case: str) -> str:
    view = VIEWS[case]
    call = t.call(2, 4, 5, 7, 8, tree=("causal",), bias=view(t.normal(2, 4, 5, 7, seed=4, dtype=t.side)))
    return t.agrees(call.but(query=view(call.query), key=view(call.key), value=view(call.value)))


@rule(34, "transposed, strided, expanded and offset inputs give the contiguous result", ("transposed", "expanded"))
def layout_of_grad_out(t: Trial, case: str) -> str:
    call = t.call(2, 4, 5, 7, 8, tree=("causal",))
    grad_out = VIEWS[case](call.grad_out)
    return t.gradients_agree(call, call.differentiate(t.fn, grad_out)[1], grad_out)


COMPOSITES = (
    *("causal, GQA, d_v", "softcap and mask", "softcap and bias", "sinks and window", "everything", "alibi"),
    *("T5 bias", "T5 bias across blocks", "across blocks", "across blocks, causal"),
)


def composite_call(t: Trial, case: str) -> Call:
    """Calls that ask for several things at once, where backends differ most."""
    causal = ("causal",)

    def side(*shape: int, seed: int = 4) -> Tensor:
        return t.normal(*shape, seed=seed, dtype=t.side)

    def offsets(*each: int) -> Tensor:
        return torch.tensor(each, device=t.device)

    given: dict[str, tuple[tuple[int, int, int, int, int], dict[str, Any]]] = {
        "causal, GQA, d_v": ((2, 6, 5, 7, 11), {"Hkv": 2, "Dv": 3, "tree": causal}),
        "softcap and mask": ((2, 3, 5, 7, 11), {"tree": causal, "options": {"softcap": 0.5}}),
        "softcap and bias": ((2, 3, 5, 7, 11), {"bias": side(5, 7), "options": {"softcap": 0.5}}),
        "sinks and window": ((2, 3, 5, 7, 11), {"tree": ("window", 2, 0), "sinks": side(3, seed=5)}),
        "everything": (
            (2, 6, 9, 11, 7),
            {
                "tree": ("or", ("and", causal, ("padding", (4, 11), "right")), ("columns", 1)),
                "Hkv": 3,
                "Dv": 5,
                "bias": side(6, 1, 11),
                "sinks": side(6, seed=5),
                "options": {"softcap": 2.0, "scale": -0.4},
                "query_offset": offsets(1, 0),
            },
        ),
        "alibi": (
            (2, 6, 5, 7, 11),
            {"Hkv": 3, "tree": causal, "bias": side(6) * 0.5, "rule": ("alibi",), "query_offset": offsets(1, 4)},
        ),
        "T5 bias": ((2, 3, 9, 13, 7), {"bias": side(8, 3), "rule": ("t5", 8, 11, True), "query_offset": 2}),
        "T5 bias across blocks": (
            (1, 2, 147, 275, 9),
            {"tree": causal, "bias": side(32, 2), "rule": ("t5", 32, 128, False)},
        ),
        "across blocks": ((1, 2, 147, 275, 9), {"tree": ("and", ("window", 90, 17), ("strided", 3))}),
        "across blocks, causal": ((1, 4, 261, 261, 8), {"Hkv": 2, "tree": causal}),
    }
    sizes, more = given[case]
    return t.call(*sizes, **more)


@rule(35, "semantics never depend on the backend; what cannot be done is refused by name", COMPOSITES)
def composite(t: Trial, case: str) -> str:
    return t.agrees(composite_call(t, case))


@rule(35, "semantics never depend on the backend; what cannot be done is refused by name", dtypes=DOUBLE)
def unknown_backend(t: Trial, case: str) -> str:
    t.need("explain")
    call = t.call(1, 2, 3, 5, 7)
    fn = t.fn
    while isinstance(fn, functools.partial):
        fn = fn.func
    return t.raises(ValueError, ["backend", "warp"], lambda: fn(call.query, call.key, call.value, backend="warp"))


@rule(36, "the chosen backend and the reason are queryable", ("plain", "causal", "everything"), WIDE)
def plan(t: Trial, case: str) -> str:
    explain = t.need("explain")
    call = composite_call(t, "everything") if case == "everything" else t.call(2, 3, 5, 7, 11)
    call.tree = ("causal",) if case == "causal" else call.tree
    found = explain(call.query, call.key, call.value, **call.keywords())
    expect(isinstance(found.backend, str) and bool(found.backend), f"plan.backend is {found.backend!r}")
    expect(isinstance(found.reason, str) and bool(found.reason), f"plan.reason is {found.reason!r}")
    named = getattr(t.surface, "backend", "auto")
    expect(named in ("auto", found.backend), f"plan.backend is {found.backend!r} where {named!r} was asked for")
    expect(found.backend in str(found), "printing the plan does not show the backend")
    return f"{found.backend}: {found.reason}"


@rule(71, "equal calls get equal plans, whatever ran before", ("plain", "causal", "everything", "decode"), WIDE)
def the_plan_does_not_remember(t: Trial, case: str) -> str:
    explain = t.need("explain")

    def found() -> Any:  # each time other tensors and another mask, with the same in them
        sizes = (2, 3, 1, 63, 11) if case == "decode" else (2, 3, 33, 33, 11)
        call = composite_call(t, "everything") if case == "everything" else t.call(*sizes)
        call.tree = ("causal",) if case in ("causal", "decode") else call.tree
        plan = explain(call.query, call.key, call.value, **call.keywords())
        return plan.backend, plan.reason, str(plan)

    first = found()
    for others in (t.call(1, 3, 63, 63, 11, tree=("window", 3, 0)), t.call(2, 3, 1, 111, 11, tree=("causal",))):
        explain(others.query, others.key, others.value, **others.keywords())
        others.run(t.fn)
        again = found()
        expect(again == first, f"the plan was {first[0]}: {first[1]}; after another call it is {again[0]}: {again[1]}")
    return f"{first[0]}, each time"


@rule(71, "what a plan names can run, at every size", ("1", "63", "257", "513"), WIDE)
def the_plan_can_run(t: Trial, dim: str) -> str:
    call = t.call(1, 2, 5, 7, int(dim), tree=("causal",))
    plan = t.need("explain")(call.query, call.key, call.value, **call.keywords())
    return f"{plan.backend}: {t.agrees(call, gradients=False)}"


DTYPE = "the output has q's dtype and device; under autocast the autocast dtype"


@rule(37, DTYPE, ("plain", "float32 bias", "masked"))
def output_dtype(t: Trial, case: str) -> str:
    call = t.call(2, 3, 5, 7, 11)
    if case == "float32 bias":
        call.bias, call.sinks = t.normal(5, 7, dtype=t.side), t.normal(3, dtype=t.side)
    if case == "masked":
        call.tree = ("and", ("causal",), ("padding", (0, 5), "right"))
    out = call.run(t.fn)
    expect(out.dtype == t.dtype, f"output is {out.dtype}, q is {t.dtype}")
    expect(out.device == call.query.device, f"output is on {out.device}, q on {call.query.device}")
    return f"{out.dtype} on {out.device}"


@rule(37, DTYPE, ("alike", "mixed"), (torch.float32,))
def output_dtype_under_autocast(t: Trial, case: str) -> str:
    call = t.call(2, 3, 5, 7, 11, tree=("causal",))
    if case == "mixed":
        call.key = call.key.bfloat16()
    with _autocast(t):
        out = call.run(t.fn)
    expect(out.dtype == torch.bfloat16, f"output is {out.dtype}, expected {torch.bfloat16}")
    return str(out.dtype)


def _autocast(t: Trial) -> AbstractContextManager[Any]:
    return torch.autocast(torch.device(t.device).type, dtype=torch.bfloat16)


@rule(38, "autocast, no_grad and inference_mode change no value beyond dtype", ("no_grad", "inference_mode"))
def mode(t: Trial, case: str) -> str:
    for call in (t.call(2, 3, 5, 7, 11), composite_call(t, "everything"), t.call(1, 2, 9, 9, 8, tree=("causal",))):
        plain, _ = call.differentiate(t.fn)
        with getattr(torch, case)():
            inside = call.run(t.fn)
        gap = float((inside.double() - plain.double()).abs().max())
        expect(torch.equal(inside, plain), f"values under {case} differ by {gap:.1e}")
        expect(not inside.requires_grad, f"the output requires gradient under {case}")
    return "same values"


@rule(38, "autocast, no_grad and inference_mode change no value beyond dtype", ("plain", "causal"), (torch.float32,))
def autocast(t: Trial, case: str) -> str:
    call = t.call(2, 3, 5, 7, 11, tree=("causal",) if case == "causal" else None)
    with _autocast(t):
        out = call.run(t.fn)
    rounded = call.but(query=call.query.bfloat16(), key=call.key.bfloat16(), value=call.value.bfloat16())
    return within("output", out, rounded.oracle.out, rounded.value_budget())


@rule(39, "torch.compile(fullgraph) and vmap agree with eager", ("plain", "mask and bias", "sinks"), (torch.float32,))
def compiled(t: Trial, case: str) -> str:
    call = t.call(2, 4, 5, 7, 8)
    if case == "mask and bias":
        call.tree, call.bias = ("causal",), t.normal(5, 7, seed=4)
    call.sinks = t.normal(4, seed=5) if case == "sinks" else None
    given = call.keywords()
    plain, gradients = call.differentiate(t.fn, wrt=("query", "key", "value"))
    torch.compiler.reset()
    # The graph is what the rule is about; generating machine code from it would take most of the suite's time.
    compiled_fn = torch.compile(lambda q, k, v: t.fn(q, k, v, **given), fullgraph=True, backend="aot_eager")
    inputs = [x.detach().requires_grad_() for x in (call.query, call.key, call.value)]
    out = compiled_fn(*inputs)
    found = dict(zip(("query", "key", "value"), torch.autograd.grad(out, inputs, call.grad_out), strict=True))
    details = [t.same("output", out.detach(), plain, 2 * call.value_budget())]
    budgets = call.gradient_budgets(call.grad_out)
    details += [t.same(f"gradient of {name}", found[name], gradients[name], 2 * budgets[name]) for name in found]
    return "; ".join(details)


@rule(39, "torch.compile(fullgraph) and vmap agree with eager", ("plain", "masked", "gradients"), WIDE)
def mapped(t: Trial, case: str) -> str:
    calls = [t.call(2, 4, 5, 7, 8, tree=None if case == "plain" else ("causal",)) for _ in range(3)]
    for number, call in enumerate(calls):
        call.query = call.query + number
    given = calls[0].keywords()

    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return t.fn(q, k, v, **given)

    stacked = [torch.stack([getattr(call, name) for call in calls]) for name in ("query", "key", "value")]
    budget = 2 * max(call.value_budget() for call in calls)
    if case != "gradients":
        out = torch.func.vmap(one)(*stacked)
        return t.same("output", out, torch.stack([call.run(t.fn) for call in calls]), budget)
    found = torch.func.vmap(torch.func.grad(lambda q, k, v: one(q, k, v).square().sum()))(*stacked)
    expected = []
    for call in calls:
        query = call.query.detach().requires_grad_()
        expected.append(torch.autograd.grad(one(query, call.key, call.value).square().sum(), query)[0])
    return t.same("gradient of query", found, torch.stack(expected), 10 * budget + FLOOR[t.dtype])
