"""All forms of linear attention mean the same, in values and gradients, under every mask they take."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests import forced
from tests.linear.linear_oracle import attend, gradients, inputs
from tests.memory import peak_bytes

import regard
from regard import linear_attention, masks
from regard.linear import RandomFeatures

B, H, HKV, L, D, DV = 2, 6, 3, 37, 5, 7
LENGTHS = [31, 11]
IDS = torch.tensor([[0] * 10 + [1] * 17 + [-1] * 10, [-1] * 2 + [4] * 20 + [2] * 14 + [-1]])
HIDDEN = {
    "padding": ~masks.padding(LENGTHS).dense(1, L)[:, 0, 0],
    "left padding": ~masks.padding(LENGTHS, side="left").dense(1, L)[:, 0, 0],
    "keep": torch.arange(L).expand(B, L) % 3 == 1,
    "ids": IDS < 0,
}
CAUSAL = {
    "causal": masks.causal(),
    "wide window": masks.window(left=L),
    "padding": masks.causal() & masks.padding(LENGTHS),
    "left padding": masks.padding(LENGTHS, side="left") & masks.causal(),
    "keep": masks.causal() & masks.keep(torch.arange(L) % 3 != 1),
    "documents": masks.causal() & masks.documents(lengths=[3, 14, 1, 19]),
    "ids": masks.causal() & masks.documents(ids=IDS),
}
UNORDERED = {
    "everything": masks.everything(),
    "none": None,
    "columns": masks.columns(20) | masks.padding([3, 29]),
    "padding": masks.padding(LENGTHS),
    "documents": masks.documents(lengths=[3, 14, 1, 19]),
    "ids": masks.documents(ids=IDS),
}


@pytest.fixture(params=["one segment", "many segments"])
def segments(request, monkeypatch):
    forced.sizes(monkeypatch, chunk_of_linear=8)
    if request.param == "many segments":
        forced.sizes(monkeypatch, chunks_of_linear_at_once=16 * B * H)


def agree(found, exact, tensors, tolerance=1e-10):
    assert found.shape == exact.shape
    assert (found - exact).abs().max() <= tolerance
    for mine, truth in zip(gradients(found, *tensors), gradients(exact, *tensors), strict=True):
        assert (mine - truth).abs().max() <= tolerance


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("form", ["chunked", "recurrent", "quadratic"])
@pytest.mark.parametrize("mask", CAUSAL)
def test_causal_forms_equal_the_formula(mask, form):
    tensors = inputs(B, H, L, L, D, Dv=DV, Hkv=HKV)
    found = linear_attention(*tensors, mask=CAUSAL[mask], form=form)
    agree(found, attend(*tensors, CAUSAL[mask]), tensors)


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("form", ["chunked", "recurrent", "quadratic"])
@pytest.mark.parametrize("mask", ["causal", "padding", "keep", "documents", "ids"])
def test_decay_and_gates_equal_the_formula_with_gradients_of_their_own(mask, form):
    tensors = inputs(B, H, L, L, D, Dv=DV, Hkv=HKV)
    decay = torch.tensor([1.0, 0.5, 0.9, 0.99, 0.01, 0.75], dtype=torch.float64, requires_grad=True)
    log_gate = F.logsigmoid(3 * torch.randn(B, H, L, dtype=torch.float64)).requires_grad_()
    found = linear_attention(*tensors, mask=CAUSAL[mask], decay=decay, log_gate=log_gate, form=form)
    together = decay.log()[None, :, None] + log_gate
    exact = attend(*tensors, CAUSAL[mask], log_gate=together, hidden=HIDDEN.get(mask))
    agree(found, exact, (*tensors, decay, log_gate))


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("form", ["chunked", "recurrent"])
def test_a_decay_for_each_key_value_head_keeps_one_state_for_its_group(form):
    tensors = inputs(B, H, L, L, D, Dv=DV, Hkv=HKV)
    decay = torch.tensor([0.5, 0.9, 0.99], dtype=torch.float64)
    state = regard.linear.LinearState()
    found = linear_attention(*tensors, mask=masks.causal(), decay=decay, form=form, state=state)
    exact = attend(*tensors, masks.causal(), log_gate=decay.log().repeat_interleave(2)[None, :, None].expand(B, H, L))
    agree(found, exact, tensors)
    assert state.sums.shape == (B, HKV, D, DV)


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("form", ["auto", "chunked", "quadratic"])
@pytest.mark.parametrize("mask", UNORDERED)
def test_unordered_forms_equal_the_formula(mask, form):
    tensors = inputs(B, H, L, L, D, Dv=DV, Hkv=HKV)
    agree(linear_attention(*tensors, mask=UNORDERED[mask], form=form), attend(*tensors, UNORDERED[mask]), tensors)


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("feature_map", ["elu", "relu", "identity"])
def test_every_map_works_with_and_without_the_normaliser(feature_map, normalize):
    query, key, value = inputs(B, H, L, L, D, Dv=DV)
    if feature_map == "identity":  # weights of both signs would make a sum near 0, and no error bound hold
        query, key = (x.abs().detach().requires_grad_() for x in (query, key))
    tensors, given = (query, key, value), {"feature_map": feature_map, "normalize": normalize}
    for form in ("chunked", "recurrent"):
        found = linear_attention(*tensors, mask=masks.causal(), form=form, **given)
        agree(found, attend(*tensors, masks.causal(), **given), tensors)


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("offset", [None, 0, -5, 3, 20, 50, -100])
@pytest.mark.parametrize(("rows", "keys"), [(11, 37), (37, 11)])
@pytest.mark.parametrize("kind", ["causal", "documents", "causal documents"])
def test_queries_may_stand_anywhere_beside_the_keys(kind, rows, keys, offset):
    tensors = inputs(B, 4, rows, keys, D, Hkv=2)
    documents = masks.documents(lengths=[3, keys - 3])
    mask = {"causal": masks.causal(), "documents": documents, "causal documents": masks.causal() & documents}[kind]
    for form in ("chunked", "quadratic"):
        found = linear_attention(*tensors, mask=mask, query_offset=offset, form=form)
        agree(found, attend(*tensors, mask, offset=offset), tensors)


def test_a_scale_multiplies_the_product_of_plain_queries_and_keys():
    query, key, value = inputs(1, 1, 5, 5, 3)
    found = linear_attention(query, key, value, mask=masks.causal(), feature_map="identity", normalize=False, scale=2.0)
    assert torch.allclose(found, torch.tril(2 * query @ key.transpose(-1, -2)) @ value)


def test_a_function_of_ones_own_may_change_the_number_of_features_and_gets_gradients():
    tensors = inputs(1, 2, 21, 21, 5)
    weight = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)

    def features(x):
        return torch.sigmoid(x @ weight)

    given = {"mask": masks.causal(), "feature_map": features}
    found = linear_attention(*tensors, form="chunked", **given)
    exact = linear_attention(*tensors, form="quadratic", **given)
    agree(found, exact, (*tensors, weight))


def test_first_and_second_derivatives_pass_gradcheck(monkeypatch):
    forced.sizes(monkeypatch, chunk_of_linear=3, chunks_of_linear_at_once=6)
    tensors = inputs(1, 1, 11, 11, 2, Dv=1)
    mask = masks.causal() & masks.documents(lengths=[4, 7])
    decay = torch.tensor([0.9], dtype=torch.float64, requires_grad=True)

    def call(query, key, value, decay):
        return linear_attention(query, key, value, mask=mask, decay=decay)

    assert torch.autograd.gradcheck(call, (*tensors, decay))
    assert torch.autograd.gradgradcheck(call, (*tensors, decay))


def test_rows_that_see_nothing_are_zero_and_give_no_gradient():
    tensors = inputs(2, 2, 9, 9, 3)
    for mask in (masks.padding([0, 9]), masks.causal() & masks.padding([4, 9], side="left")):
        for form in ("auto", "chunked", "quadratic"):
            out = linear_attention(*tensors, mask=mask, form=form)
            empty = ~mask.dense(9, 9).expand(2, 1, 9, 9).any(-1)[:, 0]
            assert (out.transpose(1, 2)[empty] == 0).all()
            grads = gradients(out, *tensors)
            assert all(torch.isfinite(grad).all() for grad in grads)
            assert (grads[0].transpose(1, 2)[empty] == 0).all()


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_attend_to_gives_zeros_and_gradients_of_the_right_shape(rows, keys):
    tensors = inputs(2, 2, rows, keys, 3)
    for mask in (None, masks.causal()):
        out = linear_attention(*tensors, mask=mask)
        assert out.shape == (2, 2, rows, 3)
        assert not out.any()
        assert [grad.shape for grad in gradients(out, *tensors)] == [tensor.shape for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_in_float32(dtype):
    length = 3000  # more than a half-precision sum of ones can count
    query, key, value = (x.detach().to(dtype) for x in inputs(1, 2, length, length, 11))
    exact = attend(query.double(), key.double(), value.double(), masks.causal())
    for form in ("chunked", "quadratic"):
        found = linear_attention(query, key, value, mask=masks.causal(), form=form)
        assert found.dtype == dtype
        # one rounding of the result, and float32 sums of `length` terms before it
        allowed = exact.abs() * torch.finfo(dtype).eps / 2 + 1e-5
        assert ((found.double() - exact).abs() <= allowed).all()


def test_autocast_gives_its_own_dtype_and_float32_sums():
    query, key, value = (x.detach().float() for x in inputs(1, 2, 63, 63, 11))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_attention(query, key, value, mask=masks.causal())
    plain = linear_attention(*(x.bfloat16() for x in (query, key, value)), mask=masks.causal())
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, plain)


def test_a_later_key_leaves_earlier_rows_as_they_are_to_the_last_bit():
    query, key, value = (x.detach() for x in inputs(1, 2, 111, 111, 5))
    for features in ("elu", RandomFeatures(5, 33, dtype=torch.float64)):
        given = {"mask": masks.causal(), "feature_map": features}
        before = linear_attention(query, key, value, **given)
        other_key, other_value = key.clone(), value.clone()
        other_key[:, :, 70:] *= 100.0
        other_value[:, :, 70:] = 1e30
        after = linear_attention(query, other_key, other_value, **given)
        assert torch.equal(before[:, :, :70], after[:, :, :70])
        assert not torch.equal(before[:, :, 70:], after[:, :, 70:])


def test_memory_beyond_the_result_does_not_grow_with_the_length():
    def extra(length):
        tensors = [torch.randn(1, 4, length, 16) for _ in range(3)]
        with torch.no_grad():
            return peak_bytes(lambda: linear_attention(*tensors, mask=masks.causal())) - tensors[0].nbytes

    assert extra(16384) <= 1.1 * extra(4096)


def test_memory_of_a_backward_pass_stays_near_the_gradients():
    tensors = [torch.randn(1, 4, 16384, 16, requires_grad=True) for _ in range(3)]
    one = tensors[0].nbytes

    def run():
        out = linear_attention(*tensors, mask=masks.causal())
        return torch.autograd.grad(out, tensors, torch.ones_like(out))

    # result, its gradient, three gradients whole and in parts; the weights inside chunks alone would be 4 times `one`
    assert peak_bytes(run) <= 10 * one


@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_compiled_and_vmapped_calls_agree(mask):
    tensors = [x.detach() for x in inputs(B, H, L, L, D, Hkv=HKV)]
    given = {"mask": CAUSAL[mask], "decay": [0.9, 0.8, 0.7]}
    plain = linear_attention(*tensors, **given)
    compiled = torch.compile(lambda q, k, v: linear_attention(q, k, v, **given), fullgraph=True, backend="eager")
    assert torch.allclose(compiled(*tensors), plain, rtol=0, atol=1e-12)
    stacked = torch.vmap(lambda q, k, v: linear_attention(q, k, v, **given))(*(x[None] for x in tensors))
    assert torch.allclose(stacked[0], plain, rtol=0, atol=1e-12)
