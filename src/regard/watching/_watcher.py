"""One watch: observes the calls it is shown, and has them written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.recording import Recorded, Recording, Site
from regard.watching._axes import Piece
from regard.watching._follower import Asked, Follower, in_backward, raises
from regard.watching._in_memory import InMemory
from regard.watching._layout import arranged, laid_out, rows_of_both, with_values
from regard.watching._modules import Frame
from regard.watching._output import Product
from regard.watching._projection import Projection, Waiting, known_projection, matrix_of, reads, version_of
from regard.watching._recorder import Recorder
from regard.watching._seen import Seen, Unseen
from regard.watching._silence import looking, silent
from regard.watching._tracked import Multiplied, Trace, Weights

_WHOLE = Site("", 0)


class Pending:
    """Attention that was written out, until it is known which of its axes are the heads."""

    def __init__(self, weights: Weights, rows: Sequence[Piece], stack: list[Frame], site: Site, number: int) -> None:
        self.weights, self.rows, self.stack, self.site, self.number = weights, rows, stack, site, number
        self.frame = stack[-1]  # at its end what is known must do: the module, or the one that it handed the output to
        self.version = version_of(weights.final)
        self.product: Multiplied | None = None


class Watcher(Follower):
    """A block of ``regard.watch``."""

    def __init__(self, model: nn.Module, recording: Recording, asked: Asked) -> None:
        super().__init__(model, recording, asked)
        self.recorder = Recorder(asked, self.places)
        self._pending: list[Pending] = []
        self._waiting: Waiting | None = None
        self._version: int | None = None  # of what the call that waits gave: something may write into it

    # Modules begin and end

    def _entered(self, frame: Frame) -> None:
        if self._waiting is not None:
            self._try_projection(self._waiting, frame)

    def _left(self, frame: Frame, out: Any) -> None:
        if self._pending and self._stack:
            self._hand_over(frame, out)
        super()._left(frame, out)

    def _hand_over(self, frame: Frame, out: Any) -> None:
        """A module that gives the output of attention as it is leaves it to the one around it to show the heads."""
        given = [self.tracker.of(x) for x in (out if isinstance(out, (tuple, list)) else (out,))]
        calls = [known.call for known in given if isinstance(known, Product)]
        for pending in self._pending:
            if pending.frame is frame and any(pending is call for call in calls):
                pending.frame = self._stack[-1]

    def _end_of(self, frame: Frame | None) -> None:
        for pending in [p for p in self._pending if frame is None or p.frame is frame]:
            self._settled(pending, self.tracker.trace_of(pending))
        super()._end_of(frame)

    def _all_ended(self) -> None:
        self._stop_waiting()
        with self._noting(_WHOLE):
            self.recorder.move(all_of_it=True)

    # Which calls they make

    def see(self, make: Callable[[], Seen | InMemory], out: Any = None) -> None:
        """Observe a call that has just run. Whatever goes wrong here is noted, and never reaches the model."""
        stack = [] if silent() or in_backward() else self._now()
        if not stack:
            return  # not the model's, or the recomputation of a call that was seen
        self._observe(make, stack, self._site(stack), self.passes - 1, out)

    def _miss_at(self, stack: list[Frame], site: Site, number: int, reason: str) -> None:
        self._observe(raises(reason), stack, site, number, None)

    def _attended(self, weights: Weights, rows: Sequence[Piece]) -> Pending | None:
        stack = [] if in_backward() else self._now()
        users = weights.softmax.users
        if not stack or any(frame is stack[-1] for frame in users):
            # values of another kind (relative positions, say) for weights that were seen
            for pending in self._pending if rows else ():
                if pending.weights.softmax is weights.softmax:
                    pending.rows = rows_of_both(pending.rows, rows)
            return None
        users.append(stack[-1])
        pending = Pending(weights, rows, list(stack), self._site(stack), self.passes - 1)
        if self.asked.want.value_mass:
            pending.product = self.tracker.product
        self._pending.append(pending)
        return pending

    def _settled(self, pending: Pending, trace: Trace) -> None:
        if pending not in self._pending:
            return
        self._pending.remove(pending)

        def make() -> InMemory:
            if pending.version is not None and pending.weights.final._version != pending.version:
                raise Unseen("its weights were overwritten after the product with values")
            known = pending.weights
            found = arranged(known, pending.rows, trace, self.heads_dim(pending.site.path), pending.stack)
            made, keys = laid_out(known, found), known.final.shape[-1]
            live = None if self.tracker.kept is None else self.tracker.kept.get(id(known.softmax.lse))
            if live is not None and (live.shape == known.final.shape or _begins_with(live, known.final)):
                made = made._replace(
                    live=live, arrange=lambda tensor: laid_out(known._replace(final=tensor[..., :keys]), found).weights
                )
            return made if pending.product is None else with_values(made, found, pending.product)

        self._observe(make, pending.stack, pending.site, pending.number, None)
        del pending.weights  # what follows the output must not keep the weights

    # What becomes of them

    def _observe(
        self, make: Callable[[], Seen | InMemory], stack: list[Frame], site: Site, number: int, out: Any
    ) -> None:
        layer = self._asked_layer(site)
        if layer is None:
            return
        self._stop_waiting()
        with self._noting(site):
            self._waiting = Waiting(make(), list(stack), site, layer, number, out)
        if not self.asked.want.value_mass:
            self._stop_waiting()
            return
        # the lengths of values are those behind the output projection: it runs next, and is waited for
        self._version = None if self._waiting is None else version_of(self._waiting.seen.result)
        known = known_projection(stack, site.path)
        if known is not None:
            self._stop_waiting(known)

    def _noting(self, site: Site) -> _Noting:
        return _Noting(self.recording.missed, site)

    def _try_projection(self, waiting: Waiting, frame: Frame) -> None:
        """A module with a matrix begins: it is the output projection if it was handed what the call gave."""
        weight = matrix_of(frame.module)
        if weight is None:
            return
        found = None
        with self._noting(waiting.site):
            if version_of(waiting.seen.result) == self._version and reads(waiting.seen, frame.args, weight):
                found = Projection(frame.path, weight)
        self._stop_waiting(found)

    def _stop_waiting(self, projection: Projection | None = None) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            call = None
            with self._noting(waiting.site):
                call = self._record(waiting, projection)
            if call is not None:
                self.recording.calls.append(call)
                with self._noting(waiting.site):
                    self.recorder.move(all_of_it=self.asked.on_call is not None or not self._stack)
                if self.asked.on_call is not None:
                    self.asked.on_call(call)

    def _record(self, call: Waiting, projection: Projection | None) -> Recorded | None:
        return self.recorder.record(call, projection)


class _Noting(looking):
    """Whatever goes wrong with looking is a note, and never reaches the model."""

    __slots__ = ("_missed", "_site")

    def __init__(self, missed: list[tuple[str, str]], site: Site) -> None:
        self._missed, self._site = missed, site

    def __exit__(self, *raised: Any) -> bool:
        super().__exit__(*raised)
        error = raised[1]
        if isinstance(error, Unseen):
            self._missed.append((str(self._site), str(error)))
        elif isinstance(error, Exception):
            first = (str(error).strip().splitlines() or ["no reason given"])[0][:200]
            self._missed.append((str(self._site), f"{type(error).__name__}: {first}"))
        return isinstance(error, Exception)


def _begins_with(whole: Tensor, part: Tensor) -> bool:
    """Whether a softmax's output is the weights, and after them what has no key: a sink, say, that was cut off."""
    if whole.shape[:-1] != part.shape[:-1] or whole.shape[-1] <= part.shape[-1]:
        return False
    return torch.equal(whole.detach()[..., : part.shape[-1]].to(part.dtype), part.detach())
