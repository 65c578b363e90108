"""What a model's code did with the output of a softmax, function by function, so that it can be done again.

A written-out attention is edited where its output is laid out as the model's width again (only then is it known which
axes are the heads): the softmax is taken of other logits, and all that followed is done again with its result.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from regard.editing._writes import Draw
from regard.watching import _axes

if TYPE_CHECKING:
    from regard.edits._edit import CannotEdit
    from regard.watching._axes import Dims
    from regard.watching._tracked import Softmax, Weights


_numbers = itertools.count()


class Node:
    """A function call whose result came from a softmax; its arguments are tensors, or nodes where those did too."""

    __slots__ = (
        "args", "at", "axis", "broken", "dims", "done", "draw", "func", "kwargs", "number", "shape", "softmax",
        "version", "whole",
    )  # fmt: skip

    def __init__(
        self, func: Callable[..., Any], args: Any, kwargs: Any, at: int | None, draw: Draw | None = None
    ) -> None:
        self.func, self.args, self.kwargs, self.at, self.draw = func, args, kwargs, at, draw
        self.shape: tuple[int, ...] | None = None  # of the weights, where this call took the softmax
        self.softmax: Softmax | None = None  # likewise
        self.number = next(_numbers)
        self.axis = -1
        self.version = 0
        self.whole = True  # whether the function gave the weights as the softmax has them
        self.dims: Dims | None = None  # of the output, where this call multiplied weights and values
        self.done: list[bool] = []  # where somebody asks: one entry for each time that it was computed again
        self.broken = False  # to compute it again would give something else: see overwritten and note_aside

    @property
    def takes_softmax(self) -> bool:
        return getattr(self.func, "__name__", "") in _SOFTMAXES

    @property
    def logits(self) -> Tensor:
        given: Tensor = self.kwargs["input"] if "input" in self.kwargs else self.args[0]
        return given

    def run(self, args: Any, kwargs: Any) -> Tensor:
        with contextlib.nullcontext() if self.draw is None else self.draw.repeated():
            out = self.func(*args, **kwargs)
        return out if self.at is None else out[self.at]  # type: ignore[no-any-return]

    def softmaxes(self) -> set[int]:
        """The numbers of those that it came from."""
        return {each.number for each in self.line() if each.shape is not None}

    def line(self) -> Iterator[Node]:
        """The node, and all that it was computed from."""
        yield self
        for before in nodes(self.args, self.kwargs):
            yield from before.line()


class Chain:
    """The nodes of tensors that live."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}
        self.draw: Draw | None = None  # of the function that is about to run
        self._alive: dict[int, weakref.ref[Tensor]] = {}
        # what was computed from weights and is none itself: the softmaxes of each
        self.aside: dict[int, tuple[weakref.ref[Tensor], set[int]]] = {}

    def __bool__(self) -> bool:
        return bool(self.nodes) or bool(self.aside)

    def clear(self) -> None:
        self.nodes.clear()
        self._alive.clear()
        self.aside.clear()

    def numbers(self) -> set[int]:
        """Those of all nodes that something living was computed from."""
        found: dict[int, Node] = {}
        left = list(self.nodes.values())
        while left:
            node = left.pop()
            if node.number not in found:
                found[node.number] = node
                left.extend(nodes(node.args, node.kwargs))
        return set(found)

    def of(self, tensor: object) -> Node | None:
        return self.nodes.get(id(tensor)) if self.nodes else None

    def softmaxes_aside(self, given: list[Tensor]) -> set[int]:
        """Of what was computed aside from the chain, among these tensors."""
        if not self.aside:
            return set()
        found = (self.aside.get(id(each)) for each in given)
        return {softmax for each in found if each is not None for softmax in each[1]}

    def is_aside(self, tensor: Tensor) -> bool:
        return id(tensor) in self.aside

    def note_aside(self, tensor: Tensor, softmaxes: set[int]) -> None:
        at = id(tensor)
        self.aside[at] = weakref.ref(tensor, lambda _: self.aside.pop(at, None)), softmaxes

    def living(self) -> list[Tensor]:
        return [tensor for ref in list(self._alive.values()) if (tensor := ref()) is not None]

    def note(self, tensor: Tensor, node: Node) -> None:
        at = id(tensor)

        def forget(_: Any) -> None:
            self.nodes.pop(at, None)
            self._alive.pop(at, None)

        self.nodes[at] = node
        self._alive[at] = weakref.ref(tensor, forget)

    def add(self, func: Any, args: Any, kwargs: Any, out: Tensor, at: int | None) -> Node:
        node = self.node(func, args, kwargs, at)
        self.note(out, node)
        return node

    def node(self, func: Any, args: Any, kwargs: Any, at: int | None = None) -> Node:
        return Node(func, self.linked(args), self.linked(kwargs), at, self.draw)

    def root(self, func: Any, args: Any, kwargs: Any, out: Tensor, known: Weights) -> Node:
        node = Node(func, args, kwargs, None)
        self.note(out, node)
        node.softmax, node.shape, node.axis = known.softmax, known.softmax.shape, known.softmax.axis
        node.whole = not known.changed and known.dims == _axes.of_shape(node.shape)
        if not node.takes_softmax:  # exponentials that were divided, say: the weights themselves say as much
            node.args = (out.detach() if not out.requires_grad else out,)
            node.kwargs = {}
        node.version = _version(node.logits)
        out = kwargs.get("out")
        node.broken = isinstance(out, Tensor) and _share(out, node.logits)
        return node

    def overwritten(self, into: Tensor) -> None:
        """A function is about to write into this tensor. What shares its memory cannot be computed again."""
        for tensor in self.living():
            node = self.nodes[id(tensor)]
            for each in node.line():
                each.broken = each.broken or any(_share(leaf, into) for leaf in tensors(each.args, each.kwargs))
            if tensor is not into and _share(tensor, into):  # what was computed from it before stays right
                late = Node(node.func, node.args, node.kwargs, node.at, node.draw)
                late.broken = True
                self.nodes[id(tensor)] = late

    def linked(self, given: Any) -> Any:
        """Arguments, with nodes in place of tensors that have one."""
        if isinstance(given, Tensor):
            return self.of(given) or given
        if isinstance(given, (tuple, list)) and type(given) in (tuple, list):
            return type(given)(self.linked(one) for one in given)
        if isinstance(given, dict):
            return {name: self.linked(one) for name, one in given.items()}
        return given


class Replay:
    """The calls of a chain, done again with other weights."""

    def __init__(
        self,
        weights: Callable[[Node], Tensor],
        output: Callable[[Node, Tensor], Tensor],
        refuse: Callable[[str], CannotEdit],
    ) -> None:
        self.weights, self.output, self.refuse = weights, output, refuse
        self._done: dict[int, tuple[Node, Tensor]] = {}

    def value(self, given: Any) -> Any:
        if isinstance(given, Node):
            if id(given) not in self._done:
                self._done[id(given)] = (given, self._run(given))
            return self._done[id(given)][1]
        if isinstance(given, (tuple, list)) and type(given) in (tuple, list):
            return type(given)(self.value(one) for one in given)
        if isinstance(given, dict):
            return {name: self.value(one) for name, one in given.items()}
        return given

    def _run(self, node: Node) -> Tensor:
        if node.broken:
            raise self.refuse(
                "a tensor that its attention was computed with, or gave, is written into afterwards, or something else "
                "is computed from its weights and comes back to them"
            )
        if node.shape is not None:
            if not node.whole:
                raise self.refuse("the softmax is taken inside a function that cannot be taken apart")
            if _version(node.logits) != node.version:
                raise self.refuse("the logits were overwritten after the softmax, so it cannot be taken again")
            return self.weights(node)
        out = node.run(self.value(node.args), self.value(node.kwargs))
        node.done.append(True)
        return out if node.dims is None else self.output(node, out)


def tensors(*given: Any) -> Iterator[Tensor]:
    """The tensors among arguments, in lists and dicts too."""
    return _among(Tensor, given)


def nodes(*given: Any) -> Iterator[Node]:
    return _among(Node, given)


def _among(kind: type, given: Any) -> Iterator[Any]:
    for one in given:
        if isinstance(one, kind):
            yield one
        elif isinstance(one, (tuple, list)):
            yield from _among(kind, one)
        elif isinstance(one, dict):
            yield from _among(kind, one.values())


def _share(one: Tensor, other: Tensor) -> bool:
    """Whether the memory of two tensors overlaps, as far as their first and last numbers tell."""
    if one.device != other.device or not one.numel() or not other.numel():
        return False
    (a, b), (c, d) = _range(one), _range(other)
    return a < d and c < b


def _range(tensor: Tensor) -> tuple[int, int]:
    try:
        start = tensor.data_ptr()
        length = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    except RuntimeError:  # it has no memory of its own
        return 0, 0
    return start, start + length * tensor.element_size()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


_SOFTMAXES = frozenset(("softmax", "_softmax", "special_softmax", "_safe_softmax"))
# Functions in which weights may meet values.
PRODUCTS = frozenset(
    ("matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "mv", "baddbmm", "addbmm", "addmm", "addmv", "einsum", "sum",
     "tensordot", "inner", "linear", "multi_dot", "chain_matmul", "_sum", "dot")
)  # fmt: skip
