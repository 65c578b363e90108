"""Whole calls drawn at random, as plain values: a failing one prints as a line of Python that repeats it.

The same `draw` serves a seeded generator, for long runs with known frequencies, and hypothesis, which shrinks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from regard import masks
from regard.testing._calls import INPUTS, Call, array, normal
from regard.testing._rules_of_bias import dense, table_shape
from regard.testing._rules_of_masks import CONSTRUCTORS, Tree, kinds

T = TypeVar("T")
DTYPES = ("float64", "float32", "float16", "bfloat16")
BACKENDS = ("auto", "blockwise", "eager", "sdpa", "reference")
EDGES = (63, 64, 65, 127, 128, 129, 255, 256, 257, 300)
LAYOUTS = ("contiguous", "transposed", "strided", "offset", "expanded")
POISON = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf"), "huge": 0.0}


class Source(Protocol):
    """Where choices come from."""

    def integer(self, low: int, high: int) -> int: ...

    def one_of(self, items: Sequence[T]) -> T: ...


class Seeded:
    """Choices by a seed, the same on every machine."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def one_of(self, items: Sequence[T]) -> T:
        return self._random.choice(items)


@dataclass(frozen=True)
class Recipe:
    """A call without its tensors, which are drawn from `seed`."""

    B: int = 1
    H: int = 1
    Hkv: int = 1
    L: int = 3
    S: int = 5
    D: int = 7
    Dv: int = 7
    dtype: str = "float32"
    backend: str = "auto"
    tree: Tree | None = None
    offset: Any = None  # None, a number, or one per batch item
    bias: tuple[int, ...] | None = None  # its shape, or that of the rule's table
    rule: tuple[Any, ...] | None = None  # of a bias that is a rule
    minus_inf: bool = False  # whether the bias holds some -inf
    sinks: bool = False
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    layout: str = "contiguous"
    poison: str | None = None  # put into keys and values that nobody may see
    wrt: tuple[str, ...] = INPUTS
    seed: int = 0
    lost: str | None = None  # the input that is nothing but NaN

    def __repr__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Recipe({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    def traits(self) -> list[tuple[str, str]]:
        """What the coverage table counts: (group, name)."""
        found = [("dtype", self.dtype), ("backend", self.backend), ("layout", self.layout)]
        found += [("mask", kind) for kind in dict.fromkeys(kinds(self.tree))] if self.tree else [("mask", "no mask")]
        flags = {
            "bias": self.bias is not None and self.rule is None,
            "alibi": self.rule is not None and self.rule[0] == "alibi",
            "T5 bias": self.rule is not None and self.rule[0] == "t5",
            "-inf in bias": self.minus_inf,
            "bias with gradient": self.bias is not None and "bias" in self.wrt,
            "sinks": self.sinks,
            "softcap": self.softcap is not None,
            "scale": self.scale is not None,
            "scale ≤ 0": self.scale is not None and self.scale <= 0,
            "dropout": self.dropout > 0,
            "grouped heads": self.Hkv != self.H,
            "d_v ≠ d_k": self.Dv != self.D,
            "query_offset": isinstance(self.offset, int),
            "query_offset an item": isinstance(self.offset, tuple),
            "poison": self.poison is not None,
            "gradients": bool(self.wrt),
            "nothing but NaN": self.lost is not None,
            "an empty size": 0 in (self.B, self.L, self.S),
            "a size above 128": max(self.L, self.S) > 128,
        }
        return found + [("modifier", name) for name, on in flags.items() if on]


def draw(source: Source, backends: Sequence[str] = BACKENDS) -> Recipe:
    L, S = _length(source), _length(source)
    Hkv, group = source.one_of((1, 1, 2, 3)), source.one_of((1, 1, 1, 2, 3))
    B = source.one_of((1, 2, 2, 3)) if source.integer(0, 49) else 0
    if L * S > 10_000:
        B, Hkv = min(B, 2), min(Hkv, 2)
    H = Hkv * group
    D = source.one_of((1, 2, 3, 5, 8, 16, 17, 33))
    sizes = (B, H, L, S)
    tree = None if source.integer(0, 6) == 0 else _tree(source, sizes, source.one_of((0, 0, 0, 1, 1, 2)))
    rule = _rule(source) if source.integer(0, 7) == 0 else None
    bias = _bias_shape(source, sizes) if rule is None and source.integer(0, 2) == 0 else None
    if rule is not None:
        bias = table_shape(rule, H)
    dropout = source.one_of((0.25, 0.5, 0.8)) if source.integer(0, 11) == 0 else 0.0
    hides = tree is not None and dropout == 0
    backend = source.one_of(backends)
    wants = ((), INPUTS, INPUTS, ("query", "key", "value"), ("value", "sinks"), ("key", "bias"))
    return Recipe(
        *sizes[:2],
        Hkv,
        L,
        S,
        D,
        D if source.integer(0, 2) else source.one_of((1, 3, 4, 9, 19)),
        source.one_of(DTYPES),
        backend,
        tree,
        _offset(source, B, L, S),
        bias,
        rule,
        bias is not None and rule != ("alibi",) and source.integer(0, 3) == 0,  # slopes are finite
        source.integer(0, 3) == 0,
        source.one_of((0.0, -0.7, 0.3, 1.5)) if source.integer(0, 3) == 0 else None,
        source.one_of((0.5, 2.0, 20.0)) if source.integer(0, 4) == 0 else None,
        dropout,
        source.one_of(("contiguous", *LAYOUTS)),
        source.one_of(tuple(POISON)) if hides and source.integer(0, 7) == 0 else None,
        () if backend == "reference" else source.one_of(wants),  # the oracle's arithmetic is not differentiable
        source.integer(0, 10**6),
        source.one_of(("query", "key", "value")) if dropout == 0 and source.integer(0, 15) == 0 else None,
    )


def hypothesis_recipes(backends: Sequence[str] = BACKENDS) -> Any:
    """The same calls as a hypothesis strategy; needs hypothesis, which only the tests depend on."""
    from hypothesis import strategies

    class Drawn:
        def __init__(self, take: Callable[..., Any]) -> None:
            self._take = take

        def integer(self, low: int, high: int) -> int:
            return int(self._take(strategies.integers(low, high)))

        def one_of(self, items: Sequence[T]) -> T:
            found: T = self._take(strategies.sampled_from(items))
            return found

    return strategies.composite(lambda take: draw(Drawn(take), backends))()


def build(recipe: Recipe) -> tuple[Call, Call]:
    """The call with its poison, and the same call clean, for the oracle."""
    dtype, r = getattr(torch, recipe.dtype), recipe
    side = torch.float32 if dtype in (torch.float16, torch.bfloat16) and recipe.seed % 2 else dtype
    shapes = ((r.B, r.H, r.L, r.D), (r.B, r.Hkv, r.S, r.D), (r.B, r.Hkv, r.S, r.Dv))
    query, key, value = (_laid(normal(s, r.seed + n, dtype), r.layout) for n, s in enumerate(shapes))
    offset = torch.tensor(r.offset, dtype=torch.int64) if isinstance(r.offset, tuple) else r.offset
    clean = Call(query, key, value, r.tree, masks, query_offset=offset, rule=r.rule)
    if r.bias is not None:
        # of the size of published slopes, so that distant keys are seen too
        clean.bias = normal(r.bias, r.seed + 3, side) * (0.1 if r.rule == ("alibi",) else 1.0)
        if r.minus_inf:
            clean.bias[normal(r.bias, r.seed + 4, side) > 0.8] = -float("inf")
    clean.sinks = normal((r.H,), r.seed + 5, side) if r.sinks else None
    given = {"scale": r.scale, "softcap": r.softcap}
    clean.options = {name: number for name, number in given.items() if number is not None}
    dirty = clean if r.poison is None else _poisoned(clean, r)
    if r.lost is not None:
        dirty = dirty.but(**{r.lost: torch.full_like(getattr(dirty, r.lost), float("nan"))})
    return dirty, clean


def permitted(clean: Call, r: Recipe) -> Any:
    """Which pairs mask and bias permit, broadcastable to [B, H, L, S]."""
    seen = clean.pairs if clean.pairs is not None else np.ones(clean.sizes, dtype=bool)
    if clean.bias is not None:
        bias = array(clean.bias)
        seen = seen & ~np.isneginf(bias if r.rule is None else dense(r.rule, bias, clean.sizes, clean.query_offset))
    return np.broadcast_to(seen, clean.sizes)


def _poisoned(clean: Call, r: Recipe) -> Call:
    hidden = ~permitted(clean, r).reshape(r.B, r.Hkv, r.H // r.Hkv, r.L, r.S).any((2, 3))
    where = torch.from_numpy(hidden)[..., None]
    number = POISON[r.poison or "nan"] or torch.finfo(clean.query.dtype).max * 0.9
    return clean.but(key=torch.where(where, number, clean.key), value=torch.where(where, number, clean.value))


def _laid(x: Tensor, layout: str) -> Tensor:
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":
        return torch.stack([x, torch.full_like(x, float("nan"))], -1).flatten(-2)[..., ::2]
    if layout == "offset":
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), float("nan"), dtype=x.dtype)
        wide[..., 2:-1] = x
        return wide[..., 2:-1]
    return x[:1].expand(x.shape) if layout == "expanded" else x


def _length(source: Source) -> int:
    size = source.integer(0, 99)
    if size < 2:
        return 0
    if size < 55:
        return source.integer(1, 13)
    if size < 78:
        return source.integer(14, 70)
    return source.one_of(EDGES) if size < 90 else source.integer(71, 300)


def _offset(source: Source, B: int, L: int, S: int) -> Any:
    kind = source.integer(0, 5)
    if kind == 0:
        return source.integer(-3, S)
    if kind == 1:
        return tuple(source.integer(-3, max(S - L, 0) + 2) for _ in range(B))
    return None


def _rule(source: Source) -> tuple[Any, ...]:
    if source.integer(0, 1):
        return ("alibi",)
    return "t5", source.one_of((4, 12, 32)), source.one_of((17, 40, 128)), bool(source.integer(0, 1))


def _bias_shape(source: Source, sizes: tuple[int, int, int, int]) -> tuple[int, ...]:
    B, H, L, S = sizes
    return source.one_of(
        ((B, H, L, S), (L, S), (S,), (1, 1, 1, S), (H, 1, 1), (B, 1, 1, S), (1, H, L, S), (1, 1, L, 1))
    )


def _tree(source: Source, sizes: tuple[int, int, int, int], depth: int) -> Tree:
    if depth == 0:
        leaf = _leaf(source, sizes)
        return ("not", leaf) if source.integer(0, 9) == 0 else leaf
    joint = source.one_of(("and", "and", "or", "not"))
    if joint == "not":
        return ("not", _tree(source, sizes, depth - 1))
    return (joint, _tree(source, sizes, depth - 1), _tree(source, sizes, source.integer(0, depth - 1)))


def _leaf(source: Source, sizes: tuple[int, int, int, int]) -> Tree:
    B, H, L, S = sizes
    kind, seed = source.one_of(CONSTRUCTORS), source.integer(0, 999)
    if kind == "window":
        return kind, source.one_of((0, 1, 2, 5, 33, 64, 130)), source.one_of((0, 0, 1, 3, 40))
    if kind == "padding":
        lengths = tuple(source.integer(0, S) for _ in range(B))
        return kind, lengths, source.one_of(("right", "left"))
    if kind == "documents_lengths":
        cuts = sorted(source.integer(0, S) for _ in range(source.integer(0, 4)))
        return kind, tuple(high - low for low, high in zip([0, *cuts], [*cuts, S], strict=True))
    if kind == "documents_ids":
        return kind, seed, source.one_of(((S,), (B, S)))
    if kind in ("prefix", "columns"):
        return kind, source.integer(0, S + 1)
    if kind == "strided":
        return kind, source.integer(1, 9)
    if kind == "blocks":
        size = source.one_of((1, 3, 16, 64))
        rows, columns = max(L, S) // size + source.integer(0, 1), S // size + source.integer(0, 1)
        lead = source.one_of(((), (B, 1), (1, H), (B, H)))
        return kind, seed, (*lead, max(rows, 1), max(columns, 1)), size
    if kind == "random_blocks":
        return kind, source.integer(1, 3), source.one_of((1, 4, 16, 64)), seed
    if kind in ("keep", "drop", "from_additive"):
        return kind, seed, source.one_of(((L, S), (B, 1, 1, S), (1, H, L, 1), (B, H, L, S), (1, 1, L, S)))
    return (kind,)
