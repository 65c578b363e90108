"""How often kernels are compiled: once for a kind of call, whatever its lengths, layout, mask or number of heads; and
those of the backward pass while the forward one is.

Nothing is compiled here: Triton says what it would compile anew for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests import forced
from tests.core_calls import prepare

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("calls on CPU tensors stand for calls on a GPU", allow_module_level=True)

from tests._triton.inside import attend, backward, forward, gradients  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver, jit  # noqa: E402

from regard import bias, masks  # noqa: E402
from regard.spec import Call  # noqa: E402

Variant = tuple[str, str]


class Driver:
    """Of a GPU that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[bool, set[Variant]]]:
    """What was to be compiled: to be launched (False), and ahead of it (True)."""
    found: dict[bool, set[Variant]] = {False: set(), True: set()}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        *_, binder = self.device_caches[0]
        _, kinds, options = binder(*args, **constants)
        found[warmup].add((self.__name__, f"{kinds} {sorted(options.items())}"))

    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(jit.JITFunction, "run", run)
    forced.fresh_launches(monkeypatch)
    forced.compiling_ahead(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    yield found
    for kernel in _kernels():
        kernel.device_caches.clear()


def _kernels() -> list[Any]:
    return [forward.attend, backward.keys_backward, backward.queries_backward, backward.bias_backward]


def call_of(L: int = 200, D: int = 64, H: int = 4, G: int = 4, B: int = 2, layout: str = "heads", **given: Any) -> Call:
    def made(heads: int) -> torch.Tensor:
        dtype = given.get("dtype", torch.bfloat16)
        if layout == "heads":
            return torch.empty(B, heads, L, D, dtype=dtype).requires_grad_()
        return torch.empty(B, L, heads, D, dtype=dtype).transpose(1, 2).requires_grad_()

    names = ("mask", "bias", "scale", "softcap", "sinks")
    return prepare(made(H), made(G), made(G), *(given.get(name) for name in names), given.get("dropout", 0.0), None)


def run(call: Call) -> None:
    done = attend.attend(call, False)
    gradients.gradients(call, torch.empty_like(done.out), done.out, done.lse, (True, True, True, False))


LIKE: dict[str, list[dict[str, Any]]] = {
    "window": [
        {"mask": masks.window(left=30)},
        {"mask": masks.window(left=31)},
        {"mask": masks.causal(), "L": 333},
        {"mask": masks.window(left=30, right=7), "H": 6, "G": 6, "B": 1},
        {"mask": masks.causal(), "layout": "tokens"},
        {"mask": masks.causal(), "sinks": torch.zeros(4)},
    ],
    "documents": [
        {"mask": masks.documents(lengths=[70, 130])},
        {"mask": masks.documents(lengths=[100, 100, 133]), "L": 333, "H": 5, "G": 5},
    ],
    "grouped": [{"mask": masks.causal(), "G": 2}, {"mask": masks.causal(), "H": 6, "G": 1}],
    "dims": [{"mask": masks.causal(), "D": dim} for dim in (40, 48, 56)],
    "odd dims": [{"mask": masks.causal(), "D": dim} for dim in (33, 50, 63)],
    "alibi": [{"bias": bias.alibi(4), "mask": masks.causal(), "L": length} for length in (200, 333)],
    "matrix": [{"bias": torch.zeros(shape)} for shape in ((1, 1, 200, 200), (2, 4, 1, 200), (1, 4, 200, 200))],
}


@pytest.mark.parametrize("kind", LIKE)
def test_like_calls_are_compiled_once(kind: str, asked: dict[bool, set[Variant]]) -> None:
    for given in LIKE[kind]:
        run(call_of(**given))
    assert sorted(name for name, _ in asked[False]) == ["attend", "keys_backward", "queries_backward"]


def test_other_kinds_are_compiled_apart(asked: dict[bool, set[Variant]]) -> None:
    kinds = [{}, {"D": 128}, {"D": 63}, {"softcap": 5.0}, {"dropout": 0.1}, {"dtype": torch.float16}, {"L": 20}]
    for given in kinds:
        run(call_of(mask=masks.causal(), **given))
    assert len(asked[False]) == 3 * len(kinds)


@pytest.mark.parametrize("kind", LIKE)
def test_the_backward_pass_finds_what_was_compiled_ahead(kind: str, asked: dict[bool, set[Variant]]) -> None:
    for given in LIKE[kind]:
        run(call_of(**given))
    assert {variant for variant in asked[False] if variant[0] != "attend"} == asked[True]


def test_what_fails_ahead_fails_where_it_is_launched(
    asked: dict[bool, set[Variant]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = jit.JITFunction.run

    def failing(self: Any, *args: Any, **more: Any) -> Any:
        if self.__name__ == "queries_backward":
            raise ValueError("too large")
        return whole(self, *args, **more)

    monkeypatch.setattr(jit.JITFunction, "run", failing)
    call = call_of(mask=masks.causal())
    done = attend.attend(call, False)
    with pytest.raises(ValueError, match="too large"):
        gradients.gradients(call, done.out, done.out, done.lse, (True, True, True, False))
