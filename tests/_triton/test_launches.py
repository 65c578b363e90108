"""From the second like call on, kernels are launched with what the first worked out: never with its numbers where they
differ, and never with its tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests import forced
from tests._triton import definitions
from tests._triton.calls import DEVICE, call_of, found_and_wrong, placed, tensors
from tests._triton.inside import inputs, launcher, observing
from tests.core_calls import prepare

from regard import Want, bias, masks

SUMS = Want(map=(3, 5), top_k=0)
MORE = SUMS.but(first=3, weights=(slice(3, 20), slice(5, 30)))
SIZES = {"B": 2, "H": 2, "G": 1, "L": 11, "S": 37, "D": 16}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is remembered of other tests."""
    if DEVICE == "cpu":
        from tests._triton.compiled import compile_kernels

        compile_kernels(monkeypatch)
    forced.fresh_launches(monkeypatch)


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for each call all of whose kernels were launched with what an earlier one worked out."""
    calls: list[int] = []
    slow: list[bool] = []
    launch, observe = launcher.Launch.__call__, observing.observe

    def watched() -> bool:
        from triton.knobs import runtime

        return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)

    def noted(self: launcher.Launch, memory: Any) -> None:
        given = [each.data_ptr() for each in memory if isinstance(each, torch.Tensor)]
        slow.append(self._ready is None or any(address % 16 for address in given) or watched())
        launch(self, memory)

    def counted(*given: Any) -> Any:
        slow.clear()
        found = observe(*given)
        assert slow
        if not any(slow):
            calls.append(len(slow))
        return found

    monkeypatch.setattr(launcher.Launch, "__call__", noted)
    monkeypatch.setattr(observing, "observe", counted)
    yield calls


def wrong(want: Want = SUMS, query: Any = None, key: Any = None, **given: Any) -> list[str]:
    """Of a call with new numbers."""
    fresh = tensors(**SIZES)
    return found_and_wrong(fresh[0] if query is None else query, fresh[1] if key is None else key, want, **given)[1]


@pytest.mark.parametrize("causal", [False, True])
def test_like_calls_give_the_statistics_of_their_own_tensors(causal: bool, repeated: list[int]) -> None:
    for _ in range(3):
        assert wrong(MORE, mask=masks.causal() if causal else None) == []
    assert len(repeated) == 2


def test_the_largest_weights_are_those_of_the_call(repeated: list[int]) -> None:
    for _ in range(2):
        query, key = tensors(H=1, L=5, S=11, D=16)  # these kernels take long to interpret
        assert found_and_wrong(query, key, Want.none().but(top_k=3))[1] == []
    assert len(repeated) == 1


def test_descriptors_are_of_the_tensors_of_their_call(monkeypatch: pytest.MonkeyPatch, repeated: list[int]) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(inputs, "has_copy_engine", lambda device: True)
    assert [wrong() for _ in range(2)] == [[], []]
    assert len(repeated) == 1


def test_what_an_earlier_call_found_stays(repeated: list[int]) -> None:
    query, key = tensors(**SIZES)
    first = found_and_wrong(query, key, MORE)[0]
    copies = {name: value.clone() for name, value in first.items()}
    again = found_and_wrong(query, key, MORE)[0]
    assert wrong(MORE) == [] and len(repeated) == 2
    assert all(torch.equal(first[name], copies[name]) and torch.equal(again[name], copies[name]) for name in copies)


def test_other_strides_are_another_call(repeated: list[int]) -> None:
    query, key = tensors(**SIZES)
    tokens_first = query.transpose(1, 2).contiguous().transpose(1, 2)
    by_column = key.transpose(2, 3).contiguous().transpose(2, 3)  # copied before it is read
    for _ in range(2):
        assert wrong(query=query) == wrong(query=tokens_first) == wrong(key=by_column) == []
    assert len(repeated) == 3


def test_other_addresses_are_another_call(repeated: list[int]) -> None:
    query, key = tensors(**SIZES)
    odd = torch.zeros(query.numel() + 1, device=DEVICE)[1:].view(query.shape).copy_(query)
    assert wrong(query=query) == wrong(query=odd) == wrong(query=query) == wrong(query=odd) == []
    assert len(repeated) == 1


def test_masks_of_one_structure_keep_their_own_tables(repeated: list[int]) -> None:
    first, second = (placed(masks.padding(lengths) & masks.causal()) for lengths in ([5, 20], [30, 37]))
    assert first is not None and second is not None and first.structure == second.structure
    for _ in range(2):
        assert wrong_by(first) == wrong_by(second) == []
    assert len(repeated) == 3  # tables are memory, as tensors are


def test_a_mask_that_was_changed_in_place_is_another(repeated: list[int]) -> None:
    lengths = torch.tensor([5, 20], device=DEVICE)
    mask = masks.padding(lengths)
    assert wrong_by(mask) == wrong_by(mask) == []
    lengths += 11
    assert wrong_by(mask) == wrong_by(mask) == []
    assert len(repeated) == 3  # a launch holds nothing of what the mask does


def wrong_by(mask: masks.Mask) -> list[str]:
    """Of a call with new numbers and this very mask."""
    query, key = tensors(**SIZES)
    call = prepare(query, key, key, mask, None, None, None, None, 0.0, None)
    lse, exact = definitions.statistics(call, SUMS)
    return definitions.wrong(observing.observe(call, lse.float(), SUMS), exact)


def test_key_masses_of_blocks_are_those_of_the_call(repeated: list[int]) -> None:
    want = Want(map=(1, 5), top_k=0)
    holes = masks.keep(torch.arange(37, device=DEVICE) % 30 < 7)
    for mask in (None, masks.causal(), holes):
        for _ in range(3):
            assert wrong(want, mask=mask) == []
    assert len(repeated) >= 4


def test_other_wants_are_other_calls(repeated: list[int]) -> None:
    wants = [SUMS, MORE, Want.none().but(rows=True), SUMS.but(queries=slice(3, 11)), SUMS.but(map=(5, 3)), MORE]
    assert [wrong(want, mask=masks.causal()) for want in wants] == [[]] * 6
    assert len(repeated) == 1


def test_offsets_are_those_of_the_call(repeated: list[int]) -> None:
    mask = masks.causal()
    assert [wrong(mask=mask, query_offset=offset) for offset in (3, 9, 3)] == [[]] * 3
    assert len(repeated) == 1
    each = [torch.tensor(offsets, device=DEVICE) for offsets in ([3, 9], [16, 0])]
    for offset in each:
        assert wrong(mask=mask, query_offset=offset) == wrong(query_offset=offset) == []
    assert len(repeated) == 3


def test_modifiers_are_those_of_the_call(repeated: list[int]) -> None:
    def added(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE)

    for given in ({"softcap": 2.0}, {"softcap": 5.0}, {"scale": -0.5}, {"sinks": added(2)}, {"sinks": added(2)}):
        assert wrong(**given) == []
    assert len(repeated) == 1
    for shape in ((2, 2, 11, 37), (1, 1, 1, 37), (2, 2, 11, 37), (1, 1, 1, 37)):
        assert wrong(bias=added(*shape)) == []
    assert len(repeated) == 3
    query, key = tensors(**SIZES)
    rule, line = bias.alibi(2), bias.alibi(2).dense(11, 37).to(DEVICE)
    lse = definitions.whole(call_of(query, key, bias=line))[0].float()
    by_rule, by_line = (observing.observe(call_of(query, key, bias=b), lse, SUMS) for b in (rule, line))
    assert all((by_rule[name] - by_line[name]).abs().max() < 1e-4 for name in by_rule)


def test_nothing_of_a_call_is_kept_alive() -> None:
    query, key = tensors(**SIZES)
    call = call_of(query, key, mask=masks.causal())
    lse = definitions.whole(call)[0].float()
    found = observing.observe(call, lse, MORE)
    held = [weakref.ref(tensor) for tensor in (query, key, lse, *found.values())]
    del query, key, lse, call, found
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)


def test_nothing_is_launched_unseen_where_launches_are_watched(
    monkeypatch: pytest.MonkeyPatch, repeated: list[int]
) -> None:
    import triton

    for name in ("launch_enter_hook", "launch_exit_hook"):
        monkeypatch.setattr(getattr(triton.knobs.runtime, name), "calls", [lambda about: None])
        assert wrong() == wrong() == []
        monkeypatch.setattr(getattr(triton.knobs.runtime, name), "calls", [])
    assert repeated == []


def test_memory_is_made_as_torch_makes_it() -> None:
    like = torch.empty(3, 1, 5, 7, dtype=torch.bfloat16, device=DEVICE)
    make = launcher.maker(like.shape, like.dtype, like.device)
    first, second = make(), make()
    for made in (first, second):
        assert (made.shape, made.stride(), made.dtype, made.device) == (
            like.shape,
            like.stride(),
            like.dtype,
            like.device,
        )
        assert not made.requires_grad
    assert first.data_ptr() != second.data_ptr()
