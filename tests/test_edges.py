"""Corners that were once wrong: each test is one of them."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from tests.core_calls import prepare
from torch._subclasses.fake_tensor import FakeTensorMode

import regard
from memory import peak_bytes
from regard import masks
from regard.backends import ALL


def tensors(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    return [torch.randn(*sizes, generator=made, dtype=dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("backend", ["blockwise", "sdpa", "eager"])
def test_autocast_rounds_the_inputs_and_nothing_inside(backend: str) -> None:
    q, k, v = tensors(2, 4, 63, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = regard.attention(q, k, v, mask=masks.causal(), backend=backend)
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    low = [t.detach().bfloat16().requires_grad_() for t in (q, k, v)]
    expected = regard.attention(*low, mask=masks.causal(), backend=backend)
    assert torch.equal(out, expected)
    for found, wanted in zip(grads, torch.autograd.grad(expected.float().sum(), low), strict=True):
        torch.testing.assert_close(found, wanted.float())


@pytest.mark.parametrize("backend", ["blockwise", "sdpa"])
def test_offsets_changed_before_the_backward_pass_are_refused(backend: str) -> None:
    q, k, v = tensors(2, 4, 7, 16)
    offset = torch.tensor([0, 2])
    out = regard.attention(q, k, v, mask=masks.causal(), query_offset=offset, backend=backend)
    offset += 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_causal_with_more_keys_than_queries_is_a_rectangle_and_a_flagged_triangle() -> None:
    query, key = torch.randn(1, 8, 1000, 64), torch.randn(1, 8, 1111, 64)
    call = prepare(query, key, key, masks.causal(), None, None, None, None, 0.0, None)
    steps = ALL["sdpa"].plan_steps(call)  # type: ignore[attr-defined]
    assert [(step.kind, step.rows, step.width) for step in steps] == [("rect", 1000, 111), ("triangle", 1000, 1000)]


@pytest.mark.parametrize("mask", [masks.strided(3), ~masks.strided(3)], ids=str)
def test_a_large_mask_is_never_built_whole(mask: masks.Mask) -> None:
    query = torch.randn(1, 2, 8192, 8)
    assert peak_bytes(lambda: regard.attention(query, query, query, mask=mask)) < 8192 * 8192 / 2


@pytest.mark.parametrize("backend", ["blockwise", "sdpa", "eager", "reference"])
@pytest.mark.parametrize("sink", [-torch.inf, torch.inf])
def test_infinite_sinks_take_nothing_or_everything(backend: str, sink: float) -> None:
    q, k, v = (t.detach() for t in tensors(2, 4, 7, 16))
    mask, sinks = masks.padding([0, 5]), torch.full((4,), sink)
    out = regard.attention(q, k, v, mask=mask, sinks=sinks, backend=backend)
    expected = regard.attention(q, k, v, mask=mask, backend=backend) if sink < 0 else torch.zeros_like(q)
    torch.testing.assert_close(out, expected)


def test_statistics_do_not_see_a_key_hidden_by_the_bias() -> None:
    q, k, v = (t.detach() for t in tensors(2, 4, 63, 16))
    bias = torch.zeros(63)
    bias[2] = -torch.inf
    clean = regard.observe(q, k, v, bias=bias, want=regard.Want.all())
    k[:, :, 2] = torch.nan
    seen = regard.observe(q, k, v, bias=bias, want=regard.Want.all())
    for name in ("entropy", "max_weight", "key_mass", "map", "distance", "weights", "top_keys", "first_mass"):
        assert torch.equal(getattr(seen, name), getattr(clean, name)), name


def test_kept_pairs_of_a_tensor_mask_count_every_item() -> None:
    mask = masks.keep(torch.ones(13, 37, dtype=torch.bool))
    assert mask.kept_pairs(13, 37, torch.tensor([20, -4]), 2, 4) == (2 * 4 * 13 * 37, True)


def test_a_nan_key_reaches_the_query_gradient_of_the_rows_that_use_it_alone() -> None:
    q, k, v = tensors(1, 2, 33, 16)
    key = k.detach().clone()
    key[0, 0, 5, 3] = torch.nan
    out = regard.attention(q, key, v, mask=masks.causal())
    assert torch.equal(out.isnan().any(-1).nonzero(), torch.tensor([[0, 0, row] for row in range(5, 33)]))
    grad = torch.autograd.grad(out[:, :, :20].square().sum(), q)[0]
    assert torch.equal(grad.isnan().any(-1).nonzero(), torch.tensor([[0, 0, row] for row in range(5, 20)]))


def test_observe_ignores_tangents_and_out_carries_them() -> None:
    q, k, v = (t.detach() for t in tensors(1, 2, 7, 16))
    with forward_ad.dual_level():
        seen = regard.observe(forward_ad.make_dual(q, torch.ones_like(q)), k, v, mask=masks.causal())
        assert forward_ad.unpack_dual(seen.out).tangent is not None
        assert forward_ad.unpack_dual(seen.entropy).tangent is None


def test_observe_says_that_it_cannot_be_transformed() -> None:
    q, _, _ = tensors(1, 1, 2, 7, 16)
    with pytest.raises(regard.Refused, match="vmap"):
        torch.vmap(lambda x: regard.observe(x, x, x).out)(q)


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.causal() & masks.window(3), masks.strided(2)])
def test_tensors_without_values_get_shapes_and_leave_nothing_behind(mask: masks.Mask | None) -> None:
    with FakeTensorMode():
        x = torch.randn(2, 4, 63, 16)
        assert regard.attention(x, x, x, mask=mask).shape == x.shape
    for backend in ("auto", "eager", "blockwise"):
        x = torch.empty(2, 4, 63, 16, device="meta")
        assert regard.attention(x, x, x, mask=mask, backend=backend).shape == x.shape
    x = torch.randn(2, 4, 63, 16)
    assert torch.isfinite(regard.attention(x, x, x, mask=mask)).all()


def test_a_default_device_does_not_move_what_masks_are_made_of() -> None:
    with torch.device("meta"):
        mask = masks.padding([3, 7]) & masks.random_blocks(1, 2, 3) & masks.documents(lengths=[4, 5])
    x = torch.randn(2, 4, 9, 16)
    assert regard.attention(x, x, x, mask=mask).shape == x.shape


def test_plans_and_observations_can_be_pickled() -> None:
    x = torch.randn(2, 4, 9, 16)
    seen = pickle.loads(pickle.dumps(regard.observe(x, x, x, mask=masks.causal())))
    assert seen.plan.backend == "sdpa"
    assert seen.plan.cost.kept_pairs == 2 * 4 * 45


def test_numbers_of_numpy_are_numbers_and_booleans_are_not() -> None:
    x = torch.randn(2, 4, 9, 16)
    ours = regard.attention(x, x, x, scale=0.5, query_offset=3, mask=masks.causal())
    assert torch.equal(
        regard.attention(x, x, x, scale=np.float32(0.5), query_offset=np.int64(3), mask=masks.causal()), ours
    )
    for name in ("scale", "dropout", "softcap", "query_offset"):
        with pytest.raises(TypeError, match=name):
            regard.attention(x, x, x, **{name: True})
    for name, value in (("softcap", 1e39), ("scale", 10**400), ("query_offset", 2**63)):
        with pytest.raises(ValueError, match=name):
            regard.attention(x, x, x, **{name: value})
    with pytest.raises(TypeError, match="backend"):
        regard.attention(x, x, x, backend=["sdpa"])


def test_left_padding_by_small_integers_does_not_wrap() -> None:
    mask = masks.padding(torch.tensor([5], dtype=torch.uint8), side="left")
    assert mask.dense(2, 300).sum() == 10


@pytest.mark.parametrize("size", [5, 130])
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_inputs_made_from_each_other_get_each_gradient_once(
    size: int, mask: masks.Mask | None, softcap: float | None
) -> None:
    x = torch.randn(1, 2, size, 7, dtype=torch.float64, requires_grad=True)
    for make in (lambda x: (x, x, x), lambda x: (x, 2 * x, x * x)):
        found = {}
        for backend in ("auto", "eager"):
            out = regard.attention(*make(x), mask=mask, softcap=softcap, backend=backend)
            (plain,) = torch.autograd.grad(out.square().sum(), x, retain_graph=True)
            (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), x)
            found[backend] = plain, first.detach(), second
        for mine, theirs in zip(found["auto"], found["eager"], strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-10 * float(theirs.abs().max()))


def test_a_second_derivative_of_one_input_alone() -> None:
    q, k, v = (torch.randn(1, 2, 5, 7, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for leaf in (q, k, v):
        found = []
        for backend in ("auto", "eager"):
            out = regard.attention(q, k, v, backend=backend)
            (first,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
        assert torch.allclose(*found, rtol=0, atol=1e-10)


def test_rows_that_see_huge_keys_pass_gradients_on_once_where_inputs_are_made_from_each_other() -> None:
    x = torch.randn(1, 1, 5, 4, dtype=torch.float64)
    x[0, 0, 2] = -1e155 * x[0, 0, 4].sign()  # the last row sees it, with a logit of -inf
    x.requires_grad_()
    grads = []
    for q, k, v in ((x, x, x), (x * 1, x * 1, x * 1), (x, 1 * x, x)):
        out = regard.attention(q, k, v, mask=masks.causal())
        grads.append(torch.autograd.grad(out[:, :, [0, 1, 4]].sin().sum(), x)[0])
    assert torch.equal(grads[0].isfinite(), grads[1].isfinite())
    assert torch.allclose(grads[0], grads[1], rtol=0, atol=1e-12, equal_nan=True)
    assert torch.allclose(grads[2], grads[1], rtol=0, atol=1e-12, equal_nan=True)
