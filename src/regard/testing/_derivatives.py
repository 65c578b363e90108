"""Rules 40 to 44: derivatives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from regard.testing._calls import INPUTS, Call, array, expect
from regard.testing._masks import trees
from regard.testing._rules_of_bias import table_shape
from regard.testing._suite import DOUBLE, Trial, rule, within

MASKS = ("no mask", *trees(3, 5), "joined")
BESIDE = ("bias", "-inf in bias", "alibi", "T5 bias", "sinks", "softcap", "scale 0", "GQA and d_v", "all together")


def differentiable_call(t: Trial, case: str) -> Call:
    """A small call for each mask type and modifier, whose derivatives are checked by finite differences."""
    minus = t.normal(3, 5, seed=4)
    minus[1, 2:4] = -float("inf")
    causal, grouped = ("causal",), {"H": 4, "Hkv": 2, "Dv": 3}
    given: dict[str, dict[str, Any]] = {
        "no mask": {},
        "joined": {"tree": ("or", ("and", causal, ("window", 1, 0)), ("columns", 1))},
        "bias": {"bias": t.normal(3, 1, 5, seed=4)},
        "-inf in bias": {"bias": minus},
        "alibi": {"bias": t.normal(3, seed=4), "rule": ("alibi",), "tree": causal},
        "T5 bias": {"bias": t.normal(8, 3, seed=4), "rule": ("t5", 8, 11, True)},
        "sinks": {"sinks": t.normal(3, seed=5)},
        "softcap": {"options": {"softcap": 0.8}},
        "scale 0": {"options": {"scale": 0.0}},
        "GQA and d_v": {"tree": causal, **grouped},
        "all together": {
            "tree": ("and", causal, ("padding", (0, 4), "right")),
            "bias": t.normal(4, 1, 5, seed=4),
            "sinks": t.normal(4, seed=5),
            "options": {"softcap": 1.5},
            **grouped,
        },
    }
    return t.call(**{"B": 2, "H": 3, "L": 3, "S": 5, "D": 2, **(given.get(case) or {"tree": trees(3, 5).get(case)})})


def _function(t: Trial, call: Call) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The call as a function of everything that can be differentiated, and the inputs."""
    names = [name for name in INPUTS if getattr(call, name) is not None]
    inputs = []
    for name in names:
        # A bias of -inf has no neighbourhood: finite differences move the finite part only.
        inputs.append(torch.where(torch.isfinite(getattr(call, name)), getattr(call, name), 0.0).requires_grad_())
    fixed = {name: torch.isneginf(getattr(call, name).detach()) for name in names}

    def run(*tensors: Tensor) -> Tensor:
        given = {
            name: tensor.masked_fill(fixed[name], -float("inf")) if bool(fixed[name].any()) else tensor
            for name, tensor in zip(names, tensors, strict=True)
        }
        return call.but(**given).run(t.fn)

    return run, tuple(inputs)


@rule(40, "gradcheck passes for q, k, v, bias and sinks under every mask type", (*MASKS, *BESIDE), DOUBLE)
def first_derivatives(t: Trial, case: str) -> str:
    run, inputs = _function(t, differentiable_call(t, case))
    _passes(torch.autograd.gradcheck, run, inputs)
    return t.agrees(differentiable_call(t, case))


@rule(41, 'gradgradcheck passes under "auto"; a named backend that cannot refuses by name', (*MASKS, *BESIDE), DOUBLE)
def second_derivatives(t: Trial, case: str) -> str:
    run, inputs = _function(t, differentiable_call(t, case))
    _passes(torch.autograd.gradgradcheck, run, inputs)
    return "agrees with finite differences"


def _passes(checker: Callable[..., bool], run: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    try:
        checker(run, inputs, fast_mode=True)
    except GradcheckError as error:
        expect(False, " ".join(str(error).split())[:300])


@rule(42, "forward-mode derivatives agree with reverse mode", (*MASKS, *BESIDE), DOUBLE)
def forward_mode(t: Trial, case: str) -> str:
    run, inputs = _function(t, differentiable_call(t, case))
    plain = tuple(x.detach() for x in inputs)
    tangents = tuple(t.normal(*x.shape, seed=20 + n) for n, x in enumerate(plain))
    with warnings.catch_warnings():
        # torch compiles its own decompositions on the first use of forward mode, and warns of how it does so.
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)
        out, forward = torch.func.jvp(run, plain, tangents)[:2]
    cotangent = t.normal(*out.shape, seed=30)
    reverse = torch.autograd.grad(run(*inputs), inputs, cotangent)
    ahead = float((forward * cotangent).sum())
    back = float(sum((g * u).sum() for g, u in zip(reverse, tangents, strict=True)))
    expect(abs(ahead - back) <= 1e-10 * (1 + abs(back)), f"forward gives {ahead:.12g}, reverse {back:.12g}")
    return f"{ahead:.6g} both ways"


SUBSETS = tuple("+".join(names) for size in (1, 2, 5) for names in combinations(INPUTS, size))


@rule(43, "only tensors that require gradient receive one", SUBSETS, (torch.float32,))
def receivers(t: Trial, case: str) -> str:
    wanted = case.split("+")
    call = _all_inputs(t)
    leaves = {name: getattr(call, name).detach().requires_grad_(name in wanted) for name in INPUTS}
    out = call.but(**leaves).run(t.fn)
    expect(out.requires_grad, "the output does not require gradient")
    out.backward(call.grad_out)  # type: ignore[no-untyped-call]
    got = [name for name in INPUTS if leaves[name].grad is not None]
    expect(got == wanted, f"{got} received a gradient, {wanted} require one")
    changed = [name for name in INPUTS if leaves[name].requires_grad != (name in wanted)]
    expect(not changed, f"requires_grad of {changed} was changed")
    found = {name: grad for name in wanted if (grad := leaves[name].grad) is not None}
    return t.gradients_agree(call, found)


@rule(43, "only tensors that require gradient receive one", dtypes=(torch.float32,))
def nothing_requires_gradient(t: Trial, case: str) -> str:
    out = _all_inputs(t).run(t.fn)
    expect(not out.requires_grad, "the output requires gradient though no input does")
    return "no gradient"


def _all_inputs(t: Trial) -> Call:
    call = t.call(2, 4, 5, 7, 8, Hkv=2, tree=("causal",))
    call.bias, call.sinks = t.normal(4, 5, 7, seed=4), t.normal(4, seed=5)
    return call


BIASES = {
    "S": (7,),
    "L S": (5, 7),
    "1 1 1 S": (1, 1, 1, 7),
    "H 1 1": (3, 1, 1),
    "B 1 L 1": (2, 1, 5, 1),
    "1 H 1 S": (1, 3, 1, 7),
    "one number": (1,),
    "all": (2, 3, 5, 7),
}


TABLES = {"alibi": ("alibi",), "T5": ("t5", 8, 11, True), "T5 one way": ("t5", 6, 7, False)}


@rule(44, "a learned bias receives the gradient summed over its broadcast dimensions", TABLES)
def learned_table(t: Trial, case: str) -> str:
    shape = table_shape(TABLES[case], 3)
    call = t.call(2, 3, 5, 7, 11, bias=t.normal(*shape, seed=4, dtype=t.side), rule=TABLES[case], tree=("causal",))
    return t.agrees(call)


@rule(44, "a learned bias receives the gradient summed over its broadcast dimensions", BIASES)
def learned_bias(t: Trial, case: str) -> str:
    call = t.call(2, 3, 5, 7, 11, bias=t.normal(*BIASES[case], seed=4, dtype=t.side), tree=("causal",))
    _, found = call.differentiate(t.fn)
    assert call.bias is not None
    expect(found["bias"].shape == call.bias.shape, f"gradient has shape {tuple(found['bias'].shape)}")
    truth, budgets = call.oracle_gradients(call.grad_out), call.gradient_budgets(call.grad_out)
    largest_entry = float(abs(truth["bias"]).max())
    detail = within("gradient of bias", found["bias"], truth["bias"], budgets["bias"])
    return f"{detail}, entries up to {largest_entry:.1e}, sum {array(found['bias']).sum():.1e}"
