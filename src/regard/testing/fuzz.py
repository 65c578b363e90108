"""Random whole calls against the oracle, values and gradients: `python -m regard.testing.fuzz --calls 20000 --jobs 2`.

An error may be as large as rules 26 to 28 say (2E in the output, 3E in gradients, and the floor), plus the rounding of
the result to its dtype and of the terms that cancel in a gradient, since E can be 0 by luck.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import regard
from regard.spec import Refused
from regard.testing import _recipes
from regard.testing._calls import Call, Failed, array, expect, largest, rounding
from regard.testing._conditioning import accumulated
from regard.testing._recipes import Recipe
from regard.testing._rules_of_masks import source

__all__ = ["Recipe", "snippet", "verify"]

Counts = Counter[tuple[str, str, str]]


def verify(recipe: Recipe) -> str:
    """Run one call and compare it with the oracle: "ran", or "refused" by a named backend; raises Failed."""
    dirty, clean = _recipes.build(recipe)
    fn, dtype = functools.partial(regard.attention, backend=recipe.backend), clean.query.dtype
    try:
        if recipe.dropout:
            fn = functools.partial(_after_seed, fn, recipe)
            clean.kept = _multiplier(fn, clean, recipe)
        out, gradients = _run(fn, dirty, recipe.wrt)
    except Refused:
        expect(recipe.backend != "auto", 'backend="auto" refused the call')
        return "refused"
    if recipe.lost is not None:
        _compare_lost(out, _recipes.permitted(clean, recipe).any(-1))
        return "ran"
    _compare("output", out, clean.oracle.out, rounding(clean.oracle.out, dtype), clean.value_budget)
    if gradients:
        truth = clean.oracle_gradients(clean.grad_out)
        budgets = functools.cache(functools.partial(_gradient_budgets, clean))
        for name, found in gradients.items():
            # The heads of a group each round their part before the parts are added.
            parts = recipe.H // recipe.Hkv if name in ("key", "value") else 1
            free = parts * rounding(truth[name], dtype)
            _compare(f"gradient of {name}", found, truth[name], free, functools.partial(lambda of: budgets()[of], name))
    return "ran"


def _gradient_budgets(call: Call) -> dict[str, float]:
    terms = accumulated(call, call.grad_out)
    return {name: bound + terms[name] for name, bound in call.gradient_budgets(call.grad_out).items()}


def snippet(recipe: Recipe) -> str:
    """Python that repeats a call."""
    said = "" if recipe.tree is None else f"  # mask: {source(recipe.tree)}"
    return f"from regard.testing.fuzz import Recipe, verify{said}\nverify({recipe!r})"


def _run(fn: Any, call: Call, wrt: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
    present = [name for name in wrt if getattr(call, name) is not None]
    if not present:
        return call.run(fn), {}
    return call.differentiate(fn, wrt=present)


def _compare(what: str, found: Tensor, exact: Any, free: float, budget: Callable[[], float]) -> None:
    expect(tuple(found.shape) == exact.shape, f"{what} has shape {tuple(found.shape)}, expected {exact.shape}")
    error = largest(array(found) - exact)
    if error <= free:
        return
    # Most calls end above: what plain arithmetic would have cost is worked out only where it decides.
    bound = free + budget()
    expect(error <= bound, f"{what}: error {error:.2e} > {bound:.2e} (largest entry {largest(exact):.2e})")


def _compare_lost(out: Tensor, used: Any) -> None:
    """Where every number of an input is NaN, rows that see a key are NaN, and rows that see none are 0."""
    lost = torch.isnan(out)
    expected = torch.from_numpy(used)[..., None].expand(out.shape)
    expect(torch.equal(lost, expected), f"NaN in {int(lost.sum())} numbers, expected in {int(expected.sum())}")
    expect(not bool(out[~lost].any()), "a row that sees nothing is not 0")


def _after_seed(fn: Any, recipe: Recipe, *tensors: Tensor, **given: Any) -> Tensor:
    torch.manual_seed(recipe.seed)
    found: Tensor = fn(*tensors, dropout=recipe.dropout, **given)
    return found


def _multiplier(fn: Any, call: Call, recipe: Recipe) -> Any:
    """What dropout multiplies each weight by, seen by attending to unit vectors with the same seed."""
    S = recipe.S
    unit = torch.eye(S, dtype=call.value.dtype).expand(recipe.B, recipe.Hkv, S, S)
    kept = array(call.but(value=unit).run(fn)) != 0
    return kept / (1 - recipe.dropout)


def _batch(task: tuple[int, Sequence[int], tuple[str, ...]]) -> tuple[Counts, list[tuple[str, str]]]:
    """Calls by number, in this process: what was drawn with what became of it, and the failures."""
    seed, calls, backends = task
    torch.set_num_threads(1)
    counts: Counts = Counter()
    failures = []
    for number in calls:
        recipe = _recipes.draw(_recipes.Seeded(f"{seed}:{number}"), backends)
        try:
            outcome = verify(recipe)
        except Exception as error:  # whatever happens is a finding about this call, and the run goes on
            outcome = "failed"
            text = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
            failures.append((text, snippet(recipe)))
        counts.update((group, name, outcome) for group, name in [*recipe.traits(), ("all", "calls")])
    return counts, failures


def run(
    calls: int, seed: int, jobs: int = 1, backends: Sequence[str] = _recipes.BACKENDS
) -> tuple[Counts, list[tuple[str, str]]]:
    """Verify calls 0 … calls - 1 of a seed, in `jobs` processes."""
    tasks = [(seed, range(low, min(low + 100, calls)), tuple(backends)) for low in range(0, calls, 100)]
    counts: Counts = Counter()
    failures: list[tuple[str, str]] = []
    if jobs == 1:
        for part, failed in map(_batch, tasks):
            counts, failures = counts + part, failures + failed
        return counts, failures
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for part, failed in pool.imap(_batch, tasks):
            counts, failures = counts + part, failures + failed
    return counts, failures


def table(counts: Counts) -> str:
    """How often each thing was drawn, and what became of those calls."""
    lines = [f"{'':<28}{'drawn':>8}{'ran':>8}{'refused':>9}{'failed':>8}"]
    for group in ("all", "backend", "dtype", "mask", "modifier", "layout"):
        lines.append(group)
        for name in sorted({found for of, found, _ in counts if of == group}):
            each = [counts[group, name, outcome] for outcome in ("ran", "refused", "failed")]
            lines.append(f"  {name:<26}{sum(each):>8}{each[0]:>8}{each[1]:>9}{each[2]:>8}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m regard.testing.fuzz", description=__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes, each of one thread")
    parser.add_argument("--backend", action="append", choices=_recipes.BACKENDS, help="only these; may be repeated")
    parser.add_argument("--show", type=int, default=10, help="failures to print")
    given = parser.parse_args(argv)
    if given.calls < 1 or given.jobs < 1:
        parser.error("--calls and --jobs must be at least 1")
    began = time.monotonic()
    counts, failures = run(given.calls, given.seed, given.jobs, given.backend or _recipes.BACKENDS)
    say = sys.stdout.write
    say(table(counts) + "\n\n")
    for text, code in failures[: given.show]:
        say(f"{text}\n{code}\n\n")
    say(f"{given.calls} calls of seed {given.seed} in {time.monotonic() - began:.0f} s: {len(failures)} failed\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
