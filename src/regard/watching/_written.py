"""Attention that a model writes out: a softmax, and the product of its output with values that follows.

Operators are met one by one. The output of a softmax is followed through views, casts, dropout and masking; a product
that sums over the softmax's own axis is attention. The product is followed in turn: the axes that are laid next to
the values' dim, to make the model's width again, are the heads. What the weights went through that would make them
other weights (mixed across heads, scaled) is kept as the reason why their statistics would be wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.watching import _axes
from regard.watching._axes import FEATURE, OTHER, Dims, Piece
from regard.watching._effects import (
    CUTS,
    MOVERS,
    carried_by,
    fills_with_zeros,
    is_filled,
    is_mask,
    makes_new,
    name_of,
    picks,
)
from regard.watching._output import Partial, Product
from regard.watching._products import (
    PRODUCTS,
    factors,
    next_to_feature,
    rows_of,
    same_but_feature,
    scales_numbers,
    scales_values,
    shift_of,
    trace_in,
    with_feature,
)
from regard.watching._scores import Curved, Scores
from regard.watching._tracked import Multiplied, Softmax, Trace, Weights, keys_of, softmax_weights
from regard.watching._views import VIEWS

aten = torch.ops.aten


class Tracker:
    """What is known of the tensors that live, by identity. One for each watch."""

    def __init__(
        self,
        attended: Callable[[Weights, Sequence[Piece]], Any],
        settled: Callable[[Any, Trace], None],
        suspected: Callable[..., None],
        parameters: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self.attended, self.settled, self.suspected = attended, settled, suspected
        self._parameters = parameters
        self._storages: dict[int, weakref.ref[Tensor]] | None = None  # where those lie, in the pass that is under way
        self._shapes: set[tuple[int, ...]] = set()  # of those that may be matrices of several experts, sorted
        self.sources: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # see ``_divided``
        self.known: dict[int, Any] = {}
        self._alive: dict[int, weakref.ref[Tensor]] = {}
        self._outputs: dict[int, Dims] = {}  # by call: the dims that its output had last
        self.noise: dict[int, weakref.ref[Tensor]] = {}
        self.kept: dict[int, Tensor] | None = (
            None  # where somebody asks for gradients: outputs of softmaxes, by their lse
        )
        self.product: Multiplied | None = None  # what is being shown

    def __bool__(self) -> bool:
        return bool(self.known)

    def clear(self) -> None:
        self.known.clear()
        self._alive.clear()
        self._outputs.clear()
        self.noise.clear()

    def of(self, tensor: object) -> Any:
        return self.known.get(id(tensor))

    def note(self, tensor: Tensor, what: Any) -> None:
        at = id(tensor)

        def forget(_: Any) -> None:
            self.known.pop(at, None)
            self._alive.pop(at, None)

        self.known[at] = what
        self._alive[at] = weakref.ref(tensor, forget)
        if isinstance(what, Product) and not what.apart:
            self._outputs[id(what.call)] = what.dims

    def trace_of(self, call: Any) -> Trace:
        """What the output of a call tells of the heads as it is, when nothing more comes of it."""
        return trace_in(self._outputs.pop(id(call), ()))

    def note_noise(self, tensor: Tensor) -> None:
        at = id(tensor)
        self.noise[at] = weakref.ref(tensor, lambda _: self.noise.pop(at, None))

    def learned(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, or a view of one; inside a mode torch may not say so of a view."""
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, torch.nn.Parameter):
            return True
        if self._storages is None:
            with torch._C.DisableTorchFunction():
                self._storages = {_storage(each): weakref.ref(each) for each in self._parameters()}
                self._shapes = {tuple(sorted(each.shape)) for each in self._parameters() if each.dim() > 2}
        at = _storage(tensor)
        found = self._storages.get(at) if at else None
        parameter = None if found is None else found()
        return parameter is not None and _storage(parameter) == at  # it may have been moved, and its memory used again

    def seems_learned(self, tensor: Tensor) -> bool:
        """Whether it may be a parameter, in another dtype (as autocast makes it) or read from fewer bits."""
        return self.learned(tensor) or (tensor.dim() > 2 and tuple(sorted(tensor.shape)) in self._shapes)

    def begin_pass(self) -> None:
        """Parameters may lie elsewhere than in the pass before."""
        self._storages = None

    # One operator that has run. ``known`` are its tensors that something is known of.

    def softmax(self, given: Tensor, axis: int, out: Tensor, *, by_function: bool = False) -> None:
        axis %= max(1, given.dim())
        if given.dim() == 0 or not out.is_floating_point() or given.is_nested:
            return
        lse = _lse(given.detach(), out.detach(), axis)
        if self.kept is not None:
            self.kept[id(lse)] = out
        known = self.of(given)
        picked, of_scores = getattr(known, "picked", ""), isinstance(known, (Scores, Curved))
        softmax = Softmax(axis, tuple(out.shape), lse, by_function, [], of_scores=of_scores, picked=picked)
        self.note(out, softmax_weights(out, softmax))

    def before(self, args: tuple[Any, ...]) -> None:
        """An operator is about to write into its first argument: weights that are to be read later are kept apart."""
        known = self.of(args[0]) if args else None
        if isinstance(known, Weights):
            self.note(args[0], known._replace(final=known.final.clone()))

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if getattr(func, "overloadpacket", None) is aten.native_layer_norm:
            out = out[0]
        for at, given in enumerate(args[:4]):  # the fourth of ``scatter`` is what it writes
            if isinstance(given, (tuple, list)):
                self._joined(func, given, out)
                continue
            known = self.known.get(id(given)) if isinstance(given, Tensor) else None
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
                self.settled(part.call, trace_in(part.dims))
            return
        if known is None:
            return
        if packet in MOVERS and isinstance(out, Tensor):
            self.note(out, known._replace(dims=(), changed=known.changed or f"moved by {name_of(packet)}"))
        else:
            self.strayed(known, packet, out)

    def strayed(self, known: Weights, packet: Any, out: Any) -> None:
        """Something was computed of weights that is not followed. It may have been attention, where in all of the pass
        no product of these weights with values is met."""
        softmax = known.softmax
        if softmax.of_scores and not makes_new(packet) and _are_computed(out):
            why = known.changed or f"read by {name_of(packet)}"
            why = f"its weights are {why}, and no product of them with values can be followed"
            self.suspected(softmax, lambda: bool(softmax.users), why, in_all_of_the_pass=True)

    def _one(self, known: Any, func: Any, at: int, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        packet = getattr(func, "overloadpacket", None)
        if isinstance(known, Weights) and not known.dims:
            self._lost(known, func, at, args, out)
            return
        view = VIEWS.get(packet) if at == 0 and known.dims else None
        if view is not None and isinstance(out, Tensor):
            dims = view(known.dims, args, kwargs, out)
            self._viewed(known, packet, dims, out)
        elif isinstance(known, Weights):
            self._weights(known, func, at, args, out)
        elif (follow := getattr(known, "follow", None)) is not None:
            follow(self, packet, at, args, kwargs, out)

    def _lost(self, known: Weights, func: Any, at: int, args: Any, out: Any) -> None:
        """Weights whose axes are mixed are followed only to say that their product could not be read."""
        packet = getattr(func, "overloadpacket", None)
        if packet in PRODUCTS:
            self._multiplied(known, packet, at, args, out)
        elif (made := carried_by(func, out)) is not None:
            grown = made.numel() > args[at].numel() and packet not in MOVERS and packet not in VIEWS
            if not grown or packet not in (aten.mul, aten.mul_):
                self.note(made, known)
                if grown:
                    self.strayed(known, packet, out)
            elif known.softmax.of_scores and isinstance(args[1 - at], Tensor) and not self.learned(args[1 - at]):
                self.note(made, Partial((), known, ()))
        else:
            self.strayed(known, packet, out)

    def _viewed(self, known: Any, packet: Any, dims: Dims | None, out: Tensor) -> None:
        if isinstance(known, Weights):
            if dims is None:
                self.note(
                    out,
                    known._replace(dims=(), changed=known.changed or f"reshaped by {name_of(packet)} so that axes mix"),
                )
            elif packet is aten.slice and dims != known.dims:
                if _only_a_sink_is_cut(known, dims, out):
                    self.note(out, known._replace(dims=dims, final=out.detach(), final_dims=dims))
                else:
                    self.note(out, known._replace(dims=(), changed=known.changed or "cut into parts"))
            else:
                self.note(out, known._replace(dims=dims))
        elif not isinstance(known, Product):
            if dims is not None and (packet is not aten.slice or same_but_feature(dims, known.dims)):
                self.note(out, known._replace(dims=dims))
        elif dims is not None:
            heads = next_to_feature(dims)
            if heads is not None:
                self.settled(known.call, Trace(heads))
            else:
                self.note(out, known._replace(dims=dims))
        else:
            self.settled(known.call, trace_in(known.dims))

    def _weights(self, known: Weights, func: Any, at: int, args: Any, out: Any) -> None:
        packet = getattr(func, "overloadpacket", None)
        if packet in PRODUCTS:
            self._multiplied(known, packet, at, args, out)
        elif packet is aten.native_dropout and at == 0:
            self.note(out[0], known)
        elif packet in (aten.mul, aten.mul_) and isinstance(out, Tensor):
            other = args[1 - at]
            if isinstance(other, Tensor) and id(other) in self.noise:
                self.note(out, known)  # dropout, as torch does it on a CPU
            elif isinstance(other, Tensor) and scales_values(known.dims, other) and not self.learned(other):
                self._scaled(Partial(with_feature(known.dims, out.shape), known, rows_of(known, other)), out)
            elif isinstance(other, Tensor) and scales_numbers(known, other) and not self.learned(other):
                self._scaled(Partial(known.dims, known, rows_of(known, other)), out)
            elif out.shape == args[at].shape and is_mask(other):
                self.note(out, known._replace(final=out.detach(), final_dims=known.dims))
            elif out.shape == args[at].shape:
                self.note(out, known._replace(changed=known.changed or "multiplied by something"))
        elif is_filled(packet) and isinstance(out, Tensor) and out.shape == args[at].shape:
            if fills_with_zeros(packet, at, args):
                self.note(out, known._replace(final=out.detach(), final_dims=known.dims))
            else:
                self.note(out, known._replace(changed=known.changed or "filled with numbers other than 0"))
        elif packet is aten.convolution and at == 0:
            dims = (known.dims[0], _axes.whole(OTHER, out.shape[1]), *known.dims[2:])
            self.note(out, known._replace(dims=dims, changed=known.changed or "mixed across heads by a convolution"))
        elif packet in CUTS and isinstance(out, (tuple, list)):
            for part in out:
                self.note(part, known._replace(dims=(), changed=known.changed or "cut into parts"))
        elif (made := carried_by(func, out)) is not None:
            if made.shape == args[at].shape and packet not in MOVERS and not picks(packet):
                self.note(made, known._replace(changed=known.changed or f"changed by {name_of(packet)}"))
            elif packet in MOVERS or known.softmax.of_scores:  # the gates of experts are picked and scattered too
                self.note(made, known._replace(dims=(), changed=known.changed or f"moved by {name_of(packet)}"))
                if packet not in MOVERS and not picks(packet):
                    self.strayed(known, packet, out)
        else:
            self.strayed(known, packet, out)

    def _multiplied(self, known: Weights, packet: Any, at: int, args: Any, out: Tensor) -> None:
        if not known.dims:
            shift = shift_of(packet)
            if at - shift in (0, 1) and not self.learned(args[2 * shift + 1 - at]):
                self.attended(known, ())
            else:
                self.strayed(known, packet, out)
            return
        found = factors(known.dims, packet, at, args)
        if found is None:
            return
        if found.summed == keys_of(known):
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
            if all(piece in left for piece in keys_of(known)):
                self.note(out, known._replace(dims=made, changed=known.changed or "mixed across heads by a product"))

    def _scaled(self, known: Partial, out: Tensor) -> None:
        if keys_of(known.weights):
            self.note(out, known)
        elif (call := self.attended(known.weights, known.rows)) is not None:
            self.note(out, Product(known.dims, call))  # of one key there is nothing to sum, and torch.einsum does not


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


def _are_computed(out: Any) -> bool:
    found = out if isinstance(out, (tuple, list)) else (out,)
    return any(isinstance(one, Tensor) and one.is_floating_point() and one.numel() != 1 for one in found)


def _storage(tensor: Tensor) -> int:
    """Where its numbers are; 0 where there are none, or in many places."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        return 0
    return tensor.untyped_storage().data_ptr()


_OVER_QUERIES = "its softmax is not over the keys (over the queries, say), so the weights of a query have no sum of 1"
