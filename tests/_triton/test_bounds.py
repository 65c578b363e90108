"""A kernel that leaves its arguments' memory is caught (only on the interpreter: a GPU would do it)."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def doubled(X, Y, n, LIMIT: tl.constexpr):
    at = tl.arange(0, 8)
    tl.store(Y + at, 2 * tl.load(X + at, mask=at < n, other=0), mask=at < LIMIT)


@triton.jit
def counted(Y):
    tl.atomic_add(Y + tl.arange(0, 8), 1.0)


def test_inside_all_is_well() -> None:
    y = torch.zeros(6)
    doubled[(1,)](torch.arange(5.0), y, 5, 6)
    assert y.tolist() == [0, 2, 4, 6, 8, 0]


@pytest.mark.parametrize("read, written, done", [(6, 5, "reads 1 of 6"), (5, 7, "writes 2 of 7"), (5, 6, "writes 1")])
def test_reading_and_writing_beyond_the_end(read: int, written: int, done: str) -> None:
    with pytest.raises(InterpreterError, match=f"a kernel {done}"):
        doubled[(1,)](torch.arange(5.0), torch.zeros(5), read, written)


def test_adding_beyond_the_end() -> None:
    with pytest.raises(InterpreterError, match="a kernel adds to 3 of 8"):
        counted[(1,)](torch.zeros(5))
