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
    """In the unit that keeps it short: 10.6 ms, 104 s, 34.5 min, 23 h, 1 204 days."""
    for unit, step in (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if time < 999.5 * step:  # three digits round to 1000 from here on
            return f"{time / step:.3g} {unit}"
    for unit, step, most in (("min", 60, 120), ("h", 3600, 48)):
        if time < most * step:
            return f"{time / step:.3g} {unit}"
    days = time / 86_400
    return f"{days:.3g} days" if days < 999.5 else f"{whole(round(days))} days" if days < 1e9 else f"{days:.1e} days"


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
