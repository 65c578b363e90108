"""What a model's code did with the output of a softmax, function by function, so that it can be done again.

A written-out attention is edited where its output is laid out as the model's width again (only then is it known which
axes are the heads): the softmax is taken of other logits, and all that followed is done again with its result.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from regard.edits._edit import CannotEdit
from regard.watching import _axes

if TYPE_CHECKING:
    from regard.watching._axes import Dims
    from regard.watching._tracked import Weights


class Node:
    """A function call whose result came from a softmax; its arguments are tensors, or nodes where those did too."""

    __slots__ = ("args", "at", "axis", "dims", "func", "kwargs", "shape", "version", "whole")

    def __init__(self, func: Callable[..., Any], args: Any, kwargs: Any, at: int | None) -> None:
        self.func, self.args, self.kwargs, self.at = func, args, kwargs, at
        self.shape: tuple[int, ...] | None = None  # of the weights, where this call took the softmax
        self.axis = -1
        self.version = 0
        self.whole = True  # whether the function gave the weights as the softmax has them
        self.dims: Dims | None = None  # of the output, where this call multiplied weights and values

    @property
    def takes_softmax(self) -> bool:
        return getattr(self.func, "__name__", "") in _SOFTMAXES

    @property
    def logits(self) -> Tensor:
        given: Tensor = self.kwargs["input"] if "input" in self.kwargs else self.args[0]
        return given

    def run(self, args: Any, kwargs: Any) -> Tensor:
        out = self.func(*args, **kwargs)
        return out if self.at is None else out[self.at]  # type: ignore[no-any-return]


class Chain:
    """The nodes of tensors that live."""

    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {}
        self._alive: dict[int, weakref.ref[Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def clear(self) -> None:
        self._nodes.clear()
        self._alive.clear()

    def of(self, tensor: object) -> Node | None:
        return self._nodes.get(id(tensor)) if self._nodes else None

    def living(self) -> list[Tensor]:
        return [tensor for ref in list(self._alive.values()) if (tensor := ref()) is not None]

    def note(self, tensor: Tensor, node: Node) -> None:
        at = id(tensor)

        def forget(_: Any) -> None:
            self._nodes.pop(at, None)
            self._alive.pop(at, None)

        self._nodes[at] = node
        self._alive[at] = weakref.ref(tensor, forget)

    def add(self, func: Any, args: Any, kwargs: Any, out: Tensor, at: int | None) -> Node:
        node = Node(func, self.linked(args), self.linked(kwargs), at)
        self.note(out, node)
        return node

    def root(self, func: Any, args: Any, kwargs: Any, out: Tensor, known: Weights) -> Node:
        node = self.add(func, args, kwargs, out, None)
        node.shape, node.axis = known.softmax.shape, known.softmax.axis
        node.whole = not known.changed and known.dims == _axes.of_shape(node.shape)
        if not node.takes_softmax:  # exponentials that were divided, say: the weights themselves say as much
            node.args = (out.detach() if not out.requires_grad else out,)
            node.kwargs = {}
        node.version = _version(node.logits)
        return node

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

    def __init__(self, weights: Callable[[Node], Tensor], output: Callable[[Node, Tensor], Tensor]) -> None:
        self._weights, self._output = weights, output
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
        if node.shape is not None:
            if not node.whole:
                raise CannotEdit("the softmax is taken inside a function that cannot be taken apart")
            if _version(node.logits) != node.version:
                raise CannotEdit("the logits were overwritten after the softmax, so it cannot be taken again")
            return self._weights(node)
        out = node.run(self.value(node.args), self.value(node.kwargs))
        return out if node.dims is None else self._output(node, out)


def tensors(*given: Any) -> Iterator[Tensor]:
    """The tensors among arguments, in lists and dicts too."""
    for one in given:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, (tuple, list)):
            yield from tensors(*one)
        elif isinstance(one, dict):
            yield from tensors(*one.values())


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


_SOFTMAXES = frozenset(("softmax", "_softmax", "special_softmax", "_safe_softmax"))
# Functions in which weights may meet values.
PRODUCTS = frozenset(
    ("matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "mv", "baddbmm", "addbmm", "addmm", "addmv", "einsum", "sum",
     "tensordot", "inner", "linear", "multi_dot", "chain_matmul", "_sum", "dot")
)  # fmt: skip
