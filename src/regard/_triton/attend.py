"""Attention by the kernels of this package: out and lse, row statistics in the same pass, and the gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard._triton import inputs
from regard._triton.encode import BAND, DENSE, Runs, Tiling, band_of, encode, encode_columns, pieces
from regard._triton.inputs import Inputs, Piece, can_be_copied, described, pieces_of, power, rows_of_unit_stride
from regard._triton.run import on, run

if TYPE_CHECKING:
    from regard.spec import Call, CallSpec

Tiles = dict[str, int]
# of devices that are not asked, the interpreter among them
_SHARED_MEMORY = 232_448


def refuse(spec: CallSpec) -> list[str]:
    """Why the kernels cannot run such a call; nothing when they can."""
    reasons = inputs.refuse(spec)
    if spec.value_dim > inputs.widest(spec.dtype):
        reasons.append(f"value dim {spec.value_dim} does not fit the Triton kernels' tiles")
    return reasons


def mask_bytes(call: Call) -> int:
    """Bytes of the tables of the call's mask, and of its largest piece where pairs are tested one by one."""
    if band_of(call) is not None:
        return 0
    tiles = tiles_of(call.spec)
    encoded = encode(call, Tiling(tiles["BM"], tiles["BN"]))
    return encoded.nbytes + max(piece.lo.nbytes if piece.rows else 0 for piece in pieces_of(call, encoded, tiles["BM"]))


class Attended(NamedTuple):
    out: Tensor  # [B, H, L, Dv]
    lse: Tensor  # [B, H, L], float32, likewise the rest
    entropy: Tensor | None
    max_weight: Tensor | None


@lru_cache(16)
def shared_memory(device: str) -> int:
    """Bytes of shared memory that a program may use."""
    if device != "cuda" or not torch.cuda.is_available():
        return _SHARED_MEMORY
    return int(torch.cuda.get_device_properties().shared_memory_per_block_optin)  # type: ignore[attr-defined]


def _fitting(options: list[Tiles], needs: Callable[[Tiles], int], device: str) -> Tiles:
    """The first of the options that fits the device's shared memory, or the last."""
    limit = shared_memory(device)
    return next((tiles for tiles in options if needs(tiles) <= limit), options[-1])


def _option(BM: int, BN: int, num_warps: int, num_stages: int) -> Tiles:
    return {"BM": BM, "BN": BN, "num_warps": num_warps, "num_stages": num_stages}


def _widths(spec: CallSpec) -> tuple[int, int]:
    return max(16, power(spec.head_dim)), max(16, power(spec.value_dim))


def _bias_item(spec: CallSpec) -> int:
    """Bytes of a number of the bias as a kernel reads it."""
    if spec.bias is None:
        return 0
    return 4 if spec.bias.rule is not None else spec.bias.dtype.itemsize


@lru_cache(4096)
def tiles_of(spec: CallSpec) -> Tiles:
    """Sizes of the forward pass' tiles, warps and stages of the pipeline: what is fastest of what fits."""
    wide, wide_v = _widths(spec)
    widest, size = max(wide, wide_v), spec.dtype.itemsize
    if size == 4:
        options = [_option(64, 32, 4, 2), _option(32, 32, 4, 2), _option(32, 32, 4, 1)]
    elif spec.queries <= 64 and widest <= 128:
        options = [_option(64, 64, 4, 3), _option(64, 64, 4, 2)]
    elif widest <= 64:
        options = [_option(128, 64, 4, 3), _option(128, 64, 4, 2), _option(64, 64, 4, 2)]
    elif widest <= 128:
        options = [_option(128, 128, 8, 3)] if inputs.has_copy_engine(torch.device(spec.device)) else []
        options += [_option(128, 64, 8, 3), _option(128, 64, 8, 2), _option(64, 64, 4, 3), _option(64, 64, 4, 2)]
    else:
        options = [_option(128, 64, 8, 2), _option(64, 64, 4, 2), _option(64, 32, 4, 2)]
    options.append(_option(32, 32, 4, 1))

    def needs(tiles: Tiles) -> int:
        rows, keys = tiles["BM"], tiles["BN"]
        stage = keys * (wide + wide_v) * size + rows * keys * _bias_item(spec)
        return rows * wide * size + tiles["num_stages"] * stage + rows * keys * 4 * (size == 4)

    return _fitting(options, needs, spec.device)


@lru_cache(4096)
def gradient_tiles(spec: CallSpec) -> tuple[Tiles, Tiles, Tiles]:
    """Those of the three backward kernels: of keys and values, of queries, of a bias."""
    wide, wide_v = _widths(spec)
    widest, size = max(wide, wide_v), spec.dtype.itemsize
    if size == 4:
        own = [_option(32, 32, 4, 1)]
    elif widest <= 64:
        own = [_option(64, 128, 8, 3), _option(64, 64, 4, 3), _option(64, 64, 4, 2)]
    elif widest <= 128:
        own = [_option(64, 128, 8, 3), _option(64, 128, 8, 2), _option(64, 64, 8, 2), _option(32, 64, 4, 2)]
    else:
        own = [_option(64, 64, 8, 2), _option(32, 64, 8, 2), _option(32, 64, 8, 1)]
    own.append(_option(32, 32, 4, 1))

    def needs(walked: str, owned: str) -> Callable[[Tiles], int]:
        def of(tiles: Tiles) -> int:
            pairs = tiles["BM"] * tiles["BN"]
            kept = tiles[owned] * (wide + wide_v) * size
            stage = tiles[walked] * (wide + wide_v) * size + pairs * _bias_item(spec)
            return kept + tiles["num_stages"] * stage + 2 * pairs * size

        return of

    swapped = [{**tiles, "BM": tiles["BN"], "BN": tiles["BM"]} for tiles in own]
    keys = _fitting(own, needs("BM", "BN"), spec.device)
    queries = _fitting(swapped, needs("BN", "BM"), spec.device)
    square = [_option(64, 64, 4, 2), _option(64, 64, 4, 1), _option(32, 32, 4, 1)]
    return keys, queries, _fitting(square if size == 2 else square[2:], needs("BN", "BM"), spec.device)


def _tests(call: Call, tiles: Tiles, tensor: Tensor) -> tuple[Iterator[Piece], Runs | None]:
    """What the kernels test pairs by, and the runs of tiles of each block of rows. ``tensor`` stands for one that the
    kernel does not read."""
    band = band_of(call)
    if band is not None:
        lengths = tensor if band.lengths is None else band.lengths
        offsets = tensor if band.offsets is None else band.offsets
        numbers = (band.offset, band.left, band.right, band.given)
        piece = Piece(range(call.spec.queries), lengths, offsets, numbers, {"PREDICATE": BAND, "SLOTS": 0})
        return iter([piece]), None
    encoded = encode(call, Tiling(tiles["BM"], tiles["BN"]))
    return pieces_of(call, encoded, tiles["BM"]), encoded.runs


class _Draw(NamedTuple):
    """A call's dropout as the kernels take it."""

    seed: Tensor | None
    threshold: int  # draws of 24 bits below this are dropped
    share: float

    @classmethod
    def of(cls, call: Call) -> _Draw:
        p = call.spec.dropout
        if not p:
            return cls(None, 0, 1.0)
        # what a comparison with a float32 draw makes of the probability
        threshold = math.ceil(torch.tensor(p, dtype=torch.float32).item() * 2**24)
        return cls(call.seed, threshold, 0.0 if p == 1 else 1.0 / (1.0 - p))


def attend(call: Call, rows: bool) -> Attended:
    """The call's result; ``rows`` asks for entropy and largest weight too. Reads nothing from the device."""
    from regard._triton.forward import attend as kernel

    spec, tiles = call.spec, tiles_of(call.spec)
    if spec.empty:
        return _nothing(call, rows)
    given, draw = Inputs(call), _Draw.of(call)
    value = rows_of_unit_stride(call.value)
    lead = (spec.batch, spec.heads, spec.queries)
    new = call.query.new_empty
    out = new(*lead, spec.value_dim)
    lse = new(lead, dtype=torch.float32)
    entropy, largest = (new(lead, dtype=torch.float32) for _ in range(2)) if rows else (lse, lse)
    wide, wide_v = _widths(spec)
    copied = given.copied and can_be_copied(value)
    query, key, source = given.query, given.key, value
    if copied:
        query, key = described(query, tiles["BM"], wide), described(key, tiles["BN"], wide)
        source = described(value, tiles["BN"], wide_v)
    found, runs = _tests(call, tiles, lse)
    tables = (lse, lse, 0, 0) if runs is None else (runs.table, runs.counts, int(runs.groups > 1), runs.blocks)
    sinks = lse if call.sinks is None else call.sinks.detach().contiguous()
    more = {"VALUE": spec.value_dim, "DV": wide_v, "COPIED": copied, "SINK": call.sinks is not None, "ROWS": rows}
    for piece in found:
        args = (
            query, key, source, given.bias, piece.lo, piece.hi, sinks, lse if draw.seed is None else draw.seed,
            *tables[:2], out, lse, entropy, largest, *given.query.stride()[:3], *given.key.stride()[:3],
            *value.stride()[:3], *given.bias_strides, *piece.strides, tables[2], spec.queries, spec.keys,
            piece.rows.start, tables[3], draw.threshold, *given.natural_scales, draw.share,
        )  # fmt: skip
        grid = -(-len(piece.rows) // tiles["BM"]), spec.batch * spec.heads
        constants = given.shape(**tiles, **piece.test, **more, RISING=given.rises(), DROPOUT=draw.seed is not None)
        with on(call.query.device):
            run(kernel, grid, args, constants)
    return Attended(out, lse, entropy, largest) if rows else Attended(out, lse, None, None)


def _nothing(call: Call, rows: bool) -> Attended:
    """Without keys every row is empty; without rows there are none."""
    spec, new = call.spec, call.query.new_full
    lead = (spec.batch, spec.heads, spec.queries)
    missing = new(lead, torch.nan, dtype=torch.float32) if rows else None
    out = new((*lead, spec.value_dim), 0.0)
    return Attended(out, new(lead, -torch.inf, dtype=torch.float32), missing, missing)


def refuse_gradients(call: Call) -> list[str]:
    """Why the backward kernels cannot follow the forward pass of a call that ``refuse`` has nothing against."""
    if band_of(call) is not None or call.mask is None:
        return []
    tiles = gradient_tiles(call.spec)[1]
    encoded = encode(call, Tiling(tiles["BM"], tiles["BN"]))
    if encoded.test == DENSE and len(pieces(call, encoded, tiles["BM"])) > 1:
        return ["the mask has no intervals, and its booleans do not fit one piece"]
    return []


def gradients(
    call: Call, grad_out: Tensor, out: Tensor, lse: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of query, key, value and bias (of a rule: of its table); None where ``needs`` is False."""
    spec = call.spec
    if spec.empty:
        named = (call.query, call.key, call.value, call.bias)
        return tuple(  # type: ignore[return-value]
            torch.zeros_like(t) if need and t is not None else None for t, need in zip(named, needs, strict=False)
        )
    with on(call.query.device):
        backward = _Backward(call, grad_out, out, lse)
        grad_key, grad_value = backward.keys() if needs[1] or needs[2] else (None, None)
        return (
            backward.queries() if needs[0] else None,
            grad_key if needs[1] else None,
            grad_value if needs[2] else None,
            backward.bias() if needs[3] else None,
        )


class _Backward:
    """The arguments that the backward kernels share."""

    def __init__(self, call: Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> None:
        from regard._triton.backward import row_products

        spec = call.spec
        self.call, self.given, self.draw = call, Inputs(call), _Draw.of(call)
        self.value, self.grad_out = rows_of_unit_stride(call.value), rows_of_unit_stride(grad_out)
        if self.grad_out.dtype != spec.dtype:
            self.grad_out = self.grad_out.to(spec.dtype)
        self.lse = lse
        self.delta = torch.empty_like(lse)
        out = rows_of_unit_stride(out)
        block, wide_v = 64, _widths(spec)[1]
        args = (out, self.grad_out, self.delta, *out.stride()[:3], *self.grad_out.stride()[:3], spec.queries)
        shape = {"H": spec.heads, "VALUE": spec.value_dim, "DV": wide_v, "BM": block, "num_warps": 4}
        run(row_products, (-(-spec.queries // block), spec.batch * spec.heads), args, shape)

    def _arguments(self, piece: Piece) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Tensors, and strides."""
        given, draw = self.given, self.draw
        seed = self.lse if draw.seed is None else draw.seed
        tensors = (
            given.query, given.key, self.value, self.grad_out, self.lse, self.delta, given.bias, piece.lo, piece.hi,
            seed,
        )  # fmt: skip
        rows = (given.query, given.key, self.value, self.grad_out)
        strides = [stride for tensor in rows for stride in tensor.stride()[:3]]
        return tensors, (*strides, *given.bias_strides, *piece.strides)

    def _constants(self, tiles: Tiles, piece: Piece) -> dict[str, Any]:
        spec = self.call.spec
        dropout = self.draw.seed is not None
        return self.given.shape(**tiles, **piece.test, VALUE=spec.value_dim, DV=_widths(spec)[1], DROPOUT=dropout)

    def keys(self) -> tuple[Tensor, Tensor]:
        from regard._triton.backward import keys_backward

        call, spec = self.call, self.call.spec
        tiles = gradient_tiles(spec)[0]
        found, runs = _tests(call, tiles, self.lse)
        piece = next(found)
        if runs is not None:
            runs = encode_columns(call, tiles["BM"], tiles["BN"])
        grads = tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (call.key, call.value))
        tensors, strides = self._arguments(piece)
        args = (*tensors, *self._tables(runs), *grads, *strides, *self._numbers(runs))
        grid = -(-spec.keys // tiles["BN"]), spec.batch * spec.kv_heads
        run(keys_backward, grid, args, self._constants(tiles, piece))
        return grads  # type: ignore[return-value]

    def queries(self) -> Tensor:
        from regard._triton.backward import queries_backward

        call, spec = self.call, self.call.spec
        tiles = gradient_tiles(spec)[1]
        found, runs = _tests(call, tiles, self.lse)
        piece = next(found)
        grad = torch.empty(call.query.shape, dtype=spec.dtype, device=call.query.device)
        tensors, strides = self._arguments(piece)
        args = (*tensors, *self._tables(runs), grad, *strides, *self._numbers(runs))
        grid = -(-spec.queries // tiles["BM"]), spec.batch * spec.heads
        run(queries_backward, grid, args, self._constants(tiles, piece))
        return grad

    def _tables(self, runs: Runs | None) -> tuple[Tensor, Tensor]:
        return (self.lse, self.lse) if runs is None else (runs.table, runs.counts)

    def _numbers(self, runs: Runs | None) -> tuple[Any, ...]:
        spec, draw = self.call.spec, self.draw
        tables = (0, 0) if runs is None else (int(runs.groups > 1), runs.blocks)
        return (
            tables[0], spec.queries, spec.keys, tables[1], draw.threshold, *self.given.scales, spec.scale, draw.share,
        )  # fmt: skip

    def bias(self) -> Tensor:
        """Of a tensor its own gradient, of a rule that of its table."""
        call, spec = self.call, self.call.spec
        assert call.bias is not None and spec.bias is not None
        tiles = gradient_tiles(spec)[2]
        rule = spec.bias.rule
        down, across = -(-spec.queries // tiles["BM"]), -(-spec.keys // tiles["BN"])
        new = self.lse.new_empty
        if rule is None:
            batch, heads, rows, keys = call.bias.shape
            # a row or a key of size 1: one number for each tile, summed below
            sums = new(batch, heads, rows if rows > 1 or spec.queries == 1 else down, keys if keys > 1 else across)
            one_row, one_key = rows == 1 and spec.queries > 1, keys == 1 and spec.keys > 1
            self._sum_bias(tiles, sums, (batch, heads), down * across, sums.stride(), one_row, one_key)
            return sums.sum_to_size(call.bias.shape).to(call.bias.dtype)
        owners = spec.batch if isinstance(call.offset, Tensor) else 1
        diagonals = down + across - 1
        size = tiles["BM"]
        sums = new(owners, spec.heads, diagonals, size, size)
        self._sum_bias(tiles, sums, (owners, spec.heads), diagonals, (0, 0, 0, 0), False, False)
        grad = torch.zeros_like(call.bias, dtype=torch.float32)
        return _along_diagonals(call, sums, grad, down).to(call.bias.dtype)

    def _sum_bias(
        self, tiles: Tiles, sums: Tensor, own: tuple[int, int], programs: int, strides: tuple[int, ...], *ones: bool
    ) -> None:
        from regard._triton.backward import bias_backward

        call, spec, draw = self.call, self.call.spec, self.draw
        assert spec.bias is not None
        piece = next(_tests(call, tiles, self.lse)[0])
        tensors, more = self._arguments(piece)
        shared = (1 if own[0] == spec.batch else spec.batch), (1 if own[1] == spec.heads else spec.heads)
        along = spec.bias.rule is not None
        tiles_across = -(-spec.keys // tiles["BN"])
        args = (
            *tensors, sums, *more, *strides, spec.queries, spec.keys, tiles_across, *shared, programs, draw.threshold,
            *self.given.scales, draw.share,
        )  # fmt: skip
        constants = {**self._constants(tiles, piece), "ALONG": along, "ONE_ROW": ones[0], "ONE_KEY": ones[1]}
        run(bias_backward, (programs, own[0] * own[1]), args, constants)


def _along_diagonals(call: Call, sums: Tensor, grad: Tensor, down: int) -> Tensor:
    """Tiles summed along tile diagonals, [items, H, diagonals, n, n], to the gradient of the rule's table."""
    from regard.bias._rule import diagonal_sums

    spec = call.spec
    assert spec.bias is not None and spec.bias.rule is not None
    items, heads, diagonals, size, _ = sums.shape
    line = diagonal_sums(sums)[
        ..., : 2 * size - 1
    ]  # entry n of diagonal d: distance (d − down + 1)·size + n − size + 1
    steps = torch.arange(diagonals, device=sums.device)[:, None] - (down - 1)
    distance = steps * size + torch.arange(2 * size - 1, device=sums.device) - (size - 1)
    distance = distance.view(1, -1)
    offset = call.offset.view(-1, 1) if isinstance(call.offset, Tensor) else call.offset
    spec.bias.rule.line_gradient(grad, line.reshape(items, heads, -1), distance - offset)
    return grad
