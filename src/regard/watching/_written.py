"""Attention that a model writes out: a softmax, and the product of its output with values that follows.

Operators are met one by one. The output of a softmax is followed through views, casts, dropout and masking; a product
that sums over the softmax's own axis is attention. The product is followed in turn: the axes that are laid next to
the values' dim, to make the model's width again, are the heads. What the weights went through that would make them
other weights (mixed across heads, scaled) is kept as the reason why their statistics would be wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.watching import _axes
from regard.watching._axes import FEATURE, OTHER, Dims, Piece
from regard.watching._views import VIEWS

aten = torch.ops.aten


class Weights(NamedTuple):
    """The output of a softmax, or what became of it."""

    dims: Dims  # of this tensor
    softmax: Softmax
    final: Tensor  # the weights as the product sees them, but before dropout
    final_dims: Dims
    changed: str = ""  # what makes them no softmax's output any more


class Softmax(NamedTuple):
    axis: int
    shape: tuple[int, ...]
    lse: Tensor  # the shape without the axis
    by_function: bool  # whether torch's attention function took it, not the model's code
    users: list[Any]  # calls of modules that multiplied values by it


class Partial(NamedTuple):
    """Values scaled by weights, not summed yet."""

    dims: Dims
    weights: Weights
    rows: tuple[Piece, ...]  # axes of the weights along which the values are repeated: those of the queries


class Product(NamedTuple):
    """The output of attention on its way to the model's width."""

    dims: Dims
    call: Any  # what the watcher made of the product


class Tracker:
    """What is known of the tensors that live, by identity. One for each watch."""

    def __init__(
        self, attended: Callable[[Weights, Sequence[Piece]], Any], settled: Callable[[Any, Any], None]
    ) -> None:
        self.attended, self.settled = attended, settled
        self._known: dict[int, Any] = {}
        self._alive: dict[int, weakref.ref[Tensor]] = {}
        self.noise: dict[int, weakref.ref[Tensor]] = {}
        self.kept: dict[int, Tensor] | None = (
            None  # where somebody asks for gradients: outputs of softmaxes, by their lse
        )
        self.product: tuple[Tensor, Tensor] | None = None  # values and output of the product that is being shown

    def __bool__(self) -> bool:
        return bool(self._known)

    def clear(self) -> None:
        self._known.clear()
        self._alive.clear()
        self.noise.clear()

    def of(self, tensor: object) -> Any:
        return self._known.get(id(tensor))

    def note(self, tensor: Tensor, what: Any) -> None:
        at = id(tensor)

        def forget(_: Any) -> None:
            self._known.pop(at, None)
            self._alive.pop(at, None)

        self._known[at] = what
        self._alive[at] = weakref.ref(tensor, forget)

    def note_noise(self, tensor: Tensor) -> None:
        at = id(tensor)
        self.noise[at] = weakref.ref(tensor, lambda _: self.noise.pop(at, None))

    # One operator that has run. ``known`` are its tensors that something is known of.

    def softmax(self, given: Tensor, axis: int, out: Tensor, *, by_function: bool = False) -> None:
        axis %= max(1, given.dim())
        if given.dim() == 0 or not out.is_floating_point() or given.is_nested:
            return
        lse = _lse(given.detach(), out.detach(), axis)
        if self.kept is not None:
            self.kept[id(lse)] = out
        self.note(out, softmax_weights(out, Softmax(axis, tuple(out.shape), lse, by_function, [])))

    def before(self, args: tuple[Any, ...]) -> None:
        """An operator is about to write into its first argument: weights that are to be read later are kept apart."""
        known = self.of(args[0]) if args else None
        if isinstance(known, Weights):
            self.note(args[0], known._replace(final=known.final.clone()))

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if getattr(func, "overloadpacket", None) is aten.native_layer_norm:
            out = out[0]
        for at, given in enumerate(args[:3]):
            if isinstance(given, (tuple, list)):
                self._joined(func, given, out)
                continue
            known = self._known.get(id(given)) if isinstance(given, Tensor) else None
            if known is not None:
                self._one(known, func, at, args, kwargs, out)
                if isinstance(known, Weights) and self.of(out) is not None:
                    return

    def _joined(self, func: Any, given: Sequence[Any], out: Any) -> None:
        """Weights that were taken together with others lose their axes."""
        known = next((found for x in given if isinstance(found := self.of(x), Weights)), None)
        packet = getattr(func, "overloadpacket", None)
        if known is not None and packet in _MOVERS and isinstance(out, Tensor):
            self.note(out, known._replace(dims=(), changed=known.changed or f"moved by {_name(packet)}"))

    def _one(self, known: Any, func: Any, at: int, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if not isinstance(known, (Weights, Partial, Product)):
            return
        packet = getattr(func, "overloadpacket", None)
        if isinstance(known, Weights) and not known.dims:
            self._lost(known, packet, at, args, out)
            return
        view = VIEWS.get(packet) if at == 0 else None
        if view is not None and isinstance(out, Tensor):
            dims = view(known.dims, args, kwargs, out)
            self._viewed(known, packet, dims, out)
        elif isinstance(known, Weights):
            self._weights(known, packet, at, args, kwargs, out)
        elif isinstance(known, Partial):
            if packet is aten.sum and isinstance(out, Tensor):
                self._summed(known, args, out)
        elif isinstance(known, Product):
            self._used(known, packet, at, out)

    def _lost(self, known: Weights, packet: Any, at: int, args: Any, out: Any) -> None:
        """Weights whose axes are mixed are followed only to say that their product could not be read."""
        if packet in _PRODUCTS:
            self._multiplied(known, packet, at, args, out)
        elif (packet in VIEWS or packet in _MOVERS or packet in _FILLS) and isinstance(out, Tensor):
            self.note(out, known)

    def _viewed(self, known: Any, packet: Any, dims: Dims | None, out: Tensor) -> None:
        if isinstance(known, Weights):
            if dims is None:
                self.note(
                    out,
                    known._replace(dims=(), changed=known.changed or f"reshaped by {_name(packet)} so that axes mix"),
                )
            elif packet is aten.slice and dims != known.dims:
                if _only_a_sink_is_cut(known, dims, out):
                    self.note(out, known._replace(dims=dims, final=out.detach(), final_dims=dims))
                else:
                    self.note(out, known._replace(dims=(), changed=known.changed or "cut into parts"))
            else:
                self.note(out, known._replace(dims=dims))
        elif isinstance(known, Partial):
            if dims is not None:
                self.note(out, known._replace(dims=dims))
        elif dims is not None:
            heads = _next_to_feature(dims)
            if heads is not None:
                self.settled(known.call, heads)
            else:
                self.note(out, known._replace(dims=dims))
        else:
            self.settled(known.call, _found(known.dims))

    def _weights(self, known: Weights, packet: Any, at: int, args: Any, kwargs: Any, out: Any) -> None:
        if packet in _PRODUCTS:
            self._multiplied(known, packet, at, args, out)
        elif packet is aten.native_dropout and at == 0:
            self.note(out[0], known)
        elif packet in (aten.mul, aten.mul_) and isinstance(out, Tensor):
            other = args[1 - at]
            if isinstance(other, Tensor) and id(other) in self.noise:
                self.note(out, known)  # dropout, as torch does it on a CPU
            elif isinstance(other, Tensor) and _scales_values(known.dims, other):
                self._scaled(Partial(_with_feature(known.dims, out.shape), known, _rows(known, other)), out)
            elif out.shape == args[at].shape:
                self.note(out, known._replace(changed=known.changed or "multiplied by something"))
        elif packet in _FILLS and isinstance(out, Tensor) and out.dim() == len(known.dims):
            fill = (
                args[2]
                if packet in (aten.masked_fill, aten.masked_fill_)
                else args[3 - at]
                if packet is aten.where
                else 0.0
            )
            if _is_zero(fill):
                self.note(out, known._replace(final=out.detach(), final_dims=known.dims))
            else:
                self.note(out, known._replace(changed=known.changed or "filled with numbers other than 0"))
        elif packet is aten.convolution and at == 0:
            dims = (known.dims[0], _axes.whole(OTHER, out.shape[1]), *known.dims[2:])
            self.note(out, known._replace(dims=dims, changed=known.changed or "mixed across heads by a convolution"))
        elif packet in _CUTS and isinstance(out, (tuple, list)):
            for part in out:
                self.note(part, known._replace(dims=(), changed=known.changed or "cut into parts"))
        elif packet in _MOVERS and isinstance(out, Tensor) and out.dim() >= 2:
            self.note(out, known._replace(dims=(), changed=known.changed or f"moved by {_name(packet)}"))
        elif packet in _KEEPERS and isinstance(out, Tensor) and out.shape == args[at].shape:
            self.note(out, known._replace(changed=known.changed or f"changed by {_name(packet)}"))

    def _multiplied(self, known: Weights, packet: Any, at: int, args: Any, out: Tensor) -> None:
        shift = 1 if packet in (aten.addmm, aten.baddbmm, aten.addmv, aten.addbmm) else 0
        side = at - shift
        if side not in (0, 1):
            return
        if not known.dims:
            if not _learned(args[shift + 1 - side]):
                self.attended(known, ())
            return
        dims, other = known.dims, args[shift + 1 - side]
        summed = dims[-1] if side == 0 else dims[-2]
        rows = dims[-2] if side == 0 else dims[-1]
        if packet in (aten.mv, aten.addmv):
            summed, rows = dims[-1], dims[-2]
        feature = _axes.whole(FEATURE, other.shape[-1] if side == 0 else other.shape[-2]) if other.dim() > 1 else ()
        lead = dims[:-2]
        if summed == self._keys(known):
            if _learned(other):
                return  # a softmax over rows that were learned: no tokens
            self.product = (other, out) if side == 0 and not shift else None
            call = self.attended(known, rows)
            self.product = None
            if call is not None and packet not in (aten.mv, aten.addmv, aten.addbmm):
                made = (*lead, rows, feature) if side == 0 else (*lead, feature, rows)
                self.note(out, Product(made, call))
        elif packet not in (aten.mv, aten.addmv, aten.addbmm):
            fresh = _axes.whole(OTHER, size_of_last(other, side))
            made = (*lead, rows, fresh) if side == 0 else (*lead, fresh, rows)
            left = [piece for dim in made for piece in dim]
            if all(piece in left for piece in self._keys(known)):
                self.note(out, known._replace(dims=made, changed=known.changed or "mixed across heads by a product"))

    def _scaled(self, known: Partial, out: Tensor) -> None:
        if self._keys(known.weights):
            self.note(out, known)
        elif (call := self.attended(known.weights, known.rows)) is not None:
            self.note(out, Product(known.dims, call))  # of one key there is nothing to sum, and torch.einsum does not

    def _summed(self, known: Partial, args: Any, out: Tensor) -> None:
        axes = args[1] if len(args) > 1 else None
        if axes is None:
            return
        dims = {axis % len(known.dims) for axis in ([axes] if isinstance(axes, int) else axes)}
        keys = self._keys(known.weights)
        if len(dims) != 1 or known.dims[at := next(iter(dims))] != keys or not keys:
            return
        keep = bool(args[2]) if len(args) > 2 else False
        rest = [dim for n, dim in enumerate(known.dims) if n != at or keep]
        if keep:
            rest[at] = ()
        call = self.attended(known.weights, known.rows)
        if call is not None:
            self.note(out, Product(tuple(rest), call))

    def _used(self, known: Product, packet: Any, at: int, out: Any) -> None:
        """An operator that is no view has read the output: the heads lie next to the values' dim, or there are none."""
        if packet in _STILL and isinstance(out, Tensor) and out.dim() == len(known.dims):
            self.note(out, known)
            return
        self.settled(known.call, _found(known.dims))

    def _keys(self, known: Weights) -> tuple[Piece, ...]:
        """The softmax's own axis, as it is in the final weights: a sink may have been cut off."""
        axis = known.softmax.axis
        for dim in known.final_dims:
            if any(piece.axis == axis for piece in dim):
                return dim
        return ()


def softmax_weights(out: Tensor, softmax: Softmax) -> Weights:
    dims = _axes.of_shape(out.shape)
    return Weights(dims, softmax, out.detach(), dims)


def size_of_last(other: Tensor, side: int) -> int:
    return other.shape[-1] if side == 0 else other.shape[-2]


def _lse(given: Tensor, out: Tensor, axis: int) -> Tensor:
    """Log-sum-exp of the logits, from the largest of them and its weight."""
    dtype = torch.float64 if out.dtype == torch.float64 else torch.float32
    if not out.numel():
        return out.new_zeros(out.shape[:axis] + out.shape[axis + 1 :], dtype=dtype)
    top = given.amax(axis).to(dtype)
    lse = top - out.amax(axis).to(dtype).log()
    return lse.masked_fill(top == -torch.inf, -torch.inf)


def _only_a_sink_is_cut(known: Weights, dims: Dims, out: Tensor) -> bool:
    """Whether a slice leaves all of the weights but one last key, which stood for a sink."""
    same = [mine == other for mine, other in zip(dims, known.dims, strict=True)]
    at = same.index(False)
    length = known.softmax.shape[known.softmax.axis]
    starts = out.storage_offset() == known.final.storage_offset()
    return same.count(False) == 1 and dims[at] == _axes.whole(known.softmax.axis, length - 1) and starts


def _next_to_feature(dims: Dims) -> tuple[Piece, ...] | None:
    """The pieces of the weights that share a dim with the values' dim; None when it stands alone."""
    for dim in dims:
        if any(piece.axis == FEATURE for piece in dim):
            heads = tuple(piece for piece in dim if piece.axis >= 0)
            return heads or None
    return None


def _found(dims: Dims) -> tuple[Piece, ...] | None:
    """The heads, as they are known when something else than a view reads the output: see ``_layout.laid_out``."""
    cut = any(piece.outer != 1 or piece.inner != 1 for dim in dims for piece in dim)
    return _next_to_feature(dims) or (() if cut else None)


def _scales_values(dims: Dims, other: Tensor) -> bool:
    """Whether a product of two tensors is one of weights with values: the other has a dim where the weights have 1."""
    if other.dim() == 0 or _learned(other):
        return False
    ours = ((),) * (other.dim() - len(dims)) + dims
    theirs = (1,) * (len(ours) - other.dim()) + tuple(other.shape)
    return sum(not mine and size > 1 for mine, size in zip(ours, theirs, strict=True)) == 1


def _rows(known: Weights, values: Tensor) -> tuple[Piece, ...]:
    """The axes of the queries, from values that are multiplied by weights: other queries take the same values."""
    ours = ((),) * (values.dim() - len(known.dims)) + known.dims
    first = len(ours) - values.dim()
    repeated = [n < first or values.shape[n - first] == 1 or values.stride(n - first) == 0 for n in range(len(ours))]
    keys = known.softmax.axis
    rows = tuple(p for dim, same in zip(ours, repeated, strict=True) if same for p in dim if p.axis != keys)
    shape = known.softmax.shape
    alone = shape[keys] == 1 and 1 in shape[:keys] + shape[keys + 1 :]  # one query, perhaps, which looks at one key
    if not rows and shape[keys - 1] > 1 and not alone:  # values that were copied for each query: it may be any axis
        rows = tuple(piece for dim in ours for piece in dim if piece.axis != keys)
    return rows


def _with_feature(dims: Dims, shape: Sequence[int]) -> Dims:
    ours = ((),) * (len(shape) - len(dims)) + dims
    return tuple(mine or _axes.whole(FEATURE, size) for mine, size in zip(ours, shape, strict=True))


def _learned(tensor: Tensor) -> bool:
    base = tensor if tensor._base is None else tensor._base
    return isinstance(base, torch.nn.Parameter)


def _is_zero(fill: Any) -> bool:
    if isinstance(fill, Tensor):
        return fill.numel() == 1 and not fill.is_meta and float(fill) == 0.0
    return isinstance(fill, (int, float)) and fill == 0


def _name(packet: Any) -> str:
    return str(packet).removeprefix("aten.")


_PRODUCTS = frozenset(
    (aten.bmm, aten.mm, aten.baddbmm, aten.addmm, aten.mv, aten.addmv, aten.addbmm)
)  # fmt: skip
_FILLS = frozenset((aten.masked_fill, aten.masked_fill_, aten.where, aten.nan_to_num, aten.nan_to_num_))
_KEEPERS = frozenset(
    (aten.add, aten.add_, aten.sub, aten.sub_, aten.div, aten.div_, aten.pow, aten.exp, aten.clamp, aten.copy_,
     aten.clamp_min, aten.relu, aten.sigmoid, aten.native_layer_norm, aten._softmax, aten.scatter, aten.index_put_)
)  # fmt: skip
_MOVERS = frozenset(
    (aten.constant_pad_nd, aten.as_strided, aten.cat, aten.index, aten.gather, aten.index_select, aten.select,
     aten.roll, aten.flip, aten.stack)
)  # fmt: skip
_CUTS = frozenset((aten.split, aten.split_with_sizes, aten.unbind, aten.chunk, aten.tensor_split))
# Operators after which the output of attention is still itself, for finding its heads.
_STILL = frozenset((aten.mul, aten.mul_, aten.add, aten.add_, aten.div, aten.div_, aten.native_layer_norm))
