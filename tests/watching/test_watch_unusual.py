"""`regard.watch` on models that are interrupted, call themselves, have no values, or attend by hand."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.watching.models import ByHand, Stack, check_statistics
from torch import Tensor, nn

import regard

X = torch.randn(2, 11, 21)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_after_an_interrupt_that_was_caught_passes_and_layers_count_on() -> None:
    class Interrupted(nn.Module):
        def __init__(self, caught: bool) -> None:
            super().__init__()
            self.caught, self.first, self.second = caught, ByHand(), ByHand()

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(KeyboardInterrupt) if self.caught else contextlib.nullcontext():
                self.first(x)
            return self.second(x)

    for caught in (True, False):
        model = Interrupted(caught)
        model.first.register_forward_hook(interrupt)
        with regard.watch(model) as recording:
            for _ in range(2):
                with contextlib.suppress(KeyboardInterrupt):
                    model(X)
        paths = ["first", "second"] if caught else ["first"]
        assert [call.path for call in recording] == 2 * paths
        assert [call.number for call in recording] == [n for n in (0, 1) for _ in paths]


def test_a_model_that_calls_itself_makes_one_pass() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = ByHand()

        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            return self(self.inner(x), again=False) if again else self.inner(x)

    with regard.watch(model := Twice()) as recording:
        model(X)
    assert [(call.path, call.number) for call in recording] == [("inner", 0), ("inner #2", 0)]


def test_a_model_on_the_meta_device_runs_and_its_calls_are_listed() -> None:
    unseen = pytest.warns(UserWarning, match="on the meta device there are no values")
    with unseen, regard.watch(model := ByHand().to("meta")) as recording:
        out = model(X.to("meta"))
    assert out.is_meta and len(recording) == 0
    assert [reason for _, reason in recording.missed] == ["on the meta device there are no values"]


class Written(nn.Module):
    """Attention with matrix products of its own."""

    def __init__(self, softmax: Any) -> None:
        super().__init__()
        self.softmax = softmax

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (3, -1)).transpose(1, 2)
        return (self.softmax(q @ q.mT) @ q).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    "softmax",
    [lambda s: s.softmax(-1), lambda s: torch.softmax(s, dim=3), lambda s: F.softmax(input=s, dim=-1), nn.Softmax(-1)],
    ids=["method", "torch", "functional", "module"],
)
def test_attention_written_out_is_seen_next_to_a_fused_call_and_marked(softmax: Any) -> None:
    model = Stack(ByHand(), Written(softmax))
    expected = model(X)
    with regard.watch(model) as recording:
        out = model(X)
    assert torch.equal(out, expected) and recording.missed == []
    assert [(call.path, call.written_out) for call in recording] == [("layers.0", False), ("layers.1", True)]
    q = (X + model.layers[0](X)).detach().unflatten(-1, (3, -1)).transpose(1, 2)
    check_statistics(recording.calls[1], (q @ q.mT).softmax(-1))


def test_other_softmaxes_are_no_attention() -> None:
    class Routed(ByHand):
        def forward(self, x: Tensor) -> Tensor:
            gates = x.softmax(-1) * x[None].softmax(1)[0]
            return super().forward(x * gates)

    model = Stack(Routed(), regard.nn.MultiHeadAttention(21, 3), nn.MultiheadAttention(21, 3, batch_first=True))
    model.layers[2].forward = functools.partial(itself, model.layers[2].forward)  # type: ignore[method-assign]
    with regard.watch(model) as recording:
        model(X)
    assert len(recording) == 3 and recording.missed == []


class Reuses(nn.Module):
    """Its values stand where a parameter stood, as memory that was given back may be used again."""

    def __init__(self) -> None:
        super().__init__()
        self.kv, self.num_heads, self.other = nn.Linear(21, 42), 3, nn.Parameter(torch.zeros(2, 3, 11, 7))
        self.memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        k, v = (part.unflatten(-1, (3, 7)).transpose(1, 2) for part in self.kv(x).chunk(2, -1))
        if self.memory is not None:
            v = self.memory.copy_(v)
        return ((k @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_values_in_memory_that_a_parameter_has_left_are_values() -> None:
    model = Stack(ByHand(), Reuses())
    inner: Any = model.layers[1]
    with torch.no_grad():
        expected = model(X)
        with regard.watch(model) as recording, regard.edit(model, regard.edits.cut(keys=1)) as report:
            model(X)
            inner.memory, inner.other.data = inner.other.data, inner.other.data.clone()
            model(X)
            inner.memory = None
            model.to(torch.float64).float()  # its parameters move
            model(X)
        assert len(recording) == len(report) == 6 and recording.missed == []
        torch.testing.assert_close(model(X), expected)


def itself(forward: Any, x: Tensor) -> Tensor:
    return forward(x, x, x)[0]
