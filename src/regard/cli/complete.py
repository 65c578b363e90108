"""Shell completion. A shell asks anew for every key, so nothing here imports torch; a test compares the
names with those that the library has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

BACKENDS = ("auto", "reference", "eager", "blockwise", "sdpa", "flex", "triton")
PEERS = (
    "torch",
    "torch-math",
    "torch-is_causal",
    "nn.MultiheadAttention",
    "flex",
    "x-transformers",
    "x-transformers-flash",
    "transformers-sdpa",
    "transformers-eager",
)
DTYPES = ("float64", "float32", "float16", "bfloat16")
DEVICES = ("cpu", "cuda", "mps")
PACKAGED = ("minilm", "smollm2")
MASKS = ("everything()", "causal()", "window(left=256)", "columns(4)", "prefix(16)", "strided(8)")


def one_of(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Complete one name. Where none fits, the shell offers files."""

    def offer(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return offer


def some_of(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Complete the last of several comma-separated names; none is offered twice."""

    def offer(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        given = before.split(",")
        return [f"{before}{comma}{name}" for name in names if name.startswith(last) and name not in given]

    return offer
