"""What the constructors and `check` refuse, and that they say why (rules 1, 2, 12, 23)."""

from __future__ import annotations

import pytest
import torch

from regard import masks

BITS = torch.ones(3, 5, dtype=torch.bool)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("name", ["keep", "drop"])
def test_integer_masks_are_refused_by_name_with_both_conventions(name, dtype):
    with pytest.raises(TypeError, match=rf"masks\.{name}.*True = may attend.*True = forbidden.*MultiheadAttention"):
        getattr(masks, name)(torch.ones(3, 5, dtype=dtype))


@pytest.mark.parametrize("name", ["keep", "drop"])
def test_a_float_tensor_is_a_bias_never_a_mask(name):
    with pytest.raises(TypeError, match=rf"masks\.{name}.*bias=.*from_additive"):
        getattr(masks, name)(torch.zeros(3, 5))


@pytest.mark.parametrize("name", ["keep", "drop", "from_additive"])
@pytest.mark.parametrize("value", [[[True]], None, 3, masks.causal()])
def test_what_is_not_a_tensor_is_refused(name, value):
    with pytest.raises(TypeError, match=rf"masks\.{name}: expected a tensor"):
        getattr(masks, name)(value)


@pytest.mark.parametrize("name", ["keep", "drop"])
@pytest.mark.parametrize("shape", [(), (2, 3, 5), (1, 1, 1, 3, 5)])
def test_other_ranks_are_refused(name, shape):
    with pytest.raises(ValueError, match=r"\[S\], \[L, S\] or \[B or 1, H or 1, L or 1, S or 1\]"):
        getattr(masks, name)(torch.ones(shape, dtype=torch.bool))


def test_from_additive_refuses_booleans_and_names_both_conventions():
    with pytest.raises(TypeError, match=r"masks\.from_additive.*masks\.keep.*masks\.drop.*Two conventions"):
        masks.from_additive(BITS)


@pytest.mark.parametrize("odd", [-1e9, 1.0, float("nan"), float("inf"), -1e-30])
def test_from_additive_refuses_other_numbers_and_names_bias(odd):
    added = torch.zeros(3, 5)
    added[1, 2] = odd
    with pytest.raises(ValueError, match="bias="):
        masks.from_additive(added)


def test_from_additive_refuses_a_tensor_that_requires_grad():
    with pytest.raises(ValueError, match="requires grad.*bias="):
        masks.from_additive(torch.zeros(3, 5, requires_grad=True))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: masks.window(-1), ValueError, "window: left .* got -1"),
        (lambda: masks.window(1, right=-2), ValueError, "window: right .* got -2"),
        (lambda: masks.window(1.5), TypeError, "window: left must be an int, got float"),
        (lambda: masks.window(True), TypeError, "window: left must be an int, got bool"),
        (lambda: masks.window(2**63), ValueError, "window: left"),
        (lambda: masks.prefix(-1), ValueError, "prefix: n"),
        (lambda: masks.columns("3"), TypeError, "columns: n must be an int, got str"),
        (lambda: masks.columns(torch.tensor(3)), TypeError, "columns: n must be an int, got an int64 tensor"),
        (lambda: masks.strided(0), ValueError, "strided: s must be in 1"),
        (lambda: masks.padding([3, -1]), ValueError, "lengths must be at least 0, got -1"),
        (lambda: masks.padding([3, 1.5]), TypeError, "padding: lengths must hold integers"),
        (lambda: masks.padding([True]), TypeError, "padding: lengths must hold integers"),
        (lambda: masks.padding(3), TypeError, "list of ints or an integer tensor"),
        (lambda: masks.padding(torch.ones(3)), TypeError, "padding: lengths must hold integers, got a float32"),
        (lambda: masks.padding(BITS), TypeError, "padding: lengths must hold integers, got a bool"),
        (lambda: masks.padding(torch.ones(3, 2, dtype=torch.int64)), ValueError, r"1 dimension.*\[3, 2\]"),
        (lambda: masks.padding([3], side="top"), ValueError, "side must be .*got 'top'"),
        (lambda: masks.documents(), TypeError, "either lengths= or ids=, got neither"),
        (lambda: masks.documents([3], ids=[0, 0, 0]), TypeError, "either lengths= or ids=, got both"),
        (lambda: masks.documents(lengths=[3, -2]), ValueError, "at least 0, got -2"),
        (lambda: masks.documents(ids=[0, -2]), ValueError, "at least -1, got -2"),
        (lambda: masks.documents(ids=torch.zeros(1, 2, 3).long()), ValueError, "1 or 2 dimension"),
        (lambda: masks.blocks(torch.ones(3, 5), 2), TypeError, "table must be a bool tensor .*got a float32"),
        (lambda: masks.blocks([[True]], 2), TypeError, "table must be a bool tensor"),
        (lambda: masks.blocks(BITS[0], 2), ValueError, r"got shape \[5\]"),
        (lambda: masks.blocks(BITS, 0), ValueError, "blocks: size must be in 1"),
        (lambda: masks.random_blocks(-1, 2, 0), ValueError, "random_blocks: count"),
        (lambda: masks.random_blocks(1, 0, 0), ValueError, "random_blocks: size"),
        (lambda: masks.random_blocks(1, 2, 0.5), TypeError, "random_blocks: seed"),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_given(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    ("mask", "sizes", "words"),
    [
        (masks.padding([3, 1, 2]), (2, 7, 3, 5), r"padding\(\[3, 1, 2\]\) is for 3 batch items, but the call has 2"),
        (masks.padding([3, 1]), (1, 7, 3, 5), "2 batch items"),
        (masks.documents(lengths=[3, 1]), (2, 7, 3, 5), "add up to 4, but the call has 5 keys"),
        (masks.documents(ids=[0, 0, 1]), (2, 7, 3, 5), "ids for 3 keys, the call has 5"),
        (masks.documents(ids=torch.zeros(3, 5).long()), (2, 7, 3, 5), "3 batch items"),
        (masks.keep(BITS), (2, 7, 4, 5), r"3 queries, but the call has 4.*\[2, 7, 4, 5\]"),
        (masks.drop(BITS), (2, 7, 3, 6), "5 keys, but the call has 6"),
        (masks.keep(BITS), (2, 7, 1, 5), "3 queries, but the call has 1"),
        (masks.keep(BITS[None, None].expand(1, 3, 3, 5)), (2, 7, 3, 5), "3 heads, but the call has 7"),
        (masks.keep(BITS[None, None].expand(1, 3, 3, 5)), (2, 1, 3, 5), "3 heads, but the call has 1"),
        (masks.from_additive(torch.zeros(2)), (2, 7, 3, 5), "2 keys, but the call has 5"),
        (masks.blocks(BITS[None, None].expand(2, 1, 3, 5), 4), (3, 7, 3, 5), "2 batch items"),
        (masks.causal() & ~masks.keep(BITS), (2, 7, 4, 5), "3 queries"),
        (masks.keep(BITS) | masks.causal(), (2, 7, 4, 5), "3 queries"),
    ],
)
def test_a_mask_that_does_not_fit_the_call_says_which_and_how(mask, sizes, words):
    with pytest.raises(ValueError, match=words):
        mask.check(*sizes)


@pytest.mark.parametrize("name", ["keep", "drop"])
def test_a_row_of_keys_for_each_item_is_told_how_to_be_four_dims(name):
    mask = getattr(masks, name)(torch.ones(2, 5, dtype=torch.bool))
    for joined in (mask, mask & masks.causal()):
        with pytest.raises(ValueError, match=r"2 queries, but the call has 3.*pass t\[:, None, None, :\]"):
            joined.check(2, 7, 3, 5)
    with pytest.raises(ValueError) as other:
        mask.check(2, 7, 3, 6)
    assert "None, None" not in str(other.value)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_padding_of_such_a_mask_names_its_lengths_and_keep(kind):
    with pytest.raises((TypeError, ValueError), match=r"t\.sum\(-1\).*masks\.keep\(t\.bool\(\)\[:, None, None, :\]\)"):
        masks.padding(torch.ones(2, 5, dtype=kind))


@pytest.mark.parametrize("name", ["keep", "drop", "from_additive"])
def test_three_dims_are_told_how_to_become_four(name):
    given = torch.zeros(2, 3, 5, dtype=torch.float32 if name == "from_additive" else torch.bool)
    with pytest.raises(ValueError, match=r"got \[2, 3, 5\]: reshape it to \[B, H, L, S\].*t\[:, None\].*unflatten"):
        getattr(masks, name)(given)


@pytest.mark.parametrize("name", ["keep", "drop", "from_additive"])
def test_an_array_is_told_how_to_become_a_tensor(name):
    with pytest.raises(TypeError, match=r"got ndarray: wrap it in torch\.from_numpy"):
        getattr(masks, name)(BITS.numpy())


@pytest.mark.parametrize("sizes", [(-1, 3), (3, -1)])
def test_dense_and_show_refuse_sizes_below_zero(sizes):
    for draw in (masks.causal().dense, masks.causal().show):
        with pytest.raises(ValueError, match=f"at least 0, got L={sizes[0]} and S={sizes[1]}"):
            draw(*sizes)


def test_a_mask_that_fits_passes_the_check():
    for mask in (masks.padding([3, 1]), masks.keep(BITS), masks.keep(BITS[:1, None, None]), masks.documents([2, 3])):
        (mask & masks.causal()).check(2, 7, 3, 5) if mask.batch == 2 else mask.check(2, 7, 3, 5)


def test_joining_masks_for_different_batches_names_both():
    with pytest.raises(ValueError, match="2 batch items.*3 batch items"):
        masks.padding([1, 2]) & masks.padding([1, 2, 3])


def test_dense_and_show_check_the_sizes_too():
    with pytest.raises(ValueError, match="3 queries"):
        masks.keep(BITS).dense(4, 5)
    with pytest.raises(ValueError, match="add up to 4"):
        masks.documents([4]).show(4, 5)


def test_a_mask_has_no_truth_value():
    for use in (lambda: bool(masks.causal()), lambda: masks.causal() and masks.window(3), lambda: not masks.causal()):
        with pytest.raises(TypeError, match=r"& \| ~"):
            use()


@pytest.mark.parametrize("other", [BITS, None, True, 3])
def test_joining_with_something_else_names_keep_and_drop(other):
    for use in (lambda: masks.causal() & other, lambda: masks.causal() | other):
        with pytest.raises(TypeError, match=r"masks\.keep.*masks\.drop"):
            use()


def test_a_tensor_on_the_left_of_a_mask_is_refused():
    with pytest.raises(TypeError):
        BITS & masks.causal()
    with pytest.raises(TypeError):
        BITS | masks.causal()


def test_a_tile_refuses_a_step():
    with pytest.raises(ValueError, match="neighbouring"):
        masks.causal().tile(range(0, 4, 2), range(4), 4, 4, offset=0)
