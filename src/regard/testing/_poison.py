"""Rules 6 to 8 and 72: what a row may not see cannot reach it, and what it sees is not hidden from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from regard.spec import Refused
from regard.testing._calls import Call, array, expect
from regard.testing._rules_of_masks import Tree
from regard.testing._suite import NotApplicable, Trial, rule, within

HUGE = {torch.float64: (1e307, 1.7e308), torch.float32: (1e38, 3e38), torch.bfloat16: (1e38, 3e38)}
CONTENTS = ("nan", "+inf", "-inf", "huge", "larger still")


def hiding_routes(t: Trial) -> dict[str, tuple[Call, int]]:
    """Calls and the key that some or all of their rows may not see."""
    column = torch.zeros(1, 1, 1, 9, dtype=t.side, device=t.device)
    column[..., 4] = float("-inf")
    keep: Tree = ("and", ("keep", 3, (7, 9)), ("everything",))
    return {
        "padding": (t.call(2, 4, 7, 9, 11, tree=("padding", (5, 8), "right")), 8),
        "-inf bias": (t.call(2, 4, 7, 9, 11, bias=column), 4),
        "columns": (t.call(2, 4, 7, 9, 11, tree=("columns", 6), options={"softcap": 2.0}), 7),
        "causal": (t.call(2, 4, 7, 9, 11, tree=("causal",)), 6),
        "window and bias": (
            t.call(2, 4, 7, 9, 11, tree=("window", 2, 1), bias=t.normal(7, 9, seed=8, dtype=t.side)),
            4,
        ),
        "keep": (t.call(2, 4, 7, 9, 11, tree=keep), 5),
        "grouped causal": (t.call(2, 4, 7, 9, 11, Hkv=2, tree=("causal",)), 6),
        "documents": (t.call(2, 4, 9, 9, 11, tree=("documents_lengths", (4, 5))), 2),
    }


WHOLE = ("padding", "-inf bias", "columns")
PARTIAL = ("causal", "window and bias", "keep", "grouped causal", "documents")
POISONED = tuple(f"{route} {content}" for route in WHOLE + PARTIAL for content in CONTENTS)


def poisoned(t: Trial, case: str) -> tuple[Call, Call, int, Any]:
    """The clean call, the poisoned one, the poisoned key, and which rows `[B, H, L]` may see it."""
    route, content = next((route, case[len(route) + 1 :]) for route in WHOLE + PARTIAL if case.startswith(route))
    if route in PARTIAL and not _reads_values(t):
        raise NotApplicable("a partly visible poisoned key, where values are not read")
    call, j = hiding_routes(t)[route]
    small, large = HUGE.get(t.dtype, (3e4, 65504.0))
    number = {"nan": float("nan"), "+inf": float("inf"), "-inf": -float("inf"), "huge": small, "larger still": large}
    key, value = call.key.clone(), call.value.clone()
    key[:, :, j] = number[content]
    value[:, :, j] = number[content]
    logits = call.oracle.logits
    return call, call.but(key=key, value=value), j, ~np.isneginf(logits[..., j])


def _reads_values(t: Trial) -> bool:
    on_cpu = torch.device(t.device).type == "cpu"
    return on_cpu or getattr(t.surface, "backend", "") in ("eager", "blockwise")


@rule(6, "what a row may not see leaves its output unchanged, bitwise", POISONED)
def hidden_content(t: Trial, case: str) -> str:
    clean, dirty, _, sees = poisoned(t, case)
    blind = torch.from_numpy(~sees).to(t.device)
    before, after = clean.run(t.fn)[blind], dirty.run(t.fn)[blind]
    expect(torch.equal(before, after), f"rows that may not see it changed: {_changed(before, after)}")
    return f"{int(blind.sum())} rows keep their bits"


@rule(7, "hidden keys and values get gradient 0 and disturb no other gradient", POISONED)
def hidden_gradient(t: Trial, case: str) -> str:
    clean, dirty, j, sees = poisoned(t, case)
    grad_out = clean.grad_out
    _, found = dirty.differentiate(t.fn, grad_out)
    if not sees.any():
        for name in ("key", "value"):
            row = array(found[name])[:, :, j]
            expect(bool((row == 0).all()), f"gradient of the hidden {name} holds {row.ravel()[:3]}")
        return t.gradients_agree(clean, found, grad_out)
    blind = torch.from_numpy(~sees).to(t.device)
    exact, bound = clean.oracle_gradients(grad_out)["query"], clean.gradient_budgets(grad_out)["query"]
    return within("gradient of query", found["query"][blind], exact[~sees], bound)


@rule(8, "NaN that a row uses reaches that row and no other", ("query", "key", "value"))
def nan_without_a_mask(t: Trial, case: str) -> str:
    return _nan_reaches(t, t.call(2, 4, 5, 7, 3), case)


NAN_CASES = tuple(f"{name} {route}" for name in ("query", "key", "value") for route in PARTIAL)


@rule(8, "NaN that a row uses reaches that row and no other", NAN_CASES)
def nan_in(t: Trial, case: str) -> str:
    name, _, route = case.partition(" ")
    if not _reads_values(t):
        raise NotApplicable("a partly visible poisoned key, where values are not read")
    return _nan_reaches(t, hiding_routes(t)[route][0], name)


def _nan_reaches(t: Trial, call: Call, name: str) -> str:
    given = getattr(call, name).clone()
    given[1, 1, 3, 2] = float("nan")
    allowed = ~np.isneginf(call.oracle.logits)
    expected = np.zeros(allowed.shape[:3], dtype=bool)
    if name == "query":
        expected[1, 1, 3] = allowed[1, 1, 3].any()
    else:
        group = call.query.shape[1] // call.key.shape[1]  # the query heads that share key/value head 1
        expected[1, group : 2 * group] = allowed[1, group : 2 * group, :, 3]
    found = np.isnan(array(call.but(**{name: given}).run(t.fn))).any(-1)
    hidden, spread = int((expected & ~found).sum()), int((found & ~expected).sum())
    expect(not hidden, f"NaN is hidden from {hidden} rows that use it")
    expect(not spread, f"NaN reaches {spread} rows that do not use it")
    return f"exactly {int(expected.sum())} rows"


WHOLLY = tuple(
    f"{name} {route}"
    for name in ("query", "key", "value")
    for route in (
        "alone",
        "in 17 keys",
        "causal",
        "grouped",
        "one key",
        "sinks",
        "padding",
        "window",
        "observed",
        "cached",
    )
)


@rule(72, "NaN shows in every row that uses nothing else", WHOLLY)
def nothing_but_nan(t: Trial, case: str) -> str:
    name, _, route = case.partition(" ")
    calls = {
        "in 17 keys": t.call(2, 4, 5, 17, 3),
        "causal": t.call(2, 4, 7, 7, 3, tree=("causal",)),
        "grouped": t.call(2, 4, 5, 7, 3, Hkv=2),
        "one key": t.call(2, 4, 3, 1, 5),
        "sinks": t.call(2, 4, 5, 7, 3, sinks=t.normal(4, seed=6, dtype=t.side)),
        "padding": t.call(2, 4, 5, 7, 3, tree=("padding", (5, 3), "right")),
        "window": t.call(2, 4, 7, 9, 3, tree=("and", ("causal",), ("window", 2, 0))),
    }
    call = calls.get(route, t.call(2, 4, 5, 7, 3))
    call = call.but(**{name: torch.full_like(getattr(call, name), float("nan"))})
    if route == "observed":
        seen = t.observe(call)
        found = {"output": seen.out} if name == "value" else {"output": seen.out, "lse": seen.lse}
    elif route == "cached":
        found = {"output": _first_token(t, call)}
    else:
        found = {"output": call.run(t.fn), "output with gradients": _with_gradients(t, call)}
    for what, given in found.items():
        hidden = int((~torch.isnan(given)).sum())
        expect(not hidden, f"{what}: {hidden} of {given.numel()} numbers are not NaN")
    return f"{', '.join(found)}: nothing but NaN"


def _with_gradients(t: Trial, call: Call) -> torch.Tensor:
    try:
        return call.but(query=call.query.detach().requires_grad_()).run(t.fn).detach()
    except (NotImplementedError, Refused):  # a backend without gradients says so; its output was looked at
        return call.run(t.fn)


def _first_token(t: Trial, call: Call) -> torch.Tensor:
    cache = t.need("cache").KVCache(9)
    key, value, offset = cache.update(call.key[:, :, :1], call.value[:, :, :1])
    return t.fn(call.query[:, :, :1], key, value, mask=t.masks.causal(), query_offset=offset)


def _changed(before: torch.Tensor, after: torch.Tensor) -> str:
    bad = int((~torch.isfinite(after)).sum())
    return f"{bad} entries not finite" if bad else f"by up to {float((before - after).abs().max()):.1e}"
