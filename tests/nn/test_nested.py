from __future__ import annotations

import warnings

import pytest
import torch
from tests.nn.helpers import build, close, random

from regard import masks
from regard.nn import AttentionSublayer

LENGTHS = (5, 1, 11, 0, 7)


def nest(items, **keywords):
    return torch.nested.nested_tensor([x.detach() for x in items], layout=torch.jagged, **keywords)


def same(nested, items, tolerance=1e-12):
    parts = nested.unbind()
    return len(parts) == len(items) and all(close(a, b, tolerance) for a, b in zip(parts, items, strict=True))


# Rules that depend on distance only, and rules that depend on where a token stands in its item.
RULES = {
    "none": None,
    "causal": masks.causal(),
    "local": masks.causal() & masks.window(left=2),
    "strided": ~masks.strided(2) | masks.window(left=0),
    "columns": masks.columns(2),
    "prefix": masks.causal() | masks.prefix(3),
    "blocks": masks.blocks(torch.eye(4, dtype=torch.bool), 3),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_nested_batch_equals_each_item_alone_with_positions_restarting(rule, packed):
    module = build(44, 4, packed=packed, num_kv_heads=2)
    items = [random(n, 44) for n in LENGTHS]
    out = module(nest(items), mask=rule)
    assert out.is_nested and out.layout == torch.jagged
    assert same(out, [module(x[None], mask=rule)[0] for x in items])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_gradients_flow_through_nested_input(rule):
    module = build(44, 4)
    items = [random(n, 44, grad=True) for n in LENGTHS]
    nested = nest(items, requires_grad=True)
    parameters = list(module.parameters())
    found = torch.autograd.grad(module(nested, mask=rule).values().square().sum(), [nested, *parameters])
    total = sum(module(x[None], mask=rule).square().sum() for x in items)
    expected = torch.autograd.grad(total, [*items, *parameters])
    assert same(found[0], expected[: len(items)])
    assert all(close(a, b, 1e-10) for a, b in zip(found[1:], expected[len(items) :], strict=True))


@pytest.mark.parametrize("rule", [None, masks.causal(), masks.columns(2), masks.window(left=3, right=1)])
def test_nested_cross_attention_with_lengths_of_its_own(rule):
    module = build(44, 4, key_dim=9, value_dim=13)
    queries = [random(n, 44, grad=True) for n in LENGTHS]
    keys = [random(n, 9) for n in (3, 7, 0, 5, 7)]
    values = [random(n, 13) for n in (3, 7, 0, 5, 7)]
    nested_key = nest(keys)
    nested_value = torch.nested.nested_tensor_from_jagged(torch.cat(values), offsets=nested_key.offsets())
    nested = nest(queries, requires_grad=True)
    out = module(nested, nested_key, nested_value, mask=rule)
    alone = [module(q[None], k[None], v[None], mask=rule)[0] for q, k, v in zip(queries, keys, values, strict=True)]
    assert same(out, alone)
    (found,) = torch.autograd.grad(out.values().square().sum(), nested)
    assert same(found, torch.autograd.grad(sum(x.square().sum() for x in alone), queries))


def test_nested_cross_attention_with_equal_lengths_made_apart():
    module = build(44, 4)
    queries, keys = ([random(n, 44) for n in LENGTHS] for _ in range(2))
    out = module(nest(queries), nest(keys), mask=masks.causal())
    assert same(out, [module(q[None], k[None], mask=masks.causal())[0] for q, k in zip(queries, keys, strict=True)])


def test_a_bias_indexes_the_padded_batch():
    module = build(44, 4)
    items, bias = [random(n, 44) for n in LENGTHS], random(1, 4, 11, 11)
    out = module(nest(items), bias=bias)
    assert same(out, [module(x[None], bias=bias[..., : len(x), : len(x)])[0] for x in items])


def test_the_output_adds_to_the_input():
    module = build(44, 4)
    nested = nest([random(n, 44) for n in LENGTHS])
    assert (nested + module(nested)).is_nested
    assert (nested + module(nested, mask=masks.columns(2))).is_nested


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_sublayer_takes_nested_input(norm):
    layer = AttentionSublayer(44, 4, norm=norm, dtype=torch.float64)
    items = [random(n, 44) for n in LENGTHS if n]
    assert same(layer(nest(items), mask=masks.causal()), [layer(x[None], mask=masks.causal())[0] for x in items])


def test_nested_input_with_holes():
    module = build(44, 4)
    x = random(3, 7, 44)
    holes = torch.nested.narrow(x, 1, torch.tensor([1, 0, 2]), torch.tensor([3, 7, 4]), layout=torch.jagged)
    out = module(holes, mask=masks.causal())
    assert same(out, [module(part[None], mask=masks.causal())[0] for part in (x[0, 1:4], x[1], x[2, 2:6])])


def test_mixing_nested_and_padded_is_refused():
    module = build(44, 4)
    nested = nest([random(n, 44) for n in LENGTHS])
    with pytest.raises(TypeError, match="query nested but key and value padded"):
        module(nested, random(5, 7, 44))
    with pytest.raises(TypeError, match="key and value nested but query padded"):
        module(random(5, 7, 44), nested)


def test_other_nested_input_is_refused_by_name():
    module = build(44, 4)
    items = [random(n, 44) for n in LENGTHS]
    with pytest.raises(TypeError, match=r"layout=torch\.jagged"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch recommends the same
        module(torch.nested.as_nested_tensor(items, layout=torch.strided))
    with pytest.raises(ValueError, match="same number of items"):
        module(nest(items), nest(items[:3]))
    with pytest.raises(ValueError, match="key and value must have the same lengths"):
        module(nest(items), nest(items), nest(items[::-1]))
    with pytest.raises(ValueError, match="cache takes padded"):
        module(nest(items), cache=object())
