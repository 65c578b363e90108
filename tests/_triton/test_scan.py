"""Linear attention by the kernels: values and gradients as its formula says, whatever masks, gates and maps join."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from tests import forced
from tests._triton.calls import multiply_bfloat16
from tests.linear.linear_oracle import attend, gradients, inputs
from torch import Tensor
from torch.nn import functional as F

from regard import linear_attention, masks
from regard.linear import LinearState, explain

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# two chunks, and one more token, where chunks are of 32
B, H, HKV, L, D, DV = 2, 2, 1, 65, 5, 18
IDS = torch.tensor([[0] * 40 + [1] * 5 + [-1] * 20, [-1] * 2 + [4] * 30 + [2] * 25 + [-1] * 8])
LENGTHS = [62, 30]
# the interpreter multiplies in float32, tensor cores in three products of rounded halves
ROUNDING = 2e-6 if INTERPRETED else 2e-5


@pytest.fixture(autouse=True)
def many_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    forced.sizes(monkeypatch, segments_of_a_scan=1)
    if INTERPRETED:
        multiply_bfloat16(monkeypatch)


def calls(dtype: torch.dtype, gated: bool, heads: int = HKV, items: int = B) -> tuple[list[Tensor], list[Tensor]]:
    """Query, key, value and gates for the kernels, and the same in float64."""
    exact = [x.detach().to(dtype) for x in inputs(items, H, L, L, D, Dv=DV, Hkv=heads)]
    if gated:
        exact.append(F.logsigmoid(torch.randn(items, H, L, generator=torch.Generator().manual_seed(3)) + 2))
    return [x.to(DEVICE).requires_grad_() for x in exact], [x.double().requires_grad_() for x in exact]


def worst(found: Tensor, exact: Tensor) -> float:
    return float(((found.cpu().double() - exact).norm() / exact.norm()).detach())


def placed(mask: masks.Mask) -> masks.Mask:
    return masks.rebuild(mask.code, tuple(tensor.to(DEVICE) for tensor in mask.tensors)) if mask.given else mask


CASES: dict[str, tuple[masks.Mask, Tensor | None, dict[str, Any]]] = {
    "plain": (masks.causal(), None, {}),
    "padding, gates": (
        masks.causal() & masks.padding(LENGTHS),
        torch.arange(L) >= torch.tensor(LENGTHS)[:, None],
        {"feature_map": "relu", "normalize": False},
    ),
    "documents, gates": (masks.causal() & masks.documents(ids=IDS), IDS < 0, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_formula(case: str) -> None:
    mask, hidden, given = CASES[case]
    mine, exact = calls(torch.float32, "gates" in case, items=B if "gates" in case else 1)
    gates = [{"log_gate": tensors[3]} if "gates" in case else {} for tensors in (mine, exact)]
    found = linear_attention(*mine[:3], mask=placed(mask), form="fused", **given, **gates[0])
    truth = attend(*exact[:3], mask, hidden=hidden, **given, **gates[1])
    assert worst(found, truth) < ROUNDING
    for name, one, other in zip("qkvg", gradients(found, *mine), gradients(truth, *exact), strict=False):
        assert worst(one, other) < ROUNDING, name


def test_a_decay_of_each_head_gets_its_gradient_and_a_row_sees_only_what_came_before() -> None:
    mine, exact = calls(torch.float32, False, heads=H, items=1)
    decay = torch.tensor([0.9, 0.5], dtype=torch.float64)
    rates = [decay.to(DEVICE).requires_grad_(), decay.clone().requires_grad_()]
    # fewer queries than keys, at the end
    query, query64 = (tensors[0][:, :, 40:] for tensors in (mine, exact))
    options = {"feature_map": "identity", "normalize": False}
    found = linear_attention(query, *mine[1:], mask=masks.causal(), form="fused", decay=rates[0], **options)
    logs = rates[1].log()[None, :, None].expand(1, H, L)
    truth = attend(query64, *exact[1:], masks.causal(), log_gate=logs, **options)
    assert worst(found, truth) < ROUNDING
    pairs = zip(gradients(found, *mine, rates[0]), gradients(truth, *exact, rates[1]), strict=True)
    assert max(worst(one, other) for one, other in pairs) < 5 * ROUNDING


def test_columns_of_values_and_features_are_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    forced.sizes(monkeypatch, columns_of_a_scan=16)
    given = [x.detach()[:, :, :40].float() for x in inputs(1, 1, 40, 40, 17, Dv=18)]
    given.append(F.logsigmoid(torch.randn(1, 1, 40, generator=torch.Generator().manual_seed(3)) + 2))
    mine = [x.to(DEVICE).requires_grad_() for x in given]
    exact = [x.double().requires_grad_() for x in given]
    found = linear_attention(*mine[:3], mask=masks.causal(), form="fused", log_gate=mine[3])
    truth = attend(*exact[:3], masks.causal(), log_gate=exact[3])
    assert worst(found, truth) < ROUNDING
    for name, one, other in zip("qkvg", gradients(found, *mine), gradients(truth, *exact), strict=True):
        assert worst(one, other) < ROUNDING, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_errs_no_more_than_plain_arithmetic_does_twice(dtype: torch.dtype) -> None:
    mine, exact = calls(dtype, False, heads=H, items=1)
    found = linear_attention(*mine, mask=masks.causal(), form="fused")
    truth = attend(*exact, masks.causal())
    plain = [x.detach().to(dtype).requires_grad_() for x in exact]
    rounded = attend(*plain, masks.causal())
    unit = torch.finfo(dtype).eps
    assert worst(found, truth) <= 2 * worst(rounded, truth) + unit
    triples = zip(gradients(found, *mine), gradients(truth, *exact), gradients(rounded, *plain), strict=True)
    for one, other, third in triples:
        assert worst(one, other) <= 2 * worst(third, other) + unit


def test_a_state_goes_on_where_the_call_before_it_ended() -> None:
    mine, exact = calls(torch.float32, True)
    query, key, value, gate = (x.detach() for x in mine)
    mask = masks.causal() & masks.documents(lengths=[10, 25, L - 35])
    state = LinearState()
    parts = []
    for piece in (slice(0, 36), slice(36, L)):
        new = [x[:, :, piece] for x in (query, key, value)]
        # the mask is about all keys so far
        sized = masks.causal() & masks.documents(lengths=[10, 25, piece.stop - 35])
        given = {"mask": sized, "log_gate": gate[:, :, piece], "state": state, "normalize": False}
        assert explain(*new, **given).backend == "fused"
        parts.append(linear_attention(*new, **given))
    truth = attend(*exact[:3], mask, log_gate=exact[3], normalize=False)
    assert worst(torch.cat(parts, 2), truth) < ROUNDING
    whole = LinearState()
    linear_attention(query, key, value, mask=mask, log_gate=gate, state=whole, form="chunked")
    assert state.sums is not None and whole.sums is not None and state.norms is not None and whole.norms is not None
    assert torch.allclose(state.sums, whole.sums, atol=1e-5)
    assert torch.allclose(state.norms, whole.norms, atol=1e-5)


def test_what_is_hidden_stays_hidden_whatever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    forced.values_on_gpu(monkeypatch)
    mine, _ = calls(torch.float32, False, items=1)
    mask = placed(masks.causal() & masks.padding(LENGTHS[1:]))
    clean = linear_attention(*mine, mask=mask, form="fused")
    wanted = gradients(clean, *mine)
    query, key, value = (x.detach().clone() for x in mine)
    key[:, :, LENGTHS[1] :] = torch.nan
    value[:, :, LENGTHS[1] :] = torch.inf
    spoilt = [x.requires_grad_() for x in (query, key, value)]
    found = linear_attention(*spoilt, mask=mask, form="fused")
    assert torch.equal(found, clean)
    assert all(torch.equal(one, other) for one, other in zip(gradients(found, *spoilt), wanted, strict=True))


def test_a_map_of_ones_own_and_second_derivatives_go_through_torch() -> None:
    weight = torch.randn(D, 7, generator=torch.Generator().manual_seed(1)).to(DEVICE).requires_grad_()
    mine, _ = calls(torch.float32, False, heads=H, items=1)
    short = [x[:, :, :40] for x in mine]

    def features(x: Tensor) -> Tensor:
        return torch.sigmoid(x @ weight)

    given = {"mask": masks.causal(), "feature_map": features}
    found = linear_attention(*short, form="fused", **given)
    truth = linear_attention(*short, form="quadratic", **given)
    for one, other in zip(gradients(found, weight, *mine), gradients(truth, weight, *mine), strict=True):
        assert worst(one, other.detach().cpu().double()) < 5 * ROUNDING
    seconds = []
    for form in ("fused", "quadratic"):
        out = linear_attention(*(x[:, :, :20] for x in mine), mask=masks.causal(), form=form)
        (first,) = torch.autograd.grad(out.square().sum(), mine[0], create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), mine[1])[0])
    assert worst(seconds[0], seconds[1].cpu().double()) < 5 * ROUNDING
