"""Statistics of a call by the kernels of this package: the same results as ``regard.observation``, without a host read.

``refuse`` says from the spec alone what the kernels cannot do; ``observe`` does the rest.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard._triton import inputs
from regard._triton.again import Again, Layout, likeness, remembered
from regard._triton.encode import DENSE, Tiling, encode
from regard._triton.inputs import Inputs, Piece, described, pieces_of, power
from regard._triton.run import Launched, on
from regard.statistics import BUCKETS

if TYPE_CHECKING:
    from regard.spec import Call, CallSpec
    from regard.statistics import Want

_MOST_KEPT = 256
# largest k for which thresholds are taken from maxima of groups of keys: half the groups there are
_MOST_BY_GROUPS = 32
_LISTS = 4
# how the threshold, the choice among found keys, and the search where too many were found are compiled
_BOUND = {"BM": 64, "num_warps": 1, "num_stages": 1}
_CHOICE = {"BM": 1, "num_warps": 1, "num_stages": 1}
_SEARCH = {"BM": 16, "PARTS": 4, "num_warps": 4, "num_stages": 1}
# key masses of all blocks of rows, where these are kept apart: how they are folded, and how many numbers at most
_FOLD = {"KEYS": 64, "AT_ONCE": 16, "CELLS": 8, "WIDTH": 64, "num_warps": 1}
_MOST_MASSES = 1 << 24
# of the sums over distances, see tiles
_COPIES = 16


def refuse(spec: CallSpec, want: Want) -> list[str]:
    """Why the kernels cannot observe such a call; nothing when they can."""
    reasons = inputs.refuse(spec)
    if spec.mode != "plain":
        reasons.append(f"there is nothing to observe in {spec.mode} mode")
    if spec.empty:
        reasons.append("there is nothing to observe")
    if want.top_k > _MOST_KEPT:
        reasons.append(f"top_k above {_MOST_KEPT}")
    if want.asks_unusual:
        reasons.append("value mass, pairs and scores")
    return reasons


def observing_bytes(spec: CallSpec, want: Want) -> int:
    """Bytes of the statistics and of what the kernels leave to each other."""
    return _recipe(spec, want).layout.nbytes


class Recipe(NamedTuple):
    """What is the same in every call of one spec and want."""

    tiles: dict[str, int]  # sizes of the tiles and how a program is compiled
    flags: dict[str, Any]  # which statistics the observation pass folds
    finds: dict[str, int]  # tiles of the pass that finds the largest weights
    limit: range  # queries that count for key mass and map
    grid: tuple[int, int]  # cells of the map
    sums: int  # numbers summed over rows, for each head
    magic: float  # see add_exactly
    tiling: Tiling
    wide: bool  # cells of the map need 64-bit numbers
    room: int  # entries of a list, see top
    by_block: bool  # key mass of each block of rows is kept apart
    layout: Layout

    @property
    def passes(self) -> bool:
        """Whether the observation pass has anything to do."""
        return any(self.flags[name] for name in ("ROWS", "MASS", "MAP", "DISTANCE", "FIRSTS", "TOP"))


_recipes: dict[tuple[Any, ...], Recipe] = {}


def _recipe(spec: CallSpec, want: Want) -> Recipe:
    key = (spec, want.key)
    found = _recipes.get(key)
    if found is None:
        if len(_recipes) >= 4096:
            _recipes.clear()
        found = _recipes[key] = _make_recipe(spec, want)
    return found


def _make_recipe(spec: CallSpec, want: Want) -> Recipe:
    limit = range(spec.queries)[want.queries or slice(None)]
    grid = (0, 0)
    if want.map is not None:
        grid = min(want.map[0], len(limit)), min(want.map[1], spec.keys)
    by_groups = 0 < want.top_k <= _MOST_BY_GROUPS
    flags = {
        "ROWS": want.rows,
        "MASS": want.key_mass and len(limit) > 0,
        "MAP": grid[0] > 0,
        "DISTANCE": want.distance,
        "FIRSTS": want.first > 0,
        "LIMIT": len(limit) < spec.queries,
        "TOP": by_groups,
        "GROUPS": 64 if by_groups and want.top_k > 16 else 32,
    }
    tiles = _tiles(spec)
    wide = (spec.queries + 1) * max(1, grid[0]) >= 1 << 31 or (spec.keys + 256) * max(1, grid[1]) >= 1 << 31
    by_block = not wide and _by_block(spec, flags, grid, tiles["BM"])
    sums = _COPIES * BUCKETS * want.distance
    if by_block:
        flags.update(MAP=False, MASS=True)
    else:
        sums += spec.keys * want.key_mass + grid[0] * grid[1]
    # one more loop over tiles doubles the time of compilation where logits take long to compute
    distinct = spec.bias is None and spec.softcap is None
    split = (0, 0) if by_block else grid, (limit.start, limit.stop), want.distance
    if flags["LIMIT"] and (grid[0] or want.distance):
        split = (1, 1), (0, 0), False  # no tile is plain
    tiling = Tiling(tiles["BM"], tiles["BN"], *split, distinct)
    # no sum exceeds the number of rows by more than rounding, and float64 counts to 2^53
    magic = 1.5 * 2.0 ** spec.queries.bit_length()
    room = flags["GROUPS"] // 2
    masses = math.prod((spec.batch, spec.heads, -(-spec.queries // tiles["BM"]), spec.keys)) if by_block else 0
    layout = _layout(spec, want, grid, (sums, masses), flags["GROUPS"] if by_groups else 0)
    return Recipe(tiles, flags, _find_tiles(spec), limit, grid, sums, magic, tiling, wide, room, by_block, layout)


def _by_block(spec: CallSpec, flags: dict[str, Any], grid: tuple[int, int], rows: int) -> bool:
    """Whether key mass is kept apart for each block of rows, and the map made from it: short calls, in which there is a
    cell of the map for every few tiles."""
    numbers = spec.batch * spec.heads * -(-spec.queries // rows) * spec.keys
    if not flags["MAP"] or flags["LIMIT"] or numbers > _MOST_MASSES:
        return False
    return all(row * spec.queries // grid[0] % rows == 0 for row in range(grid[0]))


def _layout(spec: CallSpec, want: Want, grid: tuple[int, int], sums: tuple[int, int], groups: int) -> Layout:
    """``sums``: numbers of each head, and key masses of all blocks of rows. ``groups``: of keys whose maxima are kept,
    twice the entries of a list of noted keys; 0 where none are noted."""
    lead = (spec.batch, spec.heads)
    shapes: dict[str, tuple[int, ...]] = {}
    if want.rows:
        shapes.update(entropy=(spec.queries,), max_weight=(spec.queries,))
    if want.key_mass:
        shapes["key_mass"] = (spec.keys,)
    if want.map is not None:
        shapes["map"] = grid
    if want.top_k:
        shapes["top_weights"] = shapes["top_keys"] = (spec.queries, want.top_k)
    if want.distance:
        shapes["distance"] = (BUCKETS,)
    if want.first:
        shapes["first_mass"] = (spec.queries,)
    if want.weights is not None:
        spans = zip(want.weights, (spec.queries, spec.keys), strict=True)
        shapes["weights"] = tuple(len(range(size)[span]) for span, size in spans)
    kinds = {"top_keys": torch.int64}
    results = {name: ((*lead, *shape), kinds.get(name, torch.float32)) for name, shape in shapes.items()}
    rows = math.prod(lead) * spec.queries
    between: dict[str, tuple[int, torch.dtype]] = {}
    if want.top_k:
        between["count"] = rows * _LISTS, torch.int32
    if groups:
        room = groups // 2
        between["maxima"] = rows * groups, torch.float32
        between["threshold"] = rows, torch.float32
        between["noted"] = rows * _LISTS * room, torch.int64
    zeros: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if sums[0]:
        zeros["sums"] = (*lead, sums[0]), torch.float64
    if sums[1]:
        between["masses"] = sums[1], torch.float32
    return Layout(results, zeros, between)


def _zeroed(layout: Layout) -> Layout:
    """Key masses of blocks of rows start at 0: not all of them are written."""
    between = dict(layout.between)
    count, dtype = between.pop("masses")
    return layout._replace(zeros={**layout.zeros, "masses": ((count,), dtype)}, between=between)


def _tiles(spec: CallSpec) -> dict[str, int]:
    deep = spec.dtype != torch.float32 and spec.head_dim <= 128
    # so that three or four programs share a multiprocessor; what does not fit the registers then is rarely used
    registers = 168 if spec.head_dim > 64 else 128
    return {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3 if deep else 2, "maxnreg": registers}


def _find_tiles(spec: CallSpec) -> dict[str, int]:
    half = spec.dtype != torch.float32
    # wide heads take much shared memory, which devices with a copy engine have
    if half and spec.head_dim <= (128 if inputs.has_copy_engine(torch.device(spec.device)) else 64):
        return {"BM": 64, "BN": 128, "num_warps": 4, "num_stages": 3, "maxnreg": 128}
    return {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3 if half else 2}


def _choice(spec: CallSpec, direct: bool) -> dict[str, int]:
    if not direct:
        return {**_CHOICE, "BM": 64}  # the interpreter runs programs in turn
    # few registers: many programs share a multiprocessor, and one row waits while others are computed
    return _CHOICE if spec.head_dim > 128 else {**_CHOICE, "maxnreg": 64 if spec.head_dim <= 64 else 80}


def observe(call: Call, lse: Tensor, want: Want) -> dict[str, Tensor]:
    """Every wanted statistic of a call that ``refuse`` has no reason against, [B, H, ...]."""
    with on(call.query.device):
        lse = lse.to(torch.float32).contiguous()
        rows, others = (call.query, call.key), (lse,) if call.bias is None else (lse, call.bias)
        key = likeness(call, ("observe", want.key), rows, others)
        if key is None:
            return _observe(call, lse, want)[0]
        first: list[dict[str, Tensor]] = []

        def launch() -> Again | None:
            found, again = _observe(call, lse, want, keep=True)
            first.append(found)
            return again

        again = remembered(call, key, launch)
        if first:
            return first[0]
        found = None if again is None else again((*rows, *others))
        return _observe(call, lse, want)[0] if found is None else found


@torch.no_grad()
def _observe(call: Call, lse: Tensor, want: Want, keep: bool = False) -> tuple[dict[str, Tensor], Again | None]:
    """``keep``: with what was launched, where it can be launched again."""
    recipe = _recipe(call.spec, want)
    encoded = encode(call, recipe.tiling)
    launched: list[Launched | None] = []
    # a DENSE test is made for each call, and large
    keep = keep and encoded.test != DENSE
    given = Inputs(call, launched if keep else None)
    layout = recipe.layout
    if recipe.by_block and encode(call, _plain_tiling(recipe)).runs.extents is None:
        layout = _zeroed(layout)
    memory = layout.allocate(call.query.device)
    found = {**memory, "lse": lse}
    if want.top_k and not recipe.flags["TOP"]:
        found["count"].fill_(recipe.room + 1)
        keep = False
    for piece in pieces_of(call, encoded, recipe.tiles["BM"]):
        _observe_piece(given, piece, want, recipe, found)
    _finish(given, want, recipe, found)
    own = (given.query, given.key, lse) if call.bias is None else (given.query, given.key, lse, given.bias)
    again = Again.of(launched, own, layout, memory) if keep else None
    return {name: memory[name] for name in recipe.layout.results}, again


def _observe_piece(given: Inputs, piece: Piece, want: Want, recipe: Recipe, found: dict[str, Tensor]) -> None:
    if recipe.passes:
        _observation_pass(given, piece, want, recipe, found)
    if want.top_k:
        _top(given, piece, want, recipe, found)
    if want.weights is not None:
        _rectangle(given, piece, want, found)


def _sources(given: Inputs, piece: Piece, lse: Tensor, tiles: dict[str, int] | None = None) -> tuple[Any, ...]:
    """Query, key and the rest; with ``tiles`` for the copy engine, where it can be used."""
    query, key = given.query, given.key
    if tiles is not None and given.copied:
        width = max(16, power(given.call.spec.head_dim))
        query, key = described(query, tiles["BM"], width), described(key, tiles["BN"], width)
    return query, key, lse, given.bias, piece.lo, piece.hi


def _strides(given: Inputs, piece: Piece) -> tuple[int, ...]:
    return (*given.query.stride()[:3], *given.key.stride()[:3], *given.bias_strides, *piece.strides)


def _observation_pass(given: Inputs, piece: Piece, want: Want, recipe: Recipe, found: dict[str, Tensor]) -> None:
    from regard._triton.kernels import observe as kernel

    call, lse, tiles, flags = given.call, found["lse"], recipe.tiles, recipe.flags
    spec, offset = call.spec, call.offset
    each = isinstance(offset, Tensor)
    summed = {name: flags[name] for name in ("MAP", "DISTANCE")}
    edges = encode(call, recipe.tiling) if any(summed.values()) else None
    sources, strides = _sources(given, piece, lse, tiles), _strides(given, piece)
    runs = encode(call, _plain_tiling(recipe)).runs
    tables = runs.table, runs.counts, *((runs.table, runs.counts) if edges is None else edges.runs[:2])
    rows = tuple(found.get(name, lse) for name in ("sums", "entropy", "max_weight", "first_mass", "maxima", "masses"))
    sizes = (
        spec.queries, spec.keys, piece.rows.start, 0 if each else offset, recipe.limit.start, recipe.limit.stop,
        *recipe.grid, want.first, runs.blocks,
    )  # fmt: skip
    divisors = *divisor(spec.keys), *divisor(max(1, recipe.grid[1]))
    map_at, cells = (0, 0) if recipe.by_block else (spec.keys * want.key_mass, math.prod(recipe.grid))
    args = (
        *sources, *tables, offset if each else lse, *rows, *strides, int(runs.groups > 1), *sizes, *divisors,
        recipe.sums, map_at, map_at + cells, *given.scales, recipe.magic,
    )  # fmt: skip
    plain = summed if edges is None or (edges.split and not flags["LIMIT"]) else dict.fromkeys(summed, False)
    shape = given.shape(**tiles, **piece.test, WARPS=tiles["num_warps"], COPIED=given.copied, WIDE=recipe.wide)
    constants = {
        **flags,
        **plain,
        **shape,
        "EACH": each,
        "BY_BLOCK": recipe.by_block,
        "DIRECT": spec.device == "cuda",
        **{f"EDGE_{name}": used for name, used in summed.items()},
    }
    programs = spec.batch * spec.heads * (1 if edges is None else 2)
    given.run(kernel, (-(-len(piece.rows) // tiles["BM"]), programs), args, constants)


def _plain_tiling(recipe: Recipe) -> Tiling:
    """Of the observation pass, but for the edges."""
    return Tiling(recipe.tiles["BM"], recipe.tiles["BN"])


def divisor(d: int) -> tuple[int, int]:
    """A factor and a shift that together divide numbers from 0 to 2^31 - 1 by d, exactly.

    With 2^e the next power of two from d on, the factor exceeds 2^(31+e) / d by less than 1: n times that is less than
    2^31, less than the smallest distance of n / d from the next whole number, 1 / d, times 2^(31+e).
    """
    shift = 31 + (d - 1).bit_length()
    return -(-(1 << shift) // d), shift


def _top(given: Inputs, piece: Piece, want: Want, recipe: Recipe, found: dict[str, Tensor]) -> None:
    from regard._triton import top

    spec, tiles, room, lse = given.call.spec, recipe.finds, recipe.room, found["lse"]
    # here nothing is straddled: longer runs
    runs = encode(given.call, Tiling(tiles["BM"], tiles["BN"])).runs
    heads, rows = spec.batch * spec.heads, len(piece.rows)
    plain, strides = _sources(given, piece, lse), _strides(given, piece)
    sizes = (int(runs.groups > 1), spec.queries, spec.keys, piece.rows.start, runs.blocks, *given.scales)
    chosen = found["top_weights"], found["top_keys"]
    direct = spec.device == "cuda"
    lengths = {"ROOM": room, "TOP": want.top_k, "KEPT": power(want.top_k), "DIRECT": direct}
    if recipe.flags["TOP"]:
        block = _BOUND["BM"]
        args = found["maxima"], lse, found["threshold"], spec.queries, piece.rows.start
        shape = {**_BOUND, "TOP": want.top_k, "GROUPS": recipe.flags["GROUPS"]}
        given.run(top.bound, (-(-rows // block), heads), args, shape)
        noted = tuple(found[name] for name in ("count", "noted"))
        sources = _sources(given, piece, lse, tiles)
        args = (*sources, runs.table, runs.counts, found["threshold"], *noted, *strides, *sizes)
        shape = given.shape(**tiles, **piece.test, RAW=given.rises(), COPIED=given.copied, ROOM=room, DIRECT=direct)
        given.run(top.find, (-(-rows // tiles["BM"]), heads), args, shape)
        if piece.rows.stop == spec.queries:
            args = (*plain[:4], *noted, *chosen, *strides[:10], spec.queries, *given.scales)
            choice = _choice(spec, direct)
            shape = given.shape(**choice, ROOM=room, TOP=want.top_k, KEPT=max(16, power(want.top_k)), DIRECT=direct)
            del shape["PRECISION"]
            given.run(top.choose, (-(-spec.queries // choice["BM"]), heads), args, shape)
    args = (*plain, runs.table, runs.counts, found["count"], *chosen, *strides, *sizes)
    shape = given.shape(**_SEARCH, **lengths, **piece.test, BN=tiles["BN"], RUN_ROWS=tiles["BM"])
    given.run(top.search, (-(-rows // (_SEARCH["BM"] * _SEARCH["PARTS"])), heads), args, shape)


def _rectangle(given: Inputs, piece: Piece, want: Want, found: dict[str, Tensor]) -> None:
    from regard._triton.small import rectangle

    spec, block = given.call.spec, 64
    assert want.weights is not None
    rows, keys = (range(n)[span] for span, n in zip(want.weights, (spec.queries, spec.keys), strict=True))
    inside = range(max(rows.start, piece.rows.start), min(rows.stop, piece.rows.stop))
    if not len(inside) or not len(keys):
        return
    grid = -(-len(keys) // block), -(-len(inside) // block), spec.batch * spec.heads
    args = (
        *_sources(given, piece, found["lse"]), found["weights"], *_strides(given, piece), spec.queries, spec.keys,
        piece.rows.start, rows.start, inside.stop, keys.start, keys.stop, len(rows), *given.scales,
    )  # fmt: skip
    given.run(rectangle, grid, args, given.shape(**piece.test, BM=block, BN=block, num_stages=1, num_warps=4))


def _finish(given: Inputs, want: Want, recipe: Recipe, found: dict[str, Tensor]) -> None:
    """The sums as float32, in their places."""
    from regard._triton.small import finish_sums, fold_blocks

    if recipe.by_block:
        _fold_blocks(fold_blocks, given, want, recipe, found)
        return
    if not recipe.sums:
        return
    spec, sums, size = given.call.spec, found["sums"], 512
    mass, cells = spec.keys * want.key_mass, recipe.grid[0] * recipe.grid[1]
    args = (
        sums, *(found.get(name, sums) for name in ("key_mass", "map", "distance")), recipe.sums,
        max(1, recipe.grid[0]), max(1, recipe.grid[1]), len(recipe.limit), spec.keys, mass, cells, recipe.sums,
    )  # fmt: skip
    given.run(
        finish_sums, (-(-recipe.sums // size), spec.batch * spec.heads), args, {"SIZE": size, "WIDE": recipe.wide}
    )


def _fold_blocks(kernel: Any, given: Inputs, want: Want, recipe: Recipe, found: dict[str, Tensor]) -> None:
    spec, masses, (rows, cols) = given.call.spec, found["masses"], recipe.grid
    runs = encode(given.call, _plain_tiling(recipe)).runs
    partly = spec.mask is not None and runs.extents is not None
    extents = runs.extents if partly else masses
    sums, *results = (found.get(name, masses) for name in ("sums", "key_mass", "map", "distance"))
    programs = rows * -(-cols // _FOLD["CELLS"]) + 1 + (-(-spec.keys // _FOLD["KEYS"]) if want.key_mass else 0)
    sizes = runs.blocks, int(runs.groups > 1), rows, cols, spec.queries, spec.keys, recipe.sums
    constants = {**_FOLD, "H": spec.heads, "BM": recipe.tiles["BM"], "BN": recipe.tiles["BN"]}
    constants.update(PARTLY=partly, MASSED=want.key_mass, DISTANCES=want.distance)
    given.run(kernel, (programs, spec.batch * spec.heads), (masses, extents, sums, *results, *sizes), constants)
