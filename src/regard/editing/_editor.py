"""One edit: which calls it meets, and what becomes of them. It follows the model as a watch does."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from regard import api, masks
from regard.editing import _fused, _ready
from regard.editing._positions import of_cross, of_self
from regard.editing._report import Changed, Report
from regard.editing._texts import Texts
from regard.edits._edit import CannotEdit, Change, Edit, Place
from regard.masks._joins import both
from regard.plan import program_of
from regard.recording import Recording, Site
from regard.spec import OfOtherCall
from regard.statistics import Want
from regard.watching import _around
from regard.watching._follower import Asked, Follower, in_backward
from regard.watching._index import index_of
from regard.watching._layout import loops_over_heads
from regard.watching._modules import (
    CHECKPOINTS,
    TRANSFORMS,
    Frame,
    attribute,
    has_cache,
    inside_transform,
    is_cross,
    runs_code_of,
)
from regard.watching._operators import unheard
from regard.watching._padding import real_queries
from regard.watching._seen import Seen, Unseen, of_call
from regard.watching._silence import silence, silent
from regard.watching._tracked import Weights

if TYPE_CHECKING:
    from regard.spec import Call
    from regard.watching._axes import Piece
    from regard.watching._in_memory import InMemory


_MOST_DECIDED = 256  # each token that is decoded is a place of its own


class Met(NamedTuple):
    """A call of the model that is to be edited."""

    site: Site
    layer: int
    turn: int
    stack: list[Frame]


class Used(NamedTuple):
    """Attention that was written out: the weights, and the axes that its product kept."""

    weights: Weights
    rows: list[Piece]
    met: Met | None  # None where it is not to be edited
    also: tuple[tuple[Editor, Met], ...] = ()  # edits of blocks around this one, which are made at once


class Editor(Follower):
    changes_calls = True
    unseen = frozenset()  # functions are shown to it, and it lets those run unseen that it need not see

    def __init__(
        self,
        model: nn.Module,
        edits: Sequence[Edit],
        asked: Asked,
        heads: Sequence[int] | Mapping[int | str, Sequence[int]] | None,
        tokens: list[list[str]],
        report: Report,
    ) -> None:
        super().__init__(model, Recording(type(model).__name__), asked)
        self.edits, self.report, self.chosen, self.tokens = edits, report, heads, tokens
        self.texts, self.longest = Texts(asked.tokenizer), 0  # the most tokens that a text had
        self.adds_edges = any(edit.adds_edges for edit in edits)
        self.only_looks = any(edit.only_looks for edit in edits)
        self.counts_queries = any(edit.counts_queries for edit in edits)
        self.acts_on_output = any(edit.acts_on_output for edit in edits)
        # whether an edit wants to know more of a call than its place and its output
        self.listens = any(edit.wants_mass or type(edit).saw is not Edit.saw for edit in edits)
        self.busy = 0  # above 0 while a call runs that this edit has changed, or leaves as it is
        self.used: list[Used] = []  # products and uses of them that the operator under way was found to be
        self.settled: list[tuple[Used, Any]] = []
        self.trouble: CannotEdit | None = None
        self.acted: set[int] = set()  # which of the edits, by number, have changed something
        self.check_ended: Callable[[], None] = lambda: None  # raises where an output went away unedited
        self.forget_pass: Callable[[], None] = lambda: None  # what was written out in a pass that has ended
        self.last: Place | None = None  # of which the output was asked for
        self._met_before: Counter[Site] = Counter()
        self._memories: dict[tuple[int, Site], dict[Any, Any]] = {}
        self._places_of_wholes: dict[Hashable, Place] = {}
        self._rows_met: dict[Site, list[range]] = {}  # in this pass, of calls with fewer queries than keys
        self._heads_of: dict[tuple[Site, int], tuple[int, ...]] = {}
        # whether what becomes of a call goes by its numbers alone
        self.by_numbers = all(edit.by_numbers for edit in edits)
        self._ready: dict[Hashable, _ready.Ready] = {}  # by kind of call
        self._decided: dict[Hashable, dict[Hashable, Any]] = {}  # by edit and place: see ``Place.decided``

    # Which calls are met

    def meet(self) -> Met | None:
        """The call that is about to run, if it is the model's and of a layer that is edited."""
        stack = self._now()
        if not stack:
            return None
        site = self._site(stack)
        layer = self._asked_layer(site)
        if layer is None:
            return None
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        if transformed or in_backward() or runs_code_of(TRANSFORMS, CHECKPOINTS):
            raise self._refuse(site, layer, _out_of_reach())
        turn = self._met_before[site]
        self._met_before[site] += 1
        return Met(site, layer, turn, list(stack))

    def see(self, make: Callable[[], Seen | InMemory], out: Any = None) -> None:
        """An attention kernel ran that nothing above it has shown. Raised at the next function, or where the model
        ends: an error that passes through TorchScript loses its words."""
        if self.busy or silent() or in_backward():
            return
        try:
            met = self.meet()
        except CannotEdit as error:
            self.trouble = self.trouble or error
            return
        if met is None:
            return
        why = "its attention runs where it cannot be changed"
        try:
            with silence():
                make()
        except Unseen as reason:
            why = str(reason)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        self.trouble = self.trouble or self._refuse(
            met.site, met.layer, f"{why}; a Hugging Face model can be loaded with attn_implementation='sdpa' or 'eager'"
        )

    def _ran_elsewhere(self, path: str) -> None:
        raise CannotEdit(f"{path or '(root)'} runs on another thread than the one that opened the edit")

    def _attended(self, weights: Weights, rows: Sequence[Piece]) -> Any:
        if self.busy or in_backward() or not self._now():
            return None
        users = weights.softmax.users  # not the uses, which would hold themselves
        before = next((user for user in users if user and user[0] and user[0].stack[-1] is self._now()[-1]), None)
        try:
            met = self.meet() if before is None else before[0]
            if met is not None and not self.hears_in_silence:
                why = "the product of weights and values runs inside a function that cannot be taken apart"
                late = "its weights are divided by their sum only after the product with values"
                why = late if weights.softmax.late else f"{why} (TorchScript, say)"
                raise self._refuse(met.site, met.layer, why)
            if before is not None and weights.changed:
                return None  # values of another kind (relative positions, say) for weights that were met
            around = [] if met is None or before is not None else self._around()
            also = tuple((one, there) for one in around if (there := one.meet()) is not None)
        except CannotEdit as error:  # raised where the operator has run: what happens here is noted, never raised
            self.trouble = self.trouble or error
            return None
        if before is None:
            users.append(before := (met, also))
        self.used.append(Used(weights, list(rows), *before))
        return self.used[-1]

    def raise_trouble(self) -> None:
        if self.trouble is not None:
            trouble, self.trouble = self.trouble, None
            raise trouble

    def _around(self) -> list[Editor]:
        """The edits whose blocks are around this one's, innermost first."""
        here = _around.here()
        return [one for one in reversed(here[: here.index(self)]) if isinstance(one, Editor) and not one.busy]

    def _settled(self, pending: Any, trace: Any) -> None:
        if isinstance(pending, Used):
            self.settled.append((pending, trace))

    def _miss_at(self, stack: list[Frame], site: Site, number: int, reason: str) -> None:
        layer = self._asked_layer(site)
        if not self.busy and layer is not None:
            self.trouble = self.trouble or self._refuse(site, layer, reason)

    def _pass_ended(self, out: Any) -> None:
        try:
            if out is not None and not self.busy:
                self.check_ended()
        except CannotEdit as error:
            self.trouble = self.trouble or error
        self.forget_pass()

    def turns_met(self) -> list[int]:
        """How many calls of each edited site were met."""
        return list(self._met_before.values())

    def _refuse(self, site: Site, layer: int, why: str) -> CannotEdit:
        return CannotEdit(f"{site} (layer {layer}) cannot be edited: {why}")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A call is under way that was met."""
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1

    # What becomes of them

    def place(self, met: Met, seen: Seen | InMemory, kv_heads: int) -> Place:
        queries, keys = seen.queries, seen.keys
        if queries == keys and self.texts.are_none and self.places.at_whole_texts(seen, keys, met.site, met.stack):
            return self._place_of_whole(met, seen, kv_heads)
        if isinstance(seen, Seen) and torch.is_grad_enabled():
            seen = seen.detached()
        kind = "cross" if is_cross(met.stack, queries, keys) else "self"
        placed, _, dropped = self.places.placed(seen, kind, met.site, met.stack)
        real = real_queries(placed, met.stack, kind)
        at = of_cross(seen, met.stack) if kind == "cross" else of_self(placed, met.stack, dropped)
        if self.counts_queries and kind == "self" and queries < keys:
            self._check_not_in_parts(met, seen, at.first)
        if isinstance(at.first, int):
            self.longest = max(self.longest, at.first + queries)
        return self._new_place(
            met,
            seen,
            kv_heads,
            kind=kind,
            offset=at.offset,
            first=at.first,
            read=at.read,
            dropped=at.dropped,
            in_order=at.in_order,
            tokens=self.texts.of(met.stack, self.passes, at.first) or self.tokens,
            goes_on=has_cache(met.stack),
            real=real,
        )

    def _place_of_whole(self, met: Met, seen: Seen | InMemory, kv_heads: int) -> Place:
        """A place that was met before is the same but for its turn."""
        key, tokens = (met.site, seen.shape, seen.device, kv_heads), seen.queries
        found = self._places_of_wholes.get(key)
        if found is None:
            if len(self._places_of_wholes) > _MOST_DECIDED:
                self._places_of_wholes.clear()
            self.longest = max(self.longest, tokens)
            found = self._places_of_wholes[key] = self._new_place(
                met, seen, kv_heads, kind="self", offset=0, first=0, read=tokens, dropped=0, tokens=self.tokens
            )
        found.turn, found.has_edges, found.edges = met.turn, None, None
        return found

    def _new_place(self, met: Met, seen: Seen | InMemory, kv_heads: int, **more: Any) -> Place:
        batch, count, queries, keys = seen.shape
        found = Place(
            site=met.site,
            layer=met.layer,
            turn=met.turn,
            batch=batch,
            count=count,
            kv_heads=kv_heads if kv_heads < count else _own_heads(met.stack, count),
            heads=self._heads(met, count),
            queries=queries,
            keys=keys,
            device=seen.device,
            **more,
        )
        found.alike = self._alike(found)
        return found

    def _check_not_in_parts(self, met: Met, seen: Seen | InMemory, first: int | Tensor | None) -> None:
        """Without a cache, queries are taken for the last tokens. A module that attends for some queries after others
        has them all stand there."""
        if loops_over_heads(met.stack, seen.shape[1]) or has_cache(met.stack):
            return  # a decoded token of a padded batch among them, whose places would be waited for on a GPU
        each = set(first.flatten().tolist()) if isinstance(first, Tensor) else {first}
        start = each.pop() if len(each) == 1 else None
        if start is None:
            return
        rows, before = range(start, start + seen.queries), self._rows_met.setdefault(met.site, [])
        if any(max(rows.start, other.start) < min(rows.stop, other.stop) for other in before):
            why = "it attends for some of its queries at a time, and which tokens those are is not known"
            raise self._refuse(met.site, met.layer, f"{why}: edits that name no queries are possible")
        before.append(rows)

    def _begin(self, frame: Frame) -> None:
        self._rows_met.clear()
        super()._begin(frame)

    def _heads(self, met: Met, count: int) -> tuple[int, ...]:
        found = self._heads_of.get((met.site, count))
        if found is None:
            found = self._heads_of[met.site, count] = self._checked_heads(met, count)
        return found

    def _checked_heads(self, met: Met, count: int) -> tuple[int, ...]:
        given = self.chosen
        if isinstance(given, Mapping):
            places = (met.layer, met.site.path, str(met.site))
            given = next(given[place] for place in places if place in given)
        if given is None:
            return tuple(range(count))
        if wrong := [head for head in given if not -count <= head < count]:
            raise ValueError(f"heads={wrong} were asked for, and {met.site} (layer {met.layer}) has {count} heads")
        return tuple(sorted({head % count for head in given}))

    def _edges_of(self, seen: Seen, place: Place, here: list[Follower]) -> Callable[[range, range], Tensor] | None:
        # a block inside this one may have cut the same edge already: then both count, as in one list
        inside = len(here) > 1 and any(one is not self and isinstance(one, Editor) and one.busy for one in here)
        return None if self.adds_edges or inside else _fused.edges_of(seen, place)

    def each(self, place: Place) -> Iterator[Edit]:
        """The edits, with what each remembers of the place."""
        alike = place.alike
        for number, edit in enumerate(self.edits):
            place.memory = self._memories.setdefault((number, place.site), {})
            place.decided = None if alike is None else self._decided.setdefault((number, alike), {})
            yield edit

    def _alike(self, place: Place) -> Hashable:
        """All numbers of a place that decide what becomes of it, whatever its layer; None where tensors or texts do."""
        of_items = isinstance(place.offset, Tensor) or isinstance(place.first, Tensor) or isinstance(place.read, Tensor)
        if of_items or place.tokens is not self.tokens:
            return None
        if len(self._decided) > _MOST_DECIDED:
            self._decided.clear()
        return (
            place.kind, place.batch, place.count, place.heads, place.queries, place.keys, place.offset, place.first,
            place.read, place.dropped, place.in_order, place.goes_on, place.device,
        )  # fmt: skip

    def changes(self, place: Place) -> list[Change]:
        found = []
        for number, edit in enumerate(self.each(place)):
            if (change := edit.change(place)) is not None:
                found.append(change)
                self.acted.add(number)
        if len(found) > 1:
            found.sort(key=lambda change: change.pattern is None)  # a pattern stands for all that was there
        return found

    def outputs(self, out: Tensor, place: Place) -> Tensor | None:
        """The output with its edits; None where none has changed it."""
        new, self.last = None, place if self.only_looks else None
        if not self.acts_on_output:
            return None
        for number, edit in enumerate(self.each(place)):
            if edit.acts_on_output and (found := edit.output(out, place)) is not None:
                self.acted.add(number)
                out = new = _fused.with_heads(found, out, place)
        if new is not None:
            self._show(new, place)
        return new

    def _show(self, out: Tensor, place: Place) -> None:
        """Blocks around this one were shown the output before it was changed here. Those that write it down are shown
        it again, as it leaves the call."""
        here = _around.here()
        for one in here[: here.index(self)] if len(here) > 1 else ():
            if isinstance(one, Editor) and one.last is not None and one.last.site == place.site:
                for edit in one.each(one.last):
                    if edit.only_looks:
                        edit.output(out, one.last)

    def wrote(self, place: Place, changed: bool) -> None:
        if changed:
            number = self.passes - 1
            self.report.calls.append(Changed(place.layer, str(place.site), place.heads, number, place.kind))

    # Calls of regard's own

    def own_call(self, run: Callable[..., Any], program: Any, call: Call) -> Any:
        if self.busy:
            return run(program, call)
        met = self.meet()
        if met is None:
            with self.running():
                return run(program, call)
        seen = of_call(call)
        with unheard():
            place = self.place(met, seen, call.spec.kv_heads)
            self._look_for_edges(place, seen, _around.here())
            changes = self.changes(place)
        with self.running():
            ran = None
            if changes:
                call = ran = self._changed_call(seen, changes, place, call)
                program = program_of(call, "auto")
            result = run(program, call)
            if result.out.shape[3] > seen.value.shape[3]:  # values were made wider for a steer
                result = result._replace(out=result.out[..., : seen.value.shape[3]].contiguous())
            out = self.outputs(result.out, place)
            if self.listens:
                self._tell(of_call(call).detached(), place)
        self.wrote(place, bool(changes) or out is not None)
        if out is not None:
            result = result._replace(out=out)
        if ran is not None:
            # by name: what a kernel leaves may be put into shape when it is read
            result = OfOtherCall(result.out, result.lse, result.rows, result.finite)
            result.ran = ran
        return result

    def _changed_call(self, seen: Seen, changes: list[Change], place: Place, call: Call) -> Call:
        seen = self.applied(seen, changes, place)
        return seen.call(call.spec.dropout).replace(seed=call.seed, wants_rows=call.wants_rows)

    def applied(self, seen: Seen, changes: list[Change], place: Place) -> Seen:
        for change in changes:
            seen = _fused.changed(seen, change, place)
        return seen

    # Calls of torch's function

    def attend(self, seen: Seen, dropout: float, run: Callable[[], Tensor], met: Met) -> Tensor:
        """[batch, head, query, dim] of a call, edited; ``run`` gives the output of the call as it was."""
        # others are shown calls as the model made them
        here = _around.here()
        alone = len(here) == 1 and not self.listens
        with unheard():
            place = self.place(met, seen, seen.key.shape[1])
            kind = _ready.kind_of(seen, place) if alone and self.by_numbers and not dropout else None
            ready = None if kind is None else self._ready.get(kind)
            if ready is not None:
                out = ready.run(seen) if ready.parts else run()
                new, changed = self.outputs(out, place), bool(ready.parts)
            else:
                self._look_for_edges(place, seen, here)
                changes, width = self.changes(place), seen.value.shape[3]
                parts = _fused.by_heads(seen, changes, place) if alone and not dropout else None
                whole = seen if parts is not None else self.applied(seen, changes, place)
                if kind is not None:
                    self._remember(kind, seen, whole, parts, place, changes)
                if alone:
                    out, new = self._attended_to(whole, parts, changes, dropout, run, place, width)
                changed = bool(changes)
        if not alone:
            with self.running():
                out, new = self._attended_to(whole, parts, changes, dropout, run, place, width)
                if self.listens:
                    self._tell(whole.detached(), place)
        self.wrote(place, changed or new is not None)
        return out if new is None else new

    def _remember(
        self, kind: Hashable, seen: Seen, whole: Seen, parts: _ready.Apart | None, place: Place, changes: list[Change]
    ) -> None:
        ready = _ready.ready_of(seen, whole, parts, place) if changes else _ready.Ready(())
        if ready is not None:
            if len(self._ready) > _MOST_DECIDED:
                self._ready.clear()
            self._ready[kind] = ready

    def _look_for_edges(self, place: Place, seen: Seen, here: list[Follower]) -> None:
        place.has_edges = self._edges_of(seen, place, here)
        place.edges = _fused.kind_of_edges(seen, place)

    def _attended_to(
        self,
        seen: Seen,
        parts: _ready.Apart | None,
        changes: list[Change],
        dropout: float,
        run: Callable[[], Tensor],
        place: Place,
        width: int,
    ) -> tuple[Tensor, Tensor | None]:
        """The output before and after the edits of it; None where it has none."""
        if parts and len(parts) == 1:
            out = self._run(parts[0][1], place, dropout)
        elif parts:
            made = [(heads, self._run(part, place, dropout)) for heads, part in parts]
            out = _ready.joined(seen, [(index_of(heads, place.device), part) for heads, part in made])
        elif changes:
            out = self._run(seen, place, dropout)
            out = out if out.shape[3] == width else out[..., :width].contiguous()
        else:
            out = run()
        return out, self.outputs(out, place)

    def _run(self, seen: Seen | Call, place: Place, dropout: float) -> Tensor:
        if not isinstance(seen, Seen):
            return _fused.run_in_areas(seen)
        offset = place.offset if seen.offset is None else seen.offset
        return api.attention(*seen.tensors, **{**seen.keywords, "query_offset": offset}, dropout=dropout)

    def _tell(self, seen: Seen, place: Place) -> None:
        """What each key received, to the edits that go by it."""
        for edit in self.each(place):
            if edit.wants_mass:
                counted, told = edit.mass_of(place), seen
                with silence(), torch.no_grad():
                    if isinstance(counted, Tensor):  # other queries see nothing, and give no weight
                        told = seen._replace(mask=both(seen.mask, masks.keep(counted[:, None, :, None])), lse=None)
                        counted = None
                    want = Want(rows=False, map=None, top_k=0, distance=False, queries=counted)
                    edit.after(told.observe(want).key_mass, place)
            edit.saw(_fused.Pattern(seen), place)


def _own_heads(stack: list[Frame], count: int) -> int:
    """Keys that a module has repeated for its groups of heads have fewer of their own."""
    groups = attribute(stack[-1].module, "num_key_value_groups", 1)
    return count // groups if isinstance(groups, int) and groups > 0 and count % groups == 0 else count


def _out_of_reach() -> str:
    """Why a call cannot be edited where it runs."""
    if inside_transform():
        return "it runs inside a torch.func transform, where items are hidden"
    return (
        "gradient checkpointing runs it again in the backward pass, where an edit may be gone: switch it off "
        "(model.gradient_checkpointing_disable(), say)"
    )
