"""Positions and biases on a GPU: the numbers of the CPU, and no synchronisation."""

from __future__ import annotations

import pytest
import torch

import regard
from core_calls import no_synchronisation
from regard import masks, positions
from regard.bias import T5Bias, alibi

pytestmark = pytest.mark.gpu


def close(found, wanted, tolerance):
    return torch.allclose(found.cpu().double(), wanted.double(), rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("name", ["alibi", "t5"])
@pytest.mark.parametrize("offset", [None, torch.tensor([3, 40])], ids=["end", "per item"])
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["no mask", "causal"])
def test_a_bias_by_rule_gives_the_numbers_of_the_cpu_and_nothing_synchronises(name, offset, mask):
    rule = alibi(4) if name == "alibi" else T5Bias(4, std=1.0)
    here = [torch.randn(2, heads, tokens, 16, requires_grad=True) for heads, tokens in ((4, 63), (2, 111), (2, 111))]
    there = [x.detach().cuda().requires_grad_() for x in here]
    table = [rule.weight] if name == "t5" else []
    wanted = regard.attention(*here, mask=mask, bias=rule, query_offset=offset)
    wanted_grads = torch.autograd.grad(wanted.sum(), [*here, *table])
    on_gpu = rule.cuda() if name == "t5" else rule
    table = [on_gpu.weight] if name == "t5" else []
    moved = None if offset is None else offset.cuda()

    def run():
        out = regard.attention(*there, mask=mask, bias=on_gpu, query_offset=moved)
        return out, torch.autograd.grad(out.sum(), [*there, *table])

    run()  # constants reach the device once
    with no_synchronisation():
        out, grads = run()
    assert close(out, wanted, 1e-5)
    for found, grad in zip(grads, wanted_grads, strict=True):
        assert close(found, grad, 1e-4 * float(grad.abs().max()) + 1e-5)


def test_a_rule_is_observed_on_the_gpu():
    query, key, value = (torch.randn(2, 4, 63, 16) for _ in range(3))
    here = regard.observe(query, key, value, bias=alibi(4))
    there = regard.observe(query.cuda(), key.cuda(), value.cuda(), bias=alibi(4))
    for name in ("out", "entropy", "key_mass", "map"):
        assert close(getattr(there, name), getattr(here, name), 1e-4)
    assert "triton kernels" in str(there.plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", [None, positions.DynamicNTK(3.0, 5), positions.YaRN(4.0, 63)])
def test_rotary_turns_as_on_the_cpu_and_nothing_synchronises(dtype, scaling):
    rotary = positions.Rotary(22, scaling=scaling)
    x, offset = torch.randn(2, 3, 7, 24, dtype=dtype), torch.tensor([3, 90])
    wanted = rotary.turn(x, 5), rotary.turn(x, offset)
    rotary, x, offset = rotary.cuda(), x.cuda(), offset.cuda()
    with no_synchronisation():
        found, by_item = rotary.turn(x, 5), rotary.turn(x, offset)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    assert close(found, wanted[0], tolerance) and close(by_item, wanted[1], tolerance)
