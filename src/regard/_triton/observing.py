"""Statistics of a call by the kernels of this package: the same results as ``regard.observation``, without a host read.

``refuse`` says from the spec alone what the kernels cannot do; ``observe`` does the rest.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard._triton import inputs
from regard._triton.encode import BAND, Tiling, band_of, encode
from regard._triton.form import ObservedForm
from regard._triton.inputs import Inputs, Piece, described, pieces_of, power
from regard._triton.launcher import Launch, kept_launch, on
from regard.statistics import BUCKETS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
# rows of all heads, from which on there are two blocks of 128 for each place on the largest devices
_TALL_FROM = 1 << 16
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


def layout_of(spec: CallSpec, want: Want) -> Layout:
    """The statistics, and what the kernels leave to each other."""
    return _recipe(spec, want).layout


class Layout(NamedTuple):
    """The memory that kernels write: results by name, what starts at 0, and what one kernel leaves to another."""

    results: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    zeros: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    between: Mapping[str, tuple[int, torch.dtype]]

    @property
    def nbytes(self) -> int:
        shaped = (*self.results.values(), *self.zeros.values())
        held = [(math.prod(shape), dtype) for shape, dtype in shaped]
        return sum(count * dtype.itemsize for count, dtype in (*held, *self.between.values()))

    def allocate(self, device: torch.device) -> dict[str, Tensor]:
        found = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in self.results.items()}
        for name, (count, dtype) in self.between.items():
            found[name] = torch.empty(count, dtype=dtype, device=device)
        for name, (shape, dtype) in self.zeros.items():
            found[name] = torch.zeros(shape, dtype=dtype, device=device)
        return found


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
    ahead: bool  # the product of a tile is made while the sums of the one before are
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
    tiles = _tiles(spec, grid)
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
    finds, ahead = _find_tiles(spec), _runs_ahead(spec)
    return Recipe(tiles, flags, finds, limit, grid, sums, magic, tiling, wide, room, by_block, ahead, layout)


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


def _runs_ahead(spec: CallSpec) -> bool:
    """Whether products of matrices go on while a program computes other things, and it has the registers for two."""
    if spec.bias is not None or spec.softcap is not None:
        return False
    half = spec.dtype != torch.float32 and spec.head_dim <= 128
    return spec.device == "cpu" or (half and inputs.has_asynchronous_products(torch.device(spec.device)))


def _is_band(spec: CallSpec) -> bool:
    """Whether the mask is a band around the diagonal, and nothing more."""
    return spec.offset is not None and spec.flags is not None and not any(spec.flags[3:])


def _is_tall(spec: CallSpec, map_rows: int) -> bool:
    """Whether blocks of 128 rows occupy the device, few of them lie in two rows of the map, and no registers are needed
    for the intervals of each row."""
    if spec.lines < _TALL_FROM or not (spec.mask is None or _is_band(spec)):
        return False
    if not map_rows or spec.queries >= 1024 * map_rows:
        return True
    return spec.queries >= 128 * map_rows and all(row * spec.queries // map_rows % 128 == 0 for row in range(map_rows))


def _tiles(spec: CallSpec, grid: tuple[int, int]) -> dict[str, int]:
    if _runs_ahead(spec):
        # Every block of rows reads all keys from the second-level cache: tall blocks, two on a multiprocessor, or three
        # where rows of the map are low.
        if _is_tall(spec, grid[0]):
            return {"BM": 128, "BN": 64, "num_warps": 4, "num_stages": 3, "maxnreg": 255}
        return {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2 if spec.head_dim > 64 else 3, "maxnreg": 168}
    deep = spec.dtype != torch.float32 and spec.head_dim <= 128
    # so that three or four programs share a multiprocessor; what does not fit the registers then is rarely used
    registers = 168 if spec.head_dim > 64 else 128
    return {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3 if deep else 2, "maxnreg": registers}


def _find_tiles(spec: CallSpec) -> dict[str, int]:
    half = spec.dtype != torch.float32
    if half and _runs_ahead(spec):
        return {"BM": 128, "BN": 128, "num_warps": 8, "num_stages": 3, "maxnreg": 255}
    # wide heads take much shared memory, which devices with a copy engine have
    if half and spec.head_dim <= (128 if inputs.has_copy_engine(torch.device(spec.device)) else 64):
        return {"BM": 64, "BN": 128, "num_warps": 4, "num_stages": 3, "maxnreg": 128}
    return {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3 if half else 2}


def _choice(spec: CallSpec, direct: bool) -> dict[str, int]:
    if not direct:
        return {**_CHOICE, "BM": 64}  # the interpreter runs programs in turn
    # few registers: many programs share a multiprocessor, and one row waits while others are computed
    return _CHOICE if spec.head_dim > 128 else {**_CHOICE, "maxnreg": 64 if spec.head_dim <= 64 else 80}


@torch.no_grad()
def observe(call: Call, lse: Tensor, want: Want) -> dict[str, Tensor]:
    """Every wanted statistic of a call that ``refuse`` has no reason against, [B, H, ...]."""
    with on(call.query.device):
        lse = lse.to(torch.float32).contiguous()
        recipe = _recipe(call.spec, want)
        encoded = encode(call, recipe.tiling)
        given = Inputs(call)
        layout = recipe.layout
        if recipe.by_block and encode(call, _plain_tiling(recipe)).runs.extents is None:
            layout = _zeroed(layout)
        memory = layout.allocate(call.query.device)
        found = {**memory, "lse": lse}
        if want.top_k and not recipe.flags["TOP"]:
            found["count"].fill_(recipe.room + 1)
        for piece in pieces_of(call, encoded, recipe.tiles["BM"]):
            _observe_piece(given, piece, want, recipe, found)
        _finish(given, want, recipe, found)
        return {name: memory[name] for name in recipe.layout.results}


Work = tuple[tuple[int, ...], tuple[float, ...], dict[str, Any]]


def _launch(
    given: Inputs, want: Want, kernel: Any, kind: tuple[Any, ...], memory: tuple[Any, ...], make: Callable[[], Work]
) -> None:
    """Run a kernel on some memory. ``make`` works out its grid, its numbers and its compile-time arguments, once for
    all calls of one description and ``kind``: what of the mask's contents decides."""
    launch = kept_launch(given.call, (id(kernel), want.key, *kind), lambda: Launch(kernel, *make()))
    launch(memory)


def _kind_of(piece: Piece) -> tuple[Any, ...]:
    return (piece.rows, piece.strides, *piece.test.values())


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
    piece = _as_band(call, piece)
    summed = {name: flags[name] for name in ("MAP", "DISTANCE")}
    edges = encode(call, recipe.tiling) if any(summed.values()) else None
    runs = encode(call, _plain_tiling(recipe)).runs
    tables = runs.table, runs.counts, *((runs.table, runs.counts) if edges is None else edges.runs[:2])
    rows = tuple(found.get(name, lse) for name in ("sums", "entropy", "max_weight", "first_mass", "maxima", "masses"))
    plain = summed if edges is None or (edges.split and not flags["LIMIT"]) else dict.fromkeys(summed, False)

    def make() -> Work:
        lengths = (
            spec.queries, spec.keys, piece.rows.start, 0 if isinstance(offset, Tensor) else offset,
            recipe.limit.start, recipe.limit.stop, *recipe.grid, want.first, runs.blocks,
        )  # fmt: skip
        divisors = *divisor(spec.keys), *divisor(max(1, recipe.grid[1]))
        map_at, cells = (0, 0) if recipe.by_block else (spec.keys * want.key_mass, math.prod(recipe.grid))
        numbers = (
            *_strides(given, piece), int(runs.groups > 1), *lengths, *divisors,
            recipe.sums, map_at, map_at + cells, *given.scales, recipe.magic,
        )  # fmt: skip
        options = dict(tiles)
        sizes = {"BM": options.pop("BM"), "BN": options.pop("BN"), "WARPS": options["num_warps"]}
        form = ObservedForm(
            **{**flags, **plain, **given.shape(**sizes, **piece.test)},
            COPIED=given.copied, WIDE=recipe.wide, EACH=each, BY_BLOCK=recipe.by_block, AHEAD=recipe.ahead,
            DIRECT=spec.device == "cuda", EDGE_MAP=summed["MAP"], EDGE_DISTANCE=summed["DISTANCE"],
        )  # fmt: skip
        constants = {"F": form, **options}
        programs = spec.batch * spec.heads * (1 if edges is None else 2)
        return (-(-len(piece.rows) // tiles["BM"]), programs), numbers, constants

    memory = (*_sources(given, piece, lse, tiles), *tables, offset if each else lse, *rows)
    kind = (*_kind_of(piece), runs.groups, runs.blocks, given.copied, *plain.values())
    _launch(given, want, kernel, kind, memory, make)


def _as_band(call: Call, piece: Piece) -> Piece:
    """With a mask that is a band: tested by its two numbers, in the place of strides; other pieces as they are."""
    band = None if call.mask is None else band_of(call)
    if band is None or band.given:
        return piece
    numbers = band.offset - band.left, band.offset + band.right + 1, 0, 0
    return piece._replace(strides=numbers, test={"PREDICATE": BAND, "SLOTS": 0})


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
    plain, chosen = _sources(given, piece, lse), (found["top_weights"], found["top_keys"])
    direct = spec.device == "cuda"
    kind = (*_kind_of(piece), runs.groups, runs.blocks, given.copied)

    def numbers() -> tuple[float, ...]:
        sizes = (int(runs.groups > 1), spec.queries, spec.keys, piece.rows.start, runs.blocks)
        return (*_strides(given, piece), *sizes, *given.scales)

    def bound() -> Work:
        shape = {**_BOUND, "TOP": want.top_k, "GROUPS": recipe.flags["GROUPS"]}
        return (-(-rows // _BOUND["BM"]), heads), (spec.queries, piece.rows.start), shape

    def find() -> Work:
        shape = given.shape(**tiles, **piece.test, RAW=given.rises(), COPIED=given.copied, ROOM=room, DIRECT=direct)
        shape["AHEAD"] = recipe.ahead and shape["RAW"]
        return (-(-rows // tiles["BM"]), heads), numbers(), shape

    def choose() -> Work:
        choice = _choice(spec, direct)
        shape = given.shape(**choice, ROOM=room, TOP=want.top_k, KEPT=max(16, power(want.top_k)), DIRECT=direct)
        del shape["PRECISION"]
        own = (*_strides(given, piece)[:10], spec.queries, *given.scales)
        return (-(-spec.queries // choice["BM"]), heads), own, shape

    def search() -> Work:
        lengths = {"ROOM": room, "TOP": want.top_k, "KEPT": power(want.top_k), "DIRECT": direct}
        shape = given.shape(**_SEARCH, **lengths, **piece.test, BN=tiles["BN"], RUN_ROWS=tiles["BM"])
        return (-(-rows // (_SEARCH["BM"] * _SEARCH["PARTS"])), heads), numbers(), shape

    if recipe.flags["TOP"]:
        noted = found["count"], found["noted"]
        _launch(given, want, top.bound, kind, (found["maxima"], lse, found["threshold"]), bound)
        memory = (*_sources(given, piece, lse, tiles), runs.table, runs.counts, found["threshold"], *noted)
        _launch(given, want, top.find, kind, memory, find)
        if piece.rows.stop == spec.queries:
            _launch(given, want, top.choose, kind, (*plain[:4], *noted, *chosen), choose)
    memory = (*plain, runs.table, runs.counts, found["count"], *chosen)
    _launch(given, want, top.search, kind, memory, search)


def _rectangle(given: Inputs, piece: Piece, want: Want, found: dict[str, Tensor]) -> None:
    from regard._triton.small import rectangle

    spec, block = given.call.spec, 64
    assert want.weights is not None
    rows, keys = (range(n)[span] for span, n in zip(want.weights, (spec.queries, spec.keys), strict=True))
    inside = range(max(rows.start, piece.rows.start), min(rows.stop, piece.rows.stop))
    if not len(inside) or not len(keys):
        return

    def make() -> Work:
        grid = -(-len(keys) // block), -(-len(inside) // block), spec.batch * spec.heads
        numbers = (
            *_strides(given, piece), spec.queries, spec.keys, piece.rows.start, rows.start, inside.stop, keys.start,
            keys.stop, len(rows), *given.scales,
        )  # fmt: skip
        return grid, numbers, given.shape(**piece.test, BM=block, BN=block, num_stages=1, num_warps=4)

    memory = (*_sources(given, piece, found["lse"]), found["weights"])
    _launch(given, want, rectangle, _kind_of(piece), memory, make)


def _finish(given: Inputs, want: Want, recipe: Recipe, found: dict[str, Tensor]) -> None:
    """The sums as float32, in their places."""
    from regard._triton.small import finish_sums, fold_blocks

    if recipe.by_block:
        _fold_blocks(fold_blocks, given, want, recipe, found)
        return
    if not recipe.sums:
        return
    spec, sums, size = given.call.spec, found["sums"], 512

    def make() -> Work:
        mass, cells = spec.keys * want.key_mass, recipe.grid[0] * recipe.grid[1]
        numbers = (
            recipe.sums, max(1, recipe.grid[0]), max(1, recipe.grid[1]), len(recipe.limit), spec.keys, mass, cells,
            recipe.sums,
        )  # fmt: skip
        return (-(-recipe.sums // size), spec.batch * spec.heads), numbers, {"SIZE": size, "WIDE": recipe.wide}

    memory = (sums, *(found.get(name, sums) for name in ("key_mass", "map", "distance")))
    _launch(given, want, finish_sums, (), memory, make)


def _fold_blocks(kernel: Any, given: Inputs, want: Want, recipe: Recipe, found: dict[str, Tensor]) -> None:
    spec, masses, (rows, cols) = given.call.spec, found["masses"], recipe.grid
    runs = encode(given.call, _plain_tiling(recipe)).runs
    partly = spec.mask is not None and runs.extents is not None
    sums, *results = (found.get(name, masses) for name in ("sums", "key_mass", "map", "distance"))

    def make() -> Work:
        programs = rows * -(-cols // _FOLD["CELLS"]) + 1 + (-(-spec.keys // _FOLD["KEYS"]) if want.key_mass else 0)
        sizes = runs.blocks, int(runs.groups > 1), rows, cols, spec.queries, spec.keys, recipe.sums
        constants = {**_FOLD, "H": spec.heads, "BM": recipe.tiles["BM"], "BN": recipe.tiles["BN"]}
        constants.update(PARTLY=partly, MASSED=want.key_mass, DISTANCES=want.distance)
        return (programs, spec.batch * spec.heads), sizes, constants

    memory = (masses, runs.extents if partly else masses, sums, *results)
    _launch(given, want, kernel, (runs.blocks, runs.groups, partly), memory, make)
