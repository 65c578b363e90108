"""The loss of `_loss` and its gradient in one kernel: logits are read, gradients are written, nothing else is stored.

A vocabulary of 10 000 makes logits the largest tensors of a small model's step, and every operation on them a pass
through memory. One program has the rows of one target token, of both passes where there is R-Drop.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    logits, outputs, counts, grads, sums, likely, weights, rows, words, stride, smoothing, alpha, distill, k,
    TWICE: tl.constexpr, LIKELY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`sums` [3, rows]: the loss, −log P of the first pass, and whether the row counts.

    With LIKELY > 0, a power of two, teachers say `k` tokens of each row and how likely each is. What their tokens take
    away from the gradient is a few numbers per row, which are subtracted afterwards.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(outputs + row)
    real = (target != 0).to(tl.float32)
    share = real / tl.maximum(tl.load(counts).to(tl.float32), 1.0)
    one = logits + row * stride
    two = logits + (row + rows) * stride
    at = tl.arange(0, BLOCK)
    # how much of the wanted distribution is the target, and how much is spread over all words
    hard = 1.0 - smoothing
    evenly = smoothing
    if LIKELY > 0:
        which = tl.arange(0, LIKELY)
        token = tl.load(likely + row * k + which, mask=which < k, other=0)
        weight_of = tl.load(weights + row * k + which, mask=which < k, other=0.0).to(tl.float32)
        hard = (1.0 - distill) * (1.0 - smoothing)
        evenly = (1.0 - distill) * smoothing + distill * (1.0 - tl.sum(weight_of, 0))
    # greatest logit and sum of exponentials, and the plain sum, block by block
    top_a = tl.full([BLOCK], -float("inf"), tl.float32)
    sum_a = tl.zeros([BLOCK], tl.float32)
    all_a = tl.zeros([BLOCK], tl.float32)
    top_b = tl.full([BLOCK], -float("inf"), tl.float32)
    sum_b = tl.zeros([BLOCK], tl.float32)
    all_b = tl.zeros([BLOCK], tl.float32)
    for start in range(0, words, BLOCK):
        inside = start + at < words
        a = tl.load(one + start + at, mask=inside, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top_a, a)
        keep = tl.where(new == -float("inf"), 0.0, new)
        sum_a = sum_a * tl.exp(top_a - keep) + tl.exp(a - keep)
        top_a = new
        all_a += tl.where(inside, a, 0.0)
        if TWICE:
            b = tl.load(two + start + at, mask=inside, other=-float("inf")).to(tl.float32)
            new = tl.maximum(top_b, b)
            keep = tl.where(new == -float("inf"), 0.0, new)
            sum_b = sum_b * tl.exp(top_b - keep) + tl.exp(b - keep)
            top_b = new
            all_b += tl.where(inside, b, 0.0)
    most = tl.max(top_a, 0)
    lse_a = most + tl.log(tl.sum(sum_a * tl.exp(top_a - most), 0))
    even_a = lse_a - tl.sum(all_a, 0) / words
    nll_a = lse_a - tl.load(one + target).to(tl.float32)
    loss = hard * nll_a + evenly * even_a
    if LIKELY > 0:
        loss += distill * tl.sum(weight_of * (lse_a - tl.load(one + token).to(tl.float32)), 0)
    weight = 1.0
    lse_b = 0.0
    there = 0.0
    back = 0.0
    if TWICE:
        most = tl.max(top_b, 0)
        lse_b = most + tl.log(tl.sum(sum_b * tl.exp(top_b - most), 0))
        even_b = lse_b - tl.sum(all_b, 0) / words
        nll_b = lse_b - tl.load(two + target).to(tl.float32)
        weight = 0.5
        other = hard * nll_b + evenly * even_b
        if LIKELY > 0:
            other += distill * tl.sum(weight_of * (lse_b - tl.load(two + token).to(tl.float32)), 0)
        loss = 0.5 * (loss + other)
        forth_sum = tl.zeros([BLOCK], tl.float32)
        back_sum = tl.zeros([BLOCK], tl.float32)
        for start in range(0, words, BLOCK):
            inside = start + at < words
            a = tl.load(one + start + at, mask=inside, other=0.0).to(tl.float32) - lse_a
            b = tl.load(two + start + at, mask=inside, other=0.0).to(tl.float32) - lse_b
            forth_sum += tl.where(inside, tl.exp(a) * (a - b), 0.0)
            back_sum += tl.where(inside, tl.exp(b) * (b - a), 0.0)
        there = tl.sum(forth_sum, 0)
        back = tl.sum(back_sum, 0)
        loss += alpha * 0.5 * (there + back)
    tl.store(sums + row, loss * share)
    tl.store(sums + rows + row, nll_a * real)
    tl.store(sums + 2 * rows + row, real)
    half = 0.5 * alpha
    for start in range(0, words, BLOCK):
        inside = start + at < words
        goal = evenly / words + tl.where(start + at == target, hard, 0.0)
        a = tl.load(one + start + at, mask=inside, other=0.0).to(tl.float32) - lse_a
        p = tl.exp(a)
        grad_a = weight * (p - goal)
        if TWICE:
            b = tl.load(two + start + at, mask=inside, other=0.0).to(tl.float32) - lse_b
            q = tl.exp(b)
            grad_a += half * (p * (a - b - there) + p - q)
            grad_b = weight * (q - goal) + half * (q * (b - a - back) + q - p)
            tl.store(
                grads + (row + rows) * stride + start + at, (grad_b * share).to(grads.dtype.element_ty), mask=inside
            )
        tl.store(grads + row * stride + start + at, (grad_a * share).to(grads.dtype.element_ty), mask=inside)


class FusedLoss(torch.autograd.Function):
    """(logits [passes · rows, words], outputs [rows], …, soft targets [rows, k]) → total, nll, tokens; see `loss_of`.

    `likely` and `weights` are None where no teachers speak.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        outputs: Tensor,
        smoothing: float,
        alpha: float,
        tokens: int | None,
        likely: Tensor | None = None,
        weights: Tensor | None = None,
        distill: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, words = outputs.shape[0], logits.shape[1]
        twice = logits.shape[0] == 2 * rows
        counts = (outputs != 0).sum()
        among = counts if tokens is None else torch.full_like(counts, tokens)
        grads = torch.empty_like(logits)
        sums = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
        k = 0 if likely is None else likely.shape[1]
        _kernel[(rows,)](
            logits, outputs, among, grads, sums, outputs if likely is None else likely,
            sums if weights is None else weights, rows, words, logits.stride(0), smoothing, alpha, distill, k,
            TWICE=twice, LIKELY=triton.next_power_of_2(k) if k else 0, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        if likely is not None and weights is not None:
            share = (outputs != 0) / among.clamp_min(1) / (2 if twice else 1)
            taken = (-distill * weights.float() * share.unsqueeze(1)).to(grads.dtype)
            for part in grads.view(-1, rows, words):
                part.scatter_add_(1, likely, taken)
        ctx.save_for_backward(grads)
        total, nll, _ = sums.sum(1).unbind()
        ctx.mark_non_differentiable(nll, counts)
        return total, nll, counts

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        (grads,) = ctx.saved_tensors
        return grads * grad.to(grads.dtype), *([None] * 7)
