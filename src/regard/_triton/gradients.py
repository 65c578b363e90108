"""Gradients of attention by the kernels of ``backward``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard._triton.attend import NO_BIAS, NO_TABLES, Bias, Recipe, Test, bias_of, lists_of, owners_of
from regard._triton.encode import intervals, pieces
from regard._triton.form import Form
from regard._triton.inputs import rows_of_unit_stride
from regard._triton.launcher import Launch, kept, maker, run_on
from regard._triton.tile_sizes import gradient_tiles

if TYPE_CHECKING:
    from regard._triton.encode import TileLists
    from regard.spec import Call, CallSpec


def gradients(
    call: Call, grad_out: Tensor, out: Tensor, lse: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...] | None:
    """Gradients of query, key, value and bias (of a rule: of its table); None where ``needs`` is False. None at all
    where the mask has no intervals, and its booleans do not fit one piece."""
    spec, query = call.spec, call.query
    if grad_out.dtype != spec.dtype:
        grad_out = grad_out.to(spec.dtype)
    way = _way_of(call, grad_out, out)
    return run_on(query.device, way, call, grad_out, out, lse, needs)  # type: ignore[no-any-return]


def _way_of(call: Call, grad_out: Tensor, out: Tensor) -> Any:
    spec, query, key, value = call.spec, call.query, call.key, call.value
    strides = (query.stride(), key.stride(), value.stride(), out.stride(), grad_out.stride())
    kind = ("gradients", spec, query.device, out.dtype, *strides)
    return kept(kind, lambda: _nothing if spec.empty else _Backward(call, grad_out, out))


def compile_ahead(call: Call, out_dtype: torch.dtype) -> None:
    """Begin to compile what the gradients of this call will need, before anybody asks for them."""
    spec = call.spec
    shape = (spec.batch, spec.heads, spec.queries, spec.value_dim)
    out, grad_out = (torch.empty(shape, dtype=dtype, device="meta") for dtype in (out_dtype, spec.dtype))
    way = _way_of(call, grad_out, out)
    if isinstance(way, _Backward) and (way.banded or intervals(call) is not None):
        way.compile_ahead(call, out_dtype)


def _nothing(
    call: Call, grad_out: Tensor, out: Tensor, lse: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    tensors = (call.query, call.key, call.value, call.bias)
    return tuple(
        torch.zeros_like(t) if need and t is not None else None for t, need in zip(tensors, needs, strict=False)
    )


# rows of a tile at most
_ROWS = 128


class _Backward(Recipe):
    def __init__(self, call: Call, grad_out: Tensor, out: Tensor) -> None:
        super().__init__(call, grad_out, out)
        spec = call.spec
        self.of_out = self.strides[12:]
        self.tiles = gradient_tiles(spec)
        self.new_query, self.new_key, self.new_value = (
            maker(tensor.shape, tensor.dtype, tensor.device) for tensor in (call.query, call.key, call.value)
        )
        self.products = self._row_products(spec)

    def __call__(
        self, call: Call, grad_out: Tensor, out: Tensor, lse: Tensor, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...] | None:
        if not (self.banded or intervals(call) is not None or len(pieces(call, _ROWS)) == 1):
            return None
        query, key, value = call.query, call.key, call.value
        if not self.has_unit_strides:
            every = (query, key, value, out, grad_out)
            query, key, value, out, grad_out = (rows_of_unit_stride(tensor) for tensor in every)
        grad_query = grad_key = grad_value = grad_bias = None
        delta = self.new_row()
        bias = NO_BIAS if call.bias is None else bias_of(call)
        (test,) = self.tests(call, _ROWS)
        memory = (query, key, value, grad_out, lse, delta, bias.memory, test.lo, test.hi, call.seed)
        if needs[0]:
            grad_query = self.new_query()
            launch, tables = self._launch_over(call, bias, test, False)
            launch((*memory, *tables, out, grad_query))
        else:
            self.products((out, grad_out, delta))
        if needs[1] or needs[2]:
            grad_key, grad_value = self.new_key(), self.new_value()
            launch, tables = self._launch_over(call, bias, test, True)
            launch((*memory, *tables, grad_key, grad_value))
        if needs[3]:
            grad_bias = self._bias(call, bias, test, memory)
        return grad_query, grad_key if needs[1] else None, grad_value if needs[2] else None, grad_bias

    def _row_products(self, spec: CallSpec) -> Launch:
        from regard._triton.backward import row_products

        block = 64
        form = Form(
            DV=self.widths[1], WHOLE_V=self._form["WHOLE_V"], UNIT=self._form["UNIT"], BM=block,
            # what this kernel does not read
            D=0, WHOLE=False, BN=0, PREDICATE=0, SLOTS=0, PADDED=False, SOFTCAP=False, BIASED=0, DROPOUT=False,
            PRECISION="", DIRECT=False,
        )  # fmt: skip
        grid = -(-spec.queries // block), spec.batch * spec.heads
        numbers = (*self.of_out, *self.strides[9:12], spec.queries, spec.heads, self.sizes[3])
        return Launch(row_products, grid, numbers, {"F": form, "num_warps": 4})

    def compile_ahead(self, call: Call, out_dtype: torch.dtype) -> None:
        dtype, row = call.spec.dtype, torch.float32
        bias = NO_BIAS if call.bias is None else bias_of(call)
        (test,) = self.tests(call, _ROWS)
        memory = (call.query, call.key, call.value, dtype, row, row, bias.memory, test.lo, test.hi, call.seed)
        for of_keys, own in ((False, (out_dtype, dtype)), (True, (dtype, dtype))):
            launch, tables = self._launch_over(call, bias, test, of_keys)
            launch.compile_ahead((*memory, *tables, *own), call.query.device)

    def _launch_over(
        self, call: Call, bias: Bias, test: Test, of_keys: bool
    ) -> tuple[Launch, tuple[Tensor | None, Tensor | None]]:
        """``keys_backward`` or ``queries_backward``, and the lists that it walks over: a band has none, and all that
        decides about its launches is known already."""
        lists: TileLists | None = None
        rest: tuple[Any, ...] = ()
        if not self.banded:
            lists = lists_of(call, self.tiles[0 if of_keys else 1], test.constants["PREDICATE"], of_keys)
            rest = (test.numbers, *test.constants.values(), owners_of(lists))
        kind = (of_keys, bias.strides, rest)
        launch = self.launches.get(kind)
        if launch is None:
            launch = self.launches[kind] = self._launch(call.spec, bias, test, of_keys, owners_of(lists))
        return launch, NO_TABLES if lists is None else lists[:2]

    def _launch(self, spec: CallSpec, bias: Bias, test: Test, of_keys: bool, owners: tuple[int, int, int]) -> Launch:
        from regard._triton.backward import keys_backward, queries_backward

        tiles = self.tiles[0 if of_keys else 1]
        if of_keys:
            kernel, grid = keys_backward, (-(-spec.keys // tiles["BN"]), spec.batch * spec.kv_heads)
        else:
            kernel, grid = queries_backward, (-(-spec.queries // tiles["BM"]), spec.batch * spec.heads)
        sizes = (*owners[:2], spec.queries, spec.keys, owners[2], *self.sizes, self.threshold)
        numbers = (*self._strides(bias, test), *sizes, *self.scales, spec.scale, self.share)
        if not of_keys:
            numbers = (*numbers, *self.of_out)
        grouped = of_keys and spec.heads > spec.kv_heads
        return Launch(kernel, grid, numbers, self.constants(tiles, test, bias, GROUPED=grouped))

    def _strides(self, bias: Bias, test: Test) -> tuple[int, ...]:
        return (*self.strides[:12], *bias.strides, *test.numbers)

    def _bias(self, call: Call, bias: Bias, test: Test, memory: tuple[Any, ...]) -> Tensor:
        """Of a tensor its own gradient, of a rule that of its table."""
        spec, tiles = call.spec, self.tiles[2]
        assert call.bias is not None and spec.bias is not None
        rule = spec.bias.rule
        down, across = -(-spec.queries // tiles["BM"]), -(-spec.keys // tiles["BN"])
        if rule is None:
            batch, heads, rows, keys = call.bias.shape
            # a row or a key of size 1: one number for each tile, summed below
            lines = rows if rows > 1 or spec.queries == 1 else down
            sums = memory[4].new_empty(batch, heads, lines, keys if keys > 1 else across)
            ones = rows == 1 and spec.queries > 1, keys == 1 and spec.keys > 1
            own, programs, strides = (batch, heads), down * across, sums.stride()
        else:
            size = tiles["BM"]
            own, programs = (spec.batch if isinstance(call.offset, Tensor) else 1, spec.heads), down + across - 1
            sums = memory[4].new_empty(*own, programs, size, size)
            ones, strides = (False, False), (0, 0, 0, 0)
        kind = ("bias", bias.strides, test.numbers, *test.constants.values(), own, programs, strides, ones)
        launch = self.launches.get(kind)
        if launch is None:
            launch = self.launches[kind] = self._bias_launch(spec, bias, test, own, programs, strides, ones)
        launch((*memory, sums))
        if rule is None:
            of_tensor: Tensor = sums.sum_to_size(call.bias.shape).to(call.bias.dtype)
            return of_tensor
        grad = torch.zeros_like(call.bias, dtype=torch.float32)
        return _along_diagonals(call, sums, grad, down).to(call.bias.dtype)

    def _bias_launch(
        self,
        spec: CallSpec,
        bias: Bias,
        test: Test,
        own: tuple[int, int],
        programs: int,
        strides: tuple[int, ...],
        ones: tuple[bool, bool],
    ) -> Launch:
        from regard._triton.backward import bias_backward

        tiles = self.tiles[2]
        shared = (1 if own[0] == spec.batch else spec.batch), (1 if own[1] == spec.heads else spec.heads)
        across = -(-spec.keys // tiles["BN"])
        sizes = (spec.queries, spec.keys, *self.sizes, across, *shared, programs, self.threshold)
        numbers = (*self._strides(bias, test), *strides, *sizes, *self.scales, self.share)
        along = spec.bias is not None and spec.bias.rule is not None
        constants = self.constants(tiles, test, bias, ALONG=along, ONE_ROW=ones[0], ONE_KEY=ones[1])
        return Launch(bias_backward, (programs, own[0] * own[1]), numbers, constants)


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
