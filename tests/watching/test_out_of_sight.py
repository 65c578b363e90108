"""What a watch does not look at, since nothing there can attend; and what it reads once, and not for every call."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from core_calls import Operators, no_synchronisation
from regard.recording import Recorded, Site
from regard.watching import _padding, _recorder
from regard.watching._follower import Asked
from regard.watching._operators import Listening
from regard.watching._placing import Places
from regard.watching._read import Read
from regard.watching._recorder import Recorder


class Attends(nn.Module):
    """One layer of two heads; ``between`` is a module that it runs before it attends."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.qkv, self.between, self.out = nn.Linear(12, 36), between or nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 6)).transpose(1, 2) for part in self.qkv(self.between(x)).chunk(3, -1))
        keep = None if attention_mask is None else attention_mask.bool()[:, None, None]
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=keep).transpose(1, 2).flatten(2))


X = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(0))


def shown(model: nn.Module, run: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that a watch of the model is shown."""
    names: list[str] = []
    real = Listening.__torch_dispatch__

    def noting(self: Listening, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names.append(func.name())
        return real(self, func, types, args, kwargs)

    monkeypatch.setattr(Listening, "__torch_dispatch__", noting)
    with warnings.catch_warnings(), regard.watch(model):
        warnings.simplefilter("ignore")
        run()
    return names


@torch.no_grad()
def test_linear_layers_run_out_of_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Attends()
    names = shown(model, lambda: model(X), monkeypatch)
    assert not {"aten::addmm", "aten::mm", "aten::t"} & set(names)
    assert any("attention" in name for name in names)


@torch.no_grad()
def test_a_linear_layer_whose_matrix_is_keys_is_attention() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Linear(12, 7, bias=False)
            del self.scores.weight

        def forward(self, x: Tensor) -> Tensor:
            self.scores.weight = x[0]  # type: ignore[assignment]
            return self.scores(x[0]).softmax(-1) @ x[0]

    model = Scores()
    with regard.watch(model, heads_dim=0) as recording:
        model(X)
    assert len(recording) == 1


@torch.no_grad()
@pytest.mark.parametrize("where", ["hook", "forward", "all modules", "class"])
def test_attention_that_somebody_put_into_a_linear_layer_is_seen(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Attends()
    x = torch.randn(1, 2, 7, 4)

    def attend(*_: object) -> None:
        F.scaled_dot_product_attention(x, x, x)

    handle: Any = None
    if where == "hook":
        handle = model.between.register_forward_hook(attend)
    elif where == "all modules":
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, *_: attend() if module is model.between else None
        )
    elif where == "class":
        of_all = nn.Linear.forward
        monkeypatch.setattr(
            nn.Linear,
            "forward",
            lambda module, given: (attend() if module is model.between else None, of_all(module, given))[1],
        )
    else:
        forward = model.between.forward
        model.between.forward = lambda given: (attend(), forward(given))[1]  # type: ignore[method-assign]
    try:
        with regard.watch(model) as recording:
            model(X)
    finally:
        if handle is not None:
            handle.remove()
    assert len(recording) == 2


@torch.no_grad()
def test_modes_of_others_are_shown_what_linear_layers_run() -> None:
    model = Attends()
    with Operators() as plain:
        model(X)
    for inner in (True, False):
        names, watch = Operators(), regard.watch(model)
        with names if inner else watch, watch if inner else names:
            model(X)
        assert names.names.count("aten::addmm") == plain.names.count("aten::addmm") == 3


@torch.no_grad()
@pytest.mark.parametrize("block", [regard.watch, lambda model: regard.edit(model, regard.edits.ablate("zero"))])
def test_an_interrupt_in_a_linear_layer_loses_nothing_of_the_next_pass(block: Callable[[nn.Module], Any]) -> None:
    model, attention = Attends(), []
    linear = F.linear

    def interrupted(*given: Any) -> Tensor:
        if not attention:
            raise KeyboardInterrupt
        return linear(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", interrupted)
        with block(model) as found:
            with pytest.raises(KeyboardInterrupt):
                model(X)
            attention.append(1)
            model(X)
        assert len(found.calls) == 1
        attention.clear()
        with pytest.raises(KeyboardInterrupt), block(model):
            model(X)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0


@torch.no_grad()
def test_a_linear_layer_called_by_itself_is_no_pass() -> None:
    model = Attends()
    with regard.watch(model) as recording:
        model.qkv(X)
        model(X)
    assert [call.number for call in recording] == [0]


def test_what_was_read_of_a_tensor_is_read_again_when_it_has_changed() -> None:
    read, asked = Read(), []

    def total(tensor: Tensor) -> Any:
        return read.once(tensor, "sum", lambda: asked.append(1) or int(tensor.sum()))

    x = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert [total(x), total(x), total(x[1]), total(x[1]), total(x[:, 1]), len(asked)] == [21, 21, 15, 15, 7, 3]
    x[0, 0] = 11
    assert [total(x), total(x[0])] == [31, 16]
    with torch.inference_mode():  # torch does not count who writes into this one
        mine = x.clone()
        first = total(mine)
        mine += 1
        assert total(mine) == first + 6
    assert len(read._found) == 1
    del x
    assert not read._found


@torch.no_grad()
def test_padding_is_read_once_for_all_layers_and_anew_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict({"a": Attends(), "b": Attends()})
    model.forward = lambda x, attention_mask: model["b"](model["a"](x, attention_mask), attention_mask)  # type: ignore[method-assign]
    counted, real = [], _padding._tokens
    monkeypatch.setattr(_padding, "_tokens", lambda *given: (counted.append(1), real(*given))[1])
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 5:] = 0
    with regard.watch(model) as recording:
        model(X, mask)
        assert len(counted) == 1
        mask[1, 3:] = 0
        model(X, mask)
        assert len(counted) == 2
    missing = [int(call.entropy[1, 0].isnan().sum()) for call in recording]
    assert missing == [2, 2, 4, 4]


def test_a_mask_that_is_filled_past_torch_is_read_anew_in_each_pass() -> None:
    """torch counts no such writes: a loop that fills one array for each batch."""
    memory = np.ones((2, 7), dtype=np.bool_)
    mask = torch.from_numpy(memory)
    with regard.watch(attends := Attends()) as recording:
        for first in (7, 3, 5):
            memory[1] = np.arange(7) < first
            attends(X, attention_mask=mask)
    assert [int(call.entropy[1, 0].isnan().sum()) for call in recording] == [0, 4, 2]


class Elsewhere(Tensor):
    """Says that it is on a GPU, and notes who waits for it."""

    waits = 0
    device = torch.device("cuda")

    def cpu(self, *_: object) -> Tensor:
        Elsewhere.waits += 1
        return self.as_subclass(Tensor)


@pytest.mark.parametrize("keep_on_cpu", [True, False])
def test_statistics_are_moved_off_a_device_once_the_pass_has_ended(
    keep_on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Elsewhere, "waits", 0)
    recorder = Recorder(Asked(keep_on_cpu=keep_on_cpu), Places())
    calls = []
    for layer in range(3):
        parts = {name: torch.randn(1, 2, 7).as_subclass(Elsewhere) for name in ("lse", "entropy")}
        numbers = torch.zeros(1, dtype=torch.int64), torch.full((1, 1, 1), 7, dtype=torch.int32).as_subclass(Elsewhere)
        call = Recorded(
            site=Site("a", 0), layer=layer, number=0, kind="self", phase="prefill", keys=7, heads=(0, 1),
            positions=numbers[0], permitted=numbers[1], parts=parts,
        )  # fmt: skip
        recorder.note(call, torch.device("cuda"))
        recorder.move(all_of_it=False)
        calls.append(call)
    assert Elsewhere.waits == 0
    recorder.move(all_of_it=True)
    for call in calls:
        assert type(call.permitted) is Tensor
        assert all((type(part) is Tensor) == keep_on_cpu for part in call.parts.values())
    waits = Elsewhere.waits
    recorder.move(all_of_it=True)
    assert Elsewhere.waits == waits == (9 if keep_on_cpu else 3)


def test_many_statistics_do_not_wait_for_the_end_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_recorder, "_MOST_TO_MOVE", 50)
    monkeypatch.setattr(Elsewhere, "waits", 0)
    recorder = Recorder(Asked(), Places())
    part = torch.randn(1, 2, 7).as_subclass(Elsewhere)
    call = Recorded(
        site=Site("a", 0), layer=0, number=0, kind="self", phase="prefill", keys=7, heads=(0, 1),
        positions=torch.zeros(1, dtype=torch.int64), permitted=torch.full((1, 1, 1), 7), parts={"lse": part},
    )  # fmt: skip
    recorder.note(call, torch.device("cuda"))
    recorder.move(all_of_it=False)
    assert type(call.parts["lse"]) is Tensor


@pytest.mark.gpu
@torch.no_grad()
def test_a_watched_pass_waits_for_the_gpu_only_at_its_end() -> None:
    """From the second one on: the first one moves tables of the mask to the GPU, and which heads are watched."""

    class Model(nn.Module):
        known = False

        def forward(self, x: Tensor) -> Tensor:
            with no_synchronisation() if self.known else contextlib.nullcontext():
                first = F.scaled_dot_product_attention(*x, is_causal=True)
                return first + F.scaled_dot_product_attention(*x, is_causal=True)

    x, model = torch.randn(3, 1, 4, 512, 64, device="cuda", dtype=torch.bfloat16), Model()
    with regard.watch(model, heads=[0, 1, 3]) as recording:
        model(x)
        model.known = True
        model(x)
    assert len(recording) == 4 and not recording.missed
    assert all(part.device.type == "cpu" for call in recording for part in call.parts.values())
