"""Every experiment, the trained ones with few steps: enough for what does not depend on what they learned."""

from __future__ import annotations

import functools

from regard import lab
from regard.lab import run

TRAINED = ("E7", "X2", "X3")


@functools.cache
def quick(name: str) -> lab.Result:
    if name in TRAINED:
        return getattr(lab, lab.TOPICS[name])(steps=3)
    return run(name)
