"""Block selection: the best blocks by pooled keys, and never a word from the future."""

from __future__ import annotations

import pytest
import torch

import regard
from core_calls import check_against_oracle, tensors
from regard import masks, sparse

B, H, G, L, D, SIZE = 2, 4, 2, 203, 7, 16


def table_of(mask):
    blocks = mask.parts[1] if mask.kind == "and" else mask
    return blocks.tensors[0]


def test_the_best_blocks_by_mean_key_are_kept_beside_the_own_one():
    query, key, _ = tensors(B, H, G, L, L, D)
    table = table_of(sparse.select_blocks(query, key, size=SIZE, keep=2))
    blocks = key.float().split(SIZE, 2)
    means = torch.stack([block.mean(2) for block in blocks], 2).repeat_interleave(H // G, 1)
    for q in range(len(blocks)):
        scores = torch.einsum("bhd,bhcd->bhc", query[:, :, q * SIZE].float(), means[:, :, :q])
        wanted = torch.zeros(B, H, len(blocks), dtype=torch.bool)
        wanted[:, :, q] = True
        if q:
            wanted.scatter_(2, scores.topk(min(2, q), -1).indices, True)
        assert torch.equal(table[:, :, q], wanted)


def test_without_an_order_the_mean_query_chooses_among_all_blocks():
    query, key, _ = tensors(B, H, G, L, L, D)
    table = table_of(sparse.select_blocks(query, key, size=SIZE, keep=3, causal=False))
    q, k = (torch.stack([part.float().mean(2) for part in x.split(SIZE, 2)], 2) for x in (query, key))
    scores = q @ k.repeat_interleave(H // G, 1).transpose(-1, -2)
    own = torch.eye(q.shape[2], dtype=torch.bool)
    best = scores.masked_fill(own, -torch.inf).topk(3, -1).indices
    assert torch.equal(table, torch.zeros_like(table).scatter(-1, best, True) | own)


def test_local_and_first_blocks_are_always_kept_and_do_not_count():
    query, key, _ = tensors(B, H, G, L, L, D)
    table = table_of(sparse.select_blocks(query, key, size=SIZE, keep=2, local=3, sinks=1))
    rows = torch.arange(table.shape[2])
    for back in range(3):
        assert table[:, :, rows[back:], rows[back:] - back].all()
    assert table[..., 0].all()
    assert torch.equal(table.sum(-1).amax((0, 1)), torch.clamp(rows + 1, max=6))


@pytest.mark.parametrize("backend", ["sdpa", "blockwise", "eager"])
def test_attention_over_the_selection_equals_the_oracle_with_gradients(backend):
    query, key, value = tensors(B, H, G, L, L, D, grad=True)
    mask = sparse.select_blocks(query, key, size=SIZE, keep=2)
    check_against_oracle(backend, (query, key, value), mask=mask)


@pytest.mark.parametrize("place", [1, 16, 31, 100, 150])
def test_changing_later_tokens_changes_no_earlier_row(place):
    query, key, value = tensors(B, H, G, L, L, D)
    changed = [x.clone() for x in (query, key, value)]
    for x in changed:
        x[:, :, place:] = 50 * torch.randn_like(x[:, :, place:])
    results, seen = [], []
    for q, k, v in ((query, key, value), changed):
        mask = sparse.select_blocks(q, k, size=SIZE, keep=2, sinks=1)
        seen.append(mask.dense(L, L)[:, :, :place])
        results.append(regard.attention(q, k, v, mask=mask)[:, :, :place])
    assert torch.equal(seen[0], seen[1])
    assert torch.allclose(results[0], results[1], rtol=0, atol=1e-12)


def test_queries_after_a_cache_choose_as_they_would_in_one_call():
    query, key, _ = tensors(B, H, G, L, L, D)
    whole = sparse.select_blocks(query, key, size=SIZE, keep=2).dense(L, L)
    start = 6 * SIZE
    late = sparse.select_blocks(query[:, :, start:], key, size=SIZE, keep=2)
    assert torch.equal(late.dense(L - start, L), whole[:, :, start:])


def test_padding_does_not_count_and_may_hold_anything():
    query, key, _ = tensors(B, H, G, L, L, D)
    lengths = [150, 90]
    spoilt = key.clone()
    for item, length in enumerate(lengths):
        spoilt[item, :, length:] = torch.nan
    mask = masks.padding(lengths)
    found = table_of(sparse.select_blocks(query, spoilt, size=SIZE, keep=2, mask=mask))
    for item, length in enumerate(lengths):
        alone = sparse.select_blocks(
            query[item : item + 1, :, :length], key[item : item + 1, :, :length], size=SIZE, keep=2
        )
        table = table_of(alone)[0]
        assert torch.equal(found[item, :, : table.shape[1], : table.shape[2]], table)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"size": 0}, ValueError, "size must be at least 1"),
        ({"keep": -1}, ValueError, "keep must be at least 0"),
        ({"keep": 1.5}, TypeError, "keep must be an int"),
        ({"local": 0}, ValueError, "local must be at least 1"),
        ({"query_offset": -1}, ValueError, "before the first key"),
        ({"query_offset": "end"}, TypeError, "query_offset must be an int"),
        ({"query": torch.randn(2, 3, 5)}, ValueError, r"query must be \[batch, head, token, dim\]"),
        ({"key": [1]}, TypeError, "key must be a tensor"),
        ({"key": torch.randn(2, 3, 9, 7)}, ValueError, "heads that divide"),
        ({"mask": torch.ones(9, dtype=torch.bool)}, TypeError, "mask must be a regard mask .* masks.keep"),
        ({"mask": "padding"}, TypeError, "mask must be a regard mask"),
        ({"causal": "no"}, TypeError, "causal must be True or False"),
        ({"query": torch.ones(2, 4, 9, 7, dtype=torch.int64)}, TypeError, "query must be floating point"),
        ({"key": torch.ones(2, 2, 9, 7).double()}, TypeError, "query and key must have one dtype"),
        ({"key": torch.ones(2, 2, 9, 7, device="meta")}, TypeError, "one dtype and device"),
    ],
)
def test_wrong_arguments_are_named(given, error, words):
    usual = {"query": torch.randn(2, 4, 9, 7), "key": torch.randn(2, 2, 9, 7), "size": 4, "keep": 1}
    given = {**usual, **given}
    with pytest.raises(error, match=words):
        sparse.select_blocks(given.pop("query"), given.pop("key"), **given)


@pytest.mark.parametrize("rows", [3, "01", [0, 1], [[0], "1"]])
def test_chosen_blocks_that_are_no_lists_are_named(rows):
    with pytest.raises(TypeError, match="rows must hold one list of key blocks"):
        sparse.chosen_blocks(rows, 4)
