"""Attention that a model writes out, edited: other weights, and the same functions after them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard.editing import _fused
from regard.editing._chain import PRODUCTS, Chain, Node, Replay, tensors
from regard.editing._fused import Pattern
from regard.editing._writes import Write, name_of, put, undo, with_item, written_into
from regard.edits._edit import Change, Place
from regard.statistics import Want
from regard.watching import _around, _axes
from regard.watching._axes import FEATURE, Piece
from regard.watching._in_memory import InMemory
from regard.watching._layout import Arranged, arranged, rearranged
from regard.watching._seen import Unseen
from regard.watching._silence import silence
from regard.watching._tracked import Partial, Product, Trace, Weights

if TYPE_CHECKING:
    from regard.editing._editor import Editor, Met, Used
    from regard.recording import Site

# Logits so far below the largest of their row are those that a model has hidden, whatever number it writes there.
HIDDEN = 5000.0


class Written:
    """The functions that a model's code calls, with the softmaxes among them."""

    def __init__(self, editor: Editor) -> None:
        self.editor, self.chain = editor, Chain()
        self._nodes: dict[int, Node] = {}  # by use: the product
        self._uses: dict[int, Used] = {}  # by the numbers of softmaxes and products: of several attentions, which it is
        self._replays: dict[int, tuple[Used, Replay]] = {}
        self._late: dict[int, tuple[Site, int]] = {}  # by the numbers of softmaxes that were edited: where they are

    def clear(self) -> None:
        self.chain.clear()
        self._nodes.clear()
        self._uses.clear()
        self._replays.clear()
        self._late.clear()

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
        write = None
        if into is not None:
            with silence():
                write = Write(into, into.clone())
        if not _may_end(func) and not any(isinstance(self.editor.tracker.of(one), Product) for one in given):
            out = func(*args, **kwargs)
            self._note(func, *self._again(args, kwargs, write), out)
            return out
        return self._tried(func, args, kwargs, given, others_listen(), write)

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
        elif others_listen:
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
        aside = self.chain.softmaxes_aside(given)
        for at, part in parts:
            known = tracker.of(part)
            if not isinstance(known, (Weights, Partial, Product)):
                if isinstance(part, Tensor) and (linked or aside):
                    self.chain.note_aside(part, aside.union(*(node.softmaxes() for node in linked)))
                continue
            before = [tracker.of(one) for one in given if self.chain.of(one) is not None]
            begins = isinstance(known, Weights) and not any(_same_softmax(known, one) for one in before)
            if before and not begins:
                node = self.chain.add(func, args, kwargs, part, at)
                # with other weights, what was computed from them aside would be another number too
                node.broken = node.broken or not aside.isdisjoint(node.softmaxes())
            elif isinstance(known, Weights) and at is None:
                self.chain.root(func, args, kwargs, part, known)

    def _begin(self, func: Any, args: Any, kwargs: Any, out: Any, used: list[Used]) -> None:
        known = self.editor.tracker.of(out) if isinstance(out, Tensor) else None
        if isinstance(out, Tensor):
            node = self.chain.add(func, args, kwargs, out, None)
            node.dims = known.dims if isinstance(known, Product) else ()
            node.broken = not self.chain.softmaxes_aside(list(tensors(args, kwargs))).isdisjoint(node.softmaxes())
            for one in used:
                self._nodes[id(one)] = node
                softmaxes = [each.number for each in node.line() if each.softmax is one.weights.softmax]
                own = next((self._uses[number] for number in softmaxes if number in self._uses), one)
                self._uses.update(dict.fromkeys((node.number, *softmaxes), own))

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
        for tensor in self.chain.living():
            use = self._use_of(tensor)
            if use is not None and use.met is not None and id(use) not in self._replays:
                why = "its output leaves the model before any use of it"
                raise self.editor._refuse(use.met.site, use.met.layer, why)

    def _use_of(self, tensor: object) -> Used | None:
        """The attention that a tensor is the output of, if it is to be edited: one of them where several were added."""
        known = self.editor.tracker.of(tensor)
        if not isinstance(known, Product) or known.call.met is not None:
            return known.call if isinstance(known, Product) else None
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
        call = _Call([(editor, met), *use.also], use, found, self._nodes.get(id(use)))

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


class _Layout(NamedTuple):
    arranged: Arranged
    shape: tuple[int, ...]

    def out_of(self, tensor: Tensor) -> Tensor:
        """[batch, head, query, key] of a tensor as the softmax has it."""
        return rearranged(tensor, self.arranged.pieces(_axes.of_shape(self.shape)), self._groups())

    def back(self, tensor: Tensor, like: Tensor) -> Tensor:
        return put_back(tensor, self.arranged.pieces(_axes.of_shape(self.shape)), self._groups(), like)

    def _groups(self) -> list[list[Piece]]:
        """With the softmax's own axis whole: what stands for a sink may have been cut off of the last weights."""
        axis = next(piece.axis for piece in self.arranged.groups[3]) if self.arranged.groups[3] else None
        pieces = self.arranged.pieces(_axes.of_shape(self.shape))
        keys = [piece for piece in pieces if piece.axis == axis] if axis is not None else []
        return [*self.arranged.groups[:3], keys]


class _Call:
    """One written-out call while it is done again."""

    def __init__(self, editors: list[tuple[Editor, Met]], use: Used, found: Arranged, product: Node | None) -> None:
        self.arranged, self.product = found, product
        self.layout = _Layout(found, use.weights.softmax.shape)
        with silence(), torch.no_grad():
            weights = rearranged(use.weights.final, found.pieces(use.weights.final_dims), found.groups)
            seen = InMemory(weights, weights.new_zeros(weights.shape[:3]))
            places = [editor.place(met, seen, weights.shape[1]) for editor, met in editors]
            if not any(editor.adds_edges for editor, _ in editors):
                for place in places:
                    place.has_edges = _edges_of(weights)
            self.steps = [_Step(editor, place) for (editor, _), place in zip(editors, places, strict=True)]
            for place in places:
                place.has_edges = None  # it holds the weights

    def weights(self, node: Node) -> Tensor:
        """The softmax again, of other logits."""
        logits = node.logits if node.takes_softmax else _logarithm(node.logits)
        x = self.layout.out_of(logits)
        empty = None
        for step in self.steps:
            for change in step.changes:
                x, more = _changed(x, change, step.place)
                empty = more if empty is None else empty if more is None else empty | more
        out = self._softmax(node, self.layout.back(x, logits))
        if empty is not None:
            out = self.layout.back(self.layout.out_of(out).masked_fill(empty, 0.0), out)
        for step in self.steps:
            step.tell(self.layout.out_of(out.detach()))
            step.write(bool(step.changes))
        return out

    def _softmax(self, node: Node, logits: Tensor) -> Tensor:
        if not node.takes_softmax:
            return logits.softmax(node.axis)
        if "input" in node.kwargs:
            return node.run(node.args, {**node.kwargs, "input": logits})
        return node.run((logits, *node.args[1:]), node.kwargs)

    def output(self, node: Node, out: Tensor) -> Tensor:
        """The product, with the edits of its output."""
        if not any(edit.acts_on_output for step in self.steps for edit in step.editor.edits):
            return out
        pieces = self.arranged.pieces(node.dims or ())
        groups = [*self.arranged.groups[:3], [piece for piece in pieces if piece.axis == FEATURE]]
        if node is not self.product or sorted(pieces) != sorted(piece for group in groups for piece in group):
            raise self.steps[0].place.refuse("its output is laid out, or added up, so that no head stands apart")
        apart, last = rearranged(out, pieces, groups), None
        for step in reversed(self.steps):  # the innermost has the last word
            new = step.editor.outputs(apart, step.place)
            step.write(new is not None)
            if new is not None:
                apart = last = new
        return out if last is None else put_back(last, pieces, groups, out)


class _Step:
    """What one edit does to a call."""

    def __init__(self, editor: Editor, place: Place) -> None:
        self.editor, self.place = editor, place
        self.changes = editor.changes(place)
        self._wrote = False

    def write(self, changed: bool) -> None:
        if changed and not self._wrote:
            self._wrote = True
            self.editor.wrote(self.place, True)

    def tell(self, weights: Tensor) -> None:
        """The weights [batch, head, query, key] that are used, to edits that go by them."""
        place = self.place
        with silence(), torch.no_grad():
            for edit in self.editor.each(place):
                if edit.wants_mass:
                    seen, counted = weights[..., : place.keys], edit.mass_of(place)
                    if isinstance(counted, Tensor):
                        seen, counted = seen.masked_fill(~counted[:, None, :, None], 0.0), None
                    edit.after(seen[:, :, counted or slice(None)].sum(2), place)
                edit.saw(Pattern(None, weights, weights.shape[3] - place.keys), place)


def _edges_of(weights: Tensor) -> Callable[[range, range], Tensor]:
    """The edges that a call has, as ``Place.has_edges`` gives them. Where a row does not sum to 1, the model took
    weights away after the softmax: a 0 there does not say that the softmax had no such edge."""

    def has_edges(rows: range, columns: range) -> Tensor:
        found = weights[:, :, rows.start : rows.stop]
        whole = found.sum(-1, keepdim=True, dtype=torch.float32) > 0.999
        return (found[..., columns.start : columns.stop] > 0) | ~whole

    return has_edges


@contextlib.contextmanager
def _running(use: Used, editor: Editor) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for one in (editor, *(other for other, _ in use.also)):
            stack.enter_context(one.running())
        yield


def _changed(x: Tensor, change: Change, place: Place) -> tuple[Tensor, Tensor | None]:
    """Logits after a change, and the rows [batch, head, query, 1] that it left without keys."""
    extra = x.shape[3] - place.keys
    mine = _fused.head_rows(place)
    if change.pattern is not None:
        return torch.where(mine, _pattern(change.pattern, x, place), x), None
    if change.add is not None:
        u, b = (part.to(place.device) for part in change.add.factors())
        most = torch.finfo(x.dtype).max / 2
        more = u[:, None, :, None] * b[:, None, None].clamp(-most, most)
        x = torch.where(mine, x + torch.nn.functional.pad(more, (0, extra)).to(x), x)
    if change.hide is None:
        return x, None
    rows, columns = range(place.queries), range(place.keys)
    offset = place.offset.to(x.device) if isinstance(place.offset, Tensor) else place.offset
    change.hide.check(place.batch, place.count, place.queries, place.keys)
    hide = change.hide.tile(rows, columns, place.queries, place.keys, offset=offset, device=x.device)
    hide = torch.nn.functional.pad(hide & mine, (0, extra)).expand(*x.shape[:2], -1, -1)
    with torch.no_grad():
        top = x.amax(-1, keepdim=True)
        shown = (x > -torch.inf) & (x >= top - HIDDEN)
        empty = ~(shown & ~hide).any(-1, keepdim=True) & hide.any(-1, keepdim=True)
    # a row without keys keeps its logits, which are numbers, and then loses its weights
    return x.masked_fill(hide & ~empty, -torch.inf), empty


def _pattern(pattern: Pattern, x: Tensor, place: Place) -> Tensor:
    """The recorded weights as logits: their logarithm."""
    weights = pattern.weights
    if weights is None:
        assert pattern.seen is not None
        with silence():
            weights = pattern.seen.observe(Want(map=None, top_k=0, weights="all")).weights
    if weights.shape[1:] != x.shape[1:] or weights.shape[0] not in (1, x.shape[0]):
        raise place.refuse(
            f"its weights are {list(x.shape)} [batch, head, query, key], and the recorded ones "
            f"{list(weights.shape)}: patch a pattern from a run of the same length"
        )
    return _logarithm(weights.to(x)).expand_as(x)


def put_back(tensor: Tensor, pieces: list[Piece], groups: Any, like: Tensor) -> Tensor:
    """The inverse of ``rearranged``, in memory as ``like`` is: code that views the one can view the other."""
    order = [pieces.index(piece) for group in groups for piece in group]
    apart = tensor.reshape([piece.size for group in groups for piece in group])
    inverse = sorted(range(len(order)), key=order.__getitem__)
    made = apart.permute(inverse).reshape(like.shape)
    strides: list[int] = [like.stride(dim) for dim in range(like.dim())]
    outer_first = sorted(range(like.dim()), key=lambda dim: (-strides[dim], dim))
    back = sorted(range(like.dim()), key=outer_first.__getitem__)
    return made.permute(outer_first).contiguous().permute(back)


def _logarithm(weights: Tensor) -> Tensor:
    """Weights as logits; what has no weight is hidden, and takes no gradient."""
    none = weights <= 0
    return weights.masked_fill(none, 1.0).log().masked_fill(none, -torch.inf)


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
