"""Queries that are fewer or more than the keys: which tokens they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.watching.models import check_statistics
from torch import Tensor, nn

import regard

X = torch.randn(2, 11, 21, generator=torch.Generator().manual_seed(1))


class InChunks(nn.Module):
    """Three heads; a few queries at a time look at all keys, or what becomes of those."""

    num_heads = 3

    def __init__(self, how: str, heads: bool = False) -> None:
        super().__init__()
        self.how, self.heads, self.qkv, self.cache = how, heads, nn.Linear(21, 63), False
        self.hidden: Tensor | None = None
        self.weights: list[Tensor] = []

    def split(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (3, 7)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        if self.heads:
            return torch.cat([self.part(q[:, [n], -5:], k[:, [n]], v[:, [n]]) for n in range(3)], 1)
        return torch.cat([self.part(some, k, v) for some in q.split(4, 2)], 2).transpose(1, 2).flatten(2)

    def part(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = q @ k.mT / 7**0.5
        if self.hidden is not None:
            logits = logits.masked_fill(self.hidden[:, None, None], -torch.inf)
        self.weights.append(logits.softmax(-1))
        if self.how == "written":
            return logits.softmax(-1) @ v
        mask = None if self.hidden is None else ~self.hidden[:, None, None].expand(-1, 1, q.shape[2], -1)
        return F.scaled_dot_product_attention(q, k, v, mask)


def distances(weights: Tensor, start: int) -> Tensor:
    """[batch, head, 32]: the weight of each bucket, with the queries' own places."""
    far = (torch.arange(weights.shape[2])[:, None] + start - torch.arange(weights.shape[3])).abs()
    bucket = torch.where(far == 0, 0, far.clamp_min(1).log2().floor().long() + 1)
    return torch.stack([weights[:, :, bucket == n].sum(-1) for n in range(32)], -1)


@pytest.mark.parametrize("how", ["written", "fused"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_chunks_of_queries_that_are_all_of_the_tokens_stand_in_their_order(
    how: str, padded: bool, inside: bool, mode: Any
) -> None:
    torch.manual_seed(0)
    model = InChunks(how)
    whole = nn.Sequential(nn.Identity(), model) if inside else model
    if padded:
        model.hidden = torch.arange(11) >= torch.tensor([[11], [8]])
    with mode(), regard.watch(whole, count_padding=True, heads=[0, 2]) as recording:
        for _ in range(2):
            whole(X)
    assert recording.missed == [] and [int(call.positions[0]) for call in recording] == [0, 4, 8] * 2
    for call, weights in zip(recording, model.weights, strict=True):
        check_statistics(call, weights[:, [0, 2]])
        torch.testing.assert_close(call.distance, distances(weights[:, [0, 2]], int(call.positions[0])))


@pytest.mark.parametrize("how", ["written", "fused"])
def test_chunks_of_a_text_that_is_one_chunk_longer_than_the_one_before_are_no_next_tokens(how: str) -> None:
    model = InChunks(how)
    with torch.no_grad(), regard.watch(model) as recording:
        model(X[:, :7])
        model(X)
    assert [int(call.positions[0]) for call in recording] == [0, 4, 0, 4, 8]
    assert {call.phase for call in recording} == {"prefill"}


@pytest.mark.parametrize("how", ["written", "fused"])
@pytest.mark.parametrize(("sizes", "heads"), [([11], False), ([4], False), ([7, 7], False), ([11], True)])
def test_queries_that_are_not_all_of_the_tokens_in_order_are_the_last_ones(
    how: str, sizes: list[int], heads: bool
) -> None:
    class Last(InChunks):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)
            return torch.cat([self.part(q[:, :, -size:], k, v) for size in sizes], 2)

    model = InChunks(how, heads) if heads else Last(how)
    with torch.no_grad(), regard.watch(model) as recording:
        model(X)
    assert [int(call.positions[0]) for call in recording] == [11 - call.queries for call in recording]
    for call, weights in zip(recording, model.weights, strict=True):
        torch.testing.assert_close(call.distance, distances(weights, 11 - call.queries))


@pytest.mark.parametrize("how", ["written", "fused"])
def test_queries_of_keys_that_are_fewer_are_all_tokens_from_the_first(how: str) -> None:
    class Reduced(InChunks):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)
            return self.part(q, k[:, :, ::2], v[:, :, ::2]).transpose(1, 2).flatten(2)

    model = Reduced(how)
    with torch.no_grad(), regard.watch(model) as recording:
        model(X)
    assert recording.calls[0].keys == 6 and recording.calls[0].positions.tolist() == [0]
    model.hidden = torch.arange(6)[None].expand(2, -1) == 1
    with torch.no_grad():
        wanted, model.hidden = model(X), None
        plain = model(X)
        with regard.edit(model, regard.edits.cut(queries=3, keys=1)):
            found = model(X)
    torch.testing.assert_close(found[:, 3], wanted[:, 3])
    assert torch.allclose(found[:, :3], plain[:, :3]) and torch.allclose(found[:, 4:], plain[:, 4:])


@pytest.mark.parametrize("how", ["written", "fused"])
def test_a_mask_that_hides_the_last_keys_from_the_last_query_alone_does_not_say_where_it_stands(how: str) -> None:
    """A mask of memory that is not filled yet hides them from all."""

    class Masked(InChunks):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)
            hide = torch.zeros(3, 11, dtype=torch.bool)
            hide[2, 5:] = True
            hide[:2, 5:] = self.cache
            hide = hide[:, :] if self.hidden is None else hide | self.hidden
            if how == "fused":
                return F.scaled_dot_product_attention(q[:, :, :3], k, v, ~hide).transpose(1, 2).flatten(2)
            logits = (q[:, :, :3] @ k.mT / 7**0.5).masked_fill(hide, -torch.inf)
            return (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)

    for cache, start in ((True, 2), (False, 8)):
        model = Masked(how)
        model.cache = cache
        with torch.no_grad(), regard.watch(model) as recording:
            plain = model(X)
        assert recording.calls[0].positions.unique().tolist() == [start]
        if not cache:  # every key is one that was read
            model.hidden = torch.arange(11) == 10
            with torch.no_grad():
                wanted, model.hidden = model(X), None
                with regard.edit(model, regard.edits.cut(keys=10)):
                    found = model(X)
            torch.testing.assert_close(found, wanted)
            assert not torch.allclose(found, plain)


@pytest.mark.parametrize("order", ["last first", "every third"])
def test_slices_that_are_taken_in_another_order_are_not_given_the_places_of_those_in_order(order: str) -> None:
    class InAnotherOrder(InChunks):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)
            parts = [q[:, :, n::3] for n in range(3)] if order == "every third" else [q[:, :, 5:], q[:, :, :5]]
            return torch.cat([self.part(part, k, v) for part in parts], 2)

    model = InAnotherOrder("fused")
    with torch.no_grad(), regard.watch(model) as recording:
        model(X)
    starts = [int(call.positions[0]) for call in recording]
    assert starts == [11 - call.queries for call in recording]  # as fewer queries than keys are: the last tokens
