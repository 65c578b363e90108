"""Attention by the kernels of this package: out and lse, row statistics in the same pass, and the gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard._triton import decoding, inputs
from regard._triton.encode import (
    BAND,
    DENSE,
    INTERVALS,
    TileLists,
    band_of,
    dense_piece,
    intervals,
    pieces,
    tile_lists,
)
from regard._triton.inputs import Inputs, can_be_copied, described, power, rows_of_unit_stride
from regard._triton.launcher import Launch, kept_launch
from regard._triton.run import on

if TYPE_CHECKING:
    from regard.spec import Call, CallSpec

Tiles = dict[str, int]
# of devices that are not asked, the interpreter among them
_SHARED_MEMORY = 232_448
# forms of a bias, as in tiles.py
MATRIX, LINE, SLOPES = 1, 2, 3
# tiles are no larger than this
_MARGIN = 256
# float32 counts to here
_EXACT = 1 << 24
# queries from which the copy engine is worth its descriptors
_LONG = 1024


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
    found = tile_lists(call, tiles["BM"], tiles["BN"], False).nbytes
    sides = intervals(call)
    if sides is not None:
        return found + sum(side.nbytes for side in sides)
    spec = call.spec
    rows = max(len(piece) for piece in pieces(call, tiles["BM"]))
    items = spec.batch if isinstance(call.offset, Tensor) else call.mask.batch  # type: ignore[union-attr]
    return found + rows * spec.keys * items * call.mask.heads  # type: ignore[union-attr]


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
    """Bytes of a number of the bias in shared memory, through which a matrix goes."""
    return 0 if spec.bias is None or spec.bias.rule is not None else spec.bias.dtype.itemsize


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
        # with a bias, more of a tile's time goes to its numbers, and larger tiles win
        options = [] if spec.bias is None else [_option(128, 128, 8, 3)]
        options += [_option(64, 64, 4, 3), _option(64, 64, 4, 2)]
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
        own = [_option(64, 64, 4, 3), _option(64, 64, 4, 2)]
    elif widest <= 128:
        own = [
            _option(64, 128, 8, 2 if _is_short(spec) else 3),
            _option(64, 128, 8, 2),
            _option(64, 64, 8, 2),
            _option(32, 64, 4, 2),
        ]
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
    square = [_option(64, 64, 4, 3), _option(64, 64, 4, 2), _option(64, 64, 4, 1), _option(32, 32, 4, 1)]
    return keys, queries, _fitting(square if size == 2 else square[3:], needs("BN", "BM"), spec.device)


def _is_short(spec: CallSpec) -> bool:
    """Whether each key is seen from a few tiles of rows only, over which a long pipeline does not pay."""
    if spec.flags is None:
        return False
    _, left, right, _, _ = spec.flags
    return left is not None and right is not None and left + right <= 1024


class Test(NamedTuple):
    """How the kernels tell which pairs of some rows are permitted: two tensors and four numbers."""

    rows: range
    lo: Tensor | None
    hi: Tensor | None
    numbers: tuple[int, ...]
    constants: dict[str, int | bool]


def _tests(call: Call, block_q: int) -> Iterator[Test]:
    """One for all rows; of a mask that is neither a band nor intervals, one after the other as they fit the memory."""
    rows = range(call.spec.queries)
    band = band_of(call)
    if band is not None:
        numbers = (band.offset, band.left, band.right, band.given)
        padded = band.lengths is not None
        yield Test(rows, band.lengths, band.offsets, numbers, {"PREDICATE": BAND, "SLOTS": 0, "PADDED": padded})
        return
    found = intervals(call)
    if found is not None:
        lo, hi = found
        numbers = (lo.stride(0) if lo.shape[0] > 1 else 0, 0, 1, lo.stride(1))
        yield Test(rows, lo, hi, numbers, {"PREDICATE": INTERVALS, "SLOTS": lo.shape[1], "PADDED": False})
        return
    for rows in pieces(call, block_q):
        seen = dense_piece(call, rows).view(torch.uint8)
        yield Test(rows, seen, seen, seen.stride(), {"PREDICATE": DENSE, "SLOTS": 0, "PADDED": False})


def _lists(call: Call, tiles: Tiles, predicate: int, of_keys: bool = False) -> TileLists | None:
    return None if predicate == BAND else tile_lists(call, tiles["BM"], tiles["BN"], of_keys)


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

    spec = call.spec
    if spec.empty:
        return _nothing(call, rows)
    if not rows and decoding.pays(spec) and (band := band_of(call)) is not None:
        return Attended(*decoding.decode(call, band), None, None)
    tiles, given, draw = tiles_of(spec), Inputs(call), _Draw.of(call)
    bias = _bias(call)
    value = rows_of_unit_stride(call.value)
    lead = (spec.batch, spec.heads, spec.queries)
    new = call.query.new_empty
    # the gradients of a bias cancel to the last digits: they are made from an output that was not rounded
    learned = spec.grad and spec.bias is not None and spec.bias.needs_grad
    out = new(*lead, spec.value_dim, dtype=torch.float32 if learned else spec.dtype)
    lse = new(lead, dtype=torch.float32)
    entropy, largest = (new(lead, dtype=torch.float32) for _ in range(2)) if rows else (lse, lse)
    wide, wide_v = _widths(spec)
    query, key, source = given.query, given.key, value
    # a descriptor costs the host more than it saves a short call
    copied = spec.queries >= _LONG and given.copied and can_be_copied(value)
    if copied:
        query, key = described(query, tiles["BM"], wide), described(key, tiles["BN"], wide)
        source = described(value, tiles["BN"], wide_v)
    sinks = lse if call.sinks is None else call.sinks.detach().contiguous()
    with on(call.query.device):
        for test in _tests(call, tiles["BM"]):
            lists = _lists(call, tiles, test.constants["PREDICATE"])

            def make(test: Test = test, lists: TileLists | None = lists) -> Launch:
                constants = given.shape(
                    **tiles, **test.constants, VALUE=spec.value_dim, DV=wide_v, COPIED=copied, RISING=given.rises(),
                    SINK=call.sinks is not None, ROWS=rows, DROPOUT=draw.seed is not None, DIRECT=spec.device == "cuda",
                )  # fmt: skip
                constants["BIASED"] = bias.form
                numbers = (
                    *given.query.stride()[:3], *given.key.stride()[:3], *value.stride()[:3], *bias.strides,
                    *test.numbers, *_owners(lists)[:2], spec.queries, spec.keys, test.rows.start, _owners(lists)[2],
                    draw.threshold, *given.natural_scales, draw.share,
                )  # fmt: skip
                grid = -(-len(test.rows) // tiles["BM"]), spec.batch * spec.heads
                return Launch(kernel, grid, numbers, constants)

            kind = ("attend", rows, copied, test.numbers, test.rows, _owners(lists))
            launch = kept_launch(call, kind, make)
            launch([
                query, key, source, lse if bias.memory is None else bias.memory, lse if test.lo is None else test.lo,
                lse if test.hi is None else test.hi, sinks, lse if draw.seed is None else draw.seed,
                *((lse, lse) if lists is None else lists[:2]), out, lse, entropy, largest,
            ])  # fmt: skip
    return Attended(out, lse, entropy, largest) if rows else Attended(out, lse, None, None)


def _owners(lists: TileLists | None) -> tuple[int, int, int]:
    """Whether each item has lists of its own, how many lists there are, and how many an item has."""
    return (0, 0, 0) if lists is None else (int(lists.groups > 1), lists.groups * lists.blocks, lists.blocks)


class Bias(NamedTuple):
    """A bias as the kernels read it; see ``load_bias``."""

    form: int
    memory: Tensor | None
    strides: tuple[int, ...]


def _bias(call: Call) -> Bias:
    spec = call.spec
    if call.bias is None or spec.bias is None:
        return Bias(0, None, (0, 0, 0, 0))
    rule, table = spec.bias.rule, call.bias.detach()
    if rule is None:
        whole = table.expand(spec.batch, spec.heads, spec.queries, spec.keys)
        return Bias(MATRIX, whole, whole.stride())
    offset = call.offset
    if rule.is_linear and not isinstance(offset, Tensor) and spec.queries + spec.keys + abs(offset) < _EXACT:
        return Bias(SLOPES, table.contiguous(), (0, 1, int(offset), 0))
    # a row of a tile begins one earlier than the row above; tiles reach beyond the ends of the call
    place = offset.view(-1, 1) if isinstance(offset, Tensor) else offset
    steps = torch.arange(1 - spec.queries - _MARGIN, spec.keys + _MARGIN, device=table.device).unsqueeze(0) - place
    line = rule.line(table, steps).to(torch.float32).contiguous()  # [B or 1, H, L + S - 1 + 2·margin]
    strides = (line.stride(0) if len(line) > 1 else 0, line.stride(1), -1, 1)
    return Bias(LINE, line[..., spec.queries - 1 + _MARGIN :], strides)


def _nothing(call: Call, rows: bool) -> Attended:
    """Without keys every row is empty; without rows there are none."""
    spec, new = call.spec, call.query.new_full
    lead = (spec.batch, spec.heads, spec.queries)
    missing = new(lead, torch.nan, dtype=torch.float32) if rows else None
    out = new((*lead, spec.value_dim), 0.0)
    return Attended(out, new(lead, -torch.inf, dtype=torch.float32), missing, missing)


def refuse_gradients(call: Call) -> list[str]:
    """Why the backward kernels cannot follow the forward pass of a call that ``refuse`` has nothing against."""
    if band_of(call) is not None or intervals(call) is not None or len(pieces(call, 128)) == 1:
        return []
    return ["the mask has no intervals, and its booleans do not fit one piece"]


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
        self.call, self.given, self.draw, self.of_bias = call, Inputs(call), _Draw.of(call), _bias(call)
        self.value, self.grad_out = rows_of_unit_stride(call.value), rows_of_unit_stride(grad_out)
        if self.grad_out.dtype != spec.dtype:
            self.grad_out = self.grad_out.to(spec.dtype)
        self.delta, self.ready = torch.empty_like(lse), torch.empty_like(lse)
        out = rows_of_unit_stride(out)
        self.test = next(_tests(call, 128))
        self.strides = (out.stride(), self.grad_out.stride())
        block, wide_v = 64, _widths(spec)[1]

        def make() -> Launch:
            numbers = (*out.stride()[:3], *self.grad_out.stride()[:3], spec.queries)
            shape = {"H": spec.heads, "VALUE": spec.value_dim, "DV": wide_v, "BM": block, "num_warps": 4}
            return Launch(row_products, (-(-spec.queries // block), spec.batch * spec.heads), numbers, shape)

        launch = kept_launch(call, ("row products", *self.strides, out.dtype), make)
        launch([out, self.grad_out, lse, self.delta, self.ready])

    def _memory(self) -> list[Any]:
        given, test, ready = self.given, self.test, self.ready
        optional = (self.of_bias.memory, test.lo, test.hi, self.draw.seed)
        stand_in = [ready if each is None else each for each in optional]
        return [given.query, given.key, self.value, self.grad_out, ready, self.delta, *stand_in]

    def _strides(self) -> tuple[int, ...]:
        rows = (self.given.query, self.given.key, self.value, self.grad_out)
        strides = [stride for tensor in rows for stride in tensor.stride()[:3]]
        return (*strides, *self.of_bias.strides, *self.test.numbers)

    def _constants(self, tiles: Tiles) -> dict[str, Any]:
        spec, test = self.call.spec, self.test
        shape = self.given.shape(**tiles, **test.constants, VALUE=spec.value_dim, DV=_widths(spec)[1])
        dropout, direct = self.draw.seed is not None, spec.device == "cuda"
        return {**shape, "BIASED": self.of_bias.form, "DROPOUT": dropout, "DIRECT": direct}

    def _walk(self, kernel: Any, tiles: Tiles, blocks: tuple[int, int], of_keys: bool, grads: list[Tensor]) -> None:
        """Launch ``keys_backward`` or ``queries_backward`` over ``blocks`` of its own."""
        call, spec, draw = self.call, self.call.spec, self.draw
        lists = _lists(call, tiles, self.test.constants["PREDICATE"], of_keys)

        def make() -> Launch:
            scales = (*self.given.scales, spec.scale, draw.share)
            items, owners, own = _owners(lists)
            numbers = (*self._strides(), items, owners, spec.queries, spec.keys, own, draw.threshold, *scales)
            return Launch(kernel, blocks, numbers, self._constants(tiles))

        kind = ("keys" if of_keys else "queries", self.strides[1], self.test.numbers, _owners(lists))
        launch = kept_launch(call, kind, make)
        launch([*self._memory(), *((self.ready, self.ready) if lists is None else lists[:2]), *grads])

    def keys(self) -> tuple[Tensor, Tensor]:
        from regard._triton.backward import keys_backward

        call, spec = self.call, self.call.spec
        tiles = gradient_tiles(spec)[0]
        grads = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (call.key, call.value)]
        blocks = -(-spec.keys // tiles["BN"]), spec.batch * spec.kv_heads
        self._walk(keys_backward, tiles, blocks, True, grads)
        return grads[0], grads[1]

    def queries(self) -> Tensor:
        from regard._triton.backward import queries_backward

        call, spec = self.call, self.call.spec
        tiles = gradient_tiles(spec)[1]
        grad = torch.empty(call.query.shape, dtype=spec.dtype, device=call.query.device)
        blocks = -(-spec.queries // tiles["BM"]), spec.batch * spec.heads
        self._walk(queries_backward, tiles, blocks, False, [grad])
        return grad

    def bias(self) -> Tensor:
        """Of a tensor its own gradient, of a rule that of its table."""
        call, spec = self.call, self.call.spec
        assert call.bias is not None and spec.bias is not None
        tiles = gradient_tiles(spec)[2]
        rule = spec.bias.rule
        down, across = -(-spec.queries // tiles["BM"]), -(-spec.keys // tiles["BN"])
        new = self.ready.new_empty
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
        along = spec.bias.rule is not None

        def make() -> Launch:
            shared = (1 if own[0] == spec.batch else spec.batch), (1 if own[1] == spec.heads else spec.heads)
            sizes = (spec.queries, spec.keys, -(-spec.keys // tiles["BN"]), *shared, programs, draw.threshold)
            numbers = (*self._strides(), *strides, *sizes, *self.given.scales, draw.share)
            constants = {**self._constants(tiles), "ALONG": along, "ONE_ROW": ones[0], "ONE_KEY": ones[1]}
            return Launch(bias_backward, (programs, own[0] * own[1]), numbers, constants)

        kind = ("bias", self.strides[1], self.test.numbers, own, programs, strides, ones)
        kept_launch(call, kind, make)([*self._memory(), sums])


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
