"""Attention that a model writes out, edited: other weights, and the same functions after them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.editing._again import Call
from regard.editing._chain import PRODUCTS, Chain, Node, Replay, tensors
from regard.editing._writes import Write, drawn_by, name_of, put, undo, with_item, written_into
from regard.watching import _around
from regard.watching._layout import arranged, rows_of_both
from regard.watching._output import Partial, Product
from regard.watching._seen import Unseen
from regard.watching._silence import silence
from regard.watching._tracked import Trace, Weights

if TYPE_CHECKING:
    from regard.editing._editor import Editor, Met, Used
    from regard.recording import Site


class Written:
    """The functions that a model's code calls, with the softmaxes among them."""

    def __init__(self, editor: Editor) -> None:
        self.editor, self.chain = editor, Chain()
        self._nodes: dict[int, Node] = {}  # by use: the product
        self._uses: dict[int, Used] = {}  # by the numbers of softmaxes and products: of several attentions, which it is
        self._replays: dict[int, tuple[Used, Replay]] = {}
        self._led: set[int] = set()  # the numbers of softmaxes from which logits of others were computed
        self._others: list[tuple[Met, list[bool]]] = []  # products that are to be done again with another: see _note
        self._late: dict[int, tuple[Site, int]] = {}  # by the numbers of softmaxes that were edited: where they are

    def clear(self) -> None:
        self.chain.clear()
        self._nodes.clear()
        self._uses.clear()
        self._replays.clear()
        self._late.clear()
        self._others.clear()
        self._led.clear()

    def _let_go(self) -> None:
        """Forget calls of which nothing lives any more: what is known of one holds its weights."""
        alive = self.chain.numbers()
        self._uses = {number: use for number, use in self._uses.items() if number in alive}
        used = {id(use) for use in self._uses.values()}
        self._nodes = {at: node for at, node in self._nodes.items() if node.number in alive}
        self._replays = {at: found for at, found in self._replays.items() if at in used}

    def step(self, func: Any, args: Any, kwargs: Any, others_listen: Callable[[], bool]) -> Any:
        """Run a function, edited where attention comes to its end in it."""
        if not self.chain:
            out = func(*args, **kwargs)
            self._note(func, args, kwargs, out)
            return out
        given = list(tensors(args, kwargs))
        known = [self.chain.of(tensor) for tensor in given]
        self._check_one_way(func, given)
        into = written_into(func, args, kwargs)
        if into is not None:
            self.chain.overwritten(into)
        if not any(node is not None for node in known):
            out = func(*args, **kwargs)
            self._note(func, args, kwargs, out)
            return out
        if into is not None and self.chain.of(into) is not None and name_of(func) == "__setitem__":
            node = self.chain.node(with_item, args, kwargs)
            out = func(*args, **kwargs)
            self.chain.note(into, node)
            return out
        self.chain.draw = drawn_by(func, given)
        write = None
        if into is not None:
            with silence():
                write = Write(into, into.clone())
        if not _may_end(func) and not any(map(self._may_end_at, given)):
            out = func(*args, **kwargs)
            self._note(func, *self._again(args, kwargs, write), out)
            return out
        return self._tried(func, args, kwargs, given, others_listen(), write)

    def _may_end_at(self, given: Tensor) -> bool:
        """Whether anything that reads a tensor may be attention, or what comes of it: with a single key, values are
        multiplied by a weight, and there is nothing to sum."""
        known = self.editor.tracker.of(given)
        if isinstance(known, Weights):
            return known.softmax.shape[known.softmax.axis] == 1
        return isinstance(known, Product)

    def _check_one_way(self, func: Any, given: list[Tensor]) -> None:
        """What was computed from weights before they were edited may not meet what the model computes otherwise: it
        would be another number with the edited ones."""
        found = self.chain.softmaxes_aside(given)
        if not _may_end(func):
            for tensor in given:
                node = self.chain.of(tensor)
                if node is not None and isinstance(self.editor.tracker.of(tensor), Weights):
                    found |= node.softmaxes()
        late = next((self._late[number] for number in found if number in self._late), None)
        if late is not None and self._meets_others(given):
            what = f"its output, and once more by {name_of(func)} of something else that was computed from them"
            raise self.editor._refuse(*late, f"the model uses its weights in {what}")

    def _meets_others(self, given: list[Tensor]) -> bool:
        others = [one for one in given if self.chain.of(one) is None and not self.chain.is_aside(one)]
        return any(one.is_floating_point() and one.numel() > 1 for one in others)

    def _again(self, args: Any, kwargs: Any, write: Write | None) -> tuple[Any, Any]:
        """The arguments with which a function is done again: what it writes into is as it was before."""
        if write is None or self.chain.of(write.into) is not None:
            return args, kwargs
        return put(args, write), put(kwargs, write)

    def _tried(
        self, func: Any, args: Any, kwargs: Any, given: list[Tensor], others_listen: bool, write: Write | None
    ) -> Any:
        """Run a function out of sight of others, to see what it is."""
        editor = self.editor
        ends = [use for tensor in given if (use := self._use_of(tensor)) is not None]
        editor.used, editor.settled = [], []
        editor.hears_in_silence = True
        try:
            with silence():
                out = func(*args, **kwargs)
        finally:
            editor.hears_in_silence = False
        editor.raise_trouble()
        used, settled = editor.used, editor.settled
        editor.used, editor.settled = [], []
        edited = [one for one in used if one.met is not None]
        again = self._again(args, kwargs, write)
        if used and others_listen:
            self._tell_others(given)
        if edited:
            self._begin(func, *again, out, edited)
        elif ends:
            followed = any(isinstance(editor.tracker.of(part), Product) for part in tensors(out))
            if not settled and next(tensors(out), None) is None and _tells_no_content(out):
                return out
            if not settled and followed:
                self._note(func, *again, out)
                return out
            trace = next((found for _, found in settled), Trace())
            return self._ended(ends[0], trace, func, args, kwargs, write)
        elif others_listen and self._other_values(func, given) is None:
            undo(write)
            out = func(*args, **kwargs)
            self._note(func, *again, out)
        else:
            self._note(func, *again, out)
        if edited and settled:  # one function multiplied, and laid the heads together
            return self._ended(edited[0], settled[0][1], func, args, kwargs, write)
        if edited and not isinstance(editor.tracker.of(out), Product):  # nobody follows it: now, or not at all
            return self._ended(edited[0], Trace(), func, args, kwargs, write)
        return out

    def _tell_others(self, given: list[Tensor]) -> None:
        """Whoever else follows these weights is not shown their product, and may take them for weights without one."""
        for other in _around.here():
            for tensor in given if other is not self.editor else ():
                known = other.tracker.of(tensor)
                known = known.weights if isinstance(known, Partial) else known
                if isinstance(known, Weights):
                    known.softmax.users.append(None)

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        tracker = self.editor.tracker
        if not tracker and not self.chain.aside:
            return
        several = out if isinstance(out, (tuple, list)) else ()
        parts = [(None, out)] if isinstance(out, Tensor) else list(enumerate(several))
        given = list(tensors(args, kwargs))
        linked = [node for one in given if (node := self.chain.of(one)) is not None]
        aside = self._aside(given)
        for at, part in parts:
            known = tracker.of(part)
            if not isinstance(known, (Weights, Partial, Product)):
                if isinstance(part, Tensor) and (linked or aside):
                    self.chain.note_aside(part, aside.union(*(node.softmaxes() for node in linked)))
                    met = self._other_values(func, given)
                    goes_on = any(self.chain.of(one) is not None and self.chain.is_aside(one) for one in given)
                    if at is None and not aside and (met is not None or goes_on):
                        node = self.chain.add(func, args, kwargs, part, at)
                        if met is not None:
                            self._others.append((met, node.done))
                continue
            before = [tracker.of(one) for one in given if self.chain.of(one) is not None]
            begins = isinstance(known, Weights) and not any(_same_softmax(known, one) for one in before)
            if before and not begins:
                node = self.chain.add(func, args, kwargs, part, at)
                if isinstance(known, Product) and len(linked) > 1:
                    self._ends_in(node, known)
                # with other weights, what was computed from them aside would be another number too
                node.broken = node.broken or not aside.isdisjoint(node.softmaxes())
            elif isinstance(known, Weights) and at is None:
                root = self.chain.root(func, args, kwargs, part, known)
                # logits that came from other weights would be other ones if those were edited
                led = aside.union(*(node.softmaxes() for node in linked))
                self._led |= led
                root.broken = root.broken or not led.isdisjoint(self._uses)

    def _begin(self, func: Any, args: Any, kwargs: Any, out: Any, used: list[Used]) -> None:
        known = self.editor.tracker.of(out) if isinstance(out, Tensor) else None
        if isinstance(out, Tensor):
            node = self.chain.add(func, args, kwargs, out, None)
            node.dims = known.dims if isinstance(known, Product) else ()
            other_ways = self._led | self._aside(list(tensors(args, kwargs)))
            node.broken = not other_ways.isdisjoint(node.softmaxes())
            for one in used:
                self._nodes[id(one)] = node
                softmaxes = [each.number for each in node.line() if each.softmax is one.weights.softmax]
                own = next((self._uses[number] for number in softmaxes if number in self._uses), one)
                own.rows[:] = rows_of_both(own.rows, one.rows)
                self._uses.update(dict.fromkeys((node.number, *softmaxes), own))

    def _other_values(self, func: Any, given: list[Tensor]) -> Met | None:
        """Where a function multiplies other values (of relative positions, say) by weights that are moved, and that
        were multiplied by values before: by whom."""
        if not _may_end(func) or "sum" in name_of(func).split("_"):
            return None
        of_weights = (known for one in given if isinstance(known := self.editor.tracker.of(one), Weights))
        return next((user[0] for known in of_weights for user in known.softmax.users if user and user[0]), None)

    def _aside(self, given: list[Tensor]) -> set[int]:
        """The softmaxes of what was computed aside from the chain, and cannot be done again with it."""
        return self.chain.softmaxes_aside([one for one in given if self.chain.of(one) is None])

    def _ends_in(self, node: Node, known: Product) -> None:
        """Several products of the same weights are one output where they meet."""
        softmaxes = node.softmaxes()
        use = self._uses.get(next(iter(softmaxes))) if len(softmaxes) == 1 else None
        if use is not None:
            for each in node.line():
                each.dims = None
            node.dims, self._nodes[id(use)], self._uses[node.number] = known.dims, node, use

    # The end of it

    def _ended(self, use: Used, trace: Trace, func: Any, args: Any, kwargs: Any, write: Write | None = None) -> Any:
        """What a function gives, of an output of attention that was edited."""
        undo(write)
        replay = self._replay(use, trace)
        with _running(use, self.editor):
            return func(*replay.value(self.chain.linked(args)), **replay.value(self.chain.linked(kwargs)))

    def edited(self, tensor: Tensor) -> Tensor | None:
        """An output that leaves the model as it is, edited; None where the tensor is none."""
        use, node = self._use_of(tensor), self.chain.of(tensor)
        if use is None or node is None:
            return None
        replay = self._replay(use, Trace())
        with _running(use, self.editor):
            value: Tensor = replay.value(node)
        return value

    def check_ended(self) -> None:
        """Raise where an output of attention lives on that was to be edited, and was not."""
        self.editor.raise_trouble()
        for met, done in self._others:
            if not done:
                why = "its weights are multiplied by other values too, and that product is not added to the first one"
                raise self.editor._refuse(met.site, met.layer, why)
        for tensor in self.chain.living():
            use = self._use_of(tensor)
            if use is not None and use.met is not None and id(use) not in self._replays:
                why = "its output leaves the model before any use of it"
                raise self.editor._refuse(use.met.site, use.met.layer, why)

    def _use_of(self, tensor: object) -> Used | None:
        """The attention that a tensor is the output of, if it is to be edited: one of them where several were added."""
        known = self.editor.tracker.of(tensor)
        if not isinstance(known, Product):
            return None
        if known.call.met is not None:
            softmax = known.call.weights.softmax  # of several products of the same weights, the first
            return next((use for use in self._uses.values() if use.weights.softmax is softmax), known.call)
        node = self.chain.of(tensor)
        uses = [self._uses[each.number] for each in node.line() if each.number in self._uses] if node else []
        return next((use for use in uses if use.met is not None), None)

    def _replay(self, use: Used, trace: Trace) -> Replay:
        if id(use) in self._replays:
            return self._replays[id(use)][1]
        editor, met = self.editor, use.met
        assert met is not None
        try:
            found = arranged(use.weights, use.rows, trace, editor.heads_dim(met.site.path), met.stack)
        except Unseen as reason:
            raise editor._refuse(met.site, met.layer, str(reason).replace("watch(", "edit(")) from None
        if use.weights.softmax.divided and not _sum_to_1(use.weights):
            why = "it divides its weights by more than their sum, and other weights would need another divisor"
            raise editor._refuse(met.site, met.layer, why)
        call = Call([(editor, met), *use.also], use, found, self._nodes.get(id(use)))

        def weights(node: Node) -> Tensor:
            """Outputs of several attentions may meet before heads are laid side by side: each has its own edit."""
            own = self._uses.get(node.number)
            if own is None:
                return node.run(node.args, node.kwargs) if node.takes_softmax else node.logits
            return call.weights(node) if own is use else self._replay(own, trace).weights(node)

        def output(node: Node, out: Tensor) -> Tensor:
            own = self._uses.get(node.number)
            return call.output(node, out) if own is use or own is None else self._replay(own, trace).output(node, out)

        self._let_go()
        replay = Replay(weights, output, lambda why: editor._refuse(met.site, met.layer, why))
        self._replays[id(use)] = (use, replay)
        numbers = [number for number, one in self._uses.items() if one is use]
        self._late.update(dict.fromkeys(numbers, (met.site, met.layer)))
        return replay


@contextlib.contextmanager
def _running(use: Used, editor: Editor) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for one in (editor, *(other for other, _ in use.also)):
            stack.enter_context(one.running())
        yield


def _sum_to_1(known: Weights) -> bool:
    axis = next((at for at, dim in enumerate(known.final_dims) if any(p.axis == known.softmax.axis for p in dim)), None)
    sums = known.final.sum(axis, dtype=torch.float32) if axis is not None else known.final
    return bool(((sums > 0.999) | (sums == 0)).all())


def _same_softmax(known: Weights, other: Any) -> bool:
    return isinstance(other, Weights) and other.softmax is known.softmax


def _tells_no_content(out: Any) -> bool:
    """Whether this is what a tensor's size or kind was asked for. None comes from what put its numbers elsewhere."""
    if isinstance(out, tuple):
        return all(map(_tells_no_content, out))
    return isinstance(out, (bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format))


def _may_end(func: Any) -> bool:
    return name_of(func) in PRODUCTS
