"""Chooses the backend of a call by rules in order, keeps the choice for calls of one kind, and tells it in words."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from regard import backends
from regard._display import Displayed
from regard.backends import Backend, _cuda
from regard.backends._base import Program
from regard.backends._flex_rules import BLOCK
from regard.backends._kernel_call import VECTOR
from regard.masks._rebuild import of_intervals
from regard.spec import Call, CallSpec, Refused

_LIMIT = 4096

# Query-key pairs up to which plain operations on all of them take less time than launching tiles, and pairs of one
# head from which a kernel that has to be compiled first is worth it.
FEW_PAIRS = {"cpu": 8_000, "cuda": 1_000_000}
COMPILED_PAIRS = 1 << 20
# what our kernels take: heads of all items, positions, and how wide heads are; wider ones are for a few kinds of calls
MOST_HEADS, FAR, WIDEST = 32_767, 1 << 30, 256
_FEW_ON_CUDA, _FAR_KEYS = FEW_PAIRS["cuda"], FAR // 2


class Rule(NamedTuple):
    """``backend`` is chosen where the rule holds and it does not refuse; ``measured`` is what the rule rests on."""

    backend: str
    holds: Callable[[CallSpec], bool]
    words: str
    measured: str


RULES: tuple[Rule, ...] = (
    Rule(
        "triton",
        lambda spec: spec.device == "cuda" and _cuda.is_banded(spec) and _cuda.is_hopper(),
        "windows and documents: FlashAttention 2 was not made for this device",
        "benchmarks/gpu.py --only sparse",
    ),
    Rule(
        "triton",
        lambda spec: spec.areas is not None and not _cuda.is_worth_areas(spec),
        "masks with gaps, in calls that are too short for several launches",
        "benchmarks/gpu.py --only gaps",
    ),
    Rule(
        "sdpa",
        lambda spec: True,
        "torch's fused kernels are the fastest wherever they can run the call",
        "benchmarks/cpu.py, benchmarks/gpu.py",
    ),
    Rule(
        "triton",
        lambda spec: spec.device == "cuda" and not _is_read_by_pair(spec),
        "our kernels are the fastest that take this mask and these modifiers",
        "benchmarks/gpu.py",
    ),
    Rule(
        "flex",
        lambda spec: spec.queries * spec.keys >= COMPILED_PAIRS,
        "from a million pairs per head a compiled kernel is worth it; the first call of a kind takes some seconds",
        "benchmarks/backends_gpu.py",
    ),
    Rule(
        "triton",
        lambda spec: spec.device == "cuda",
        "our kernels need no compilation for each mask",
        "benchmarks/gpu.py",
    ),
    Rule(
        "eager",
        lambda spec: spec.pairs <= FEW_PAIRS.get(spec.device, FEW_PAIRS["cuda"]),
        "few pairs: computing all of them at once is the fastest",
        "benchmarks/cpu.py --only crossover",
    ),
    Rule(
        "blockwise",
        lambda spec: True,
        "the fastest for what no fused kernel does: tiles that fit the cache",
        "benchmarks/cpu.py --only crossover",
    ),
    Rule("eager", lambda spec: True, "plain operations: the only ones that torch can see through", ""),
)


def _is_read_by_pair(spec: CallSpec) -> bool:
    """Whether our kernel has to read a number for every pair: a mask without intervals, or a bias tensor."""
    if spec.bias is not None and spec.bias.rule is None:
        return True
    return spec.mask is not None and not of_intervals(spec.mask)


class Choice(NamedTuple):
    """What runs, and by which rule (None: it was named). Kept for calls of one kind: without tensors and sizes."""

    backend: Backend
    rule: Rule | None

    @property
    def named(self) -> bool:
        return self.rule is None


class Cost(NamedTuple):
    """What the forward pass of a call costs. ``kept_exact`` is False when kept_pairs is only an upper bound."""

    flops: int
    bytes: int
    kept_pairs: int
    peak_bytes: int
    kept_exact: bool


class Plan(Displayed):
    """How a call runs: ``print`` it for the table.

    ``backend`` is the name of the one that runs, ``reason`` why it was chosen, ``refusals`` why each of the others
    cannot (name to reasons), and ``spec`` the description of the call that was looked at; ``cost`` says what it takes.
    """

    def __init__(self, spec: CallSpec, choice: Choice, cost: Callable[[], Cost], observer: str | None = None) -> None:
        self.spec = spec
        self.backend = choice.backend.name
        self.observer = observer  # what folds the statistics, where some are wanted
        self._rule = None if choice.rule is None else RULES.index(choice.rule)
        self._make_cost: Callable[[], Cost] | None = cost
        self._cost: Cost | None = None

    @cached_property
    def reason(self) -> str:
        """Why this backend: that it was named, or the rule and the benchmark which the rule rests on."""
        if self._rule is None:
            return "it was named"
        rule = RULES[self._rule]
        measured = f", measured by {rule.measured}" if rule.measured else ""
        return f"{rule.words} (rule {self._rule + 1} of the plan{measured})"

    @cached_property
    def refusals(self) -> Mapping[str, list[str]]:
        """Why other backends cannot run the call; those that can, and were not chosen, are not in it."""
        return refusals(self.spec)

    @property
    def cost(self) -> Cost:
        """``flops``, ``bytes`` read and written, ``kept_pairs`` that the mask permits, ``peak_bytes`` of memory.

        Counted on first use: it may have to look at the mask's contents."""
        if self._cost is None:
            assert self._make_cost is not None
            self._cost = self._make_cost()
        return self._cost

    def __getstate__(self) -> dict[str, object]:
        # what counts the cost may hold tensors: counted now, so that only numbers travel
        return {**self.__dict__, "_cost": self.cost, "_make_cost": None}

    def __repr__(self) -> str:
        return f"Plan(backend={self.backend!r}, reason={self.reason!r})"

    def __str__(self) -> str:
        from regard.plan._table import plan_table

        return plan_table(self)


_chosen: dict[tuple[Any, ...], Choice] = {}
programs: dict[tuple[Any, ...], Program] = {}
_lock = threading.Lock()


def choose(spec: CallSpec, name: object) -> Choice:
    """The backend of a call: the one named, or under "auto" that of the first rule which holds."""
    if not isinstance(name, str):
        raise TypeError(f'backend must be "auto" or the name of a backend, got {type(name).__name__}')
    found: Choice = recall(_chosen, (kind_of(spec), name), lambda: _choose(spec, name))
    return found


def kind_of(spec: CallSpec) -> tuple[Any, ...]:
    """What a choice may depend on. Sizes are a part of it only as far as rules and backends ask about them, so that a
    text is decoded by one choice."""
    if spec.device == "cpu":
        sizes: tuple[Any, ...] = ((spec.pairs > 0) + (spec.pairs > FEW_PAIRS["cpu"]), spec.mask is None)
    elif spec.device == "cuda" and max(spec.head_dim, spec.value_dim) <= WIDEST:
        sizes = (_sizes_on_cuda(spec), spec.mask and of_intervals(spec.mask), spec.kv_heads == spec.heads)
    else:
        return spec
    described = spec.bias and (spec.bias.needs_grad, spec.bias.rule, spec.bias.dtype)
    return (
        spec.device, sizes, spec.head_dim, spec.value_dim, spec.dtype, described, spec.scale > 0, spec.softcap is None,
        spec.sinks, spec.dropout > 0, spec.dropout == 1, spec.grad, spec.unit_stride, spec.mode,
    )  # fmt: skip


def _sizes_on_cuda(spec: CallSpec) -> tuple[Any, ...]:
    heads, apart = spec.batch * spec.heads, max(spec.queries, spec.keys) + abs(spec.offset or 0)
    sizes = _predicates(heads, spec.queries, spec.keys)
    return (*sizes, spec.value_dim > 0, heads > MOST_HEADS, apart >= FAR, *_meant_on_cuda(spec))


def _meant_on_cuda(spec: CallSpec) -> tuple[Any, ...]:
    """How the fused kernels would take the mask."""
    if spec.areas is not None:
        return "areas", _cuda.is_worth_areas(spec)
    flags = _cuda.flags_of(spec)
    if flags is None:
        return ()
    return flags.causal, flags.left >= 0, flags.right > 0, flags.documents, flags.used_keys == spec.queries


def _predicates(heads: int, queries: int, keys: int) -> tuple[bool, ...]:
    """What rules and backends ask about the pairs of a call on CUDA, and how far these may lie apart."""
    pairs = heads * queries * keys
    return pairs > 0, pairs <= _FEW_ON_CUDA, queries * keys >= COMPILED_PAIRS, queries < BLOCK, keys >= _FAR_KEYS


def size_kind(query: Tensor, grad: bool, heads: int, rows: int, keys: int) -> Any:
    """What of the numbers of queries and keys decides how an unmasked call runs; all of them on a CPU where gradients
    may be asked for, which small calls leave to torch, and on devices that are neither a CPU nor CUDA. ``heads``: of
    all items."""
    if query.is_cuda:
        return _predicates(heads, rows, keys)
    if grad or not query.is_cpu:
        return heads, rows, keys
    pairs = heads * rows * keys
    return (pairs > 0) + (pairs > FEW_PAIRS["cpu"]) + 3 * (keys > VECTOR)


def recall(memory: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """``make()``, kept in a memory that is bounded, and may be used by several threads."""
    found = memory.get(key)
    if found is None:
        found = make()
        with _lock:
            if len(memory) >= _LIMIT:
                memory.clear()
            memory[key] = found
    return found


def program_of(call: Call, name: object) -> Program:
    """The program of the backend that is chosen for a call."""
    choice = choose(call.spec, name)
    return choice.backend.program(call, named=choice.named)


def refusals(spec: CallSpec) -> dict[str, list[str]]:
    """The backends that cannot run a call, and why."""
    answers = {name: _reasons(backend, spec) for name, backend in backends.ALL.items()}
    return {name: reasons for name, reasons in answers.items() if reasons}


def _reasons(backend: Backend, spec: CallSpec) -> list[str]:
    reasons = backend.refuse(spec)
    if spec.bias is not None and spec.bias.rule is not None and not backend.takes_rules(spec):
        rule = f"the bias is a rule, {spec.bias.rule}, and it takes tensors: blockwise evaluates rules in the tile"
        return [*reasons, rule]
    return reasons


def _choose(spec: CallSpec, name: str) -> Choice:
    if name == "auto":
        for rule in RULES:
            if rule.holds(spec) and not _reasons(backends.ALL[rule.backend], spec):
                return Choice(backends.ALL[rule.backend], rule)
        raise AssertionError("eager refuses nothing")
    if name not in backends.ALL:
        raise ValueError(f'backend must be "auto" or one of {", ".join(backends.ALL)}, got {name!r}')
    if reasons := _reasons(backends.ALL[name], spec):
        refused = refusals(spec)
        able = ", ".join(other for other in backends.ALL if other not in refused) or "none"
        raise Refused(f"backend {name!r} cannot run this call: {'; '.join(reasons)}. Able: {able}")
    return Choice(backends.ALL[name], None)
