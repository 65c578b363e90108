"""Like calls share what the first of them worked out, forward and backward; each has the result and the gradients of
its own tensors, strides, mask and numbers, as the reference computes them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from tests import forced
from tests._triton.calls import DEVICE
from tests._triton.inside import launcher
from tests.core_calls import differ, kept_by_dropout, oracle
from torch import Tensor

import regard
from regard import masks

# forward, then queries and keys of the backward pass
KERNELS = 3
L, S, D, E = 7, 11, 5, 3
NAMES = ("query", "key", "value")


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each launch, whether it was made with what an earlier one worked out; nothing is known of other tests."""
    if DEVICE == "cpu":
        from tests._triton.compiled import compile_kernels

        compile_kernels(monkeypatch)
    forced.fresh_launches(monkeypatch)
    found: list[bool] = []
    launch = launcher.Launch.__call__

    def noted(self: launcher.Launch, memory: Any) -> None:
        found.append(
            self._ready is not None and not any(tensor.data_ptr() % 16 for tensor in memory if tensor is not None)
        )
        launch(self, memory)

    monkeypatch.setattr(launcher.Launch, "__call__", noted)
    return found


def tensors(B: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = (B, 4, L, D), (B, 2, S, D), (B, 2, S, E)
    return [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]


def wrong(inputs: list[Tensor], tolerance: float = 3e-5, **given: Any) -> list[str]:
    """In what a call and its gradients differ from the reference."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in given.items()}
    if (mask := given.get("mask")) is not None:
        on_cpu["mask"] = masks.rebuild(mask.code, tuple(tensor.cpu() for tensor in mask.tensors))
    keep = None
    if given.get("dropout") and DEVICE == "cpu":
        keep = kept_by_dropout(*inputs[:2], given["dropout"])
    out = regard.attention(*leaves, **given, backend="triton")
    grad_out = torch.randn(out.shape).to(out.dtype)
    exact, of_inputs = oracle(*[tensor.cpu() for tensor in inputs], grad_out, keep=keep, **on_cpu)
    made = torch.autograd.grad(out, leaves, grad_out.to(DEVICE))
    found = dict(zip(("out", *NAMES), (out, *made), strict=True))
    truth = dict(zip(("out", *NAMES), (exact.out, *of_inputs[:3]), strict=True))
    sizes = {name: 1 + abs(truth[name]).max() for name in found}
    errors = {name: differ(tensor.cpu(), truth[name]) for name, tensor in found.items()}
    return [f"{name}: off by {error:.1e}" for name, error in errors.items() if not error <= tolerance * sizes[name]]


def padding(*lengths: int) -> masks.Mask:
    return masks.padding(torch.tensor(lengths, device=DEVICE))


@pytest.mark.parametrize("kind", ["none", "window", "padding", "documents"])
def test_like_calls_have_their_own_results(kind: str, shared: list[bool]) -> None:
    mask = {
        "none": None,
        "window": masks.window(left=3, right=1),
        "padding": padding(4, 9) & masks.causal(),
        "documents": masks.documents(lengths=[4, 7]),
    }[kind]
    assert wrong(tensors(), mask=mask) == wrong(tensors(), mask=mask) == []
    assert shared == [False] * KERNELS + [True] * KERNELS


def test_masks_of_one_structure_keep_their_own_numbers(shared: list[bool]) -> None:
    lengths = torch.tensor([4, 9], device=DEVICE)
    mask = masks.padding(lengths)
    assert wrong(tensors(), mask=mask) == wrong(tensors(), mask=padding(11, 1)) == []
    lengths += 2
    assert wrong(tensors(), mask=mask) == []
    assert all(shared[KERNELS:])
    # other sides and other dtypes are other structures
    assert wrong(tensors(), mask=masks.padding(lengths, side="left")) == []
    assert wrong(tensors(), mask=masks.padding(lengths.to(torch.uint8))) == []


def test_windows_and_offsets_are_those_of_the_call(shared: list[bool]) -> None:
    inputs = tensors()
    for mask, offset in ((masks.window(left=2), 4), (masks.window(left=5), 4), (masks.window(left=2), 1)):
        assert wrong(inputs, mask=mask, query_offset=offset) == []
    assert not any(shared)
    offsets = [torch.tensor(each, device=DEVICE) for each in ([0, 4], [5, -3])]
    assert [wrong(inputs, mask=masks.causal(), query_offset=offset) for offset in offsets] == [[], []]


def test_one_mask_serves_other_tensors(shared: list[bool]) -> None:
    mask = padding(4, 9)
    query, key, value = tensors()
    tokens_first = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (query, key, value)]
    strided = torch.randn(2, 4, L, 2 * D, device=DEVICE)[..., ::2]
    by_column = value.mT.contiguous().mT
    shorter = [query, key[:, :, :9], value[:, :, :9]]
    for _ in range(2):
        assert wrong([query, key, value], mask=mask) == wrong(tokens_first, mask=mask) == []
        assert wrong([strided, key, by_column], mask=mask) == wrong(shorter, mask=mask) == []
        assert wrong(tensors(dtype=torch.float16), tolerance=3e-3, mask=mask) == []
    assert shared == [False] * 5 * KERNELS + [True] * 5 * KERNELS
    assert wrong(tensors(B=1), mask=padding(4)) == []


def test_addresses_that_16_does_not_divide_are_launched_by_themselves(shared: list[bool]) -> None:
    query, key, value = tensors()
    odd = torch.zeros(key.numel() + 1, device=DEVICE)[1:].view(key.shape).copy_(key)
    for each in (key, odd, key, odd):
        assert wrong([query, each, value], mask=masks.window(left=3)) == []
    assert shared.count(True) == KERNELS


def test_lengths_and_offsets_may_lie_apart_in_memory() -> None:
    both = torch.tensor([[4, 100], [9, 100]], device=DEVICE)
    assert wrong(tensors(), mask=masks.padding(both[:, 0])) == []
    assert wrong(tensors(), mask=masks.causal(), query_offset=both[:, 0]) == []


def test_gradients_of_the_output_may_have_any_strides() -> None:
    query, key, value = (tensor.requires_grad_() for tensor in tensors())
    tokens_first = torch.randn(2, L, 4, E, device=DEVICE).transpose(1, 2)
    for _ in range(2):
        for grad_out in (torch.ones((), device=DEVICE).expand(2, 4, L, E), tokens_first):
            out = regard.attention(query, key, value, mask=masks.window(left=3), backend="triton")
            found = torch.autograd.grad(out, (query, key, value), grad_out)
            exact = oracle(query.cpu(), key.cpu(), value.cpu(), grad_out.cpu(), mask=masks.window(left=3))[1]
            assert all(differ(one.cpu(), other) < 1e-4 for one, other in zip(found, exact[:3], strict=True))


def test_sinks_of_either_precision_are_read_as_they_are() -> None:
    sinks = torch.tensor([0.5, -3.0, 2.0, 0.0], device=DEVICE)
    for _ in range(2):
        for each in (sinks, sinks.half()):
            inputs = tensors(dtype=torch.float16)
            assert wrong(inputs, tolerance=3e-3, mask=masks.window(left=3), sinks=each) == []


def test_masks_of_one_structure_may_have_more_intervals_or_fewer() -> None:
    """Of documents by a list, contents are known: with a column for all, one interval for each row or two."""
    inputs = tensors()
    for ids in ([0] * S, [0] * 6 + [1] * 5, [0] * S):
        assert wrong(inputs, mask=masks.documents(ids=ids) | masks.columns(1)) == []


def test_paddings_joined_with_themselves_and_with_others() -> None:
    first, second = padding(4, 9), padding(7, 3)
    for mask in (first & first, first & second, second & first):
        assert wrong(tensors(), mask=mask) == []


def test_decoding_reads_sinks_of_either_precision() -> None:
    query, key, value = (torch.randn(1, 2, n, 64, device=DEVICE).half() for n in (1, 1024, 1024))
    sinks = torch.tensor([8.0, 6.0], device=DEVICE)
    for each in (sinks.half(), sinks, sinks.half()):
        found = regard.attention(query, key, value, sinks=each, backend="triton")
        exact = regard.attention(query, key, value, sinks=each, backend="eager")
        assert (found - exact).abs().max() < 1e-3


def test_each_call_draws_its_own_dropout(shared: list[bool]) -> None:
    inputs = tensors()
    if DEVICE == "cpu":  # the reference repeats a draw of the CPU's generator
        assert [wrong(inputs, mask=padding(4, 9), dropout=p) for p in (0.4, 0.4, 0.25)] == [[]] * 3
        assert shared.count(True) >= KERNELS
    first, second = (regard.attention(*inputs, dropout=0.5, backend="triton") for _ in range(2))
    assert not torch.equal(first, second)


def test_only_what_is_asked_for_has_a_gradient() -> None:
    mask, mean = masks.window(left=3), torch.ones(2, 4, L, E, device=DEVICE)
    every = [tensor.requires_grad_() for tensor in tensors()]
    whole = torch.autograd.grad(regard.attention(*every, mask=mask, backend="triton"), every, mean)
    for n in range(3):
        some = [tensor if n == m else tensor.detach() for m, tensor in enumerate(every)]
        (found,) = torch.autograd.grad(regard.attention(*some, mask=mask, backend="triton"), some[n], mean)
        assert torch.equal(found, whole[n])


def test_nothing_of_a_call_is_kept_alive() -> None:
    leaves = [tensor.requires_grad_() for tensor in tensors()]
    mask = padding(4, 9)
    out = regard.attention(*leaves, mask=mask, backend="triton")
    made = torch.autograd.grad(out, leaves, torch.ones_like(out))
    held = [weakref.ref(tensor) for tensor in (*leaves, *mask.tensors, out, *made)]
    del leaves, mask, out, made
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
