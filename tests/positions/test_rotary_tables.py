"""The tables that a Rotary keeps from one layer to the next: never another's, never in a state that has passed."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from regard import masks, models
from regard.positions import DynamicNTK, Rotary, rotate


def expected(rotary: Rotary, x: Tensor, first: Any) -> Tensor:
    """By the public functions, which keep nothing."""
    tokens = torch.arange(x.shape[2])
    places = tokens + first if isinstance(first, int) else first.reshape(-1, 1, 1) + tokens
    return rotate(x, *rotary.tables(places), interleaved=rotary.interleaved)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The positions of every call of `Rotary.tables`."""
    asked: list[Tensor] = []
    tables = Rotary.tables

    def counting(self: Rotary, positions: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        asked.append(positions)
        return tables(self, positions, **more)

    monkeypatch.setattr(Rotary, "tables", counting)
    return asked


@pytest.mark.parametrize("prompts", [[[3, 5, 7]], [[3, 5, 7], [11], [2, 9]]], ids=["one", "three lengths"])
def test_tables_are_worked_out_once_a_step_for_all_layers(counted: list[Tensor], prompts: list[list[int]]) -> None:
    sizes = {"vocab_size": 13, "embed_dim": 12, "num_layers": 5, "num_heads": 3, "num_kv_heads": 3, "ff_dim": 7}
    decoder = models.Decoder(models.config("llama-2-7b", max_tokens=63, **sizes)).eval()
    decoder.generate(prompts, max_new_tokens=4)
    # and not in every step either, where a step's positions were worked out with those before
    assert 0 < len(counted) <= 4


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_table_is_only_given_to_calls_that_ask_for_the_same(interleaved: bool) -> None:
    rotary = Rotary(6, interleaved=interleaved)
    ragged = torch.tensor([5, 3])
    for first in (0, 7, 7, ragged, torch.tensor([5, 4]), ragged, 0):
        for tokens in (3, 5):
            query, key = torch.randn(2, 3, tokens, 7), torch.randn(2, 1, tokens, 7)
            turned = rotary(query, key, query_offset=first)
            assert torch.equal(turned[0], expected(rotary, query, first))
            assert torch.equal(turned[1], expected(rotary, key, first))
            assert torch.equal(rotary.turn(query, first), expected(rotary, query, first))
    ragged += 11  # the same tensor, another place
    assert torch.equal(rotary.turn(query, ragged), expected(rotary, query, ragged))


def change_in_place(rotary: Rotary) -> None:
    rotary.frequencies.mul_(0.5)


def put_another(rotary: Rotary) -> None:
    rotary.frequencies = rotary.frequencies * 0.5


def change_magnitude(rotary: Rotary) -> None:
    rotary.magnitude = 1.25


def put_other_numbers(rotary: Rotary) -> None:
    rotary.frequencies.data = rotary.frequencies * 0.5


def turn_neighbours(rotary: Rotary) -> None:
    rotary.interleaved = True


CHANGES = [change_in_place, put_another, put_other_numbers, change_magnitude, turn_neighbours]


@pytest.mark.parametrize("change", CHANGES)
def test_what_tables_are_made_of_may_change(change: Any) -> None:
    rotary, x = Rotary(6), torch.randn(2, 3, 5, 6)
    before = rotary.turn(x, 7)
    change(rotary)
    assert torch.equal(rotary.turn(x, 7), expected(rotary, x, 7))
    assert not torch.equal(rotary.turn(x, 7), before)


def test_moving_to_half_and_back_leaves_the_tables_right() -> None:
    rotary, x = Rotary(6), torch.randn(2, 3, 5, 6)
    before = rotary.turn(x, 7)
    rotary.half()
    assert torch.equal(rotary.turn(x, 7), before)
    assert rotary.turn(x.half(), 7).dtype == torch.float16
    assert torch.equal(rotary.float().turn(x, 7), before)
    assert rotary.to("meta").turn(x.to("meta"), 7).is_meta


def test_tables_made_in_inference_mode_serve_calls_with_gradients() -> None:
    rotary, x = Rotary(6), torch.randn(2, 3, 5, 6, requires_grad=True)
    with torch.inference_mode():
        rotary.turn(x, torch.tensor([7, 3]))
    rotary.turn(x, torch.tensor([7, 3])).sum().backward()
    assert x.grad is not None


def test_no_table_keeps_a_graph() -> None:
    rotary, x = Rotary(6), torch.randn(2, 3, 5, 6)
    rotary.frequencies.requires_grad_()
    for _ in range(2):  # a graph that was kept would have been freed
        rotary.turn(x, 7).sum().backward()
    assert rotary.frequencies.grad is not None


def test_tables_that_grow_with_the_length_are_made_anew(counted: list[Tensor]) -> None:
    rotary, x = Rotary(6, scaling=DynamicNTK(2.0, 11)), torch.randn(2, 3, 5, 6)
    rotary.turn(x, 63)
    rotary.turn(x, 63)
    assert len(counted) == 2


def test_long_tables_are_not_kept(counted: list[Tensor]) -> None:
    rotary, x = Rotary(64), torch.randn(1, 1, 1111, 64)
    rotary.turn(x)
    rotary.turn(x)
    assert len(counted) == 2


def test_copies_and_files_leave_the_tables_behind() -> None:
    rotary, x = Rotary(6), torch.randn(2, 3, 5, 6)
    turned = rotary.turn(x, 7)
    buffer = io.BytesIO()
    torch.save(rotary, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (copy.deepcopy(rotary), pickle.loads(pickle.dumps(rotary)), loaded):
        assert "_last" not in vars(other)
        assert torch.equal(other.turn(x, 7), turned)


def test_transforms_and_traces_neither_leave_a_table_nor_take_one() -> None:
    rotary, x = Rotary(6), torch.randn(2, 3, 5, 6)
    wanted = expected(rotary, x, 7)
    turned = torch.func.vmap(lambda one: rotary.turn(one.unsqueeze(0), 7).squeeze(0))(x)
    assert torch.equal(turned, wanted) and torch.equal(rotary.turn(x, 7), wanted)
    torch.func.grad(lambda one: rotary.turn(one, 11).sum())(x)
    assert torch.equal(rotary.turn(x, 11), expected(rotary, x, 11))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert rotary.turn(mode.from_tensor(x), 11).shape == x.shape
        rotary.turn(mode.from_tensor(x), 13)
    assert torch.equal(rotary.turn(x, 13), expected(rotary, x, 13))


def test_a_graph_recorded_after_a_call_computes_its_tables() -> None:
    rotary, x = Rotary(6), torch.randn(2, 3, 5, 6)
    starts, others = torch.tensor([1, 2]), torch.tensor([7, 3])
    rotary.turn(x, starts)
    graph = make_fx(lambda x, starts: rotary.turn(x, starts))(x, starts)
    assert torch.equal(graph(x, others), expected(rotary, x, others))


class Louder(Rotary):
    """Tables times a number that is learned."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.gain = torch.nn.Parameter(torch.ones(()))

    def tables(self, positions: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        cos, sin = super().tables(positions, **more)
        return cos * self.gain, sin * self.gain


def test_a_subclass_may_make_tables_of_what_it_learns() -> None:
    rotary, x = Louder(6), torch.randn(2, 3, 5, 6)
    before = rotary.turn(x, 7)
    before.sum().backward()
    with torch.no_grad():
        rotary.gain.mul_(2)
    rotary.turn(x, 7).sum().backward()
    assert torch.equal(rotary.turn(x, 7), before * 2)


@pytest.mark.parametrize("wide", ["cos", "sin"])
def test_what_is_turned_keeps_its_dtype_beside_tables_of_two(wide: str) -> None:
    x = torch.randn(2, 3, 5, 6)
    cos, sin = Rotary(6).tables(torch.arange(5))
    turned = rotate(x, cos.double() if wide == "cos" else cos, sin.double() if wide == "sin" else sin)
    assert turned.dtype == x.dtype and torch.equal(turned, rotate(x, cos, sin))


def test_threads_do_not_mix_their_tables() -> None:
    rotary, x = Rotary(6), torch.randn(1, 3, 5, 6)
    wanted = [expected(rotary, x, first) for first in range(7)]
    wrong: list[int] = []

    def work(first: int) -> None:
        wrong.extend(first for _ in range(111) if not torch.equal(rotary.turn(x, first), wanted[first]))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_mask_joined_for_one_padding_is_not_used_for_another() -> None:
    sizes = {"vocab_size": 13, "embed_dim": 12, "num_layers": 2, "num_heads": 3, "num_kv_heads": 3, "ff_dim": 7}
    decoder = models.Decoder(models.config("llama-2-7b", max_tokens=63, **sizes)).eval()
    tokens, mask = torch.randint(13, (2, 5)), masks.causal()
    for lengths, side in (([5, 3], "right"), ([3, 5], "right"), ([5, 3], "left"), ([5, 3], "right"), ([1, 1], "left")):
        found = decoder.states(tokens, lengths=lengths, side=side, mask=mask, caches=decoder.caches(11))
        for item, length in enumerate(lengths):
            here = slice(0, length) if side == "right" else slice(5 - length, 5)
            alone = decoder.states(tokens[item : item + 1, here])
            torch.testing.assert_close(found[item, here], alone[0])
