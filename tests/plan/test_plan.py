from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import regard
from core_calls import every_mask, permitted, prepare, tensors
from memory import peak_bytes
from regard import backends, masks
from regard import plan as planning
from regard.backends import _cuda
from regard.spec import CallSpec

OFTEN = ("sdpa", "blockwise", "eager", "reference")


def spec_of(*inputs: Any, **given: Any) -> CallSpec:
    names = ("mask", "bias", "scale", "softcap", "sinks", "dropout", "query_offset")
    values = {**dict.fromkeys(names), "dropout": 0.0, **given}
    return prepare(*inputs, *(values[name] for name in names)).spec


class Nothing(TorchDispatchMode):
    """Fails when anything is computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} ran")


@pytest.mark.parametrize("mask", [None, masks.causal() & masks.window(left=2), masks.padding([3, 4])], ids=str)
def test_explain_computes_nothing(mask: masks.Mask | None) -> None:
    inputs = tensors(grad=True)
    with Nothing():
        plan = regard.explain(*inputs, mask=mask, dropout=0.1)
        assert plan.backend in OFTEN


def test_explain_reads_no_values() -> None:
    q, k, v = tensors()
    k[:] = torch.nan
    plan = regard.explain(q, k, v, bias=torch.full((5, 7), torch.nan, dtype=torch.float64), mask=masks.causal())
    assert plan.cost.kept_pairs == 2 * 4 * (3 + 4 + 5 + 6 + 7)


def test_a_choice_is_made_once_for_equal_calls_and_holds_no_tensor() -> None:
    first, second = (planning.choose(spec_of(*tensors(), mask=masks.causal()), "auto") for _ in range(2))
    assert first is second
    spec = spec_of(*tensors(), mask=masks.keep(torch.ones(5, 7, dtype=torch.bool)), bias=torch.zeros(7).double())
    assert hash(spec) == hash(spec_of(*tensors(), mask=masks.keep(torch.zeros(5, 7) > 0), bias=torch.ones(7).double()))
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_the_choice_depends_on_what_the_spec_says_only() -> None:
    spec = spec_of(*tensors(), mask=masks.causal())
    kept = planning.choose(spec, "auto")
    planning._chosen.clear()
    again = planning.choose(spec, "auto")
    assert again is not kept and again == kept


def test_the_cache_of_choices_is_bounded() -> None:
    spec = spec_of(*tensors())
    for n in range(planning._LIMIT + 50):
        planning.choose(spec._replace(scale=float(n)), "auto")
    assert len(planning._chosen) <= planning._LIMIT


def test_threads_may_plan_and_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_LIMIT", 7)
    inputs = tensors(2, 4, 2, 63, 111, 8, dtype=torch.float32)
    given = list(every_mask(2, 4, 63, 111).values())
    expected = [regard.attention(*inputs, mask=mask) for mask in given]
    fresh = list(every_mask(2, 4, 63, 111).values())
    wrong: list[object] = []

    def work(start: int) -> None:
        try:
            for n in range(40):
                at = (start * 5 + n) % len(fresh)
                if not torch.equal(regard.attention(*inputs, mask=fresh[at]), expected[at]):
                    wrong.append(fresh[at])
                str(regard.explain(*inputs, mask=fresh[at], scale=1.0 + n + 100 * start))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(planning._chosen) <= 7


def test_a_named_backend_is_the_plans_and_says_so() -> None:
    for name in OFTEN:
        plan = regard.explain(*tensors(), backend=name)
        assert plan.backend == name and plan.reason == "it was named"


def test_refusals_are_reasons_by_backend_and_the_chosen_one_has_none() -> None:
    plan = regard.explain(*tensors(V=11, grad=True), softcap=2.0, dropout=0.5)
    assert plan.backend not in plan.refusals
    joined = "; ".join(plan.refusals["sdpa"])
    assert all(word in joined for word in ("softcap", "dropout", "value dim 11 differs from head dim 3"))
    assert len(plan.refusals["sdpa"]) == 3
    assert any("gradients" in reason for reason in plan.refusals["reference"])
    assert plan.backend in plan.reason or "fastest" in plan.reason


def test_a_refusal_names_the_backend_the_reason_and_who_could() -> None:
    with pytest.raises(regard.Refused) as raised:
        regard.explain(*tensors(), backend="sdpa", softcap=2.0)
    assert isinstance(raised.value, ValueError)
    text = str(raised.value)
    assert "'sdpa'" in text and "softcap" in text and "Able: blockwise, eager" in text


def test_no_refusal_is_said_twice() -> None:
    inputs = tensors(V=11, grad=True)
    for name, reasons in regard.explain(*inputs, softcap=2.0, dropout=0.5, mask=masks.causal()).refusals.items():
        assert name in backends.ALL and len(set(reasons)) == len(reasons) > 0


@pytest.mark.parametrize("sizes", [(2, 4, 4, 63, 111, 8, 8), (1, 6, 2, 5, 7, 3, 11)])
@pytest.mark.parametrize("backend", ["eager", "blockwise"])
def test_flops_are_what_torchs_counter_counts_on_a_dense_call(sizes: tuple[int, ...], backend: str) -> None:
    q, k, v = tensors(*sizes)
    with FlopCounterMode(display=False) as counter:
        regard.attention(q, k, v, backend=backend)
    assert regard.explain(q, k, v, backend=backend).cost.flops == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert regard.explain(q, k, v).cost.flops == counter.get_total_flops()


@pytest.mark.parametrize("kind", list(every_mask(2, 4, 13, 37)))
def test_kept_pairs_are_those_of_the_picture(kind: str) -> None:
    mask = every_mask(2, 4, 13, 37)[kind]
    positions = kind not in ("keep", "additive", "keep by head", "drop keys")
    for offset in (None, 3, *([torch.tensor([20, -4])] if positions else [])):
        cost = regard.explain(*tensors(2, 4, 2, 13, 37), mask=mask, query_offset=offset).cost
        counted = int(permitted(mask, 2, 4, 13, 37, offset).sum())
        assert cost.kept_pairs == counted if cost.kept_exact else cost.kept_pairs >= counted
        assert cost.flops == 2 * cost.kept_pairs * 6


def test_bytes_are_those_of_the_tensors_each_read_or_written_once() -> None:
    q, k, v = tensors(2, 4, 2, 63, 111, 8, V=8, dtype=torch.bfloat16)
    assert regard.explain(q, k, v).cost.bytes == 2 * (2 * q.numel() + k.numel() + v.numel())
    bias = torch.zeros(63, 111)
    more = regard.explain(q, k, v, bias=bias).cost.bytes - regard.explain(q, k, v).cost.bytes
    assert more == 4 * bias.numel()


def test_a_printed_plan_tells_the_call_the_choice_and_every_other_backend() -> None:
    text = str(regard.explain(*tensors(V=11), softcap=2.0, mask=masks.causal()))
    for word in ("B=2 H=4 Hkv=2 L=5 S=7 D=3 Dv=11", "float64", "kept pairs", "200", "flops", "peak memory", "softcap"):
        assert word in text
    assert all(name in text for name in backends.ALL)


def test_an_upper_bound_is_printed_as_one() -> None:
    mask = masks.causal() & masks.strided(3) & masks.keep(torch.rand(5, 7) > 0.5)
    plan = regard.explain(*tensors(), mask=mask)
    assert ("at most" in str(plan)) is (not plan.cost.kept_exact)


@pytest.mark.parametrize("L, S", [(0, 7), (5, 0), (0, 0)])
def test_empty_calls_have_a_plan(L: int, S: int) -> None:
    for backend in ("auto", *OFTEN):
        plan = regard.explain(*tensors(L=L, S=S), mask=masks.causal(), backend=backend)
        assert plan.cost.flops == 0 and plan.cost.kept_pairs == 0 and str(plan)


def test_tensors_without_values_can_be_planned_for() -> None:
    inputs = [torch.empty(1, 8, 100_000, 64, device="meta") for _ in range(3)]
    mask = masks.causal() & masks.window(left=255)
    cost = regard.explain(*inputs, mask=mask).cost
    assert cost.kept_pairs == 8 * (100_000 * 256 - 256 * 255 // 2)


def test_wanting_statistics_costs_more() -> None:
    inputs = tensors()
    plain, wanted = regard.explain(*inputs), regard.explain(*inputs, want=regard.Want())
    assert wanted.backend == plain.backend
    assert wanted.cost.peak_bytes > plain.cost.peak_bytes and wanted.cost.flops > plain.cost.flops


PEAKS = [(1, 4, 4, 1024, 1024, 64), (2, 8, 2, 700, 700, 32), (1, 2, 2, 4096, 4096, 32)]


PEAK_MASKS: dict[str, Callable[[int], masks.Mask | None]] = {
    "none": lambda n: None,
    "causal": lambda n: masks.causal(),
    "window": lambda n: masks.causal() & masks.window(left=100),
    "documents": lambda n: masks.documents(lengths=[n // 4] * 4),
    "prefix": lambda n: masks.causal() | masks.prefix(50),
    "padding": lambda n: masks.causal() & masks.padding([n - 30]),
    "keep": lambda n: masks.keep(torch.rand(n, n) > 0.3),
    "blocks": lambda n: masks.random_blocks(3, n // 4, 0),
    "causal blocks": lambda n: masks.causal() & masks.random_blocks(3, n // 4, 0),
}


@pytest.mark.parametrize("sizes", PEAKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", PEAK_MASKS)
@pytest.mark.parametrize("backend", ["eager", "blockwise", "sdpa"])
def test_peak_memory_is_within_half_again_of_what_is_measured(
    backend: str, kind: str, dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    if backend == "eager" and sizes[3] > 2000:
        return
    inputs, mask = tensors(*sizes, dtype=dtype), PEAK_MASKS[kind](sizes[3])
    measured = peak_bytes(lambda: regard.attention(*inputs, mask=mask, backend=backend))
    said = regard.explain(*inputs, mask=mask, backend=backend).cost.peak_bytes
    assert measured / 1.5 <= said <= measured * 1.5, (said, measured)


def calls_on_cuda() -> Iterator[CallSpec]:
    """Descriptions of many calls as they would be on CUDA, around every size that a rule or a backend asks about."""
    masks_of = {
        "none": lambda L, S: None,
        "causal": lambda L, S: masks.causal(),
        "window": lambda L, S: masks.window(left=5),
        "both sides": lambda L, S: masks.window(left=5, right=3),
        "padding": lambda L, S: masks.causal() & masks.padding([1, 3]),
        "documents": lambda L, S: masks.documents(lengths=[S]),
        "strided": lambda L, S: masks.strided(3),
        "keep": lambda L, S: masks.keep(torch.zeros(1, 1, 1, S, dtype=torch.bool)),
        "gaps": lambda L, S: masks.causal() & ~masks.columns(3),
    }
    lengths = [(1, 7), (7, 7), (127, 127), (128, 128), (128, 300), (128, 1 << 14), (1024, 1023), (1024, 1024), (3, 0)]
    for (L, S), mask, dtype, heads in itertools.product(
        lengths, masks_of.values(), (torch.bfloat16, torch.float32), ((2, 4, 4), (2, 4, 2), (2, 16_384, 4))
    ):
        batch, query_heads, kv_heads = heads
        query = torch.empty(batch, query_heads, L, 64, dtype=dtype, device="meta")
        key = torch.empty(batch, kv_heads, S, 64, dtype=dtype, device="meta")
        for offset, cap, p in ((None, None, 0.0), (0, None, 0.0), (2, 3.0, 0.0), (None, None, 0.1)):
            call = prepare(query, key, key, mask(L, S), None, None, cap, None, p, offset)
            yield call.spec._replace(device="cuda")


@pytest.mark.parametrize("hopper", [True, False])
def test_calls_of_one_kind_on_cuda_are_given_one_backend_whatever_their_sizes(
    hopper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_cuda, "is_hopper", lambda: hopper)
    found: dict[tuple[Any, ...], set[str]] = {}
    specs = list(calls_on_cuda())
    for spec in specs:
        found.setdefault(planning.kind_of(spec), set()).add(planning._choose(spec, "auto").backend.name)
    assert all(len(names) == 1 for names in found.values())
    assert len({name for names in found.values() for name in names}) >= 3
    assert len(found) < len(specs) / 2


def test_a_text_is_decoded_on_cuda_by_one_choice() -> None:
    kinds = set()
    for keys in range(600, 620):
        query = torch.empty(2, 4, 1, 64, dtype=torch.bfloat16, device="meta")
        key = torch.empty(2, 2, keys, 64, dtype=torch.bfloat16, device="meta")
        call = prepare(query, key, key, masks.padding([1, 3]), None, None, None, None, 0.0, None)
        kinds.add(planning.kind_of(call.spec._replace(device="cuda")))
    assert len(kinds) == 1
