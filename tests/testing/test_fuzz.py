"""Whole calls at random: every backend agrees with the oracle in values and gradients, or refuses by name."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import regard
from regard.testing import _recipes, fuzz
from regard.testing._calls import Failed
from regard.testing._rules_of_masks import COMBINATIONS, CONSTRUCTORS

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@pytest.mark.parametrize("backend", ["auto", *regard.backends.available("cpu")])
def test_hypothesis_calls_agree_with_the_oracle(backend):
    @settings(max_examples=500, suppress_health_check=SLOW)
    @given(_recipes.hypothesis_recipes((backend,)))
    def agrees(recipe):
        assert fuzz.verify(recipe) in ("ran", "refused")

    agrees()


@pytest.mark.parametrize("seed", [11, 12])
def test_seeded_calls_agree_with_the_oracle(seed):
    counts, failures = fuzz.run(3000, seed)
    assert failures == []
    assert counts["all", "calls", "ran"] > 1500


def test_long_run_draws_every_constructor_500_times_in_20000():
    drawn = Counter()
    for number in range(4000):
        drawn.update(_recipes.draw(_recipes.Seeded(f"3:{number}")).traits())
    scarce = {kind: drawn["mask", kind] for kind in (*CONSTRUCTORS, *COMBINATIONS) if drawn["mask", kind] < 120}
    assert scarce == {}
    assert min(drawn["dtype", name] for name in _recipes.DTYPES) > 500
    assert min(drawn["backend", name] for name in _recipes.BACKENDS) > 500
    assert min(drawn["modifier", name] for name in ("alibi", "T5 bias")) > 150


def test_same_seed_draws_the_same_call():
    first, second = (_recipes.draw(_recipes.Seeded("5:8")) for _ in range(2))
    assert first == second
    assert first != _recipes.draw(_recipes.Seeded("5:9"))


def test_recipe_prints_as_python_that_repeats_it():
    for number in range(50):
        recipe = _recipes.draw(_recipes.Seeded(f"7:{number}"))
        assert eval(repr(recipe), {"Recipe": fuzz.Recipe}) == recipe


def test_wrong_output_is_reported_with_a_snippet_that_repeats_it(monkeypatch):
    right = regard.attention
    monkeypatch.setattr(regard, "attention", lambda *given, **named: right(*given, **named) * 1.01)
    counts, failures = fuzz.run(30, 4, backends=("eager",))
    assert counts["all", "calls", "failed"] == len(failures) > 10
    text, code = failures[0]
    assert "error" in text
    with pytest.raises(Failed, match="error"):
        exec(code, {})


def test_wrong_gradient_is_caught_though_the_output_is_right(monkeypatch):
    right = regard.attention

    def wrong(query, key, value, **named):
        out = right(query, key, value, **named)
        return (
            torch.where(torch.ones_like(out, dtype=torch.bool), out, 0) if not out.requires_grad else _Scaled.apply(out)
        )

    monkeypatch.setattr(regard, "attention", wrong)
    _, failures = fuzz.run(30, 4, backends=("eager",))
    assert failures
    assert all("gradient" in text for text, _ in failures)


def test_hidden_nan_is_caught(monkeypatch):
    right = regard.attention
    monkeypatch.setattr(regard, "attention", lambda *given, **named: right(*given, **named).nan_to_num(0.0))
    _, failures = fuzz.run(200, 4, backends=("eager",))
    assert failures
    assert all("NaN in 0 numbers" in text for text, _ in failures)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):
        return out.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.1


def test_command_prints_coverage_and_succeeds(capsys):
    assert fuzz.main(["--calls", "20", "--seed", "2", "--backend", "eager"]) == 0
    printed = capsys.readouterr().out
    assert "drawn" in printed
    assert "20 calls of seed 2" in printed


def test_command_refuses_no_calls(capsys):
    with pytest.raises(SystemExit) as stopped:
        fuzz.main(["--calls", "0"])
    assert stopped.value.code == 2
    assert "--calls" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", [{"L": 63, "S": 9}, {"L": 60, "S": 31, "D": 5, "Dv": 3}])
def test_few_keys_under_many_strided_rows(sizes):
    """Neighbouring pieces, more of them than a stride has places: their keys are added one by one."""
    given = {"B": 2, "H": 6, "Hkv": 2, "D": 1, "Dv": 1, **sizes}
    tree = ("and", ("strided", 8), ("window", 5, 1))
    recipe = fuzz.Recipe(
        **given, dtype="float32", backend="blockwise", tree=tree, wrt=("key", "value", "sinks"), seed=3
    )
    assert fuzz.verify(recipe) == "ran"


@pytest.mark.parametrize("backend", ["auto", "sdpa", "blockwise", "eager"])
@pytest.mark.parametrize("given", [{}, {"softcap": 5.0}, {"sinks": True}], ids=["plain", "softcap", "sinks"])
@pytest.mark.parametrize("wrt", [(), ("value",), ("query", "key", "value")])
def test_a_query_of_nan_that_sees_nothing_is_zero_with_gradients_too(backend, wrt, given):
    hidden = ("and", ("random_blocks", 1, 1, 405), ("documents_lengths", (6, 2)))
    recipe = fuzz.Recipe(H=4, Hkv=2, L=2, S=8, D=5, Dv=5, backend=backend, tree=hidden, wrt=wrt, seed=756516, **given)
    assert not _recipes.permitted(_recipes.build(recipe)[1], recipe).any()
    if fuzz.verify(dataclasses.replace(recipe, lost="query")) == "refused":
        assert backend == "sdpa" and "softcap" in given
        return
    dirty = _recipes.build(dataclasses.replace(recipe, lost="query"))[0]
    if wrt:
        _, grads = dirty.differentiate(functools.partial(regard.attention, backend=backend), wrt=list(wrt))
        assert all(not grad.isnan().any() for grad in grads.values())
