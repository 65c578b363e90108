"""`compat.scaled_dot_product_attention` on shapes that PyTorch broadcasts: unequal ranks, no heads, unknown lengths."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from regard.compat import scaled_dot_product_attention

theirs = torch._C._nn.scaled_dot_product_attention


def drawn(draw: random.Random, *, empty: bool) -> tuple[list[torch.Tensor], dict[str, object]]:
    """Three tensors whose batch dims broadcast most of the time, of any rank from 2 to 6."""
    sizes = [0, 1, 2, 3] if empty else [1, 2, 3]
    whole = [draw.choice(sizes) for _ in range(4)]
    queries, keys, width, value_width = (draw.choice([0, 1, 3, 5] if empty else [1, 3, 5]) for _ in range(4))
    tensors = []
    for length, dim in ((queries, width), (keys, width), (keys, value_width)):
        kept = whole[4 - draw.choice([0, 1, 1, 2, 2, 3, 4]) :] if draw.random() < 0.95 else []
        batch = [n if draw.random() < 0.85 else 1 for n in kept]
        tensors.append(torch.randn(*batch, length, dim, dtype=torch.float64, requires_grad=True))
    given: dict[str, object] = {}
    if draw.random() < 0.3:
        given["is_causal"] = True
    elif draw.random() < 0.4:
        given["attn_mask"] = torch.rand(draw.choice([1, queries]), draw.choice([1, keys])) > 0.2
    if not empty and draw.random() < 0.2 and all(x.dim() > 2 for x in tensors):
        given["enable_gqa"] = True
    return tensors, given


@pytest.mark.parametrize("empty", [False, True], ids=["", "with empty dims"])
def test_every_broadcast_that_pytorch_takes_gives_the_same_values_and_gradients(empty: bool) -> None:
    draw = random.Random(0)
    torch.manual_seed(0)
    taken = unequal = 0
    for _ in range(700):
        tensors, given = drawn(draw, empty=empty)
        try:
            expected = theirs(*tensors, **given)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                scaled_dot_product_attention(*tensors, **given)
            continue
        found = scaled_dot_product_attention(*tensors, **given)
        taken, unequal = taken + 1, unequal + (len({x.dim() for x in tensors}) > 1)
        assert found.shape == expected.shape, [list(x.shape) for x in tensors]
        torch.testing.assert_close(found, expected.nan_to_num(), rtol=0, atol=1e-12)
        weight = torch.randn_like(expected)
        ours = torch.autograd.grad((found * weight).sum(), tensors)
        # rows without a key are NaN in PyTorch's gradient where they were NaN in its output
        if not expected.isnan().any():
            for one, other in zip(ours, torch.autograd.grad((expected * weight).sum(), tensors), strict=True):
                torch.testing.assert_close(one, other.nan_to_num(), rtol=0, atol=1e-12)
    assert taken > 300 and unequal > 200


@pytest.mark.parametrize(
    ("query", "key"),
    [((2, 2), (2, 2, 2)), ((5, 5), (5,)), ((2, 3), (7, 2, 3)), ((1, 1), (1, 1, 1, 3))],
    ids=["five dims", "three dims", "more", "six dims"],
)
def test_equal_first_dims_of_unequal_ranks_are_not_taken_for_batch_and_head(query: tuple, key: tuple) -> None:
    # the first two dims agree in some of these, and mean something else
    tensors = [torch.randn(*query, 4, 6), torch.randn(*key, 5, 6), torch.randn(*key, 5, 7)]
    torch.testing.assert_close(scaled_dot_product_attention(*tensors), theirs(*tensors))


def test_no_heads() -> None:
    for shapes in (
        ((2, 0, 4, 6), (2, 0, 5, 6), (2, 0, 5, 7)),
        ((2, 0, 4, 6), (2, 1, 5, 6), (2, 1, 5, 7)),
        ((2, 1, 4, 6), (2, 0, 5, 6), (2, 1, 5, 7)),
    ):
        tensors = [torch.randn(*shape, requires_grad=True) for shape in shapes]
        found = scaled_dot_product_attention(*tensors, is_causal=True)
        assert found.shape == theirs(*tensors).shape == (2, 0, 4, 7)
        assert [g.shape for g in torch.autograd.grad(found.sum(), tensors)] == [x.shape for x in tensors]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert scaled_dot_product_attention(*tensors).dtype == torch.bfloat16


def test_a_causal_bias_beside_is_causal_is_the_value_error_that_pytorch_raises() -> None:
    tensors = [torch.randn(2, 3, 5, 4) for _ in range(3)]
    for bias in (causal_upper_left(5, 5), causal_lower_right(5, 5)):
        for function in (F.scaled_dot_product_attention, scaled_dot_product_attention):
            with pytest.raises(ValueError, match="causal"):
                function(*tensors, attn_mask=bias, is_causal=True)
    with pytest.raises(RuntimeError, match="is_causal"):
        scaled_dot_product_attention(*tensors, attn_mask=torch.ones(5, 5), is_causal=True)


class ReadsACache(torch.nn.Module):
    """A decoding step whose number of keys is in a tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, query: torch.Tensor, cache: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        at = last.item()
        torch._check(at >= 0)
        torch._check(at <= 20)
        keys = cache[:, :, : at + 1]
        shape = (query.shape[2], at + 1)
        mask = None
        if self.kind == "bool":
            mask = torch.ones(shape, dtype=torch.bool)
            mask[0] = False
        elif self.kind == "float":
            mask = torch.zeros(shape)
        return scaled_dot_product_attention(query, keys, keys, attn_mask=mask)


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_mask_whose_length_depends_on_data_is_exported(kind: str, queries: int) -> None:
    query, cache = torch.randn(1, 2, queries, 8), torch.randn(1, 2, 21, 8)
    model = ReadsACache(kind)
    with torch.no_grad():
        program = torch.export.export(model, (query, cache, torch.tensor(5)))
        for last in (0, 5, 17):
            given = (query, cache, torch.tensor(last))
            found = program.module()(*given)
            torch.testing.assert_close(found, model(*given))
    assert kind != "bool" or not found[:, :, 0].any()
