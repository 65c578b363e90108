"""What training minimises: smoothed cross entropy, agreement of two passes (R-Drop), and teachers' distributions."""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

from torch import Tensor

from regard.train._batches import Soft
from regard.train._tokens import PAD

FUSED = True  # on CUDA, where Triton is installed; a benchmark may switch it off


def fuses() -> bool:
    return FUSED and importlib.util.find_spec("triton") is not None


class Loss(NamedTuple):
    total: Tensor  # what is differentiated: a mean over target tokens
    nll: Tensor  # −log P of the target, summed over its tokens (of the first pass)
    tokens: Tensor  # how many


def loss_of(
    logits: Tensor,
    outputs: Tensor,
    *,
    smoothing: float = 0.0,
    r_drop: float = 0.0,
    soft: Soft | None = None,
    distill: float = 0.0,
    tokens: int | None = None,
) -> Loss:
    """Mean over target tokens of

        (1 − λ)·CE(smoothed target) + λ·CE(teachers) + α·½(KL(p₁‖p₂) + KL(p₂‖p₁))

    Args:
        logits: `[passes · batch, token, vocab]`; two passes where there is R-Drop.
        outputs: `[batch, token]`, PAD where nothing counts.
        smoothing: ε of (1 − ε)·target + ε/vocabulary.
        r_drop: α (Liang et al., 2021).
        soft, distill: the teachers' likeliest tokens, and λ. What they leave of the probability is spread evenly.
        tokens: how many target tokens the mean is over, where this is one process's part of a batch.
    """
    if logits.is_cuda and outputs.numel() and fuses():
        from regard.train._fused_loss import FusedLoss

        flat = logits.flatten(0, -2).contiguous()
        given: tuple[Any, ...] = (flat, outputs.flatten().contiguous(), smoothing, r_drop, tokens)
        if soft is not None and distill:
            given = (*given, soft.tokens.flatten(0, 1).contiguous(), soft.weights.flatten(0, 1).contiguous(), distill)
        return Loss(*FusedLoss.apply(*given))  # type: ignore[no-untyped-call]
    passes = logits.shape[0] // max(outputs.shape[0], 1)
    log_p = logits.float().log_softmax(-1).view(passes, *outputs.shape, logits.shape[-1])
    real = outputs != PAD
    count = real.sum()
    share = real / (count.clamp_min(1) if tokens is None else tokens)
    nll = -log_p.gather(-1, outputs.expand(passes, *outputs.shape).unsqueeze(-1)).squeeze(-1)
    evenly = -log_p.mean(-1)
    each = (1 - smoothing) * nll + smoothing * evenly
    if soft is not None and distill:
        likely = soft.tokens.expand(passes, *soft.tokens.shape)
        taught = -(log_p.gather(-1, likely) * soft.weights).sum(-1) + (1 - soft.weights.sum(-1)) * evenly
        each = (1 - distill) * each + distill * taught
    total = (each * share).sum() / passes
    if passes == 2 and r_drop:
        first, second = log_p[0], log_p[1]
        apart = 0.5 * ((first.exp() - second.exp()) * (first - second)).sum(-1)
        total = total + r_drop * (apart * share).sum()
    return Loss(total, (nll[0].detach() * real).sum(), count)
