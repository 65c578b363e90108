"""The suite's machinery: checks register under a rule's number, and `check` runs them on any attention function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import regard
from regard.spec import Refused
from regard.testing._calls import Attention, Call, Failed, array, expect, largest, normal
from regard.testing.report import Outcome, Report, Row

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DOUBLE = (torch.float64,)
WIDE = (torch.float64, torch.float32)
HALF = (torch.float16, torch.bfloat16)


class NotApplicable(Exception):
    """The function under test has no such surface, or the rule says nothing about this device."""


class Trial:
    """What one check is given: the function, the device and dtype, and whatever surface comes with the function."""

    def __init__(self, fn: Attention, device: str, dtype: torch.dtype, surface: Any) -> None:
        self.fn = fn
        self.device = device
        self.dtype = dtype
        self.surface = surface

    @property
    def masks(self) -> Any:
        """The masks to call with: the surface's own, so that a broken constructor is seen, else regard's."""
        return getattr(self.surface, "masks", None) or regard.masks

    @property
    def side(self) -> torch.dtype:
        """The dtype that a bias or sinks may have: float32 when the inputs are in half precision."""
        return torch.float32 if self.dtype in HALF else self.dtype

    def need(self, name: str) -> Any:
        found = getattr(self.surface, name, None)
        if found is None:
            raise NotApplicable(f"the function comes with no {name}")
        return found

    def on_cpu(self) -> None:
        if torch.device(self.device).type != "cpu":
            raise NotApplicable("the rule is about the CPU")

    def normal(self, *shape: int, seed: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        return normal(shape, seed, dtype or self.dtype, self.device)

    def call(
        self, B: int, H: int, L: int, S: int, D: int, *, Dv: int | None = None, Hkv: int | None = None, **given: Any
    ) -> Call:
        """A call on N(0, 1) inputs; `given` are the other fields of `Call`."""
        query = self.normal(B, H, L, D, seed=1)
        key = self.normal(B, Hkv or H, S, D, seed=2)
        value = self.normal(B, Hkv or H, S, Dv or D, seed=3)
        return Call(query, key, value, masks=self.masks, **given)

    def observe(self, call: Call) -> Any:
        """The call's observation, with its whole matrix of weights."""
        _, _, L, S = call.sizes
        want = regard.Want(weights=(slice(0, L), slice(0, S)))
        return self.need("observe")(call.query, call.key, call.value, want=want, **call.keywords())

    def agrees(self, call: Call, *, gradients: bool = True) -> str:
        """The function's output, and its gradients, are within the derived budgets of the oracle's."""
        if not gradients:
            return within("output", call.run(self.fn), call.oracle.out, call.value_budget())
        grad_out = call.grad_out
        out, found = call.differentiate(self.fn, grad_out)
        detail = within("output", out, call.oracle.out, call.value_budget())
        return f"{detail}; {self.gradients_agree(call, found, grad_out)}"

    def gradients_agree(self, call: Call, found: dict[str, Tensor], grad_out: Tensor | None = None) -> str:
        """The gradients that were found are within the derived budgets of the oracle's."""
        grad_out = call.grad_out if grad_out is None else grad_out
        truth, budgets = call.oracle_gradients(grad_out), call.gradient_budgets(grad_out)
        return "; ".join(within(f"gradient of {name}", found[name], truth[name], budgets[name]) for name in found)

    def same(self, what: str, found: Tensor, other: Tensor, budget: float) -> str:
        return within(what, found, array(other), budget)

    def raises(
        self, kinds: type[Exception] | tuple[type[Exception], ...], words: Sequence[str], call: Callable[[], object]
    ) -> str:
        """The call raises one of `kinds`, with every one of `words` in the message."""
        try:
            call()
        except (NotImplementedError, Refused):
            raise
        except kinds as error:
            missing = [word for word in words if word.lower() not in str(error).lower()]
            expect(not missing, f"{type(error).__name__} does not mention {missing}: {error}")
            return f"{type(error).__name__}: {error}"
        except Exception as error:
            raise Failed(f"{type(error).__name__} in place of {_names(kinds)}: {_short(error)}") from error
        raise Failed(f"no error; expected {_names(kinds)}")


def within(what: str, found: Tensor, exact: Any, budget: float) -> str:
    expect(tuple(found.shape) == exact.shape, f"{what} has shape {tuple(found.shape)}, expected {exact.shape}")
    error = largest(array(found) - exact)
    expect(error <= budget, f"{what}: error {error:.2e} > {budget:.2e}")
    return f"{what}: error {error:.1e} ≤ {budget:.1e}"


Run = Callable[[Trial, str], "str | None"]


@dataclass(frozen=True)
class Check:
    """One check of a rule; `cases` are its variants, each a row of the report."""

    rule: int
    statement: str
    label: str
    run: Run
    cases: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]


REGISTRY: list[Check] = []


def rule(
    number: int, statement: str, cases: Iterable[str] = ("",), dtypes: tuple[torch.dtype, ...] = DTYPES
) -> Callable[[Run], Run]:
    """Register a check under a rule's number. It returns the numbers it saw and raises `Failed` when they are wrong."""

    def register(run: Run) -> Run:
        label = run.__name__.strip("_").replace("_", " ")
        REGISTRY.append(Check(number, statement, label, run, tuple(cases), dtypes))
        return run

    return register


def check(
    fn: Attention,
    *,
    rules: Iterable[int] | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | Iterable[torch.dtype] | None = None,
    surface: Any = None,
    name: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Run the conformance suite on a function with `regard.attention`'s signature.

    Args:
        fn: called as `fn(query, key, value, *, mask, bias, scale, softcap, sinks, dropout, query_offset)`, with only
            the keywords a case needs. NotImplementedError and `regard.Refused` are refusals, reported as such.
        rules: numbers of PROMISES.md; all by default.
        device: where the tensors live.
        dtype: one dtype or several; all four by default.
        surface: an object with the other surfaces that belong to `fn`, as far as it has them: `masks`, `reference`,
            `observe`, `explain`, `nn`, `cache`, `latent_attention`, `linear_attention`, `watch`. Rules about a missing
            one are "n.a.". For `regard.attention`, and partial applications of it, regard's own are used.
        name: the report's title.
        progress: called as `progress(rows done, rows in all)` before the first row and after each.
    """
    wanted = _rules(rules)
    dtypes = DTYPES if dtype is None else (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
    if unknown := [given for given in dtypes if given not in DTYPES]:
        raise ValueError(f"dtype holds {unknown[0]}; expected some of {', '.join(map(str, DTYPES))}")
    surface = _own_surface(fn) if surface is None else surface
    chosen = [one for one in sorted(REGISTRY, key=lambda entry: entry.rule) if one.rule in wanted]
    todo = [(one, kind, case) for one in chosen for kind in dtypes if kind in one.dtypes for case in one.cases]
    rows: list[Row] = []
    for one, kind, case in todo:
        if progress is not None:
            progress(len(rows), len(todo))
        rows.append(_row(one, case, Trial(fn, str(device), kind, surface)))
    if progress is not None:
        progress(len(rows), len(todo))
    return Report(name or _title(fn), rows)


def numbers() -> list[int]:
    """The rules that have a check."""
    return sorted({one.rule for one in REGISTRY})


def _row(one: Check, case: str, trial: Trial) -> Row:
    outcome, detail = _attempt(one, case, trial)
    label = f"{one.label}: {case}" if case else one.label
    return Row(one.rule, one.statement, label, str(trial.dtype).removeprefix("torch."), outcome, detail)


def _attempt(one: Check, case: str, trial: Trial) -> tuple[Outcome, str]:
    try:
        return "pass", one.run(trial, case) or ""
    except NotApplicable as reason:
        return "n.a.", str(reason)
    except (NotImplementedError, Refused) as refusal:
        return "refused", _short(refusal)
    except Failed as failure:
        return "fail", str(failure)
    except Exception as error:  # whatever a foreign function raises is a finding, not an end of the run
        return "fail", f"{type(error).__name__}: {_short(error)}"


def _own_surface(fn: Attention) -> Any:
    """regard's own surfaces, with a partial application's keywords (a backend's name) carried over."""
    bound: dict[str, Any] = {}
    while isinstance(fn, functools.partial):
        bound = {**fn.keywords, **bound}
        fn = fn.func
    if fn is not regard.attention:
        return None
    return SimpleNamespace(
        masks=regard.masks,
        reference=regard.reference,
        observe=functools.partial(regard.observe, **bound),
        explain=functools.partial(regard.explain, **bound),
        nn=regard.nn,
        cache=regard.cache,
        latent_attention=functools.partial(regard.latent_attention, **bound),
        linear_attention=regard.linear_attention,
        watch=regard.watch,
        backend=bound.get("backend", "auto"),
    )


def _rules(given: Iterable[int] | None) -> set[int]:
    known = set(numbers())
    wanted = known if given is None else set(given)
    if unknown := sorted(wanted - known):
        raise ValueError(f"rules holds {unknown}, which have no check; expected numbers among {_ranges(sorted(known))}")
    return wanted


def _ranges(found: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for number in found:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def _title(fn: Attention) -> str:
    bound = fn.keywords if isinstance(fn, functools.partial) else {}
    inner = fn.func if isinstance(fn, functools.partial) else fn
    suffix = "".join(f" {key}={value}" for key, value in bound.items())
    return f"{getattr(inner, '__name__', type(inner).__name__)}{suffix}"


def _names(kinds: type[Exception] | tuple[type[Exception], ...]) -> str:
    listed = kinds if isinstance(kinds, tuple) else (kinds,)
    return " or ".join(kind.__name__ for kind in listed)


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."
