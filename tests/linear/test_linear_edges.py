"""Corners of linear attention that were once wrong: each test is one of them."""

from __future__ import annotations

import pytest
import torch
from tests.linear import linear_oracle as oracle

import regard
from regard import masks
from regard.linear import LinearState


@pytest.mark.parametrize("head", [0, 1])
def test_a_nan_key_spoils_the_heads_of_a_group_that_see_it_and_no_other(head: int) -> None:
    q, k, v = (t.detach() for t in oracle.inputs(1, 2, 3, 3, 4, Hkv=1))
    v[0, 0, 2] = torch.nan
    seen = torch.ones(1, 2, 3, 3, dtype=torch.bool)
    seen[0, head, :, 2] = False
    out = regard.linear_attention(q, k, v, mask=masks.keep(seen), form="quadratic")
    assert out[0, 1 - head].isnan().all()
    expected = oracle.attend(q, k, v.nan_to_num(0.0), masks.keep(seen))
    torch.testing.assert_close(out[0, head], expected[0, head])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), 0.5])
def test_gates_that_are_no_logarithms_of_factors_are_refused(number: float) -> None:
    q, k, v = oracle.inputs(1, 2, 3, 3, 4)
    log_gate = -torch.ones(1, 2, 3)
    log_gate[0, 1, 1] = number
    with pytest.raises(ValueError, match=f"log_gate .*got {number}"):
        regard.linear_attention(q, k, v, mask=masks.causal(), log_gate=log_gate)


@pytest.mark.parametrize("decay", ["x", 0.5, [0.5, "x"], [True, True], {"a": 1}])
def test_a_decay_that_is_no_numbers_is_named(decay: object) -> None:
    q, k, v = oracle.inputs(1, 2, 3, 3, 4)
    with pytest.raises(TypeError, match="decay must be"):
        regard.linear_attention(q, k, v, mask=masks.causal(), decay=decay)


IDS = [
    [[0, 0, -1, 0, 0, 3, -1]],
    [[-1, 0, -1, -1, 0, 1, 1], [5, -1, 2, 2, -1, 2, -1]],
]


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("form", ["chunked", "recurrent", "quadratic"])
@pytest.mark.parametrize("gated", [False, True])
def test_padding_inside_a_document_leaves_it_one_and_is_no_step(ids: list[list[int]], form: str, gated: bool) -> None:
    q, k, v = oracle.inputs(2, 4, 7, 7, 5, Hkv=2)
    log_gate = -torch.rand(2, 4, 7, generator=torch.Generator().manual_seed(3)).double() if gated else None
    mask = masks.causal() & masks.documents(ids=torch.tensor(ids))
    out = regard.linear_attention(q, k, v, mask=mask, form=form, log_gate=log_gate)
    hidden = (torch.tensor(ids) < 0).expand(2, 7)
    expected = oracle.attend(q, k, v, mask, log_gate=log_gate, hidden=hidden)
    torch.testing.assert_close(out, expected)
    found, wanted = oracle.gradients(out, q, k, v), oracle.gradients(expected, q, k, v)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("ids", IDS)
def test_documents_with_padding_inside_and_no_order(ids: list[list[int]]) -> None:
    q, k, v = oracle.inputs(2, 4, 7, 7, 5, Hkv=2)
    mask = masks.documents(ids=torch.tensor(ids))
    expected = oracle.attend(q, k, v, mask)
    for form in ("chunked", "quadratic"):
        torch.testing.assert_close(regard.linear_attention(q, k, v, mask=mask, form=form), expected)


def test_a_document_that_comes_back_after_another_is_refused_with_padding_too() -> None:
    q, k, v = oracle.inputs(1, 2, 5, 5, 4)
    mask = masks.causal() & masks.documents(ids=[[0, -1, 1, -1, 0]])
    with pytest.raises(regard.Refused, match="comes back after another"):
        regard.linear_attention(q, k, v, mask=mask)


def test_a_state_goes_on_through_padding_inside_a_document() -> None:
    q, k, v = oracle.inputs(1, 2, 5, 5, 4)
    ids, state, outs = torch.tensor([[0, 0, -1, 0, 0]]), LinearState(), []
    for t in range(5):
        mask = masks.causal() & masks.documents(ids=ids[:, : t + 1])
        new = (x[:, :, t : t + 1] for x in (q, k, v))
        outs.append(regard.linear_attention(*new, mask=mask, decay=[0.5, 0.9], state=state))
    whole = regard.linear_attention(q, k, v, mask=masks.causal() & masks.documents(ids=ids), decay=[0.5, 0.9])
    torch.testing.assert_close(torch.cat(outs, 2), whole)


def test_reorder_takes_a_list_and_names_what_it_cannot_take() -> None:
    q, k, v = oracle.inputs(3, 2, 5, 5, 4)
    state = LinearState()
    regard.linear_attention(q, k, v, mask=masks.causal(), state=state)
    other = state.fork()
    state.reorder([2, 0])
    other.reorder(torch.tensor([2, 0]))
    assert state.batch == 2
    torch.testing.assert_close(state.sums, other.sums)
    for wrong in ("ab", [0.5], torch.tensor([0.5]), 1, [True]):
        with pytest.raises(TypeError, match="items must be integers"):
            state.reorder(wrong)  # type: ignore[arg-type]
    for beyond in ([2], [-1], torch.zeros(1, 1, dtype=torch.int64)):
        with pytest.raises(ValueError, match="items must be integers"):
            state.reorder(beyond)
    assert state.batch == 2
