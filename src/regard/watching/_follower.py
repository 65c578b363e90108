"""Which modules of a model run: kept in step by their hooks, or by the interpreter's stack where no hook runs."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.recording import Recorded, Recording, Site
from regard.statistics import Want
from regard.watching._modules import (
    NEVER_ATTEND,
    STEPS_ASIDE,
    Frame,
    Hook,
    calls_itself,
    parameters,
    paths,
    plain_path,
    running,
    runs_as_torch_wrote_it,
    takes_no_hooks,
)
from regard.watching._placing import Places
from regard.watching._read import read_anew
from regard.watching._seen import Seen, Unseen
from regard.watching._written import Tracker

if TYPE_CHECKING:
    from types import FrameType

    from regard.watching._axes import Piece
    from regard.watching._in_memory import InMemory
    from regard.watching._tracked import Trace, Weights


_compiles = torch._C._dynamo.eval_frame.get_eval_frame_callback  # what compiles on this thread, or None


class Asked(NamedTuple):
    """What somebody asks of a block, as ``regard.watch`` names it."""

    layers: Sequence[int | str] | None = None
    heads: Sequence[int] | None = None
    want: Want = Want.none()
    keep_on_cpu: bool = True
    count_padding: bool = False
    memory_limit: int | None = None
    heads_dim: int | Mapping[str, int] | None = None
    tokenizer: Any = None
    on_call: Callable[[Recorded], None] | None = None


class Suspect(NamedTuple):
    """What may be attention, unless it is read by the time a module ends: the one that computed it, or the model."""

    what: object
    stack: list[Frame]
    until: Frame
    site: Site | None  # None where it is no place that attends unless this is attention
    number: int
    is_read: Callable[[], bool]
    reason: str


class Follower:
    """Everything that happens between entering and leaving a block, on the thread that entered it: what a watch and an
    edit have in common. Operators and regard's own calls are shown to it; it knows whose they are."""

    hears_in_silence = False  # an edit tries a product that nobody else is to see
    changes_calls = False  # whether it is an edit: those are asked before a call runs
    unseen: frozenset[type] = STEPS_ASIDE  # modules of which it is not shown the operators
    _waiting: Any = None  # a call, until it is known what reads its output

    def __init__(self, model: nn.Module, recording: Recording, asked: Asked) -> None:
        self.recording, self.asked = recording, asked
        self.layers = None if asked.layers is None else set(asked.layers)
        self.thread = threading.get_ident()
        self.tracker = Tracker(self._attended, self._settled, self._suspected, functools.partial(parameters, model))
        self.listening: Any = None  # the mode by which operators are shown to it
        self.away: nn.Module | None = None  # while this module runs, none is
        self.met = 0  # calls shown so far
        self.passes = 0
        self.places = Places()
        self.ids: list[Tensor] = []  # what a tokenizer is to read
        self._stack: list[Frame] = []
        self._turns: Counter[str] = Counter()
        self._numbers: dict[Site, int] = {}  # of the places that attend
        self._suspects: list[Suspect] = []
        self._elsewhere: set[int] = set()
        self._direct: list[tuple[FrameType, Frame]] = []
        self.modules = paths(model)
        self._by_identity = {id(module): (plain_path(name), module) for name, module in model.named_modules()}
        self._unhooked = {id(part) for module in model.modules() if takes_no_hooks(module) for part in module.modules()}
        self._without_hooks = {at: self._by_identity[at] for at in self._unhooked if at in self._by_identity}
        self._handles = [handle for path, module in self.modules.items() for handle in self._hook(path, module)]

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._end_of(None)
        self._all_ended()
        self.tracker.clear()
        self._stack.clear()
        self._direct.clear()

    # What is shown to it. ``_attended`` and ``_settled`` are called by the tracker, for attention that is written out

    def see(self, make: Callable[[], Seen | InMemory], out: Any = None) -> None:
        """A call has just run; ``make`` gives it, or raises ``Unseen``."""
        raise NotImplementedError

    def miss(self, reason: str) -> None:
        """A call of the model has run that cannot be observed."""
        self.see(raises(reason))

    def own_call(self, run: Callable[..., Any], program: Any, call: Any) -> Any:
        """A call of regard's own that is about to run; an edit changes it."""
        return run(program, call)

    def _attended(self, weights: Weights, rows: Sequence[Piece]) -> Any:
        raise NotImplementedError

    def _settled(self, call: Any, trace: Trace) -> None:
        raise NotImplementedError

    def _miss_at(self, stack: list[Frame], site: Site, number: int, reason: str) -> None:
        """A call cannot be read."""
        raise NotImplementedError

    def _suspected(
        self, what: object, is_read: Callable[[], bool], reason: str, *, in_all_of_the_pass: bool = False
    ) -> None:
        stack = [] if in_backward() else self._now()
        if stack and not any(one.what is what for one in self._suspects):
            until, site = (stack[0], None) if in_all_of_the_pass else (stack[-1], self._site(stack))
            self._suspects.append(Suspect(what, list(stack), until, site, self.passes - 1, is_read, reason))

    # Modules begin and end

    def _hook(self, path: str, module: nn.Module) -> list[Any]:
        if id(module) in self._unhooked:
            return []
        if path and type(module) in NEVER_ATTEND:
            return self._hook_aside(path, module) if type(module) in self.unseen else []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if threading.get_ident() != self.thread:
                self._ran_elsewhere(path)
                return
            if self.away is not None:  # an interrupt came while operators were not shown
                self._come_back()
            frame = Frame(path, module, args, kwargs)
            if not path and self._stack and not calls_itself(module):
                self._stack.clear()  # an interrupt left modules that never came to their end
            if not self._stack and not self._enclosed(module):
                self._begin(frame)
            self._stack.append(frame)
            self._entered(frame)

        def leave(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            if threading.get_ident() != self.thread:
                return
            while self._stack:
                frame = self._stack.pop()
                self._left(frame, out)
                if frame.module is module:
                    break
            if not self._stack:
                self._all_ended()
            if not self._stack and not self._enclosed(module):
                self._end_of(None)
                self._pass_ended(out)
                self.tracker.clear()
                self._direct.clear()

        return _hooks(module, enter, leave)

    def _hook_aside(self, path: str, module: nn.Module) -> list[Any]:
        """A module of torch's that never attends: to show what it runs would take longer than to run it."""

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if threading.get_ident() != self.thread or not self._stack:
                return
            if self._waiting is not None:
                self._entered(Frame(path, module, args, kwargs))
            if self.away is not None:
                self._come_back()
            if not self.tracker.known and runs_as_torch_wrote_it(module):
                self._step_aside(module)

        def leave(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            if module is self.away and threading.get_ident() == self.thread:
                self._come_back()

        return _hooks(module, enter, leave)

    def _step_aside(self, module: nn.Module) -> None:
        """Leave the stack of those who are shown operators, if nobody else came later. Below a function that is to be
        compiled it stays: without a mode on the stack, torch would compile what runs here."""
        if _compiles() is not None:
            return
        depth = torch._C._len_torch_dispatch_stack()
        if depth and torch._C._get_dispatch_stack_at(depth - 1) is self.listening:
            self.away = module
            torch._C._pop_torch_dispatch_stack(None)

    def _come_back(self) -> None:
        self.away = None
        torch._C._push_on_torch_dispatch_stack(self.listening)

    def _entered(self, frame: Frame) -> None:
        """A module has begun."""

    def _left(self, frame: Frame, out: Any) -> None:
        self._end_of(frame)

    def _all_ended(self) -> None:
        """No module is under way any more."""

    def _pass_ended(self, out: Any) -> None:
        """The model, or a part of it that was called by itself, has given its output, or None where it failed."""

    def _end_of(self, frame: Frame | None) -> None:
        """What is still open of a module's call, or of all, is settled with what is known."""
        if not self._suspects:
            return
        ended = [one for one in self._suspects if frame is None or one.until is frame]
        self._suspects = [one for one in self._suspects if not (frame is None or one.until is frame)]
        for one in {id(one.stack[-1]): one for one in ended if not one.is_read()}.values():
            self._miss_at(one.stack, one.site or self._site(one.stack), one.number, one.reason)

    def _ran_elsewhere(self, path: str) -> None:
        thread = threading.get_ident()
        if thread not in self._elsewhere:
            self._elsewhere.add(thread)
            reason = "it ran on another thread: a watch sees the thread that opened it"
            self.recording.missed.append((str(Site(path, 0)), reason))

    def _begin(self, frame: Frame) -> None:
        """A forward pass: the model, or a part of it that is called by itself."""
        if in_backward():
            return
        self.passes += 1
        read_anew()
        self._turns.clear()
        self.tracker.begin_pass()
        self.places.decoding = False
        ids = frame.given().get("input_ids") if self.asked.tokenizer is not None else None
        if isinstance(ids, Tensor) and ids.dim() == 2:
            self.ids.append(ids.detach().cpu())

    def take_tokens(self) -> None:
        """Tokens from the ids that the model was given: of the first pass, and of the steps that continue it."""
        if not self.ids:
            return
        ids = [self.ids[0], *(more for more in self.ids[1:] if more.shape[1] == 1 and len(more) == len(self.ids[0]))]
        self.recording.tokens_from(self.asked.tokenizer, torch.cat(ids, 1))

    # Where a call is

    @property
    def entered(self) -> bool:
        """Whether a module of the model has begun and not ended, by its hooks."""
        return bool(self._stack)

    def inside(self) -> bool:
        """Whether what runs now belongs to the model."""
        return bool(self._stack) or bool(running(self._by_identity))

    def _now(self) -> list[Frame]:
        """The modules under way, outermost first. Where no hook ran, the interpreter's stack says whose code does."""
        if self._stack and not self._unhooked:
            return self._stack
        found = running(self._without_hooks if self._stack else self._by_identity)
        if not found:
            return self._stack
        self._adopt(found)
        return self._stack + [frame for _, frame in self._direct]

    def _adopt(self, found: list[tuple[FrameType, Frame]]) -> None:
        known = {id(code): frame for code, frame in self._direct}
        if not self._stack and (not self._direct or self._direct[0][0] is not found[0][0]):
            self._begin(found[0][1])
        self._direct = [(code, known.get(id(code), frame)) for code, frame in found]

    def _enclosed(self, module: nn.Module) -> bool:
        """Whether a module runs inside another whose ``forward`` was called without hooks."""
        outer = [(code, frame) for code, frame in running(self._by_identity) if frame.module is not module]
        if outer:
            self._adopt(outer)
        return bool(outer)

    def _site(self, stack: list[Frame]) -> Site:
        """The place that attends: one for each call of a module, however many calls of attention that makes."""
        self.met += 1
        frame = stack[-1]
        path = frame.path
        if (
            isinstance(frame.module, nn.TransformerEncoderLayer)
            and getattr(frame.module, "self_attn", None) is not None
        ):
            path = f"{path}.self_attn" if path else "self_attn"
        if frame.turn is None:
            frame.turn = self._turns[path]
            self._turns[path] += 1
        site = Site(path, frame.turn)
        if site not in self._numbers:
            self._numbers[site] = len(self._numbers)
            self.recording.sites.append(site)
        return site

    def _asked_layer(self, site: Site) -> int | None:
        """The number of a place that attends; None where it is not of a layer that was asked for."""
        layer = self._numbers[site]
        return layer if self.layers is None or self.layers & {layer, site.path, str(site)} else None

    def heads_dim(self, path: str) -> int | None:
        given = self.asked.heads_dim
        return given.get(path) if isinstance(given, Mapping) else given


def _hooks(module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> list[Any]:
    return [
        module.register_forward_pre_hook(Hook(enter), with_kwargs=True, prepend=True),
        module.register_forward_hook(Hook(leave), always_call=True),
    ]


def raises(reason: str) -> Callable[[], Seen]:
    def make() -> Seen:
        raise Unseen(reason)

    return make


def in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
