"""What the modules refuse, in the caller's names, dtypes and shapes (rule 23)."""

from __future__ import annotations

import pytest
import torch
from tests.nn.helpers import random
from torch import nn

from regard.nn import AttentionSublayer, MultiHeadAttention


def single(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16, torch.int64])
def test_an_input_of_another_dtype_is_named_with_the_modules(kind, packed):
    module, x = MultiHeadAttention(44, 4, packed=packed), single(3, 7, 44)
    name = str(kind).removeprefix("torch.")
    for given, argument in (((x.to(kind),), "query"), ((x, x.to(kind)), "key"), ((x, x, x.to(kind)), "value")):
        with pytest.raises(TypeError, match=f"{argument} is {name} but the module's weights are float32"):
            module(*given)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_sublayer_names_it_before_its_norm_meets_it(norm):
    layer = AttentionSublayer(44, 4, norm=norm)
    with pytest.raises(TypeError, match="query is float64 but the module's weights are float32"):
        layer(random(3, 7, 44))
    with pytest.raises(TypeError, match="query must be a tensor .* got list"):
        layer([[1.0]])


def test_autocast_takes_what_it_casts_and_nothing_else():
    module, x = MultiHeadAttention(44, 4), single(3, 7, 44)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x).dtype == module(x.half()).dtype == module(x, x.bfloat16()).dtype == torch.bfloat16
        with pytest.raises(TypeError, match="query is float64"):
            module(x.double())


def test_a_projection_that_was_replaced_may_take_any_dtype():
    class Casting(nn.Linear):
        def forward(self, x):
            return super().forward(x.to(self.weight.dtype))

    module = MultiHeadAttention(44, 4)
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(module, name, Casting(44, 44))
    assert module(random(3, 7, 44)).dtype == torch.float32


@pytest.mark.parametrize("wrong", [[[1.0]], None, 3, "x"])
def test_an_input_that_is_no_tensor_is_named(wrong):
    module, x = MultiHeadAttention(44, 4), single(3, 7, 44)
    with pytest.raises(TypeError, match=f"query must be a tensor .* got {type(wrong).__name__}"):
        module(wrong)
    if wrong is not None:
        with pytest.raises(TypeError, match="key must be a tensor"):
            module(x, wrong)
        with pytest.raises(TypeError, match="value must be a tensor"):
            module(x, x, wrong)


SIZES = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "value_head_dim", "key_dim", "value_dim")


@pytest.mark.parametrize("wrong", [4.0, "4", True, torch.tensor(4)])
@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_is_no_int_is_named(name, wrong):
    with pytest.raises(TypeError, match=f"{name} must be an int, got"):
        MultiHeadAttention(**({"embed_dim": 44, "num_heads": 4} | {name: wrong}))


@pytest.mark.parametrize("name", SIZES)
def test_a_size_below_one_is_named(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        MultiHeadAttention(**({"embed_dim": 44, "num_heads": 4} | {name: 0}))


@pytest.mark.parametrize("name", ["dropout", "out_dropout"])
def test_a_dropout_that_is_no_number_is_named(name):
    with pytest.raises(TypeError, match=rf"{name} must be a number in \[0, 1\], got 'much'"):
        MultiHeadAttention(44, 4, **{name: "much"})


def test_positions_must_be_callable():
    with pytest.raises(TypeError, match="positions must be called as .* got str"):
        MultiHeadAttention(44, 4, positions="rotary")


def test_shapes_that_do_not_go_together_are_shown_as_they_were_given():
    module, x = MultiHeadAttention(44, 4), single(3, 7, 44)
    with pytest.raises(ValueError, match=r"one batch size.*query \[3, 7, 44\], key \[2, 5, 44\], value \[2, 5, 44\]"):
        module(x, single(2, 5, 44))
    with pytest.raises(ValueError, match=r"same number of tokens.*key \[3, 7, 44\], value \[3, 5, 44\]"):
        module(x, x, single(3, 5, 44))


class Returning:
    """A cache whose `update` returns what it is told to."""

    def __init__(self, make):
        self.make = make

    def update(self, key, value):
        return self.make(key, value)


@pytest.mark.parametrize("cache", [3, {}, Returning])
def test_a_cache_without_the_protocol_is_refused(cache):
    with pytest.raises(TypeError, match=r"cache must (follow regard\.nn\.Cache; .* no update|be an object)"):
        MultiHeadAttention(44, 4)(single(3, 7, 44), cache=cache)


def test_a_module_with_positions_asks_the_cache_for_its_position():
    module = MultiHeadAttention(44, 4, positions=lambda query, key, *, query_offset: (query, key))
    with pytest.raises(TypeError, match="Returning has no position"):
        module(single(3, 7, 44), cache=Returning(lambda key, value: (key, value, 0)))


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda key, value: None, "NoneType"),
        (lambda key, value: (key, value), r"\(Tensor, Tensor\)"),
        (lambda key, value: (key, value, 0.5), r"\(Tensor, Tensor, float\)"),
        (lambda key, value: (key, None, 0), r"\(Tensor, NoneType, int\)"),
    ],
)
def test_an_update_that_returns_something_else_is_refused(make, found):
    with pytest.raises(TypeError, match=rf"cache\.update must return \(key, value, query_offset\).* got {found}"):
        MultiHeadAttention(44, 4)(single(3, 7, 44), cache=Returning(make))
