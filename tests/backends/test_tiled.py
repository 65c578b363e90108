"""Values and gradients at sizes that cross the edges of tiles, against the oracle, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from core_calls import BACKENDS, check_against_oracle, every_mask, prepare, tensors
from regard import masks
from regard.backends import blockwise
from regard.backends._steps import Room
from regard.backends.blockwise import Blockwise

B, H, G, L, S, D = 2, 4, 2, 300, 411, 5


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def bias_with_holes() -> Tensor:
    hidden = torch.rand(B, 1, L, S) < 0.3
    hidden[1, :, 7] = True
    return torch.randn(B, 1, L, S, dtype=torch.float64).masked_fill(hidden, -torch.inf)


MODIFIERS: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "bias of rows": lambda: {"bias": random(L, 1)},
    "bias of keys": lambda: {"bias": random(H, 1, S)},
    "bias by item": lambda: {"bias": random(B, H, L, S)},
    "bias that is given": lambda: {"bias": bias_with_holes()},
    "learned bias with holes": lambda: {"bias": bias_with_holes().requires_grad_()},
    "softcap": lambda: {"softcap": 1.5},
    "sinks": lambda: {"sinks": random(H)},
    "negative scale": lambda: {"scale": -0.7},
    "scale 0": lambda: {"scale": 0.0},
    "dropout": lambda: {"dropout": 0.4},
    "an offset": lambda: {"query_offset": 200},
    "a negative offset": lambda: {"query_offset": -70},
    "an offset an item": lambda: {"query_offset": torch.tensor([150, 0])},
    "all of them": lambda: {
        "bias": random(1, H, L, S),
        "softcap": 2.0,
        "sinks": random(H),
        "scale": 0.8,
        "dropout": 0.2,
        "query_offset": torch.tensor([-5, 60]),
    },
}
UNFUSED = {
    "bias of rows",
    "bias of keys",
    "bias by item",
    "learned bias with holes",
    "softcap",
    "dropout",
    "all of them",
}


def able(modifier: str) -> list[str]:
    return [name for name in BACKENDS if name != "sdpa" or modifier not in UNFUSED]


@pytest.mark.parametrize(
    ("modifier", "backend"), [(modifier, backend) for modifier in MODIFIERS for backend in able(modifier)]
)
@pytest.mark.parametrize("kind", [None, "causal", "band and columns", "keep by head"])
def test_every_modifier_gives_the_oracles_values_and_gradients(kind: str | None, modifier: str, backend: str) -> None:
    mask = None if kind is None else every_mask(B, H, L, S)[kind]
    check_against_oracle(backend, tensors(B, H, G, L, S, D, grad=True), mask=mask, **MODIFIERS[modifier]())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", list(every_mask(B, H, L, S)))
def test_every_mask_gives_the_oracles_values_and_gradients(kind: str, backend: str) -> None:
    mask = every_mask(B, H, L, S)[kind]
    check_against_oracle(backend, tensors(B, H, G, L, S, D, grad=True), mask=mask)


@pytest.mark.parametrize("backend", ["eager", "blockwise"])
def test_a_value_dim_of_its_own_gives_the_oracles_values_and_gradients(backend: str) -> None:
    check_against_oracle(backend, tensors(B, H, G, L, S, D, V=11, grad=True), mask=masks.causal())


@pytest.mark.parametrize("L, S", [(1, 411), (63, 64), (64, 63), (65, 129), (1, 1), (1100, 7), (3, 1100)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_around_the_edges_give_the_oracles_values_and_gradients(L: int, S: int, backend: str) -> None:
    for mask in (None, masks.causal(), masks.causal() & masks.window(left=30), masks.padding([S, S // 2])):
        check_against_oracle(backend, tensors(B, H, G, L, S, D, grad=True), mask=mask)


@pytest.mark.parametrize("kind", ["causal", "window", "ids", "keep by head", "random blocks"])
def test_the_tiles_of_long_calls_merge_to_the_same_result(kind: str) -> None:
    rows, keys = 270, 1111  # two tiles of each, in which items and heads are apart
    given = {"bias": random(1, 4, rows, keys), "softcap": 3.0, "sinks": random(4), "dropout": 0.3}
    mask = every_mask(2, 4, rows, keys)[kind]
    check_against_oracle("blockwise", tensors(2, 4, 2, rows, keys, 3, grad=True), mask=mask, **given)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(left=9)], ids=str)
def test_an_expanded_gradient_and_one_with_strides_give_what_a_plain_one_gives(
    mask: masks.Mask | None, backend: str
) -> None:
    inputs = tensors(B, H, G, 63, 111, 8, grad=True)
    out = regard.attention(*inputs, mask=mask, backend=backend)
    strided = torch.randn(B, 63, H, 16, dtype=torch.float64)[..., ::2].transpose(1, 2)
    for odd in (torch.ones((), dtype=torch.float64).expand(out.shape), strided):
        found = torch.autograd.grad(out, inputs, odd, retain_graph=True)
        plain = torch.autograd.grad(out, inputs, odd.contiguous(), retain_graph=True)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("backend", ["blockwise", "sdpa"])
@pytest.mark.parametrize("argument", ["query", "key", "value", "bias", "sinks"])
def test_only_what_requires_a_gradient_receives_one(argument: str, backend: str) -> None:
    q, k, v = tensors(B, H, G, 63, 111, 8)
    given = {"query": q, "key": k, "value": v, "bias": torch.randn(63, 111).double(), "sinks": torch.randn(H).double()}
    if backend == "sdpa" and argument == "bias":
        with pytest.raises(regard.Refused, match="bias requires grad"):
            regard.attention(q, k, v, bias=given["bias"].requires_grad_(), backend=backend)
        return
    given[argument].requires_grad_()
    regard.attention(mask=masks.causal(), backend=backend, **given).sum().backward()
    assert [name for name, t in given.items() if t.grad is not None] == [argument]


@pytest.mark.parametrize("backend", ["blockwise", "sdpa"])
def test_a_mask_or_a_bias_changed_before_the_backward_pass_is_noticed(backend: str) -> None:
    inputs = tensors(grad=True)
    allowed, bias = torch.rand(5, 7) > 0.4, torch.randn(5, 7, dtype=torch.float64)
    for changed in (allowed, bias):
        out = regard.attention(*inputs, mask=masks.keep(allowed), bias=bias, backend=backend)
        changed.fill_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_that_is_kept_gives_the_same_gradients_twice(backend: str) -> None:
    inputs = tensors(B, H, G, 63, 111, 8, dtype=torch.float32, grad=True)
    out = regard.attention(*inputs, mask=masks.causal(), backend=backend)
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(out.sum(), inputs), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["blockwise", "sdpa"])
def test_memory_for_a_band_grows_with_the_length_and_not_with_its_square(backend: str, dtype: torch.dtype) -> None:
    from memory import peak_bytes

    mask = masks.causal() & masks.window(left=64)
    inputs = tensors(1, 1, 1, 4096, 4096, 16, dtype=dtype)
    out = 4096 * 16 * 4
    assert peak_bytes(lambda: regard.attention(*inputs, mask=mask, backend=backend)) < 8 * out


@pytest.mark.parametrize("heads", [4, 8])
def test_below_a_causal_edge_few_pairs_are_computed_that_no_row_sees(heads: int) -> None:
    query = torch.randn(2, heads, 512, 8)
    call = prepare(query, query, query, masks.causal(), None, None, 3.0, None, 0.0, None)
    (step,) = Blockwise().plan_steps(call)
    tiles = list(blockwise._tiles(call, step, query, query, query, Room()))
    areas = [len(tile.rows) * len(range(run.start, run.stop)) for tile in tiles for run, _ in tile.runs()]
    heads_at_once = [tile.lead[0] * tile.lead[1] for tile in tiles]
    assert len(areas) == len(tiles)
    computed = sum(area * many for area, many in zip(areas, heads_at_once, strict=True))
    assert 0.5 < computed / call.spec.pairs < 0.64
