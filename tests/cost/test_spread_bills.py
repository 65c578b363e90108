"""What a call costs on several GPUs: shares as `regard.attention` takes them, bytes counted token by token."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from regard import cost, masks
from regard._sharded._shares import shares_of
from regard.cost._spread import row_shares

SIZES: dict[str, Any] = {"heads": 6, "kv_heads": 2, "head_dim": 16, "batch": 3, "dtype": "bf16"}
RULES = {
    "everything": ({}, None),
    "causal": ({"causal": True}, masks.causal()),
    "window": ({"causal": True, "window": 40}, masks.window(40)),
}
CASES = list(itertools.product(RULES, (1, 2, 5, 16)))


@pytest.mark.parametrize(("rule", "gpus"), CASES)
def test_rows_are_shared_as_the_call_shares_them(rule: str, gpus: int) -> None:
    given, mask = RULES[rule]
    mine = row_shares(cost.AttentionCall(length=333, **given, **SIZES), gpus)
    theirs = shares_of(mask, 333, 333, 0, 3, gpus).rows
    assert (
        max(abs(a - b) for one, other in zip(mine, theirs, strict=True) for a, b in zip(one, other, strict=True)) <= 1
    )


@pytest.mark.parametrize(("rule", "gpus"), CASES)
def test_bytes_are_those_of_tokens_that_lie_elsewhere(rule: str, gpus: int) -> None:
    given, mask = RULES[rule]
    call = cost.AttentionCall(length=333, **given, **SIZES)
    found = cost.spread(call, cost.device("h200"), gpus, machine=2, link=1e9, between=1e8)
    held = [set(part.tolist()) for part in torch.arange(333).chunk(gpus)]  # as DTensor lays them
    rows = [set(range(*each)) for each in row_shares(call, gpus)]
    seen = None if mask is None else mask.dense(333, 333)
    most, slowest = (0, 0), 0.0
    for rank in range(gpus):
        near = {rank - rank % 2, rank - rank % 2 + 1} & set(range(gpus))
        keys = (
            set(range(333)) if seen is None else {j for i in rows[rank] for j in seen[i].nonzero().flatten().tolist()}
        )
        parts = ((rows[rank], held, 6 * 16), (keys, held, 2 * 2 * 16), (held[rank], rows, 6 * 16))
        inside = outside = 0
        for wanted, owners, numbers in parts:
            here = set().union(*(owners[each] for each in near - {rank}))
            inside += 3 * 2 * numbers * len(wanted & here)
            outside += 3 * 2 * numbers * len(wanted - here - owners[rank])
        most, slowest = max(most, (inside + outside, outside)), max(slowest, inside / 1e9, outside / 1e8)
    assert (found.received, found.from_machines) == most
    assert found.receiving == pytest.approx(slowest)
    assert found.pairs == -(-call.pairs // gpus) and found.room == 333 * 3 * 2 * 2 * 2 * 16
    assert found.computing == pytest.approx(cost.roofline(call, cost.device("h200")).seconds / gpus)
    assert found.seconds == found.computing + found.receiving == found.to_dict()["seconds"]


def test_wrong_numbers_are_named() -> None:
    call = cost.AttentionCall(length=9, **SIZES)
    with pytest.raises(ValueError, match="gpus must be at least 1, got 0"):
        cost.spread(call, cost.device("h200"), 0)
    with pytest.raises(ValueError, match="between must be a number of bytes/s above 0, got 0"):
        cost.spread(call, cost.device("h200"), 2, between=0)
