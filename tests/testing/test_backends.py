"""Every backend of regard passes the whole suite, or refuses by name; "auto" refuses nothing."""

from __future__ import annotations

import functools

import pytest
import torch

import regard
from regard.testing import check, numbers

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
BACKENDS = ["auto", *regard.backends.available("cpu")]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_passes_every_rule_or_refuses(backend, dtype):
    report = check(functools.partial(regard.attention, backend=backend), dtype=dtype)
    assert [(row.rule, row.case, row.detail) for row in report.failures] == []
    assert report.counts["n.a."] == 0
    if backend == "auto":
        assert [(row.rule, row.case, row.detail) for row in report.rows if row.outcome == "refused"] == []


# rules are dealt out, so that several processes can share what is mostly the compiling of kernels
PARTS = 6


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("backend", ["auto", *regard.backends.available("cuda")])
def test_backend_passes_every_rule_or_refuses_on_the_gpu(backend, dtype, part):
    own = numbers()[part::PARTS]
    report = check(functools.partial(regard.attention, backend=backend), rules=own, device="cuda", dtype=dtype)
    assert [(row.rule, row.case, row.detail) for row in report.failures] == []
