"""Statistics of a call by the kernels of this package: the same results as ``regard._observing``, without a host read.

``refuse`` says from the spec alone what the kernels cannot do; ``observe`` does the rest.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard._triton.encode import DENSE, INTERVALS, Encoded, Tiling, cells_of_tiles, dense_piece, encode, pieces
from regard.statistics import BUCKETS

if TYPE_CHECKING:
    from regard.spec import Call, CallSpec
    from regard.statistics import Want

_LOG2E = math.log2(math.e)
# three products of rounded halves keep float32's accuracy on the tensor cores
_PRECISION = {torch.float32: "tf32x3", torch.float16: "ieee", torch.bfloat16: "ieee"}
_MOST_KEPT = 256
# largest k for which thresholds are taken from maxima of groups of keys: half the keys of a tile
_MOST_BY_GROUPS = 32
_FAR = 1 << 30


def refuse(spec: CallSpec, want: Want) -> list[str]:
    """Why the kernels cannot observe such a call; nothing when they can."""
    reasons = []
    if spec.device != "cuda" and not _interpreted():
        reasons.append("the observation kernels run on CUDA devices")
    if spec.dtype == torch.float64:
        reasons.append("the observation kernels accumulate in float32")
    if spec.head_dim > (128 if spec.dtype == torch.float32 else 256):
        reasons.append(f"head dim {spec.head_dim} does not fit the observation kernels' tiles")
    if spec.mode != "plain":
        reasons.append(f"the observation kernels cannot be traced ({spec.mode} mode)")
    if spec.empty:
        reasons.append("there is nothing to observe")
    if want.top_k > _MOST_KEPT:
        reasons.append(f"top_k above {_MOST_KEPT}")
    if max(spec.queries, spec.keys) + abs(spec.offset or 0) >= _FAR:
        reasons.append("positions beyond 2^30")
    return reasons


def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


class Recipe(NamedTuple):
    """What is the same in every call of one spec and want."""

    tiles: dict[str, int]  # sizes of the tiles and how a program is compiled
    flags: dict[str, Any]  # which statistics the observation pass folds
    limit: range  # queries that count for key mass and map
    grid: tuple[int, int]  # cells of the map
    sums: int  # numbers summed over rows, for each head
    magic: float  # see add_exactly
    tiling: Tiling
    groups: int


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
        "TOP": want.top_k if by_groups else 0,
        "GROUPS": max(16, 2 * _power(want.top_k)) if by_groups else 8,
    }
    sums = spec.keys * want.key_mass + grid[0] * grid[1] + BUCKETS * want.distance
    tiles = _tiles(spec, grid[0] and len(limit) // grid[0])
    # a third loop over tiles doubles the time of compilation where logits take long to compute
    distinct = spec.bias is None and spec.softcap is None
    tiling = Tiling(tiles["BM"], tiles["BN"], grid, (limit.start, limit.stop), want.distance, distinct)
    flags["SPLIT"] = tiling.straddles and distinct
    # no sum exceeds the number of rows by more than rounding, and float64 counts to 2^53
    magic = 1.5 * 2.0 ** spec.queries.bit_length()
    return Recipe(tiles, flags, limit, grid, sums, magic, tiling, flags["GROUPS"])


def _tiles(spec: CallSpec, cell: int) -> dict[str, int]:
    """``cell``: rows in a cell of the map, or 0. Blocks of rows that straddle cells cost more."""
    half = spec.dtype != torch.float32
    return {
        "D": max(16, _power(spec.head_dim)),
        "BM": 128 if half and spec.queries > 64 and cell % 128 == 0 else 64,
        "BN": 64,
        "num_warps": 4,
        "num_stages": 3 if half and spec.head_dim <= 128 else 2,
    }


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


class _Inputs:
    """A call's tensors as arguments of the kernels."""

    def __init__(self, call: Call, lse: Tensor, recipe: Recipe) -> None:
        spec = call.spec
        self.call, self.tiles = call, recipe.tiles
        self.query, self.key = _rows_of_unit_stride(call.query), _rows_of_unit_stride(call.key)
        self.lse = lse.to(torch.float32).contiguous()
        self.bias = self.lse
        self.bias_strides: tuple[int, ...] = (0, 0, 0, 0)
        if call.bias is not None:
            self.bias = call.bias.detach().expand(spec.batch, spec.heads, spec.queries, spec.keys)
            self.bias_strides = self.bias.stride()
        self.encoded = encode(call, recipe.tiling)
        self.scales = spec.scale * _LOG2E, 0.0
        if spec.softcap is not None:
            self.scales = spec.scale / spec.softcap, spec.softcap * _LOG2E

    def sources(self, piece: _Piece) -> tuple[Tensor, ...]:
        return self.query, self.key, self.lse, self.bias, piece.lo, piece.hi

    def strides(self, piece: _Piece) -> tuple[int, ...]:
        return (*self.query.stride()[:3], *self.key.stride()[:3], *self.bias_strides, *piece.strides)

    def shape(self, **more: int) -> dict[str, Any]:
        """The compile-time arguments that every kernel takes."""
        spec = self.call.spec
        return {
            "H": spec.heads,
            "GROUP": spec.heads // spec.kv_heads,
            "HEAD": spec.head_dim,
            "SOFTCAP": spec.softcap is not None,
            "BIASED": spec.bias is not None,
            **self.tiles,
            **more,
        }


class _Piece(NamedTuple):
    """Some rows of the call, and the test of their pairs."""

    rows: range
    lo: Tensor
    hi: Tensor
    strides: tuple[int, ...]
    test: dict[str, int]


def _pieces(call: Call, encoded: Encoded, lse: Tensor, block_q: int) -> list[_Piece]:
    if encoded.test == INTERVALS:
        lo, hi = encoded.lo, encoded.hi
        assert lo is not None and hi is not None
        strides = (lo.stride(0) if lo.shape[0] > 1 else 0, 0, 1, lo.stride(1))
        test = {"PREDICATE": INTERVALS, "SLOTS": lo.shape[1]}
        return [_Piece(range(call.spec.queries), lo, hi, strides, test)]
    test = {"PREDICATE": encoded.test, "SLOTS": 0}
    if encoded.test == DENSE:
        found = []
        for rows in pieces(call, encoded, block_q):
            seen = dense_piece(call, rows).view(torch.uint8)
            found.append(_Piece(rows, seen, seen, seen.stride(), test))
        return found
    return [_Piece(range(call.spec.queries), lse, lse, (0, 0, 0, 0), test)]


def observe(call: Call, lse: Tensor, want: Want) -> dict[str, Tensor]:
    """Every wanted statistic of a call that ``refuse`` has no reason against, [B, H, ...]."""
    recipe = _recipe(call.spec, want)
    with torch.no_grad():
        given = _Inputs(call, lse, recipe)
        found = _allocate(call, want, recipe)
        for piece in _pieces(call, given.encoded, given.lse, recipe.tiles["BM"]):
            _observe_piece(given, piece, want, recipe, found)
        _finish(call, want, recipe, found)
    return {name: found[name] for name in _NAMES if name in found}


_NAMES = (
    "entropy", "max_weight", "key_mass", "map", "top_weights", "top_keys", "distance", "first_mass", "weights",
)  # fmt: skip


def _allocate(call: Call, want: Want, recipe: Recipe) -> dict[str, Tensor]:
    spec, device = call.spec, call.query.device
    lead = (spec.batch, spec.heads)
    found: dict[str, Tensor] = {}

    def new(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        found[name] = torch.empty(*lead, *shape, dtype=dtype, device=device)

    if want.rows:
        new("entropy", spec.queries)
        new("max_weight", spec.queries)
    if want.first:
        new("first_mass", spec.queries)
    if want.top_k:
        new("threshold", spec.queries)
        new("top_weights", spec.queries, want.top_k)
        new("top_keys", spec.queries, want.top_k, dtype=torch.int64)
    if want.weights is not None:
        spans = [range(n)[span] for span, n in zip(want.weights, (spec.queries, spec.keys), strict=True)]
        new("weights", *map(len, spans))
    if recipe.sums:
        found["sums"] = torch.zeros(*lead, recipe.sums, dtype=torch.float64, device=device)
    return found


def _observe_piece(given: _Inputs, piece: _Piece, want: Want, recipe: Recipe, found: dict[str, Tensor]) -> None:
    flags = recipe.flags
    if flags["TOP"] or any(flags[name] for name in ("ROWS", "MASS", "MAP", "DISTANCE", "FIRSTS")):
        _observation_pass(given, piece, want, recipe, found)
    if want.top_k:
        _top(given, piece, want, recipe, found)
    if want.weights is not None:
        _rectangle(given, piece, want, found)


def _observation_pass(given: _Inputs, piece: _Piece, want: Want, recipe: Recipe, found: dict[str, Tensor]) -> None:
    from regard._triton.kernels import observe_rows

    spec, lse, runs, block = given.call.spec, given.lse, given.encoded.runs, recipe.tiles["BM"]
    offset = given.call.offset
    each = isinstance(offset, Tensor)
    map_at = spec.keys * want.key_mass
    observe_rows[(-(-len(piece.rows) // block), spec.batch * spec.heads)](
        *given.sources(piece), runs.table, runs.counts, offset if each else lse,
        cells_of_tiles(spec.keys, max(1, recipe.grid[1]), recipe.tiles["BN"], lse.device), found.get("sums", lse),
        *(found.get(name, lse) for name in ("entropy", "max_weight", "first_mass", "threshold")),
        *given.strides(piece), int(runs.groups > 1),
        spec.queries, spec.keys, piece.rows.start, 0 if each else offset, recipe.limit.start, recipe.limit.stop,
        *recipe.grid, want.first, runs.blocks, recipe.sums, map_at, map_at + math.prod(recipe.grid), *given.scales,
        recipe.magic, EACH=each, WARPS=recipe.tiles["num_warps"], PRECISION=_PRECISION[spec.dtype],
        **given.shape(**piece.test), **recipe.flags,
    )  # fmt: skip


def _top(given: _Inputs, piece: _Piece, want: Want, recipe: Recipe, found: dict[str, Tensor]) -> None:
    from regard._triton import top

    spec, tiles = given.call.spec, recipe.tiles
    # here nothing is straddled: longer runs
    runs = encode(given.call, Tiling(tiles["BM"], tiles["BN"])).runs
    heads, rows, kept = spec.batch * spec.heads, len(piece.rows), _power(want.top_k)
    room = 2 * recipe.groups
    sizes = int(runs.groups > 1), spec.queries, spec.keys, piece.rows.start, runs.blocks
    total = heads * spec.queries
    if recipe.flags["TOP"]:
        new = given.lse.new_empty
        if "count" not in found:
            found["count"] = new(total, dtype=torch.int32)
            found["tiles"] = new(total * room, dtype=torch.int32)
            found["words"] = new(total * room, dtype=torch.int64)
        lists = found["count"], found["tiles"], found["words"]
        top.find[(-(-rows // tiles["BM"]), heads)](
            *given.sources(piece), runs.table, runs.counts, found["threshold"], *lists,
            *given.strides(piece), *sizes, *given.scales, **given.shape(**piece.test), ROOM=room,
            RAW=spec.softcap is None and spec.bias is None and spec.scale > 0, WARPS=tiles["num_warps"],
            PRECISION=_PRECISION[spec.dtype],
        )  # fmt: skip
        if piece.rows.stop == spec.queries:
            block = 8
            top.choose[(-(-spec.queries // block), heads)](
                *given.sources(piece)[:4], *lists, found["top_weights"], found["top_keys"],
                *given.strides(piece)[:10], spec.queries, spec.keys, *given.scales,
                **given.shape(BM=block, num_stages=1, num_warps=1), ROOM=room, TOP=want.top_k, KEPT=kept,
            )  # fmt: skip
    elif "count" not in found:
        found["count"] = given.lse.new_full((total,), room + 1, dtype=torch.int32)
    top.search[(-(-rows // 16), heads)](
        *given.sources(piece), runs.table, runs.counts, found["count"], found["top_weights"], found["top_keys"],
        *given.strides(piece), *sizes, *given.scales,
        **given.shape(**piece.test, BM=16, num_stages=1, RUN_ROWS=tiles["BM"]), ROOM=room, TOP=want.top_k, KEPT=kept,
        PRECISION=_PRECISION[spec.dtype],
    )  # fmt: skip


def _rectangle(given: _Inputs, piece: _Piece, want: Want, found: dict[str, Tensor]) -> None:
    from regard._triton.small import rectangle

    spec, block = given.call.spec, 64
    assert want.weights is not None
    rows, keys = (range(n)[span] for span, n in zip(want.weights, (spec.queries, spec.keys), strict=True))
    inside = range(max(rows.start, piece.rows.start), min(rows.stop, piece.rows.stop))
    if not len(inside) or not len(keys):
        return
    grid = -(-len(keys) // block), -(-len(inside) // block), spec.batch * spec.heads
    rectangle[grid](
        *given.sources(piece), found["weights"], *given.strides(piece), spec.queries, spec.keys, piece.rows.start,
        rows.start, inside.stop, keys.start, keys.stop, len(rows), *given.scales,
        **given.shape(**piece.test, BM=block, BN=block, num_stages=1), PRECISION=_PRECISION[spec.dtype],
    )  # fmt: skip


def _finish(call: Call, want: Want, recipe: Recipe, found: dict[str, Tensor]) -> None:
    """The sums as float32, in their places."""
    from regard._triton.small import finish_sums

    if not recipe.sums:
        return
    spec = call.spec
    lead, heads = (spec.batch, spec.heads), spec.batch * spec.heads
    sums = found["sums"]
    new = call.query.new_empty
    mass, cells = spec.keys * want.key_mass, recipe.grid[0] * recipe.grid[1]
    if want.key_mass:
        found["key_mass"] = new(*lead, spec.keys, dtype=torch.float32)
    if want.map is not None:
        found["map"] = new(*lead, *recipe.grid, dtype=torch.float32)
    if want.distance:
        found["distance"] = new(*lead, BUCKETS, dtype=torch.float32)
    size = 1024
    finish_sums[(-(-recipe.sums // size), heads)](
        sums, *(found.get(name, sums) for name in ("key_mass", "map", "distance")), recipe.sums,
        max(1, recipe.grid[0]), max(1, recipe.grid[1]), len(recipe.limit), spec.keys, mass, cells, recipe.sums,
        SIZE=size,
    )  # fmt: skip


def _rows_of_unit_stride(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()
