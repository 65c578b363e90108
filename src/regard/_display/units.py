"""Numbers in words: with the prefix that keeps them short, in groups of digits, in ranges."""

from __future__ import annotations

from collections.abc import Sequence


def count(number: float) -> str:
    """With a prefix of thousands: 174.6 G."""
    return _prefixed(number, 1000, ("", "k", "M", "G", "T", "P", "E", "Z", "Y"), "")


def size(number: float) -> str:
    """Bytes, with a prefix of 1024s: 325.2 GiB."""
    return _prefixed(number, 1024, ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei", "Zi", "Yi"), "B")


def seconds(time: float) -> str:
    for unit, step in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if time >= step:
            return f"{time / step:.3g} {unit}" if time < 1000 * step else f"{time:.3g} s"
    return f"{time * 1e9:.3g} ns"


def flop(number: float) -> str:
    return f"{count(number)}FLOP" if count(number)[-1].isalpha() else f"{count(number)} FLOP"


def _prefixed(number: float, step: int, prefixes: Sequence[str], unit: str) -> str:
    left = number
    for prefix in prefixes:
        if left < step - 0.05:
            return f"{left:.4g} {prefix}{unit}".rstrip()
        left /= step
    return f"{number:.1e}"


def whole(number: int) -> str:
    """124 439 808."""
    return f"{number:,}".replace(",", " ")


def ranges(numbers: Sequence[int]) -> str:
    """0, 2 … 5, 9."""
    found: list[list[int]] = []
    for n in numbers:
        if found and found[-1][-1] == n - 1:
            found[-1].append(n)
        else:
            found.append([n])
    return ", ".join(f"{run[0]} … {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in found)
