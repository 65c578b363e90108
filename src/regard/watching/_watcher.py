"""One watch: follows the modules that run, observes the calls it is shown, and writes them down."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.recording import Recorded, Recording, Site
from regard.statistics import Want
from regard.watching._axes import Piece
from regard.watching._caches import tokens_held
from regard.watching._in_memory import InMemory
from regard.watching._layout import arranged, laid_out, with_values
from regard.watching._modules import (
    Frame,
    Hook,
    calls_itself,
    has_cache,
    inside_transform,
    is_cross,
    paths,
    plain_path,
    running,
    takes_no_hooks,
)
from regard.watching._padding import real_queries
from regard.watching._projection import (
    Projection,
    Waiting,
    known_projection,
    matrix_of,
    reads,
    version_of,
)
from regard.watching._seen import Seen, Unseen, check_same
from regard.watching._silence import silence, silent
from regard.watching._tokens import Tokens, reads_text
from regard.watching._tracked import Multiplied, Product, Trace, Weights
from regard.watching._written import Tracker

if TYPE_CHECKING:
    from types import FrameType


class Pending:
    """Attention that was written out, until it is known which of its axes are the heads."""

    def __init__(self, weights: Weights, rows: Sequence[Piece], stack: list[Frame], site: Site, number: int) -> None:
        self.weights, self.rows, self.stack, self.site, self.number = weights, rows, stack, site, number
        self.frame = stack[-1]  # at its end what is known must do: the module, or the one that it handed the output to
        self.version = None if weights.final.is_inference() else weights.final._version
        self.product: Multiplied | None = None


class Suspect(NamedTuple):
    """What may be attention, unless it is read by the time its module ends."""

    what: object
    stack: list[Frame]
    site: Site
    number: int
    is_read: Callable[[], bool]
    reason: str


class Watcher:
    """Everything that happens between entering and leaving the block, on the thread that entered it."""

    hears_in_silence = False  # an edit tries a product that nobody else is to see
    changes_calls = False  # whether it is an edit: those are asked before a call runs

    def __init__(
        self,
        model: nn.Module,
        recording: Recording,
        *,
        layers: Sequence[int | str] | None,
        heads: Sequence[int] | None,
        want: Want,
        keep_on_cpu: bool,
        count_padding: bool,
        memory_limit: int | None,
        heads_dim: int | Mapping[str, int] | None,
        tokenizer: Any,
        on_call: Callable[[Recorded], None] | None,
    ) -> None:
        self.recording, self.want = recording, want
        self.layers = None if layers is None else set(layers)
        self.heads = None if heads is None else list(heads)
        self.keep_on_cpu, self.memory_limit = keep_on_cpu, memory_limit
        self.count_padding, self.heads_dim = count_padding, heads_dim
        self.tokenizer, self.on_call = tokenizer, on_call
        self.thread = threading.get_ident()
        self.tracker = Tracker(self._attended, self._settled, self._suspected, model.parameters())
        self.met = 0  # calls shown so far
        self.passes = 0
        self.most_heads = 0
        self._stack: list[Frame] = []
        self._turns: Counter[str] = Counter()
        self._pending: list[Pending] = []
        self._suspects: list[Suspect] = []
        self._read: dict[str, int] = {}  # by module: tokens that its keys have come to
        self._decoding = False
        self._waiting: Waiting | None = None
        self._version: int | None = None  # of what the call that waits gave: something may write into it
        self._tokens = Tokens()
        self._elsewhere: set[int] = set()
        self._direct: list[tuple[FrameType, Frame]] = []
        self._ids: list[Tensor] = []
        self._bytes = 0
        self.modules = paths(model)
        self._by_identity = {id(module): (plain_path(name), module) for name, module in model.named_modules()}
        self._unhooked = {id(part) for module in model.modules() if takes_no_hooks(module) for part in module.modules()}
        self._without_hooks = {at: self._by_identity[at] for at in self._unhooked if at in self._by_identity}
        self._handles = [handle for path, module in self.modules.items() for handle in self._hook(path, module)]

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._end_of(None)
        self._stop_waiting()
        self.tracker.clear()
        self._stack.clear()
        self._direct.clear()

    # Which modules run

    def _hook(self, path: str, module: nn.Module) -> list[Any]:
        if id(module) in self._unhooked:
            return []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if threading.get_ident() != self.thread:
                self._ran_elsewhere(path)
                return
            frame = Frame(path, module, args, kwargs)
            if not path and self._stack and not calls_itself(module):
                self._stack.clear()  # an interrupt left modules that never came to their end
            if not self._stack and not self._enclosed(module):
                self._begin(frame)
            self._stack.append(frame)
            if self._waiting is not None:
                self._try_projection(path, module, args)

        def leave(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            if threading.get_ident() != self.thread:
                return
            while self._stack:
                frame = self._stack.pop()
                self._hand_over(frame, out)
                self._end_of(frame)
                if frame.module is module:
                    break
            if not self._stack:
                self._stop_waiting()
            if not self._stack and not self._enclosed(module):
                self._end_of(None)
                self.tracker.clear()
                self._direct.clear()

        return [
            module.register_forward_pre_hook(Hook(enter), with_kwargs=True, prepend=True),
            module.register_forward_hook(Hook(leave), always_call=True),
        ]

    def _hand_over(self, frame: Frame, out: Any) -> None:
        """A module that gives the output of attention as it is leaves it to the one around it to show the heads."""
        if not self._pending or not self._stack:
            return
        given = [self.tracker.of(x) for x in (out if isinstance(out, (tuple, list)) else (out,))]
        calls = [known.call for known in given if isinstance(known, Product)]
        for pending in self._pending:
            if pending.frame is frame and any(pending is call for call in calls):
                pending.frame = self._stack[-1]

    def _end_of(self, frame: Frame | None) -> None:
        """What is still open of a module's call, or of all, is settled with what is known."""
        for pending in [p for p in self._pending if frame is None or p.frame is frame]:
            self._settled(pending, self.tracker.trace_of(pending))
        ended = [one for one in self._suspects if frame is None or one.stack[-1] is frame]
        self._suspects = [one for one in self._suspects if one not in ended]
        for one in {id(one.stack[-1]): one for one in ended if not one.is_read()}.values():
            self._miss_at(one.stack, one.site, one.number, one.reason)

    def _ran_elsewhere(self, path: str) -> None:
        thread = threading.get_ident()
        if thread not in self._elsewhere:
            self._elsewhere.add(thread)
            reason = "it ran on another thread: a watch sees the thread that opened it"
            self.recording.missed.append((str(Site(path, 0)), reason))

    def _begin(self, frame: Frame) -> None:
        """A forward pass: the model, or a part of it that is called by itself."""
        if _in_backward():
            return
        self.passes += 1
        self._turns.clear()
        self._decoding = False
        ids = frame.given().get("input_ids") if self.tokenizer is not None else None
        if isinstance(ids, Tensor) and ids.dim() == 2:
            self._ids.append(ids.detach().cpu())

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

    def take_tokens(self) -> None:
        """Tokens from the ids that the model was given: of the first pass, and of the steps that continue it."""
        if not self._ids:
            return
        ids = [self._ids[0], *(more for more in self._ids[1:] if more.shape[1] == 1 and len(more) == len(self._ids[0]))]
        self.recording.tokens_from(self.tokenizer, torch.cat(ids, 1))

    # Which calls they make

    def see(self, make: Callable[[], Seen | InMemory], out: Any = None) -> None:
        """Observe a call that has just run. Whatever goes wrong here is noted, and never reaches the model."""
        stack = [] if silent() or _in_backward() else self._now()
        if not stack:
            return  # not the model's, or the recomputation of a call that was seen
        self._observe(make, stack, self._site(stack), self.passes - 1, out)

    def miss(self, reason: str) -> None:
        """Note a call of the model that cannot be observed."""
        self.see(_raises(reason))

    def _miss_at(self, stack: list[Frame], site: Site, number: int, reason: str) -> None:
        self._observe(_raises(reason), stack, site, number, None)

    def _suspected(self, what: object, is_read: Callable[[], bool], reason: str) -> None:
        stack = [] if _in_backward() else self._now()
        if stack and not any(one.what is what for one in self._suspects):
            self._suspects.append(Suspect(what, list(stack), self._site(stack), self.passes - 1, is_read, reason))

    def _attended(self, weights: Weights, rows: Sequence[Piece]) -> Pending | None:
        stack = [] if _in_backward() else self._now()
        users = weights.softmax.users
        if not stack or any(frame is stack[-1] for frame in users):
            return None  # values of another kind (relative positions, say) for weights that were seen
        users.append(stack[-1])
        pending = Pending(weights, rows, list(stack), self._site(stack), self.passes - 1)
        if self.want.value_mass:
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
            found = arranged(known, pending.rows, trace, self._given_dim(pending.site.path), pending.stack)
            made, keys = laid_out(known, found), known.final.shape[-1]
            live = None if self.tracker.kept is None else self.tracker.kept.get(id(known.softmax.lse))
            if live is not None and (live.shape == known.final.shape or _begins_with(live, known.final)):
                made = made._replace(
                    live=live, arrange=lambda tensor: laid_out(known._replace(final=tensor[..., :keys]), found).weights
                )
            return made if pending.product is None else with_values(made, found, pending.product)

        self._observe(make, pending.stack, pending.site, pending.number, None)
        del pending.weights  # what follows the output must not keep the weights

    def _given_dim(self, path: str) -> int | None:
        if isinstance(self.heads_dim, Mapping):
            return self.heads_dim.get(path)
        return self.heads_dim

    def _site(self, stack: list[Frame]) -> Site:
        """The place that attends: one for each call of a module, however many calls of attention that makes."""
        self.met += 1
        frame = stack[-1]
        path = frame.path
        inner = getattr(frame.module, "self_attn", None)
        if isinstance(frame.module, nn.TransformerEncoderLayer) and inner is not None:
            path = f"{path}.self_attn" if path else "self_attn"
        if frame.turn is None:
            frame.turn = self._turns[path]
            self._turns[path] += 1
        site = Site(path, frame.turn)
        if site not in self.recording.sites:
            self.recording.sites.append(site)
        return site

    def own_call(self, run: Callable[..., Any], program: Any, call: Any) -> Any:
        """A call of regard's own that is about to run; an edit changes it."""
        return run(program, call)

    # What is written down

    def _observe(
        self, make: Callable[[], Seen | InMemory], stack: list[Frame], site: Site, number: int, out: Any
    ) -> None:
        layer = self.recording.sites.index(site)
        if self.layers is not None and not self.layers & {layer, site.path, str(site)}:
            return
        self._stop_waiting()
        with self._noting(site):
            self._waiting = Waiting(make(), list(stack), site, layer, number, out)
        if not self.want.value_mass:
            self._stop_waiting()
            return
        # the lengths of values are those behind the output projection: it runs next, and is waited for
        self._version = None if self._waiting is None else version_of(self._waiting.seen.result)
        known = known_projection(stack, site.path)
        if known is not None:
            self._stop_waiting(known)

    @contextlib.contextmanager
    def _noting(self, site: Site) -> Iterator[None]:
        """Whatever goes wrong with looking is a note, and never reaches the model."""
        try:
            with silence(), torch.inference_mode(False), torch.no_grad():
                yield
        except Unseen as reason:
            self.recording.missed.append((str(site), str(reason)))
        except Exception as error:
            self.recording.missed.append((str(site), f"{type(error).__name__}: {_short(error)}"))

    def _keep(self, call: Recorded) -> None:
        self._bytes += call.bytes
        self.recording.calls.append(call)
        if self.on_call is not None:
            self.on_call(call)

    def _try_projection(self, path: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module with a matrix begins: it is the output projection if it was handed what the call gave."""
        weight = matrix_of(module)
        if weight is None or self._waiting is None:
            return
        found = None
        with self._noting(self._waiting.site):
            result = self._waiting.seen.result
            if version_of(result) == self._version and reads(self._waiting.seen, args, weight):
                found = Projection(path, weight)
        self._stop_waiting(found)

    def _stop_waiting(self, projection: Projection | None = None) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            call = None
            with self._noting(waiting.site):
                call = self._record(*waiting, projection)
            if call is not None:
                self._keep(call)

    def _ready(
        self, seen: Seen | InMemory, stack: list[Frame], site: Site
    ) -> tuple[Seen | InMemory, tuple[str, str, int]]:
        """The call with its place and without queries that are padding; its kind, its phase, and its first key."""
        if inside_transform():
            raise Unseen("inside a torch.func transform")
        if seen.device.type == "meta":
            raise Unseen("on the meta device there are no values")
        batch, count, queries, keys = seen.shape
        if not batch * count * queries * keys:
            raise Unseen("it has no queries, keys or items")
        self._check_memory(seen)
        kind = "cross" if is_cross(stack, queries, keys) else "self"
        seen, phase, start = self._placed(seen, kind, site, stack)
        if not self.count_padding:
            real = real_queries(seen, stack, kind)
            seen = seen if real is None else seen.without(real)
        return seen, (kind, phase, start)

    def _record(
        self,
        seen: Seen | InMemory,
        stack: list[Frame],
        site: Site,
        layer: int,
        number: int,
        out: Any,
        projection: Projection | None,
    ) -> Recorded:
        seen, what = self._ready(seen, stack, site)
        count = seen.shape[1]
        want = self.want
        if want.scores is not False:
            known = want.scores if isinstance(want.scores, Tensor) else self._tokens.of(seen, stack, site, what)
            want = want.but(scores=False if what[0] == "cross" else known)
        lengths = None
        if want.value_mass:
            lengths = seen.lengths(None if projection is None else projection.weight)
        self.most_heads = max(self.most_heads, count)
        heads = list(range(count)) if self.heads is None else self.heads
        if any(not -count <= head < count for head in heads):
            raise Unseen(f"it has {count} heads, and heads={heads} were asked for")
        heads = [head % count for head in heads]
        kept = list(range(len(heads)))
        if self.heads is not None and seen.can_take_heads():
            seen = seen.only(heads)
            lengths = None if lengths is None else lengths[:, heads]
        else:
            kept = heads
        permitted = seen.permitted()
        parts = seen.statistics(want, permitted, lengths)
        if out is not None and isinstance(seen, Seen):
            check_same(seen, out, heads if kept != heads else None)
        call = self._written(seen, parts, permitted, kept, tuple(heads), site, layer, number, what)
        call.projection = None if projection is None or lengths is None else projection.path
        call.of_text = reads_text(stack)
        return call

    def _check_memory(self, seen: Seen | InMemory) -> None:
        if self.memory_limit is None:
            return
        if self._bytes >= self.memory_limit:
            raise Unseen(f"the memory limit of {self.memory_limit} bytes was reached")
        if self.want.weights is not None:
            batch, heads, queries, keys = seen.shape
            spans = zip(self.want.weights, (queries, keys), strict=True)
            sizes = [len(range(size)[span]) for span, size in spans]
            more = 4 * batch * (heads if self.heads is None else len(self.heads)) * sizes[0] * sizes[1]
            if self._bytes + more > self.memory_limit:
                raise Unseen(f"its weights take {more} bytes, past the memory limit of {self.memory_limit}")

    def _written(
        self,
        seen: Seen | InMemory,
        parts: dict[str, Tensor],
        permitted: Tensor,
        kept: list[int],
        heads: tuple[int, ...],
        site: Site,
        layer: int,
        number: int,
        what: tuple[str, str, int],
    ) -> Recorded:
        if kept != list(range(parts["lse"].shape[1])):
            parts = {name: part[:, kept] for name, part in parts.items()}
        for where in {"top_keys", "value_top_keys"} & set(parts):
            parts[where] = parts[where].to(torch.int32)
        if permitted.shape[1] > 1 and permitted.shape[1] != len(heads):
            permitted = permitted[:, kept]
        offset = seen.keys - seen.queries if seen.offset is None else seen.offset
        positions = offset.to(torch.int64) if isinstance(offset, Tensor) else torch.tensor([offset])
        kind, phase, start = what
        return Recorded(
            site=site,
            layer=layer,
            number=number,
            kind=kind,
            phase=phase,
            keys=seen.keys,
            heads=heads,
            positions=positions.cpu(),
            permitted=permitted.cpu(),
            parts={name: (part.cpu() if self.keep_on_cpu else part).contiguous() for name, part in parts.items()},
            written_out=seen.written_out,
            first_key=start,
        )

    def _placed(
        self, seen: Seen | InMemory, kind: str, site: Site, stack: list[Frame]
    ) -> tuple[Seen | InMemory, str, int]:
        """The call with the place of its queries among its keys, its phase, and the token that its first key is.

        A call that has more keys than queries and continues a sequence has a cache. Its queries stand at the end of the
        keys that the last one may see: a cache that is allocated whole has unused keys after them. A cache that keeps
        only the last keys has dropped as many as its queries are further on than its keys go.
        """
        if kind == "cross":
            # queries are another text's: only a mask that counts from somewhere says where they stand among the keys
            offset = seen.offset if seen.placed and not seen.placeless else 0
            return seen._replace(offset=offset), "decode" if self._decoding else "prefill", 0
        longer, before = seen.queries < seen.keys, self._read.get(site.path)
        total = tokens_held(stack, seen.queries, seen.keys) if longer else None
        if total is not None:  # the cache counts its tokens
            reached = min(total, seen.keys)
            if not seen.placed or seen.placeless:
                seen = seen._replace(offset=reached - seen.queries)
            self._decoding, self._read[site.path] = total > seen.queries, total
            return seen, "decode" if self._decoding else "prefill", total - reached
        decode = longer and (has_cache(stack) or (before is not None and before + seen.queries == seen.keys))
        self._decoding = decode
        end: Tensor | int = seen.keys
        if longer and not seen.placed:
            last = seen.last_key()
            if last is not None:
                end = last + 1
                seen = seen._replace(offset=(last - seen.queries + 1).clamp_min(0))
        if not decode:
            self._read[site.path] = seen.keys
            return seen, "prefill", 0
        reached = int(end.max()) if isinstance(end, Tensor) else end
        if before is None or seen.placed:
            self._read[site.path] = reached
            return seen, "decode", 0
        self._read[site.path] = before + seen.queries
        return seen, "decode", max(0, before + seen.queries - reached)


def _raises(reason: str) -> Callable[[], Seen]:
    def make() -> Seen:
        raise Unseen(reason)

    return make


def _short(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0][:200]


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _begins_with(whole: Tensor, part: Tensor) -> bool:
    """Whether a softmax's output is the weights, and after them what has no key: a sink, say, that was cut off."""
    if whole.shape[:-1] != part.shape[:-1] or whole.shape[-1] <= part.shape[-1]:
        return False
    return torch.equal(whole.detach()[..., : part.shape[-1]].to(part.dtype), part.detach())
