"""Rules 45 to 50: what must not change the result."""

from __future__ import annotations

from itertools import pairwise

import torch

from regard.testing._calls import Call, expect, gap
from regard.testing._layouts import COMPOSITES, composite_call
from regard.testing._suite import Trial, rule


@rule(45, "the same call twice is bitwise equal, gradients included (CPU)", COMPOSITES)
def twice(t: Trial, case: str) -> str:
    t.on_cpu()
    call = composite_call(t, case)
    first, second = call.differentiate(t.fn), call.differentiate(t.fn)
    expect(torch.equal(first[0], second[0]), f"output changed by {gap(first[0], second[0])}")
    for name, gradient in first[1].items():
        expect(torch.equal(gradient, second[1][name]), f"gradient of {name} changed")
    return "equal bit by bit"


@rule(46, "an item alone equals the item in a batch, and 1 thread equals 2", ("plain", "causal", "keep", "padding"))
def item_alone(t: Trial, case: str) -> str:
    trees = {"plain": None, "causal": ("causal",), "keep": ("keep", 3, (1, 4, 5, 7)), "padding": None}
    call = t.call(3, 4, 5, 7, 11, tree=trees[case])
    lengths = (7, 3, 5)
    call.tree = ("padding", lengths, "right") if case == "padding" else call.tree
    whole, details = call.run(t.fn), []
    for b in range(3):
        alone = call.but(query=call.query[b : b + 1], key=call.key[b : b + 1], value=call.value[b : b + 1])
        alone.tree = ("padding", lengths[b : b + 1], "right") if case == "padding" else call.tree
        tolerance = call.value_budget() + alone.value_budget()
        details.append(t.same(f"item {b}", alone.run(t.fn), whole[b : b + 1], tolerance))
    return "; ".join(details)


@rule(46, "an item alone equals the item in a batch, and 1 thread equals 2", ("plain", "across blocks"))
def threads(t: Trial, case: str) -> str:
    t.on_cpu()
    call = composite_call(t, "across blocks, causal") if case == "across blocks" else t.call(2, 3, 5, 7, 11)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one, one_gradients = call.differentiate(t.fn)
        torch.set_num_threads(2)
        two, two_gradients = call.differentiate(t.fn)
    finally:
        torch.set_num_threads(before)
    budgets = call.gradient_budgets(call.grad_out)
    for name, gradient in one_gradients.items():
        t.same(f"gradient of {name}", two_gradients[name], gradient, 2 * budgets[name])
    return t.same("output", two, one, 2 * call.value_budget())


def _order(size: int, seed: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))


@rule(47, "permuting keys changes nothing, permuting queries permutes rows", ("keys", "queries", "keys with a mask"))
def permuted(t: Trial, case: str) -> str:
    bias = t.normal(7, 9, seed=4, dtype=t.side)
    if "mask" in case:
        bias[t.normal(7, 9, seed=5) > 0.5] = -float("inf")
    call = t.call(2, 4, 7, 9, 11, bias=bias)
    out, tolerance = call.run(t.fn), 2 * call.value_budget()
    if case == "queries":
        order = _order(7, 6).to(t.device)
        moved = call.but(query=call.query[:, :, order], bias=bias[order])
        return t.same("output", moved.run(t.fn), out[:, :, order], tolerance)
    order = _order(9, 7).to(t.device)
    moved = call.but(key=call.key[:, :, order], value=call.value[:, :, order], bias=bias[:, order])
    return t.same("output", moved.run(t.fn), out, tolerance)


@rule(48, "appending non-permitted keys changes nothing", ("padding", "causal", "-inf bias", "many, across a block"))
def appended(t: Trial, case: str) -> str:
    extra = 131 if "many" in case else 4
    call = t.call(2, 4, 5, 7, 11, query_offset=2, tree=("causal",) if case == "causal" else None)
    key = torch.cat([call.key, t.normal(2, 4, extra, 11, seed=8)], 2)
    value = torch.cat([call.value, t.normal(2, 4, extra, 11, seed=9)], 2)
    longer = call.but(key=key, value=value)
    if case == "-inf bias":
        longer.bias = torch.zeros(1, 7 + extra, dtype=t.side, device=t.device)
        longer.bias[:, 7:] = -float("inf")
    elif case != "causal":
        longer.tree = ("padding", (7, 7), "right")
    budgets = call.gradient_budgets(call.grad_out)
    out, gradients = call.differentiate(t.fn)
    found, more = longer.differentiate(t.fn)
    for name in ("query", "key", "value"):
        t.same(f"gradient of {name}", more[name][:, :, :7], gradients[name], 2 * budgets[name])
    return t.same("output", found, out, 2 * call.value_budget())


@rule(49, "any split of the queries gives the same rows", ("one by one", "3 + 8", "5 + 6 with a window"))
def split_queries(t: Trial, case: str) -> str:
    call = t.call(2, 4, 11, 13, 7, tree=("window", 3, 0) if "window" in case else ("causal",))
    call.bias = t.normal(4, 11, 13, seed=4, dtype=t.side)
    cuts = {"one by one": list(range(12)), "3 + 8": [0, 3, 11], "5 + 6 with a window": [0, 5, 11]}[case]
    rows = [_rows(call, low, high).run(t.fn) for low, high in pairwise(cuts)]
    return t.same("output", torch.cat(rows, 2), call.run(t.fn), 2 * call.value_budget())


def _rows(call: Call, low: int, high: int) -> Call:
    assert call.bias is not None
    return call.but(query=call.query[:, :, low:high], bias=call.bias[:, low:high], query_offset=2 + low)


@rule(50, "equal heads give equal outputs", ("plain", "causal", "grouped"))
def equal_heads(t: Trial, case: str) -> str:
    call = t.call(2, 6, 5, 7, 11, Hkv=2 if case == "grouped" else 6, tree=("causal",) if case == "causal" else None)
    for name in ("query", "key", "value"):
        given = getattr(call, name)
        setattr(call, name, given[:, :1].expand(given.shape).contiguous())
    out = call.run(t.fn)
    return t.same("heads against the first", out, out[:, :1].expand(out.shape), 2 * call.value_budget())
