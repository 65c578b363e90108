"""Rules 55 to 57: dropout, and weights that are asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.testing._calls import Call, array, expect, gap, largest, rounding
from regard.testing._suite import DOUBLE, WIDE, Trial, rule, within


@rule(55, "p = 0 is identity, p = 1 gives zeros, p outside [0, 1] raises", ("p = 0", "p = 1"))
def extreme(t: Trial, case: str) -> str:
    call = t.call(2, 4, 5, 7, 11, tree=("causal",))
    if case == "p = 0":
        expect(torch.equal(_dropped(t, call, 0.0), call.run(t.fn)), "p = 0 changes the output")
        return "identity"
    leaves = {name: getattr(call, name).detach().requires_grad_() for name in ("query", "key", "value")}
    out = _dropped(t, call.but(**leaves), 1.0)
    expect(bool((out == 0).all()), f"p = 1 gives entries up to {float(out.detach().abs().max())}")
    for name, gradient in zip(leaves, torch.autograd.grad(out, list(leaves.values()), call.grad_out), strict=True):
        expect(bool((gradient == 0).all()), f"p = 1: the gradient of {name} is not 0")
    return "zeros"


@rule(55, "p = 0 is identity, p = 1 gives zeros, p outside [0, 1] raises", ("-0.1", "1.1", "nan"), DOUBLE)
def outside(t: Trial, case: str) -> str:
    call = t.call(1, 2, 3, 5, 7)
    return t.raises(ValueError, ["dropout", case], lambda: _dropped(t, call, float(case)))


@rule(55, "dropout is off in eval", dtypes=(torch.float32,))
def module_in_eval(t: Trial, case: str) -> str:
    module = t.need("nn").MultiHeadAttention(12, 3, dropout=0.5, out_dropout=0.5)
    module = module.to(t.device, t.dtype).eval()
    x = t.normal(2, 5, 12)
    expect(torch.equal(module(x), module(x)), "two forward passes in eval differ")
    module.train()
    expect(not torch.equal(module(x), module(x)), "two forward passes in training are equal")
    return "off in eval, on in training"


def _dropped(t: Trial, call: Call, p: float, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return t.fn(call.query, call.key, call.value, dropout=p, **call.keywords())


def _weights_call(t: Trial) -> Call:
    """A call whose values are the unit vectors, so that its output is the matrix of weights."""
    call = t.call(2, 4, 33, 33, 33)
    call.query = call.query * 0.3
    call.value = torch.eye(33, dtype=t.dtype, device=t.device).expand(2, 4, 33, 33).contiguous()
    return call


STATISTICS = "kept weights are scaled by 1/(1-p), drop rate within 5 σ, same seed same mask"


@rule(56, STATISTICS, ("0.1", "0.5", "0.9"))
def scaled_and_counted(t: Trial, case: str) -> str:
    p, call = float(case), _weights_call(t)
    plain, found = call.oracle.out, array(_dropped(t, call, p))
    kept = found != 0
    budget = (call.value_budget() + rounding(plain, t.dtype)) / (1 - p)
    error = largest(found[kept] - plain[kept] / (1 - p))
    expect(error <= budget, f"kept weights differ from w/(1-p) by {error:.1e} > {budget:.1e}")
    rate, sigma = 1 - kept.mean(), (p * (1 - p) / kept.size) ** 0.5
    expect(abs(rate - p) <= 5 * sigma, f"drop rate {rate:.4f}, expected {p} ± {5 * sigma:.4f}")
    patterns = kept.reshape(8, -1)
    alike = [(i, j) for i in range(8) for j in range(i) if (patterns[i] == patterns[j]).all()]
    expect(not alike, "two heads or items drop the same weights")
    return f"drop rate {rate:.4f}, kept weights within {error:.1e}"


@rule(56, STATISTICS)
def seeded(t: Trial, case: str) -> str:
    call = _weights_call(t)
    first, again, other = (_dropped(t, call, 0.4, seed) for seed in (5, 5, 6))
    expect(torch.equal(first, again), "the same seed gives another mask")
    expect(not torch.equal(first, other), "another seed gives the same mask")
    unseeded = t.fn(call.query, call.key, call.value, dropout=0.4)
    expect(not torch.equal(other, unseeded), "two calls after one seed drop the same weights")
    return "by seed"


@rule(56, STATISTICS, ("query", "key", "value"), WIDE)
def gradient_under_dropout(t: Trial, case: str) -> str:
    call = _weights_call(t)
    kept = (array(_dropped(t, call, 0.4)) != 0) / 0.6  # the multiplier of each weight
    call.value = t.normal(2, 4, 33, 33, seed=9)
    leaf = getattr(call, case).detach().requires_grad_()
    out = _dropped(t, call.but(**{case: leaf}), 0.4)
    (found,) = torch.autograd.grad(out, leaf, call.grad_out)
    oracle = t.need("reference").gradients
    tensors = (array(x) for x in (call.query, call.key, call.value, call.grad_out))
    truth = dict(zip(("query", "key", "value"), oracle(*tensors, keep=kept)[:3], strict=True))
    budget = call.gradient_budgets(call.grad_out)[case] / 0.6
    return within(f"gradient of {case}", found, truth[case], budget)


@rule(57, "returned weights are pre-dropout, and asking for them changes nothing", ("0", "0.3", "masked", "everything"))
def observing(t: Trial, case: str) -> str:
    t.need("observe")
    call = t.call(2, 4, 5, 7, 8, Hkv=2)
    if case in ("masked", "everything"):
        call.tree = ("and", ("causal",), ("padding", (2, 7), "right"))
    if case == "everything":
        call.bias, call.sinks = t.normal(5, 7, seed=4, dtype=t.side), t.normal(4, seed=5, dtype=t.side)
        call.options = {"softcap": 2.0}
    p = 0.3 if case == "0.3" else 0.0
    plain = _dropped(t, call, p)
    torch.manual_seed(0)
    seen = t.observe(call.but(options={**call.options, "dropout": p}))
    expect(torch.equal(seen.out, plain), f"the output changed by {gap(seen.out, plain)}")
    bound = 1e-6 + 2.0**-23 * 10
    return within("weights", seen.weights, call.oracle.weights, bound)
