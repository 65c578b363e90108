"""Calls inside a call that is already recorded or being observed are not recorded again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_here = threading.local()


def silent() -> bool:
    return getattr(_here, "depth", 0) > 0


@contextlib.contextmanager
def silence() -> Iterator[None]:
    _here.depth = getattr(_here, "depth", 0) + 1
    try:
        yield
    finally:
        _here.depth -= 1
