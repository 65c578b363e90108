"""The loss in one kernel, interpreted on a CPU, against the loss in torch's operations."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

CHECK = """
import torch
import regard.train._fused_loss as fused
from regard.train._batches import Soft
from regard.train._loss import loss_of

fused.BLOCK = 16
torch.manual_seed(0)
for passes in (1, 2):
    for smoothing, alpha, tokens, distill in ((0.1, 0.7, None, 0.0), (0.0, 1.0, 31, 0.0), (0.1, 0.7, None, 0.6)):
        outputs = torch.randint(4, 45, (3, 5))
        outputs[1, 3:] = outputs[2] = 0
        x = (3 * torch.randn(passes * 3, 5, 45)).requires_grad_()
        top = torch.randn(3, 5, 45).softmax(-1).topk(3)  # not a power of two
        soft = Soft(top.indices, top.values)
        wanted = loss_of(x, outputs, smoothing=smoothing, r_drop=alpha, tokens=tokens, soft=soft, distill=distill)
        (grad,) = torch.autograd.grad(wanted.total, x)
        likely = (soft.tokens.flatten(0, 1), soft.weights.flatten(0, 1), distill) if distill else ()
        flat = x.reshape(-1, 45), outputs.flatten()
        total, nll, count = fused.FusedLoss.apply(*flat, smoothing, alpha, tokens, *likely)
        (found,) = torch.autograd.grad(2 * total, x)
        torch.testing.assert_close(total, wanted.total)
        torch.testing.assert_close(nll, wanted.nll)
        assert int(count) == int(wanted.tokens) == 8
        torch.testing.assert_close(found, 2 * grad)
"""

# every kind of launch, for a Hopper GPU; none is needed
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from regard.train._fused_loss import BLOCK, _kernel

kinds = "*bf16 *i64 *i64 *bf16 *fp32 *i64 *fp32 i32 i32 i32 fp32 fp32 fp32 i32 constexpr constexpr constexpr".split()
for twice, likely in ((False, 0), (True, 16)):
    fixed = {"TWICE": twice, "LIKELY": likely, "BLOCK": BLOCK}
    source = ASTSource(_kernel, dict(zip(_kernel.arg_names, kinds, strict=True)), constexprs=fixed)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert made.metadata.shared < 1024, made.metadata.shared
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_compiles_for_a_gpu() -> None:
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_one_kernel_gives_loss_and_gradient_of_torchs_operations() -> None:
    settings = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CHECK], env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
