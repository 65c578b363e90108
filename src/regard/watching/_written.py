"""Attention that a model writes out: a softmax, and the product of its output with values that follows.

Operators are met one by one. The output of a softmax is followed through views, casts, dropout and masking; a product
that sums over the softmax's own axis is attention. The product is followed in turn: the axes that are laid next to
the values' dim, to make the model's width again, are the heads. What the weights went through that would make them
other weights (mixed across heads, scaled) is kept as the reason why their statistics would be wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
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
    divided: bool = False  # whether the model divided numbers by their sum: see ``_divided``
    late: bool = False  # likewise, after the product with values
    of_scores: bool = False  # whether its logits are products of two tensors that were computed, not learned


class Partial(NamedTuple):
    """Values scaled by weights, not summed yet."""

    dims: Dims
    weights: Weights
    rows: tuple[Piece, ...]  # axes of the weights along which the values are repeated: those of the queries


class Product(NamedTuple):
    """The output of attention on its way to the model's width."""

    dims: Dims
    call: Any  # what the watcher made of the product
    apart: tuple[Piece, ...] = ()  # an axis whose parts were taken one by one


class Trace(NamedTuple):
    """What a model did with the output of attention that tells its heads."""

    heads: tuple[Piece, ...] | None = None  # the axes that were laid next to the values' dim, or averaged
    alone: bool = False  # the values' dim went into a learned matrix, with no other axis next to it
    cut: bool = False  # an axis was cut in two, and neither part was laid there
    dims: Dims = ()  # of the output, in the end


class Factors(NamedTuple):
    """A product of two tensors, of which one has axes that are known."""

    other: Tensor
    summed: tuple[Piece, ...]
    rows: tuple[Piece, ...]
    made: Dims | None  # of what it gives; None where nobody is to follow that
    values: Dims | None  # of the other; None where something is added to the product

    def multiplied(self, out: Tensor) -> Multiplied | None:
        if self.values is None or self.made is None:
            return None
        return Multiplied(self.other, self.values, out, self.made)


class Multiplied(NamedTuple):
    """Values, and their product with weights."""

    values: Tensor
    dims: Dims
    out: Tensor
    made: Dims


class Scores(NamedTuple):
    """Products of two tensors that were computed, such as queries and keys, or what became of them."""

    dims: Dims = ()

    def follow(self, tracker: Tracker, packet: Any, at: int, args: Any, kwargs: Any, out: Any) -> None:
        if (packet in VIEWS or packet in _SCALES) and isinstance(out, Tensor) and tracker.of(out) is None:
            tracker.note(out, self)


class Tracker:
    """What is known of the tensors that live, by identity. One for each watch."""

    def __init__(
        self,
        attended: Callable[[Weights, Sequence[Piece]], Any],
        settled: Callable[[Any, Trace], None],
        suspected: Callable[[object, Callable[[], bool], str], None],
        parameters: Iterable[Tensor] = (),
    ) -> None:
        self.attended, self.settled, self.suspected = attended, settled, suspected
        self._storages = {_storage(parameter) for parameter in parameters} - {0}
        self.sources: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # see ``_divided``
        self._known: dict[int, Any] = {}
        self._alive: dict[int, weakref.ref[Tensor]] = {}
        self._outputs: dict[int, Dims] = {}  # by call: the dims that its output had last
        self.noise: dict[int, weakref.ref[Tensor]] = {}
        self.kept: dict[int, Tensor] | None = (
            None  # where somebody asks for gradients: outputs of softmaxes, by their lse
        )
        self.product: Multiplied | None = None  # what is being shown

    def __bool__(self) -> bool:
        return bool(self._known)

    def clear(self) -> None:
        self._known.clear()
        self._alive.clear()
        self._outputs.clear()
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
        if isinstance(what, Product) and not what.apart:
            self._outputs[id(what.call)] = what.dims

    def trace_of(self, call: Any) -> Trace:
        """What the output of a call tells of the heads as it is, when nothing more comes of it."""
        return _found(self._outputs.pop(id(call), ()))

    def note_noise(self, tensor: Tensor) -> None:
        at = id(tensor)
        self.noise[at] = weakref.ref(tensor, lambda _: self.noise.pop(at, None))

    def learned(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, or a view of one; inside a mode torch may not say so of a view."""
        base = tensor if tensor._base is None else tensor._base
        return isinstance(base, torch.nn.Parameter) or _storage(tensor) in self._storages

    # One operator that has run. ``known`` are its tensors that something is known of.

    def softmax(self, given: Tensor, axis: int, out: Tensor, *, by_function: bool = False) -> None:
        axis %= max(1, given.dim())
        if given.dim() == 0 or not out.is_floating_point() or given.is_nested:
            return
        lse = _lse(given.detach(), out.detach(), axis)
        if self.kept is not None:
            self.kept[id(lse)] = out
        of_scores = isinstance(self.of(given), Scores)
        softmax = Softmax(axis, tuple(out.shape), lse, by_function, [], of_scores=of_scores)
        self.note(out, softmax_weights(out, softmax))

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
        """Weights that were taken together with others lose their axes. Outputs of heads that were taken apart are laid
        side by side."""
        known = next((found for x in given if isinstance(found := self.of(x), Weights)), None)
        packet = getattr(func, "overloadpacket", None)
        part = next((found for x in given if isinstance(found := self.of(x), Product)), None)
        if part is not None and packet is aten.cat and isinstance(out, Tensor):
            widened = [
                mine for mine, size, of_all in zip(part.dims, given[0].shape, out.shape, strict=True) if size != of_all
            ]
            if part.apart and len(widened) == 1 and any(piece.axis == FEATURE for piece in widened[0]):
                self.settled(part.call, Trace(part.apart))
            elif not part.apart:
                self.settled(part.call, _found(part.dims))
            return
        if known is not None and packet in _MOVERS and isinstance(out, Tensor):
            self.note(out, known._replace(dims=(), changed=known.changed or f"moved by {_name(packet)}"))

    def _one(self, known: Any, func: Any, at: int, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        packet = getattr(func, "overloadpacket", None)
        if isinstance(known, Weights) and not known.dims:
            self._lost(known, packet, at, args, out)
            return
        view = VIEWS.get(packet) if at == 0 and known.dims else None
        if view is not None and isinstance(out, Tensor):
            dims = view(known.dims, args, kwargs, out)
            self._viewed(known, packet, dims, out)
        elif isinstance(known, Weights):
            self._weights(known, packet, at, args, kwargs, out)
        elif isinstance(known, Partial):
            if packet is aten.sum and isinstance(out, Tensor):
                self._summed(known, args, out)
        elif isinstance(known, Product):
            self._used(known, packet, at, args, out)
        elif (follow := getattr(known, "follow", None)) is not None:
            follow(self, packet, at, args, kwargs, out)

    def _lost(self, known: Weights, packet: Any, at: int, args: Any, out: Any) -> None:
        """Weights whose axes are mixed are followed only to say that their product could not be read."""
        if packet in PRODUCTS:
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
        elif not isinstance(known, Product):
            if dims is not None and (packet is not aten.slice or _same_but_feature(dims, known.dims)):
                self.note(out, known._replace(dims=dims))
        elif dims is not None:
            heads = _next_to_feature(dims)
            if heads is not None:
                self.settled(known.call, Trace(heads))
            else:
                self.note(out, known._replace(dims=dims))
        else:
            self.settled(known.call, _found(known.dims))

    def _weights(self, known: Weights, packet: Any, at: int, args: Any, kwargs: Any, out: Any) -> None:
        if packet in PRODUCTS:
            self._multiplied(known, packet, at, args, out)
        elif packet is aten.native_dropout and at == 0:
            self.note(out[0], known)
        elif packet in (aten.mul, aten.mul_) and isinstance(out, Tensor):
            other = args[1 - at]
            if isinstance(other, Tensor) and id(other) in self.noise:
                self.note(out, known)  # dropout, as torch does it on a CPU
            elif isinstance(other, Tensor) and scales_values(known.dims, other) and not self.learned(other):
                self._scaled(Partial(with_feature(known.dims, out.shape), known, _rows(known, other)), out)
            elif isinstance(other, Tensor) and _scales_numbers(known, other) and not self.learned(other):
                self._scaled(Partial(known.dims, known, _rows(known, other)), out)
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
        if not known.dims:
            shift = _shift(packet)
            if at - shift in (0, 1) and not self.learned(args[2 * shift + 1 - at]):
                self.attended(known, ())
            return
        found = factors(known.dims, packet, at, args)
        if found is None:
            return
        if found.summed == self._keys(known):
            if self.learned(found.other):
                return  # a softmax over rows that were learned: no tokens
            self.product = found.multiplied(out)
            call = self.attended(known, found.rows)
            self.product = None
            if call is not None and found.made is not None:
                self.note(out, Product(found.made, call))
        elif found.made is not None:
            made = tuple(tuple(p._replace(axis=OTHER) if p.axis == FEATURE else p for p in dim) for dim in found.made)
            if known.softmax.of_scores and not self.learned(found.other):
                # unless a product over the softmax's own axis follows
                self.suspected(known.softmax, lambda: bool(known.softmax.users), _OVER_QUERIES)
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

    def _used(self, known: Product, packet: Any, at: int, args: Any, out: Any) -> None:
        """An operator that is no view has read the output. Most leave its axes as they are; some tell the heads."""
        if packet in (aten.mean, aten.sum):
            axes = args[1] if len(args) > 1 and args[1] is not None else ()
            reduced = [known.dims[axis] for axis in ([axes] if isinstance(axes, int) else axes)]
            if not any(reduced) and isinstance(out, Tensor) and out.dim() == len(known.dims):
                self.note(out, known)
            elif len(reduced) == 1 and reduced[0] and all(piece.axis >= 0 for piece in reduced[0]):
                self.settled(known.call, _found(known.dims, reduced[0]))
        elif packet in (aten.unbind, aten.select, aten.split):
            self._taken_apart(known, packet, args, out)
        elif packet in PRODUCTS or packet is aten.convolution:
            other = args[1 + _shift(packet) - (0 if packet is aten.convolution else at - _shift(packet))]
            trace = _found(known.dims)
            if trace.heads is None and not trace.cut and self.learned(other):
                channel = 1 if packet is aten.convolution else -1
                alone = [piece.axis for piece in known.dims[channel]] in ([FEATURE], [])
                trace = trace._replace(alone=alone)
            self.settled(known.call, trace)
        elif packet in _MOVERS or packet in _SCATTERS:
            self.settled(known.call, _found(known.dims))  # which row is which token is not known any more
        elif isinstance(out, Tensor) and out.shape == args[at].shape:
            self.note(out, known)

    def _taken_apart(self, known: Product, packet: Any, args: Any, out: Any) -> None:
        axis = (args[2] if len(args) > 2 else 0) if packet is aten.split else (args[1] if len(args) > 1 else 0)
        axis %= len(known.dims)
        kept = [()] if packet is aten.split else []
        dims = (*known.dims[:axis], *kept, *known.dims[axis + 1 :])
        for part in [out] if isinstance(out, Tensor) else out:
            if known.dims[axis] and not known.apart and part.dim() == len(dims):
                self.note(part, Product(dims, known.call, known.dims[axis]))

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


def _same_but_feature(dims: Dims, others: Dims) -> bool:
    return all(
        mine == other or all(piece.axis == FEATURE for piece in other) for mine, other in zip(dims, others, strict=True)
    )


def _next_to_feature(dims: Dims) -> tuple[Piece, ...] | None:
    """The pieces of the weights that share a dim with the values' dim; None when it stands alone."""
    for dim in dims:
        if any(piece.axis == FEATURE for piece in dim):
            heads = tuple(piece for piece in dim if piece.axis >= 0)
            return heads or None
    return None


def _found(dims: Dims, reduced: tuple[Piece, ...] = ()) -> Trace:
    """What the dims of the output tell of the heads when something else than a view reads it, or reduces an axis."""
    heads = _next_to_feature(dims) or reduced or None
    cut = any(piece.outer != 1 or piece.inner != 1 for dim in dims for piece in dim)
    return Trace(heads, cut=heads is None and cut, dims=dims)


def factors(dims: Dims, packet: Any, at: int, args: Any) -> Factors | None:
    """A product in which a tensor of these dims is argument ``at``; None where it is what a product is added to."""
    shift = _shift(packet)
    side = at - shift
    if side not in (0, 1):
        return None
    other = args[shift + 1 - side]
    summed, rows = (dims[-1], dims[-2]) if side == 0 else (dims[-2], dims[-1])
    if packet in (aten.mv, aten.addmv):
        summed, rows = dims[-1], dims[-2]
    feature = _axes.whole(FEATURE, size_of_last(other, side)) if other.dim() > 1 else ()
    made = (*dims[:-2], rows, feature) if side == 0 else (*dims[:-2], feature, rows)
    values = (*dims[:-2], summed, feature) if side == 0 else (*dims[:-2], feature, summed)
    followed = packet not in (aten.mv, aten.addmv, aten.addbmm)
    return Factors(other, summed, rows, made if followed else None, values if followed and not shift else None)


def _shift(packet: Any) -> int:
    return 1 if packet in (aten.addmm, aten.baddbmm, aten.addmv, aten.addbmm, aten._sparse_addmm) else 0


def scales_values(dims: Dims, other: Tensor) -> bool:
    """Whether a product of two tensors is one of weights with values: the other has a dim where the weights have 1."""
    if other.dim() == 0:
        return False
    ours = ((),) * (other.dim() - len(dims)) + dims
    theirs = (1,) * (len(ours) - other.dim()) + tuple(other.shape)
    return sum(not mine and size > 1 for mine, size in zip(ours, theirs, strict=True)) == 1


def _scales_numbers(known: Weights, other: Tensor) -> bool:
    """Likewise where a value is a single number: a dim of 1 was made for it, and other queries take the same values."""
    if len(known.dims) <= len(known.softmax.shape) or other.dim() != len(known.dims):
        return False
    if known.softmax.shape[known.softmax.axis] == 1:
        return True
    repeated = [mine != () and size == 1 for mine, size in zip(known.dims, other.shape, strict=True)]
    keys = [any(piece.axis == known.softmax.axis for piece in dim) for dim in known.dims]
    return any(repeated) and any(keys) and not repeated[keys.index(True)]


def _rows(known: Weights, values: Tensor) -> tuple[Piece, ...]:
    """The axes of the queries, from values that are multiplied by weights: other queries take the same values."""
    keys, shape = known.softmax.axis, known.softmax.shape
    rows = tuple(piece for piece in repeated_along(known.dims, values) if piece.axis != keys)
    alone = shape[keys] == 1 and 1 in shape[:keys] + shape[keys + 1 :]  # one query, perhaps, which looks at one key
    if not rows and shape[keys - 1] > 1 and not alone:  # values that were copied for each query: it may be any axis
        rows = tuple(piece for dim in known.dims for piece in dim if piece.axis != keys)
    return rows


def repeated_along(dims: Dims, values: Tensor) -> tuple[Piece, ...]:
    """The axes along which values are repeated that are multiplied by what has these dims."""
    ours = ((),) * (values.dim() - len(dims)) + dims
    first = len(ours) - values.dim()
    repeated = [n < first or values.shape[n - first] == 1 or values.stride(n - first) == 0 for n in range(len(ours))]
    return tuple(piece for dim, same in zip(ours, repeated, strict=True) if same for piece in dim)


def with_feature(dims: Dims, shape: Sequence[int]) -> Dims:
    ours = ((),) * (len(shape) - len(dims)) + dims
    return tuple(mine or _axes.whole(FEATURE, size) for mine, size in zip(ours, shape, strict=True))


def _storage(tensor: Tensor) -> int:
    """Where its numbers are; 0 where there are none, or in many places."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        return 0
    return tensor.untyped_storage().data_ptr()


def _is_zero(fill: Any) -> bool:
    if isinstance(fill, Tensor):
        return fill.numel() == 1 and not fill.is_meta and float(fill) == 0.0
    return isinstance(fill, (int, float)) and fill == 0


def _name(packet: Any) -> str:
    return str(packet).removeprefix("aten.")


PRODUCTS = frozenset(
    (aten.bmm, aten.mm, aten.baddbmm, aten.addmm, aten.mv, aten.addmv, aten.addbmm, aten._sparse_addmm)
)  # fmt: skip
_FILLS = frozenset((aten.masked_fill, aten.masked_fill_, aten.where, aten.nan_to_num, aten.nan_to_num_))
_KEEPERS = frozenset(
    (aten.add, aten.add_, aten.sub, aten.sub_, aten.div, aten.div_, aten.pow, aten.exp, aten.clamp, aten.copy_,
     aten.clamp_min, aten.relu, aten.sigmoid, aten.native_layer_norm, aten._softmax, aten.scatter, aten.index_put_)
)  # fmt: skip
_MOVERS = frozenset(
    (aten.constant_pad_nd, aten.as_strided, aten.cat, aten.index, aten.gather, aten.index_select, aten.select,
     aten.roll, aten.flip, aten.stack, aten._to_dense)
)  # fmt: skip
_SCATTERS = frozenset((aten.index_put, aten.index_put_, aten.scatter, aten.scatter_, aten.index_copy, aten.index_add))
_CUTS = frozenset((aten.split, aten.split_with_sizes, aten.unbind, aten.chunk, aten.tensor_split))
# Operators after which logits are logits.
_SCALES = frozenset(
    (aten.mul, aten.mul_, aten.div, aten.div_, aten.add, aten.add_, aten.sub, aten.sub_, aten.tanh, aten.clamp,
     aten.masked_fill, aten.masked_fill_, aten.where)
)  # fmt: skip
_OVER_QUERIES = "its softmax is not over the keys (over the queries, say), so the weights of a query have no sum of 1"
