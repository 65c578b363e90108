"""Rules 25 to 33: numbers."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import torch

from regard.testing._calls import Call, array, expect, largest, rounding
from regard.testing._suite import DOUBLE, HALF, Trial, rule, within

GRID = tuple(
    (L, S, D, spread, modifier)
    for L, S, D in ((1, 1, 1), (2, 3, 5), (3, 7, 2))
    for spread in (0.1, 1.0, 30.0)
    for modifier in ("plain", "causal", "bias", "softcap", "sinks", "scale")
)


@rule(25, "the oracle agrees with 50-digit arithmetic within 1e-13 on the grid", dtypes=DOUBLE)
def oracle_against_fifty_digits(t: Trial, case: str) -> str:
    oracle, worst = t.need("reference"), 0.0
    for number, (L, S, D, spread, modifier) in enumerate(GRID):
        random = np.random.default_rng(number)
        q, k, v = (random.standard_normal(shape) for shape in ((L, D), (S, D), (S, 3)))
        given = _modifier(modifier, L, S, random)
        found = oracle.attention((q * spread)[None, None], k[None, None], v[None, None], **given)[0, 0]
        worst = max(worst, largest(found - _fifty_digits(q * spread, k, v, given)))
    expect(worst <= 1e-13, f"largest error {worst:.1e} > 1e-13")
    return f"largest error {worst:.1e} ≤ 1e-13 on {len(GRID)} cases"


def _modifier(name: str, L: int, S: int, random: np.random.Generator) -> dict[str, Any]:
    choices: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"mask": np.tril(np.ones((L, S), dtype=bool), S - L)},
        "bias": {"bias": random.standard_normal((L, S))},
        "softcap": {"softcap": 2.5},
        "sinks": {"sinks": np.array([0.75])},
        "scale": {"scale": -0.3},
    }
    return choices[name]


def _fifty_digits(q: Any, k: Any, v: Any, given: dict[str, Any]) -> Any:
    """Attention of one head with every operation rounded at the fiftieth digit. Binary inputs convert exactly."""
    out = np.zeros((len(q), v.shape[1]))
    with localcontext() as context:
        context.prec = 50
        scale = Decimal(given["scale"]) if "scale" in given else 1 / Decimal(q.shape[1]).sqrt()
        for i in range(len(q)):
            exponentials = []
            for j in range(len(k)):
                logit = scale * sum((Decimal(a) * Decimal(b) for a, b in zip(q[i], k[j], strict=True)), Decimal(0))
                if "softcap" in given:
                    cap = Decimal(given["softcap"])
                    twice = (2 * logit / cap).exp()
                    logit = cap * (twice - 1) / (twice + 1)
                if "bias" in given:
                    logit += Decimal(float(given["bias"][i, j]))
                permitted = "mask" not in given or bool(given["mask"][i, j])
                exponentials.append(logit.exp() if permitted else Decimal(0))
            total = sum(exponentials, Decimal(0))
            if "sinks" in given:
                total += Decimal(float(given["sinks"][0])).exp()
            for d in range(v.shape[1]):
                mixed = sum((e * Decimal(float(x)) for e, x in zip(exponentials, v[:, d], strict=True)), Decimal(0))
                out[i, d] = float(mixed / total) if total else 0.0
    return out


@rule(25, "the oracle is NumPy and imports no torch", dtypes=DOUBLE)
def oracle_without_torch(t: Trial, case: str) -> str:
    name = t.need("reference").__name__
    script = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    expect(done.returncode == 0, f"importing {name} alone fails or brings in torch: {done.stderr[-200:]}")
    return f"{name} imports no torch"


LARGE = {"7 × 4096 × 128": (1, 2, 7, 4096, 128), "111 × 257 × 64": (1, 3, 111, 257, 64), "5 × 7 × 11": (2, 3, 5, 7, 11)}
WITH = ("", " causal", " GQA window bias")
LARGE_CASES = tuple(f"{name}{kind}" for name in LARGE for kind in WITH)


def _large(t: Trial, case: str) -> Call:
    name = next(name for name in LARGE if case.startswith(name))
    B, H, L, S, D = LARGE[name]
    call = t.call(B, H, L, S, D, Hkv=1 if "GQA" in case else H)
    if "causal" in case:
        call.tree = ("causal",)
    if "window" in case:
        call.tree, call.bias = ("window", 63, 3), t.normal(L, S, seed=5, dtype=t.side)
    return call


@rule(26, "float64 agrees with the oracle within 1e-12", LARGE_CASES, DOUBLE)
def float64_error(t: Trial, case: str) -> str:
    call = _large(t, case)
    return within("output", call.run(t.fn), call.oracle.out, 1e-12)


@rule(27, "float32 agrees with the oracle within 1e-5", LARGE_CASES, (torch.float32,))
def float32_error(t: Trial, case: str) -> str:
    call = _large(t, case)
    return within("output", call.run(t.fn), call.oracle.out, 1e-5)


@rule(28, "fp16/bf16: output error ≤ 2E + 1e-5, gradient error ≤ 3E + 1e-5", LARGE_CASES, HALF)
def half_precision_error(t: Trial, case: str) -> str:
    return t.agrees(_large(t, case))


@rule(29, "no overflow where the float32 logit is finite; equal logits of 1e38 share the weight", ("inputs of 60",))
def large_products(t: Trial, case: str) -> str:
    call = t.call(1, 2, 5, 7, 64)
    sign = torch.where(t.normal(64, seed=9) > 0, 60.0, -60.0).to(t.dtype)
    call.query, call.key = sign.expand_as(call.query).clone(), sign.expand_as(call.key).clone()
    call.key[:, :, ::2] *= -1
    return within("output", call.run(t.fn), call.oracle.out, rounding(call.oracle.out, t.dtype))


@rule(29, "no overflow where the float32 logit is finite; equal logits of 1e38 share the weight", ("inputs", "bias"))
def logits_of_1e38(t: Trial, case: str) -> str:
    call = t.call(2, 2, 5, 7, 1, Dv=3, options={"scale": 1.0})
    if case == "inputs" and t.dtype != torch.float16:
        call.query, call.key = torch.full_like(call.query, 1e19), torch.full_like(call.key, 1e19)
    else:
        call.bias = torch.full((5, 7), 1e38, dtype=t.side, device=t.device)
        call.options = {"scale": 0.0}
    mean = array(call.value).mean(2, keepdims=True).repeat(5, 2)
    return within("output", call.run(t.fn), mean, rounding(mean, t.dtype))


@rule(30, "adding a constant to one row's bias changes nothing beyond the tolerance", ("4", "-8", "4 causal"))
def constant_in_a_row(t: Trial, case: str) -> str:
    number = float(case.split()[0])
    call = t.call(2, 3, 5, 7, 11, bias=t.normal(5, 7, seed=4, dtype=t.side))
    call.tree = ("causal",) if "causal" in case else None
    assert call.bias is not None
    moved = call.bias.clone()
    moved[3] += number
    shifted = call.but(bias=moved)
    tolerance = call.value_budget() + shifted.value_budget()
    return t.same("output", shifted.run(t.fn), call.run(t.fn), tolerance)


WEIGHTY = ("plain", "large logits", "causal", "keep, bias and softcap", "blocks crossed")


def weighty_call(t: Trial, case: str) -> Call:
    """Calls whose weights are looked at: without sinks, with rows of every kind."""
    if case == "plain":
        return t.call(2, 4, 5, 7, 11, Hkv=2)
    if case == "large logits":
        # Whole numbers and a scale of 1/4: the products are exact in float32, so that the bound is about the softmax.
        large = t.call(2, 4, 5, 7, 11, options={"scale": 0.25})
        return large.but(query=(large.query * 30).round(), key=(large.key * 3).round())
    if case == "causal":
        return t.call(2, 3, 7, 5, 11, tree=("causal",))
    if case == "blocks crossed":
        return t.call(1, 2, 131, 137, 11, tree=("window", 70, 5))
    bias = t.normal(5, 7, seed=4, dtype=t.side)
    return t.call(2, 3, 5, 7, 11, tree=("keep", 3, (2, 1, 5, 7)), bias=bias, options={"softcap": 3.0})


def _tolerance(logits: Any) -> float:
    permitted = logits[~np.isneginf(logits)]
    return 1e-6 + 2.0**-23 * largest(permitted)


@rule(31, "weights are ≥ 0 and each non-empty row sums to 1", WEIGHTY)
def weights_sum_to_one(t: Trial, case: str) -> str:
    call = weighty_call(t, case)
    weights = array(t.observe(call).weights)
    expect(bool((weights >= 0).all()), f"smallest weight {weights.min()}")
    some = ~np.isneginf(call.oracle.lse)
    error, bound = largest(weights.sum(-1)[some] - 1), _tolerance(call.oracle.logits)
    expect(error <= bound, f"rows sum to 1 within {error:.1e} > {bound:.1e}")
    return f"rows sum to 1 within {error:.1e} ≤ {bound:.1e}"


@rule(32, "lse is returned on request and weights = exp(logit - lse)", (*WEIGHTY, "sinks"))
def weights_from_lse(t: Trial, case: str) -> str:
    call = weighty_call(t, "causal" if case == "sinks" else case)
    if case == "sinks":
        call.sinks = t.normal(3, seed=6, dtype=t.side)
    seen = t.observe(call)
    lse, logits = array(seen.lse), call.oracle.logits
    with np.errstate(invalid="ignore"):
        expected = np.where(np.isneginf(logits), 0.0, np.exp(logits - lse[..., None]))
    details = [within("weights", seen.weights, expected, _tolerance(logits))]
    some = ~np.isneginf(call.oracle.lse)
    bound = _tolerance(logits) + 2.0**-23 * largest(call.oracle.lse[some])
    error = largest(lse[some] - call.oracle.lse[some])
    expect(error <= bound, f"lse: error {error:.1e} > {bound:.1e}")
    return f"{details[0]}; lse: error {error:.1e}"


@rule(33, "NaN or +Inf in a bias raises ValueError in eager mode on CPU", ("nan", "inf", "nan next to -inf"))
def bias_not_finite(t: Trial, case: str) -> str:
    t.on_cpu()
    call = t.call(2, 3, 5, 7, 11, bias=t.normal(5, 7, seed=4, dtype=t.side))
    assert call.bias is not None
    call.bias[2, 3] = float(case.split()[0])
    if "next to" in case:
        call.bias[1, 2:5] = -float("inf")
    return t.raises(ValueError, ["bias"], lambda: call.run(t.fn))
