"""The learning rate of each step."""

from __future__ import annotations

import math

from regard.train._settings import Settings


def learning_rate(settings: Settings, step: int) -> float:
    """Of step 1, 2, …: a straight rise to `peak_lr` in `warmup` steps, then the schedule's fall."""
    warmup = max(settings.warmup, 1)
    if step < warmup:
        return settings.peak_lr * step / warmup
    if settings.schedule == "constant":
        return settings.peak_lr
    if settings.schedule == "inverse-sqrt":
        return settings.peak_lr * math.sqrt(warmup / step)
    left = min(1.0, (step - warmup) / max(settings.steps - warmup, 1))
    return settings.peak_lr * 0.5 * (1 + math.cos(math.pi * left))
