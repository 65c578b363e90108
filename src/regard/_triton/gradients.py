"""Gradients of attention by the kernels of ``backward``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard._triton.attend import Draw, bias_of, lists_of, owners_of, tests_of
from regard._triton.encode import band_of, intervals, pieces
from regard._triton.inputs import Inputs, rows_of_unit_stride
from regard._triton.launcher import Launch, kept_launch, on
from regard._triton.tile_sizes import gradient_tiles, widths

if TYPE_CHECKING:
    from regard._triton.tile_sizes import Tiles
    from regard.spec import Call


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
        self.call, self.given, self.draw, self.of_bias = call, Inputs(call), Draw.of(call), bias_of(call)
        self.value, self.grad_out = rows_of_unit_stride(call.value), rows_of_unit_stride(grad_out)
        if self.grad_out.dtype != spec.dtype:
            self.grad_out = self.grad_out.to(spec.dtype)
        self.delta, self.ready = torch.empty_like(lse), torch.empty_like(lse)
        out = rows_of_unit_stride(out)
        self.test = next(tests_of(call, 128))
        self.strides = (out.stride(), self.grad_out.stride())
        block, wide_v = 64, widths(spec)[1]

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
        shape = self.given.shape(**tiles, **test.constants, VALUE=spec.value_dim, DV=widths(spec)[1])
        dropout, direct = self.draw.seed is not None, spec.device == "cuda"
        return {**shape, "BIASED": self.of_bias.form, "DROPOUT": dropout, "DIRECT": direct}

    def _walk(self, kernel: Any, tiles: Tiles, blocks: tuple[int, int], of_keys: bool, grads: list[Tensor]) -> None:
        """Launch ``keys_backward`` or ``queries_backward`` over ``blocks`` of its own."""
        call, spec, draw = self.call, self.call.spec, self.draw
        lists = lists_of(call, tiles, self.test.constants["PREDICATE"], of_keys)

        def make() -> Launch:
            scales = (*self.given.scales, spec.scale, draw.share)
            items, owners, own = owners_of(lists)
            numbers = (*self._strides(), items, owners, spec.queries, spec.keys, own, draw.threshold, *scales)
            return Launch(kernel, blocks, numbers, self._constants(tiles))

        kind = ("keys" if of_keys else "queries", self.strides[1], self.test.numbers, owners_of(lists))
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
