"""Written-out attention whose tensors are written into, or read on the side: edited as by hand, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import edits

HEADS, DIM = 4, 6
End = Callable[[Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """``end``: the output, from logits and values."""

    def __init__(self, end: End) -> None:
        super().__init__()
        self.qkv, self.end = nn.Linear(24, 72), end

    def forward(self, x: Tensor, cut: bool = False) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (HEADS, DIM)).transpose(1, 2).contiguous() for t in parts)
        logits = q @ k.transpose(2, 3) / DIM**0.5
        if cut:
            logits = logits.index_fill(3, torch.tensor([1]), -math.inf)
        return self.end(logits, v).transpose(1, 2).flatten(2)


def weights_by_index(a: Tensor, v: Tensor) -> Tensor:
    w = a.softmax(-1)
    w[..., 0] = 0
    return w @ v


def output_by_index(a: Tensor, v: Tensor) -> Tensor:
    o = a.softmax(-1) @ v
    o[:, :, 0] = 0
    return o


def buffer(a: Tensor, v: Tensor) -> Tensor:
    o = torch.empty_like(v)
    o[:] = a.softmax(-1) @ v
    return o


def added_to(a: Tensor, v: Tensor) -> Tensor:
    o = torch.ones_like(v)
    o += a.softmax(-1) @ v
    return o


def added_in_place(a: Tensor, v: Tensor) -> Tensor:
    return torch.ones_like(v).add_(a.softmax(-1) @ v)


def into_out(a: Tensor, v: Tensor) -> Tensor:
    o = torch.empty_like(v)
    torch.mul(a.softmax(-1) @ v, 2, out=o)
    return o


def as_data(a: Tensor, v: Tensor) -> Tensor:
    o = torch.empty_like(v)
    o.data = a.softmax(-1) @ v
    return o


def through_numpy(a: Tensor, v: Tensor) -> Tensor:
    return torch.from_numpy((a.softmax(-1) @ v).numpy())


def through_lists(a: Tensor, v: Tensor) -> Tensor:
    return torch.tensor((a.softmax(-1) @ v).tolist(), dtype=v.dtype)


def scaled_in_place(a: Tensor, v: Tensor) -> Tensor:
    return (a.softmax(-1) @ v).mul_(3)


def values_without_a_past(a: Tensor, v: Tensor) -> Tensor:
    o = a.softmax(-1) @ v
    v.detach_()
    return o


RIGHT = [
    weights_by_index, output_by_index, buffer, added_to, added_in_place, into_out, as_data, through_numpy,
    through_lists, scaled_in_place, values_without_a_past,
]  # fmt: skip


def diagonal(a: Tensor, v: Tensor) -> Tensor:
    w = a.softmax(-1)
    w.diagonal(dim1=-2, dim2=-1).zero_()
    return w @ v


def threshold(a: Tensor, v: Tensor) -> Tensor:
    w = a.softmax(-1)
    return torch.where(w > 0.1, w, 0.0) @ v


def rows_of_output(a: Tensor, v: Tensor) -> Tensor:
    o = a.softmax(-1) @ v
    o[:, :, 1:] += v[:, :, :-1]
    return o


def view_of_output(a: Tensor, v: Tensor) -> Tensor:
    o = a.softmax(-1) @ v
    o[:, :, 1:].add_(v[:, :, :-1])
    return o


def view_before_it_is_written(a: Tensor, v: Tensor) -> Tensor:
    o = a.softmax(-1) @ v
    before = o[:]
    o.mul_(3)
    return before


def values_reused(a: Tensor, v: Tensor) -> Tensor:
    o = a.softmax(-1) @ v
    v.zero_()
    return o


def logits_reused(a: Tensor, v: Tensor) -> Tensor:
    w = a.softmax(-1)
    a.zero_()
    return w @ v


def into_logits(a: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(a, -1, out=a) @ v  # type: ignore[call-overload, no-any-return]


REFUSED = [
    diagonal, threshold, rows_of_output, view_of_output, view_before_it_is_written, values_reused, logits_reused,
    into_logits,
]  # fmt: skip
MODES = [torch.no_grad, torch.inference_mode]


def plain(a: Tensor, v: Tensor) -> Tensor:
    return a.softmax(-1) @ v


def two_layers(end: End) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    return nn.ModuleList([Layer(plain), Layer(end)]).double().eval(), torch.randn(2, 7, 24, dtype=torch.float64)


class Both(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, cut: bool = False) -> Tensor:
        for layer in self.layers:
            x = layer(x, cut)
        return x


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end", RIGHT, ids=lambda end: end.__name__)
def test_what_is_written_elsewhere_is_edited_as_by_hand(end: End, mode: Any) -> None:
    layers, x = two_layers(end)
    model = Both(layers)
    with mode():
        wanted = model(x, cut=True)
        with regard.edit(model, edits.cut(keys=1)) as report:
            found = model(x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert [call.layer for call in report.calls] == [0, 1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end", REFUSED, ids=lambda end: end.__name__)
def test_what_cannot_be_done_again_is_refused(end: End, mode: Any) -> None:
    layers, x = two_layers(end)
    model = Both(layers)
    with mode():
        plain_out = model(x)
        with pytest.raises(edits.CannotEdit), regard.edit(model, edits.cut(keys=1)):
            model(x)
        assert torch.equal(model(x), plain_out)
        with regard.edit(model, edits.cut(keys=1), layers=[0]):  # of layers that are not edited nothing is asked
            model(x)
