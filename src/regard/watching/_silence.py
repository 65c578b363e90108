"""Calls inside a call that is already recorded or being observed are not recorded again."""

from __future__ import annotations

import threading

_here = threading.local()


def silent() -> bool:
    return getattr(_here, "depth", 0) > 0


class silence:  # entered at every call that is edited, by a class, which takes less time than a generator
    __slots__ = ()

    def __enter__(self) -> None:
        _here.depth = getattr(_here, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        _here.depth -= 1
