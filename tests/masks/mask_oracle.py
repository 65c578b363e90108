"""Masks written a second time, as NumPy predicates of positions: what the library's masks are compared with."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from regard import masks
from regard.masks import Mask
from regard.masks._rectangle import Rectangle as Rectangle  # what edits cut: it has no name of its own in masks
from regard.masks._rectangle import rectangle as chosen_pairs

Bits = NDArray[np.bool_]


class Sizes(NamedTuple):
    B: int
    H: int
    L: int
    S: int
    offsets: tuple[int, ...]  # one, or one for each item

    @property
    def offset(self) -> int | torch.Tensor:
        return self.offsets[0] if len(self.offsets) == 1 else torch.tensor(self.offsets)

    @property
    def i(self) -> NDArray[np.int64]:
        return np.array(self.offsets).reshape(-1, 1, 1, 1) + np.arange(self.L).reshape(1, 1, -1, 1)

    @property
    def j(self) -> NDArray[np.int64]:
        return np.arange(self.S).reshape(1, 1, 1, -1)


class Pair(NamedTuple):
    """A mask of the library and the booleans it must equal, [B, H, L, S]."""

    mask: Mask
    bits: Bits


def _all(sizes: Sizes, bits: Bits) -> Bits:
    return np.broadcast_to(bits, (sizes.B, sizes.H, sizes.L, sizes.S)).astype(bool)


def everything(rng: random.Random, z: Sizes) -> Pair:
    return Pair(masks.everything(), _all(z, np.ones((1, 1, 1, 1), bool)))


def causal(rng: random.Random, z: Sizes) -> Pair:
    return Pair(masks.causal(), _all(z, z.j <= z.i))


def window(rng: random.Random, z: Sizes) -> Pair:
    left, right = rng.choice([0, 1, 2, 5, 40]), rng.choice([0, 0, 1, 3, 40])
    return Pair(masks.window(left, right), _all(z, (-left <= z.j - z.i) & (z.j - z.i <= right)))


def padding(rng: random.Random, z: Sizes) -> Pair:
    lengths = [rng.randint(0, z.S + 1) for _ in range(z.B)]
    side = rng.choice(["right", "left"])
    n = np.array(lengths).reshape(-1, 1, 1, 1)
    given = lengths if rng.random() < 0.5 else torch.tensor(lengths, dtype=rng.choice([torch.int32, torch.int64]))
    return Pair(masks.padding(given, side=side), _all(z, z.j < n if side == "right" else z.j >= z.S - n))


def documents_by_length(rng: random.Random, z: Sizes) -> Pair:
    cuts = sorted(rng.randint(0, z.S) for _ in range(rng.randint(0, 4)))
    lengths = np.diff([0, *cuts, z.S]).tolist()
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return Pair(masks.documents(lengths=lengths), _own_document(z, np.tile(owner, (z.B, 1))))


def documents_by_id(rng: random.Random, z: Sizes) -> Pair:
    each = rng.random() < 0.5
    owners = [_owners(rng, z.S) for _ in range(z.B if each else 1)]
    ids = torch.tensor(owners if each else owners[0], dtype=torch.int64).reshape((z.B, z.S) if each else (z.S,))
    return Pair(masks.documents(ids=ids), _own_document(z, np.array(owners, dtype=int).reshape(len(owners), z.S)))


def _owners(rng: random.Random, S: int) -> list[int]:
    if rng.random() < 0.5:
        return [rng.randint(-1, 2) for _ in range(S)]
    names = rng.sample(range(100), 4)
    runs = sorted(rng.randint(0, S) for _ in range(3))
    return [-1 if rng.random() < 0.1 else names[sum(k >= run for run in runs)] for k in range(S)]


def _own_document(z: Sizes, owners: NDArray[np.int64]) -> Bits:
    bits = np.zeros((z.B, z.H, z.L, z.S), bool)
    for b in range(z.B):
        owner = owners[b % len(owners)]
        for r in range(z.L):
            i = z.offsets[b % len(z.offsets)] + r
            if 0 <= i < z.S:
                bits[b, :, r] = (owner == owner[i]) & (owner >= 0)
    return bits


def prefix(rng: random.Random, z: Sizes) -> Pair:
    n = rng.choice([0, 1, 3, 7])
    return Pair(masks.prefix(n), _all(z, (z.i < n) & (z.j < n)))


def columns(rng: random.Random, z: Sizes) -> Pair:
    n = rng.choice([0, 1, 3, 7])
    return Pair(masks.columns(n), _all(z, z.j < n))


def strided(rng: random.Random, z: Sizes) -> Pair:
    s = rng.choice([1, 2, 3, 5, 11])
    return Pair(masks.strided(s), _all(z, np.mod(z.i - z.j, s) == 0))


def blocks(rng: random.Random, z: Sizes) -> Pair:
    size = rng.choice([1, 2, 3, 5])
    lead = rng.choice([(), (1, 1), (z.B, 1), (1, z.H), (z.B, z.H)])
    shape = (*lead, rng.randint(0, 5), rng.randint(0, 5))
    table = np.random.default_rng(rng.randint(0, 10**6)).random(shape) < 0.6
    four = table.reshape((1,) * (4 - table.ndim) + shape)
    bits = np.zeros((z.B, z.H, z.L, z.S), bool)
    for b in range(z.B):
        for h in range(z.H):
            part = four[b % max(1, four.shape[0]), h % max(1, four.shape[1])]
            row, col = z.i[b % len(z.i), 0] // size, z.j[0, 0] // size
            inside = (row >= 0) & (row < part.shape[0]) & (col < part.shape[1])
            for r, s in zip(*np.nonzero(inside), strict=True):
                bits[b, h, r, s] = part[row[r, 0], col[0, s]]
    return Pair(masks.blocks(torch.from_numpy(table), size), bits)


def rectangle(rng: random.Random, z: Sizes) -> Pair:
    """What a cut by positions is."""
    rows, columns = (np.zeros(size, bool) for size in (z.L, z.S))
    for chosen in (rows, columns):
        for _ in range(rng.randint(0, 3)):
            start = rng.randint(0, len(chosen))
            chosen[start : start + rng.choice([1, 1, 4, len(chosen)])] = True
    mask = chosen_pairs(rows, columns, 3)
    assert mask is not None
    bits = _all(z, rows[:, None] & columns)
    return Pair(mask, bits) if rng.random() < 0.5 else Pair(~mask, ~bits)


def keep(rng: random.Random, z: Sizes) -> Pair:
    values = _random_bits(rng, z)
    return Pair(masks.keep(torch.from_numpy(values)), _all(z, values))


def drop(rng: random.Random, z: Sizes) -> Pair:
    values = _random_bits(rng, z)
    return Pair(masks.drop(torch.from_numpy(values)), _all(z, ~values))


def from_additive(rng: random.Random, z: Sizes) -> Pair:
    values = _random_bits(rng, z)
    dtype = rng.choice([torch.float32, torch.float64, torch.bfloat16, torch.float16])
    low = rng.choice([-torch.inf, torch.finfo(dtype).min])
    added = torch.zeros(values.shape, dtype=dtype).masked_fill(torch.from_numpy(~values), low)
    return Pair(masks.from_additive(added), _all(z, values))


def _random_bits(rng: random.Random, z: Sizes) -> Bits:
    shapes = [(z.S,), (z.L, z.S), (z.B, 1, 1, z.S), (1, z.H, 1, z.S), (z.B, 1, z.L, 1), (z.B, z.H, z.L, z.S)]
    numbers = np.random.default_rng(rng.randint(0, 10**6)).random(rng.choice(shapes))
    return numbers < rng.choice([0.1, 0.5, 0.9, 1.0])


RULES: list[Callable[[random.Random, Sizes], Pair]] = [
    everything,
    causal,
    window,
    padding,
    documents_by_length,
    documents_by_id,
    prefix,
    columns,
    strided,
    blocks,
    rectangle,
    keep,
    drop,
    from_additive,
]


def join(rng: random.Random, z: Sizes, depth: int, rules: list[Callable[[random.Random, Sizes], Pair]] = RULES) -> Pair:
    """A random combination of at most 2**depth rules."""
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(rules)(rng, z)
    kind = rng.choice(["and", "or", "not"])
    a = join(rng, z, depth - 1, rules)
    if kind == "not":
        return Pair(~a.mask, ~a.bits)
    b = join(rng, z, depth - 1, rules)
    if kind == "and":
        return Pair(a.mask & b.mask, a.bits & b.bits)
    return Pair(a.mask | b.mask, a.bits | b.bits)


def sizes(rng: random.Random, most: int = 23) -> Sizes:
    B, H, L, S = rng.choice([1, 2, 3]), rng.choice([1, 2]), rng.randint(0, most), rng.randint(0, most)
    if rng.random() < 0.3:
        return Sizes(B, H, L, S, tuple(rng.randint(-5, 9) for _ in range(B)))
    return Sizes(B, H, L, S, (rng.choice([S - L, S - L, 0, -3, 4]),))


def full_size(mask: Mask, z: Sizes) -> Bits:
    """The library's booleans, spread over the whole call without being allowed to enlarge it."""
    tile = mask.tile(range(z.L), range(z.S), z.L, z.S, offset=z.offset)
    assert tile.dtype == torch.bool
    assert tile.shape[0] in (1, z.B)
    assert tile.shape[1] in (1, z.H)
    assert tile.shape[2:] == (z.L, z.S)
    return _all(z, tile.numpy())
