"""A state stands for every token before: any cut of a text into calls gives what one call gives."""

from __future__ import annotations

import doctest
import itertools

import pytest
import torch
import torch.nn.functional as F
from tests.linear.linear_oracle import attend, inputs

import regard
from regard import linear_attention, masks
from regard.linear import LinearState, RandomFeatures

CUTS = {"tokens": [1] * 23, "chunks": [5, 7, 1, 10], "prefill": [20, 1, 1, 1], "nothing new": [0, 20, 0, 3]}


def in_pieces(tensors, cuts, state, **given):
    log_gate = given.pop("log_gate", None)
    ends = torch.tensor([0, *cuts]).cumsum(0).tolist()
    outs = []
    for start, end in itertools.pairwise(ends):
        gate = {} if log_gate is None else {"log_gate": log_gate[:, :, start:end]}
        mask = given["mask"](end) if callable(given["mask"]) else given["mask"]
        piece = [x[:, :, start:end] for x in tensors]
        outs.append(linear_attention(*piece, **{**given, "mask": mask}, **gate, state=state))
    return torch.cat(outs, 2)


@pytest.mark.parametrize("cuts", CUTS)
def test_pieces_equal_the_whole_in_values_and_gradients(cuts):
    tensors = inputs(2, 4, 23, 23, 5, Hkv=2)
    log_gate = F.logsigmoid(torch.randn(2, 4, 23, dtype=torch.float64))
    state = LinearState()
    found = in_pieces(tensors, CUTS[cuts], state, mask=masks.causal(), log_gate=log_gate)
    exact = attend(*tensors, masks.causal(), log_gate=log_gate)
    assert (found - exact).abs().max() <= 1e-12
    for mine, truth in zip(
        torch.autograd.grad(found.square().sum(), tensors),
        torch.autograd.grad(exact.square().sum(), tensors),
        strict=True,
    ):
        assert (mine - truth).abs().max() <= 1e-10
    assert state.position == 23


@pytest.mark.parametrize("feature_map", ["relu", RandomFeatures(5, 13, dtype=torch.float64)])
def test_pieces_equal_the_whole_for_every_map(feature_map):
    tensors = [x.detach() for x in inputs(1, 2, 23, 23, 5)]
    given = {"mask": masks.causal(), "feature_map": feature_map}
    whole = linear_attention(*tensors, **given)
    assert (in_pieces(tensors, CUTS["tokens"], LinearState(), **given) - whole).abs().max() <= 1e-12


def test_documents_end_inside_and_between_pieces():
    tensors = [x.detach() for x in inputs(2, 2, 23, 23, 5)]
    ids = torch.tensor([[0] * 5 + [1] * 7 + [2] * 11, [3] * 11 + [-1] * 2 + [5] * 10])
    exact = attend(*tensors, masks.causal() & masks.documents(ids=ids))
    for cuts in CUTS.values():

        def mask(end):
            return masks.causal() & masks.documents(ids=ids[:, :end])

        assert (in_pieces(tensors, cuts, LinearState(), mask=mask) - exact).abs().max() <= 1e-12


def test_padding_in_a_first_call_leaves_the_state_of_the_real_tokens():
    tensors = [x.detach() for x in inputs(3, 2, 11, 11, 5)]
    lengths = [11, 4, 7]
    state = LinearState()
    linear_attention(*tensors, mask=masks.causal() & masks.padding(lengths), decay=[0.9, 0.5], state=state)
    for item, length in enumerate(lengths):
        alone = LinearState()
        piece = [x[item : item + 1, :, :length] for x in tensors]
        linear_attention(*piece, mask=masks.causal(), decay=[0.9, 0.5], state=alone)
        assert torch.allclose(state.sums[item], alone.sums[0], rtol=0, atol=1e-14)
        assert torch.allclose(state.norms[item], alone.norms[0], rtol=0, atol=1e-14)


def test_a_state_is_as_large_after_a_thousand_tokens_as_after_one():
    state = LinearState()
    sizes = set()
    for length in (1, 7, 1000, 1):
        linear_attention(*(torch.randn(2, 3, length, 5) for _ in range(3)), mask=masks.causal(), state=state)
        sizes.add(state.nbytes)
    assert sizes == {2 * 3 * 5 * (5 + 1) * 4}
    assert state.position == 1009


def test_half_precision_keeps_a_float32_state():
    state = LinearState()
    tensors = [torch.randn(1, 1, 3, 5, dtype=torch.bfloat16) for _ in range(3)]
    assert linear_attention(*tensors, mask=masks.causal(), state=state).dtype == torch.bfloat16
    assert state.sums.dtype == state.norms.dtype == torch.float32


def test_reorder_moves_items_and_fork_goes_on_alone():
    tensors = [x.detach() for x in inputs(3, 2, 9, 9, 5)]
    state = LinearState()
    linear_attention(*tensors, mask=masks.causal(), state=state)
    order = torch.tensor([2, 0, 2])
    other = state.fork()
    state.reorder(order)
    assert torch.equal(state.sums, other.sums[order]) and torch.equal(state.norms, other.norms[order])
    before = other.sums.clone()
    linear_attention(*tensors, mask=masks.causal(), state=state)
    assert torch.equal(other.sums, before) and other.position == 9 and state.position == 18


def test_truncate_is_refused_with_the_reason_and_reset_forgets():
    state = LinearState()
    linear_attention(*(torch.randn(1, 1, 3, 5) for _ in range(3)), mask=masks.causal(), state=state)
    with pytest.raises(regard.Refused, match="cannot be taken back.*fork"):
        state.truncate(2)
    state.reset()
    assert state.position == 0 and state.nbytes == 0 and "empty" in repr(state)


def test_detach_stops_gradients_of_earlier_tokens():
    first, second = inputs(1, 1, 3, 3, 5), inputs(1, 1, 3, 3, 5, seed=1)
    state = LinearState()
    linear_attention(*first, mask=masks.causal(), state=state)
    out = linear_attention(*second, mask=masks.causal(), state=state.detach())
    assert torch.autograd.grad(out.sum(), first, allow_unused=True) == (None, None, None)


def test_a_failed_call_leaves_the_state_unchanged():
    state = LinearState()
    linear_attention(*(torch.randn(1, 2, 3, 5) for _ in range(3)), mask=masks.causal(), state=state)
    before = state.sums.clone()
    for shape in ((2, 2, 3, 5), (1, 3, 3, 5), (1, 2, 3, 7)):
        with pytest.raises(ValueError, match="state"):
            linear_attention(*(torch.randn(*shape) for _ in range(3)), mask=masks.causal(), state=state)
    with pytest.raises(ValueError, match="state.*float64"):
        doubles = (torch.randn(1, 2, 3, 5, dtype=torch.float64) for _ in range(3))
        linear_attention(*doubles, mask=masks.causal(), state=state)
    assert torch.equal(state.sums, before) and state.position == 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mask": None}, "masks.causal"),
        ({"query_offset": 0}, "query_offset"),
        ({"form": "quadratic"}, "quadratic.*no state"),
        ({"form": "whole"}, "causal"),
    ],
)
def test_what_a_state_cannot_do_is_refused(given, words):
    tensors = [torch.randn(1, 1, 3, 5) for _ in range(3)]
    with pytest.raises(ValueError, match=words):
        linear_attention(*tensors, **{"mask": masks.causal(), "state": LinearState(), **given})


def test_a_state_of_another_kind_or_queries_of_other_tokens_are_refused():
    tensors = [torch.randn(1, 1, 3, 5) for _ in range(3)]
    with pytest.raises(TypeError, match="LinearState, got dict"):
        linear_attention(*tensors, mask=masks.causal(), state={})
    with pytest.raises(ValueError, match="1 queries and 3 keys"):
        linear_attention(tensors[0][:, :, :1], *tensors[1:], mask=masks.causal(), state=LinearState())


def test_the_example_in_the_docstring_is_true():
    import regard.linear._state

    found = doctest.testmod(regard.linear._state)
    assert found.attempted and not found.failed
