"""Memory that a plan tells is counted by running it on tensors without values: it is what a run then takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard
from core_calls import tensors
from memory import peak_bytes
from regard import Want, masks
from regard.backends import _meter

L = 611
MASKS = {
    "none": None,
    "causal": masks.causal(),
    "band": masks.causal() & masks.window(left=40),
    "keys": masks.padding([L - 20, L]),
    "blocks": masks.random_blocks(3, 64, seed=0),
    "any": masks.keep(torch.rand(L, L, generator=torch.Generator().manual_seed(0)) < 0.5),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("want", [None, Want(), Want(top_k=0, map=None)], ids=["call", "all", "few"])
def test_what_is_counted_is_what_is_taken(mask: str, want: Want | None) -> None:
    inputs = tensors(2, 4, 2, L, L, 16, dtype=torch.float32)
    given: dict[str, Any] = {"mask": MASKS[mask]}
    if want is not None:
        given["want"] = want
    run = regard.attention if want is None else regard.observe
    taken = peak_bytes(lambda: run(*inputs, **given))
    assert regard.explain(*inputs, **given).cost.peak_bytes == pytest.approx(taken, rel=0.15)


@pytest.mark.parametrize("backend", ["blockwise", "eager"])
def test_dropout_and_softcap_are_counted_too(backend: str) -> None:
    inputs = tensors(1, 4, 2, L, L, 16, dtype=torch.float32)
    given = {"softcap": 5.0, "dropout": 0.3, "mask": masks.causal(), "backend": backend}
    taken = peak_bytes(lambda: regard.attention(*inputs, **given))
    assert regard.explain(*inputs, **given).cost.peak_bytes == pytest.approx(taken, rel=0.15)


def test_offsets_of_items_are_read_meanwhile() -> None:
    inputs = tensors(2, 4, 2, 97, L, 16, dtype=torch.float32)
    for want in (None, Want()):
        given: dict[str, Any] = {"mask": masks.causal(), "query_offset": torch.tensor([3, 90])}
        if want is not None:
            given["want"] = want
        run = regard.attention if want is None else regard.observe
        taken = peak_bytes(lambda run=run, given=given: run(*inputs, **given))
        assert regard.explain(*inputs, **given).cost.peak_bytes == pytest.approx(taken, rel=0.15)


REMEMBERS = {
    "lengths": lambda: masks.padding([3, L]),
    "lengths of items, causal": lambda: masks.causal() & masks.padding(torch.tensor([3, L])),
    "documents": lambda: masks.documents(ids=torch.arange(L) // 100),
    "keys": lambda: masks.keep(torch.arange(L) % 7 == 3),
}


@pytest.mark.parametrize("kind", REMEMBERS)
def test_what_a_mask_remembers_is_not_counted_the_second_time(kind: str) -> None:
    """Rule 71."""
    inputs = tensors(2, 4, 2, 7, L, 16)
    for offset in (3, None):
        given: dict[str, Any] = {"mask": REMEMBERS[kind](), "query_offset": offset}
        first, second = (regard.explain(*inputs, **given).cost.peak_bytes for _ in range(2))
        regard.attention(*inputs, **given)
        regard.observe(*inputs, **given)
        assert first == second == regard.explain(*inputs, **given).cost.peak_bytes


def test_what_is_given_is_not_counted_and_what_is_gone_no_more() -> None:
    given = torch.empty(100, device="meta")

    def run() -> None:
        for _ in range(5):
            torch.add(given[:50], 1.0)

    assert _meter.peak_bytes(run, [given]) == 200


def test_loops_are_cut_short_only_while_memory_is_counted() -> None:
    seen: list[list[int]] = []
    _meter.peak_bytes(lambda: seen.append(list(_meter.some(range(0, 90, 10)))), [])
    seen.append(list(_meter.some(range(0, 90, 10))))
    assert seen == [[0, 10, 70, 80], list(range(0, 90, 10))]
