"""The loss of a model that predicts tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F


def label_smoothed_loss(
    logits: Tensor, targets: Tensor, *, smoothing: float = 0.1, ignore: int | None = None
) -> Tensor:
    """Mean cross entropy with (1 − ε)·target + ε/vocabulary (Szegedy et al., 2015; the paper's ε is 0.1).

    Args:
        logits: `[batch, token, vocab]`.
        targets: `[batch, token]`; targets equal to `ignore` (padding) do not count.
    """
    if not 0.0 <= smoothing < 1.0:
        raise ValueError(f"smoothing must be in [0, 1), got {smoothing}")
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"targets {list(targets.shape)} must be the leading dims of logits {list(logits.shape)}")
    if targets.is_floating_point():
        raise TypeError(f"targets must hold token numbers (integers), got {targets.dtype}")
    given: dict[str, Any] = {} if ignore is None else {"ignore_index": ignore}
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), label_smoothing=smoothing, **given)
