"""What devices can do at most: published figures, and what was measured on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from regard._checks import check_choice
from regard._files.write import write_atomically

PUBLISHED = "2026-11-15"  # when the figures below were last compared with their sources
EVERY = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Device:
    """The rates that bound an attention call.

    Args:
        name: of the device.
        flops: FLOP/s of matrix products, by dtype; those that are missing it cannot do.
        bandwidth: bytes/s between the processor and its memory.
        exponentials: of the softmax, a second; None where it is unknown, and then it is left out.
        overlaps: whether products, exponentials and memory work at the same time, as on a GPU, or products and
            exponentials one after the other, as on the cores of a CPU.
        source: where the figures are from.
        date: when.
        threads: of a CPU.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    exponentials: float | None
    overlaps: bool
    source: str
    date: str
    threads: int | None = None

    def rate(self, dtype: str) -> float:
        """FLOP/s of matrix products in a dtype; ValueError where the device has no figure for it."""
        if dtype not in self.flops:
            raise ValueError(f"{self.name} has no figure for {dtype}; it has {', '.join(self.flops)}")
        return self.flops[dtype]

    def to_dict(self) -> dict[str, Any]:
        """As what JSON holds."""
        return asdict(self) | {"flops": dict(self.flops)}


def _gpu(name: str, rates: tuple[float, ...], bandwidth: float, exponentials: float, source: str) -> Device:
    """Rates in TFLOP/s of float64, float32, bfloat16 and float16, dense."""
    flops = {dtype: rate * 1e12 for dtype, rate in zip(EVERY, rates, strict=True)}
    return Device(name, flops, bandwidth * 1e12, exponentials * 1e12, True, source, PUBLISHED)


# Peaks without sparsity; float32 without TF32, as torch computes it unless told otherwise. Exponentials: 16 a clock and
# multiprocessor, times their number and the boost clock.
_NAMED = {
    device.name: device
    for device in (
        _gpu("h100", (67, 67, 989, 989), 3.35, 132 * 16 * 1.83e-3, "NVIDIA H100 datasheet, SXM"),
        _gpu("h200", (67, 67, 989, 989), 4.8, 132 * 16 * 1.83e-3, "NVIDIA H200 datasheet, SXM"),
        _gpu("a100", (19.5, 19.5, 312, 312), 2.039, 108 * 16 * 1.41e-3, "NVIDIA A100 datasheet, 80 GB SXM"),
        _gpu("rtx4090", (1.29, 82.6, 165.2, 165.2), 1.008, 128 * 16 * 2.52e-3, "NVIDIA Ada architecture whitepaper"),
    )
}


def devices() -> list[str]:
    """Names of the devices whose published figures are known."""
    return list(_NAMED)


def device(name: str) -> Device:
    """Published figures of a device, such as `device("h200")`."""
    check_choice("name", name, _NAMED)
    return _NAMED[name]


def store() -> Path:
    """The file in which measurements of this machine are kept, in the user's folder for caches."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        base = Path(given)
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return base / "regard" / "machine.json"


def remembered(key: str) -> Any:
    """What was stored under `key` on a machine like this; None where there is nothing that can be read."""
    try:
        found = json.loads(store().read_text(encoding="utf-8"))
        return found[f"{processor()}: {key}"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(key: str, value: Any) -> None:
    """Keep it for the next time; where nothing can be written, it is measured again then."""
    file = store()
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {}
    found = (found if isinstance(found, dict) else {}) | {f"{processor()}: {key}": value}
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, [json.dumps(found, indent=1).encode()])


def measured(threads: int, where: str = "cpu") -> Device | None:
    """What was measured on this machine with this many threads, by `regard info --measure`; None before that."""
    found = remembered(_key(where, threads))
    try:
        return None if found is None else Device(**found)
    except TypeError:
        return None  # written by another version


def keep(found: Device, where: str = "cpu") -> None:
    """Store a measurement for `measured`."""
    remember(_key(where, found.threads or 0), found.to_dict())


def _key(where: str, threads: int) -> str:
    return f"{where}, {threads} threads" if where == "cpu" else where


def processor() -> str:
    """The name of the processor."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
