"""Some heads of a call cut or steered: on a GPU these and the others are calls of their own. Masks stay rules then, and
steered edges need no wider heads."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests import forced
from torch import Tensor, nn

import regard
from core_calls import no_synchronisation
from regard import edits, masks

HEADS = 6
CHOSEN = {"every second": (0, 2, 4), "whole groups": (2, 3), "parts of groups": (0, 3, 4), "one": (5,)}
CUTS = {
    "keys": edits.cut(keys=[0, 5]),
    "edges": edits.cut(queries=slice(4, None), keys=[1, 2]),
    "rule": edits.cut(masks.columns(2)),
    "two": edits.cut(keys=[0]) | edits.cut(~masks.window(left=3)),
}


class Model(nn.Module):
    """Causal attention of grouped heads."""

    def __init__(self, kv_heads: int = 3, dim: int = 8, **factory: object) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kv_heads, self.dim = kv_heads, dim
        self.given = nn.Linear(10, (HEADS + 2 * kv_heads) * dim, **factory)

    def forward(self, x: Tensor) -> Tensor:
        sizes = HEADS, self.kv_heads, self.kv_heads
        three = self.given(x).unflatten(-1, (-1, self.dim)).transpose(1, 2).split(sizes, 1)
        return F.scaled_dot_product_attention(*three, is_causal=True, enable_gqa=self.kv_heads != HEADS)


def edited(model: Model, x: Tensor, cut: Any, heads: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of the input."""
    x = x.detach().requires_grad_()
    with regard.edit(model, cut, heads=heads) as report:
        out = model(x)
    assert [call.heads for call in report.calls] == [heads]
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    return out.detach(), grad


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    with forced.heads_apart(monkeypatch) as parted:
        yield parted


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    forced.areas_of_few_tokens(monkeypatch)


@pytest.mark.parametrize("kv_heads", [1, 3, 6])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("heads", CHOSEN)
def test_calls_of_their_own_give_the_same(
    heads: str, cut: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch, apart: list[bool]
) -> None:
    model, x = Model(kv_heads), torch.randn(2, 11, 10, generator=torch.Generator().manual_seed(1))
    found = edited(model, x, CUTS[cut], CHOSEN[heads])
    assert apart == [True]
    monkeypatch.undo()
    for ours, whole in zip(found, edited(model, x, CUTS[cut], CHOSEN[heads]), strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-5)


STEERS: dict[str, Any] = {
    "keys": edits.steer([0, 5], 1.5),
    "late queries": edits.steer(slice(2, 6), -2.0, queries=slice(4, None)),
    "with a cut": [edits.steer([0, 5], 1.5), edits.cut(keys=[1, 5])],
}


@pytest.mark.parametrize("kv_heads", [1, 3, 6])
@pytest.mark.parametrize("steer", STEERS)
@pytest.mark.parametrize("heads", [*CHOSEN.values(), tuple(range(HEADS))], ids=str)
def test_steered_edges_are_areas_of_their_own(
    heads: tuple[int, ...], steer: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch, apart: list[bool], long: None
) -> None:
    model, x = Model(kv_heads), torch.randn(2, 11, 10, generator=torch.Generator().manual_seed(1))
    found = edited(model, x, STEERS[steer], heads)
    assert apart == [True]
    monkeypatch.undo()
    for ours, whole in zip(found, edited(model, x, STEERS[steer], heads), strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("heads", [*CHOSEN.values(), tuple(range(HEADS))], ids=str)
@pytest.mark.parametrize("edit", [*STEERS, *CUTS])
def test_how_a_call_is_taken_apart_is_worked_out_once(
    edit: str, heads: tuple[int, ...], apart: list[bool], long: None
) -> None:
    model, inputs = Model(), [torch.randn(2, 11, 10) for _ in range(3)]
    given = {**CUTS, **STEERS}[edit]
    wanted = []
    for x in inputs:
        with regard.edit(model, given, heads=heads):
            wanted.append(model(x))
    apart.clear()
    with regard.edit(model, given, heads=heads):
        found = [model(x) for x in inputs]
    assert len(apart) == 1
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("steer", [edits.steer(list(range(0, 11, 2)), 1.0), edits.steer("a", 1.0)], ids=str)
def test_steers_of_many_runs_and_of_texts_by_item_stay_in_wider_heads(
    steer: edits.Edit, apart: list[bool], long: None
) -> None:
    model, x = Model(), torch.randn(2, 11, 10)
    tokens = [["a" if n in (item, 5) else "b" for n in range(11)] for item in range(2)]
    with regard.edit(model, steer, heads=(1, 2), tokens=tokens):
        model(x)
    assert apart == [False]


def test_short_steers_stay_in_wider_heads(apart: list[bool]) -> None:
    model, x = Model(), torch.randn(2, 11, 10)
    edited(model, x, STEERS["keys"], (1, 2))
    assert apart == [False]


def test_a_watch_is_shown_the_call_whole(apart: list[bool]) -> None:
    model, x = Model(), torch.randn(1, 9, 10)
    with regard.edit(model, CUTS["keys"], heads=(1, 2)), regard.watch(model) as recording:
        model(x)
    assert apart == []
    [call] = recording.at(0)
    assert call.key_mass.shape[1] == HEADS


def test_under_autocast_the_output_has_its_precision(apart: list[bool]) -> None:
    class InFloat32(nn.Module):  # what it computes is rounded where attention begins
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    model, x = InFloat32(), torch.randn(1, 3, 9, 8)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
        with regard.edit(model, CUTS["keys"], heads=(0, 2)):
            out = model(x)
    assert apart == [True] and plain.dtype == out.dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("cut", [*CUTS, "late queries", "with a cut", "many"])
@pytest.mark.parametrize("heads", [(0, 2, 4), (0, 3, 4), tuple(range(HEADS))])
def test_long_calls_on_a_gpu(cut: str, heads: tuple[int, ...]) -> None:
    """From a million pairs on, masks that are many intervals are compiled: also while functions are listened to."""
    length = 1100
    x = torch.randn(1, length, 10, generator=torch.Generator().manual_seed(1)).cuda()
    model = Model(dim=64, device="cuda")
    many = edits.cut(queries=list(range(0, length, 7)), keys=list(range(3, length, 29)))
    edit = many if cut == "many" else {**CUTS, **STEERS}[cut]
    ours = edited(model.to(torch.bfloat16), x.bfloat16(), edit, heads)
    small = Model(dim=64)
    small.load_state_dict({name: each.float().cpu() for name, each in model.state_dict().items()})
    whole = edited(small, x.bfloat16().float().cpu(), edit, heads)
    for one, other in zip(ours, whole, strict=True):
        assert (one.float().cpu() - other).norm() < 0.02 * other.norm()
    torch.cuda.reset_peak_memory_stats()
    edited(model, x.bfloat16(), edit, heads)
    assert torch.cuda.max_memory_allocated() < 2**30


ASYNCHRONOUS = [edits.cut(masks.columns(4)), edits.cut(keys=[0, 5, 99]), edits.ablate("zero"), edits.steer([0, 5], 1.5)]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(0, 2, 4, 6), tuple(range(16))])
@pytest.mark.parametrize(
    "edit",
    [edits.cut(masks.columns(4)), edits.cut(keys=[0, 5, 99]), edits.ablate("zero"), edits.steer([0, 5], 1.5)],
    ids=str,
)
def test_an_edited_pass_never_waits_for_the_gpu(edit: edits.Edit, heads: tuple[int, ...]) -> None:
    """From the second one on: the first one moves to the GPU which heads are edited."""
    x = torch.randn(3, 1, 16, 8192, 64, device="cuda", dtype=torch.bfloat16)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(*x, is_causal=True)

    model = Model()
    with torch.no_grad(), regard.edit(model, edit, heads=heads):
        model(x)
        with no_synchronisation():
            model(x)


@pytest.mark.parametrize("edit", [*CUTS.values(), edits.ablate("zero"), edits.steer([0, 2], 1.5)], ids=str)
def test_no_query_outlives_its_pass(edit: edits.Edit) -> None:
    """Else the queries and keys of all layers stay on a GPU until Python next collects garbage."""
    model, alive = Model(), []
    fused = F.scaled_dot_product_attention

    def forward(x: Tensor) -> Tensor:
        three = model.given(x).unflatten(-1, (-1, model.dim)).transpose(1, 2).split((HEADS, 3, 3), 1)
        alive.extend(weakref.ref(each) for each in three)
        return fused(*three, is_causal=True, enable_gqa=True)

    model.forward = forward  # type: ignore[method-assign]
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad(), regard.edit(model, edit, heads=(0, 2)):
            model(torch.randn(1, 9, 10))
        assert len(alive) == 3 and not any(each() is not None for each in alive)
    finally:
        gc.enable()


@pytest.mark.parametrize("block", [regard.watch, lambda model: regard.edit(model, edits.ablate("zero"), heads=(1,))])
def test_no_output_outlives_its_pass(block: Callable[[nn.Module], Any]) -> None:
    """Nor the graph that a loss was computed by."""
    model = Model()
    gc.collect()
    gc.disable()
    try:
        with block(model):
            out = weakref.ref(model(torch.randn(1, 9, 10)))
            assert out() is None
    finally:
        gc.enable()
