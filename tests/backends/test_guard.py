"""What is hidden does not leak, and what is seen is not hidden: NaN, infinities and overflow in keys and values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard
from core_calls import BACKENDS, prepare, tensors
from regard import masks
from regard.backends import _guard
from regard.backends.sdpa import Sdpa

L, S = 63, 111
POISON = [float("nan"), float("inf"), -float("inf")]


def hide(column: int) -> dict[str, dict[str, object]]:
    """Ways to hide one key from every query."""
    allowed = torch.ones(S, dtype=torch.bool)
    allowed[column] = False
    bias = torch.zeros(S, dtype=torch.float64)
    bias[column] = -torch.inf
    return {
        "keep": {"mask": masks.keep(allowed)},
        "bias": {"bias": bias},
        "padding": {"mask": masks.padding([column, column])},
        "causal": {"mask": masks.causal(), "query_offset": column - L},
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("route", list(hide(70)))
@pytest.mark.parametrize("poison", POISON)
def test_poison_behind_a_mask_changes_no_bit_and_no_gradient(poison: float, route: str, backend: str) -> None:
    given = hide(70)[route]
    inputs = tensors(2, 4, 2, L, S, 8, grad=True)
    query, key, value = inputs
    clean = regard.attention(*inputs, backend=backend, **given)
    grads = torch.autograd.grad(clean.square().sum(), inputs)
    for which in (key, value):
        with torch.no_grad():
            bad = which.clone()
            bad[:, :, 70:71] = poison
        bad.requires_grad_()
        poisoned = (query, bad, value) if which is key else (query, key, bad)
        out = regard.attention(*poisoned, backend=backend, **given)
        assert torch.equal(out, clean)
        made = torch.autograd.grad(out.square().sum(), poisoned)
        for grad, plain in zip(made, grads, strict=True):
            assert torch.allclose(grad, plain, rtol=0, atol=1e-12)
        assert not made[1][:, :, 70].any() and not made[2][:, :, 70].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_nan_reaches_exactly_the_rows_that_use_it(which: int, backend: str) -> None:
    inputs = [t.clone() for t in tensors(2, 4, 2, L, S, 8)]
    mask = masks.causal() & masks.window(left=20)
    inputs[which][1, 0, 30, 3] = torch.nan
    out = regard.attention(*inputs, mask=mask, backend=backend)
    touched = torch.zeros(2, 4, L, dtype=torch.bool)
    if which == 0:
        touched[1, 0, 30] = True
    else:
        touched[1, :2] = mask.dense(L, S)[:, 30]
    assert torch.equal(out.isnan().any(-1), touched)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_see_poison_leave_the_gradients_of_the_others_alone(backend: str) -> None:
    query, key, value = tensors(1, 2, 1, L, L, 8, grad=True)
    with torch.no_grad():
        bad = key.clone()
        bad[:, :, 40] = torch.nan
    bad.requires_grad_()
    rows = slice(0, 40)
    out = regard.attention(query, bad, value, mask=masks.causal(), backend=backend)[:, :, rows]
    made = torch.autograd.grad(out.square().sum(), (query, bad, value))
    clean = regard.attention(query, key, value, mask=masks.causal(), backend=backend)[:, :, rows]
    for grad, plain in zip(made, torch.autograd.grad(clean.square().sum(), (query, key, value)), strict=True):
        assert torch.allclose(grad, plain, rtol=0, atol=1e-12)


def overflowing() -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = tensors(1, 2, 1, 5, 7, 8, dtype=torch.float32)
    return query.abs() * 1e25, key.abs() * torch.where(torch.arange(7) == 3, 1e25, 1.0).view(-1, 1), value


@pytest.mark.parametrize("backend", BACKENDS)
def test_products_that_overflow_behind_a_mask_are_harmless(backend: str) -> None:
    query, key, value = overflowing()
    seen = torch.arange(7) != 3
    out = regard.attention(query, key, value, mask=masks.keep(seen), backend=backend)
    alone = regard.attention(query, key[:, :, seen], value[:, :, seen], backend="eager")
    assert torch.allclose(out, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_a_bias_without_meaning_raises(bad: float, backend: str) -> None:
    bias = torch.zeros(5, 7, dtype=torch.float64)
    bias[2, 3] = bad
    with pytest.raises(ValueError, match=r"bias holds (NaN|\+inf).*-inf to hide a pair"):
        regard.attention(*tensors(), bias=bias, backend=backend)


def test_second_derivatives_pass_through_the_careful_path() -> None:
    query, key, value = tensors(1, 2, 1, 4, 5, 3)
    value[:, :, 2, 0] = torch.nan
    mask = masks.keep(torch.arange(5) != 2)

    def run(q: Tensor, k: Tensor) -> Tensor:
        return regard.attention(q, k, value, mask=mask)

    inputs = query.requires_grad_(), key.requires_grad_()
    assert torch.autograd.gradcheck(run, inputs) and torch.autograd.gradgradcheck(run, inputs)


def test_the_careful_path_in_many_chunks_gives_what_one_chunk_gives() -> None:
    """Two heads of 211 rows see the bad value, over 1031 keys of 64: seven chunks. 31 queries of both are one."""
    queries, keys = 211, 1031
    query, key, value = tensors(2, 4, 2, queries, keys, 64, dtype=torch.float32, grad=True)
    with torch.no_grad():
        value[0, 0, 50, 1] = torch.inf
    sinks, added = torch.randn(4), torch.randn(queries, keys)

    def run(rows: slice) -> tuple[Tensor, ...]:
        given = {"mask": masks.causal(), "softcap": 3.0, "sinks": sinks, "bias": added[rows]}
        out = regard.attention(query[:, :, rows], key, value, query_offset=keys - queries + rows.start, **given)
        finite = torch.where(out.isfinite(), out, 0.0)
        return out.detach(), *torch.autograd.grad(finite.sum(), (query, key, value))

    parts = [run(slice(start, min(start + 31, queries))) for start in range(0, queries, 31)]
    outs, *grads = zip(*parts, strict=True)
    expected = torch.cat(outs, 2), *(torch.stack(each).sum(0) for each in grads)
    assert not expected[0].isfinite().all()
    for one, other in zip(run(slice(0, queries)), expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("backend", ["eager", "blockwise"])
def test_dropout_on_the_careful_path_drops_the_same_weights(backend: str) -> None:
    query, key, value = tensors(1, 2, 1, L, S, 8)
    torch.manual_seed(3)
    plain = regard.attention(query, key, value, mask=masks.causal(), dropout=0.5, backend=backend)
    value[:, :, 60, 0] = torch.inf
    torch.manual_seed(3)
    out = regard.attention(query, key, value, mask=masks.causal(), dropout=0.5, backend=backend)
    assert not out.isfinite().all()
    # the other columns of the value know nothing of the infinite one
    assert torch.allclose(out[..., 1:], plain[..., 1:], rtol=0, atol=1e-12)


def test_keys_hidden_from_a_whole_item_are_neutralised_where_nothing_may_be_read() -> None:
    query, key, value = tensors(2, 4, 2, L, S, 8)
    clean = regard.attention(query, key, value, mask=masks.padding([60, 111]))
    key[0, :, 60:], value[0, :, 60:] = torch.nan, torch.inf
    mapped = torch.func.vmap(lambda q, k, v, n: regard.attention(q[None], k[None], v[None], mask=masks.padding(n))[0])
    out = mapped(query, key, value, torch.tensor([[60], [111]]))
    assert torch.allclose(out, clean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 1, 1, S), (1, 4, 1, S), (S,)])
def test_so_are_keys_that_a_bias_hides_from_every_query_and_head(shape: tuple[int, ...]) -> None:
    query, key, value = tensors(2, 4, 2, L, S, 8)
    bias = torch.randn(shape, dtype=torch.float64)
    bias[..., 60:70] = -torch.inf
    if shape[0] == 1:
        bias[:, 0, :, 80] = -torch.inf  # seen by the other heads
    call = prepare(query, key, value, None, bias, None, None, None, 0.0, None)
    clean, lost = _guard.cleaned(Sdpa(), call)
    hidden = torch.zeros(S, dtype=torch.bool)
    hidden[60:70] = True
    assert lost is None
    for before, after in ((key, clean.key), (value, clean.value)):
        assert torch.equal(after, before.masked_fill(hidden[:, None], 0.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_never_changed(backend: str) -> None:
    inputs = tensors(2, 4, 2, L, S, 8)
    inputs[1][0, 0, 70] = torch.nan
    allowed, bias = torch.rand(L, S) > 0.3, torch.randn(L, S, dtype=torch.float64)
    before = [t.clone() for t in (*inputs, allowed, bias)]
    regard.attention(*inputs, mask=masks.keep(allowed), bias=bias, backend=backend)
    assert all(
        torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(before, (*inputs, allowed, bias), strict=True)
    )


@pytest.mark.parametrize("backend", ["eager", "blockwise", "sdpa", "auto"])
@pytest.mark.parametrize(
    "dtype, huge", [(torch.float32, 2e38), (torch.bfloat16, 2e38), (torch.float64, 1e308)], ids=str
)
def test_a_huge_hidden_value_disturbs_no_gradient(backend, dtype, huge):
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(1, 2, 128, 8, generator=generator).to(dtype) for _ in range(3)]
    found = []
    for content in (0.0, huge):
        query, key, value = (tensor.clone() for tensor in plain)
        value[:, :, 100] = content
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        out = regard.attention(*leaves, mask=masks.causal(), backend=backend)
        found.append(torch.autograd.grad(out[:, :, :100].sum(), leaves))
    for without, with_it in zip(*found, strict=True):
        assert torch.equal(without, with_it)


def test_a_bias_by_rule_needs_no_values_to_be_read():
    given = tensors(1, 4, 4, 9, 9, 8)
    call = prepare(*given, masks.padding([7]), regard.bias.alibi(4), None, None, None, 0.0, None)
    cleaned, lost = _guard.cleaned(Sdpa(), call)
    assert lost is None
    assert not cleaned.key[:, :, 7:].any() and torch.equal(cleaned.key[:, :, :7], call.key[:, :, :7])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("keys", [1, 5, 17])
def test_a_call_of_nothing_but_nan_gives_nan(keys: int, which: int, backend: str) -> None:
    inputs = [t.clone() for t in tensors(2, 4, 2, keys, keys, 8)]
    inputs[which].fill_(float("nan"))
    for mask in (None, masks.causal(), masks.padding([keys, 1])):
        for grad in (False, True):
            given = [t.clone().requires_grad_(grad) for t in inputs]
            assert regard.attention(*given, mask=mask, backend=backend).isnan().all()
            seen = regard.observe(*given, mask=mask, backend=backend)
            assert seen.out.isnan().all()
            if which < 2:
                assert seen.lse.isnan().all() and seen.entropy.isnan().all()


def test_nan_weights_show_in_modules_caches_and_compat() -> None:
    module = regard.nn.MultiHeadAttention(8, 2)
    torch.nn.init.constant_(module.k_proj.weight, float("nan"))
    assert module(torch.ones(1, 5, 8)).isnan().all()
    for mask in (None, masks.causal()):
        with torch.no_grad():
            assert module(torch.ones(1, 1, 8), mask=mask, cache=regard.cache.KVCache(4)).isnan().all()
            assert module(torch.ones(1, 3, 8), mask=mask).isnan().all()
    query, key = torch.ones(1, 2, 3, 8), torch.full((1, 2, 5, 8), float("nan"))
    assert regard.compat.scaled_dot_product_attention(query, key, query.new_ones(1, 2, 5, 8)).isnan().all()


def test_hidden_numbers_change_no_bit_beside_sinks() -> None:
    query, key, value = (torch.randn(1, 4, 33, 1, generator=torch.Generator().manual_seed(n)) for n in range(3))
    changed = key.clone()
    changed[:, :, 0] = 0.0  # the log-sum-exp of the only row that sees it becomes exactly 0
    for mask in (masks.window(left=0), masks.causal() & masks.window(left=0)):
        given = {"mask": mask, "sinks": torch.linspace(-1, 1, 4), "backend": "sdpa"}
        before, after = (regard.attention(query, k, value, **given) for k in (key, changed))
        assert torch.equal(before[:, :, 1:], after[:, :, 1:])
    # the same where no mask is added: the triangle of the causal flag
    given = {"mask": masks.causal(), "sinks": torch.linspace(-1, 1, 4), "backend": "sdpa"}
    last = value.clone()
    last[:, :, 1:] = 0.0
    query[:, :, 0] = 0.0  # as above, for the first row
    hidden = key.clone()
    hidden[:, :, 32] = 5.0
    before, after = (regard.attention(query, k, last, **given) for k in (key, hidden))
    assert torch.equal(before[:, :, :32], after[:, :, :32])


@pytest.mark.parametrize("asked", [(True, True, True), (True, False, False), (False, True, False), (False, True, True)])
@pytest.mark.parametrize("poison", [*POISON, 1e300])
def test_poison_that_shows_in_a_small_calls_gradients_alone_reaches_none_of_them(
    poison: float, asked: tuple[bool, ...]
) -> None:
    def derivatives(key: Tensor) -> list[Tensor]:
        given = [x.clone().requires_grad_(need) for x, need in zip((query, key, value), asked, strict=True)]
        out = regard.attention(*given, mask=masks.padding([5, 4]))
        wanted = [x for x in given if x.requires_grad]
        first = torch.autograd.grad(out.square().sum(), wanted, retain_graph=True)
        once_more = torch.autograd.grad(out.square().sum(), wanted, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in once_more), wanted)
        return [*first, *once_more, *second]

    query, key, value = tensors(2, 3, 3, 5, 7, 8)
    bad = key.clone()
    bad[0, :, 5:, 1] = bad[1, :, 4:] = poison
    for made, clean in zip(derivatives(bad), derivatives(key), strict=True):
        torch.testing.assert_close(made, clean, rtol=0, atol=1e-11)


def test_a_bad_gradient_is_not_taken_for_a_bad_key() -> None:
    query, key, value = (x.requires_grad_() for x in tensors(2, 3, 3, 5, 7, 8))
    out = regard.attention(query, key, value, mask=masks.padding([5, 4]))
    grad = torch.ones_like(out)
    grad[0, 1, 2, 3] = torch.nan
    (made,) = torch.autograd.grad(out, query, grad)
    assert made.isnan().any(-1).nonzero().tolist() == [[0, 1, 2]]


def test_several_backward_passes_at_once_through_a_small_masked_call() -> None:
    inputs = tensors(2, 3, 3, 7, 7, 8, grad=True)
    out = regard.attention(*inputs, mask=masks.causal())
    grads = torch.randn(3, *out.shape, dtype=out.dtype)
    made = torch.autograd.grad(out, inputs, grads, is_grads_batched=True, retain_graph=True)
    for at, grad in enumerate(grads):
        for one, all_of_it in zip(torch.autograd.grad(out, inputs, grad, retain_graph=True), made, strict=True):
            torch.testing.assert_close(all_of_it[at], one)
