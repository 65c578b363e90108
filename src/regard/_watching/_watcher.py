"""One watch: follows the modules that run, observes the calls it is shown, and writes them down."""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard._watching._modules import Frame, paths
from regard._watching._padding import without_padding
from regard._watching._seen import Seen, Unseen
from regard._watching._silence import silence, silent
from regard.recording import Recorded, Recording, Site

if TYPE_CHECKING:
    from regard.observation import Observation
    from regard.statistics import Want

_transforms = torch._C._functorch.peek_interpreter_stack


class Watcher:
    """Everything that happens between entering and leaving the block, on the thread that entered it."""

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
        tokenizer: Any,
        on_call: Callable[[Recorded], None] | None,
    ) -> None:
        self.recording, self.want = recording, want
        self.layers = None if layers is None else set(layers)
        self.heads = None if heads is None else list(heads)
        self.keep_on_cpu, self.memory_limit = keep_on_cpu, memory_limit
        self.count_padding = count_padding
        self.tokenizer, self.on_call = tokenizer, on_call
        self.thread = threading.get_ident()
        self.met = 0  # calls shown so far
        self.passes = 0
        self.suspects: list[str] = []  # paths of modules that take a softmax by themselves
        self._stack: list[Frame] = []
        self._turns: Counter[str] = Counter()
        self._decoding = False
        self._ids: list[Tensor] = []
        self._bytes = 0
        self._handles = [handle for path, module in paths(model).items() for handle in self._hook(path, module)]

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._stack.clear()

    def _hook(self, path: str, module: nn.Module) -> list[Any]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if threading.get_ident() != self.thread:
                return
            frame = Frame(path, module, args, kwargs)
            if not path and self._stack and not _calls_itself(module):
                self._stack.clear()  # an interrupt left modules that never came to their end
            if not self._stack:
                self._begin(frame)
            self._stack.append(frame)

        def leave(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            if threading.get_ident() == self.thread:
                while self._stack and self._stack.pop().module is not module:
                    pass

        return [
            module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        ]

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

    def take_tokens(self) -> None:
        """Tokens from the ids that the model was given: of the first pass, and of the steps that continue it."""
        if not self._ids:
            return
        ids = [self._ids[0], *(more for more in self._ids[1:] if more.shape[1] == 1 and len(more) == len(self._ids[0]))]
        self.recording.tokens_from(self.tokenizer, torch.cat(ids, 1))

    def suspect(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a softmax over the last of four dims, as attention written out with matrix products has one."""
        given = args[0] if args else kwargs.get("input")
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if silent() or not self._stack or not isinstance(given, Tensor) or given.dim() != 4 or dim not in (-1, 3):
            return
        if self._stack[-1].path not in self.suspects:
            self.suspects.append(self._stack[-1].path)

    def report(self) -> None:
        """List the modules that seem to attend in a way which cannot be seen."""
        for path in self.suspects:
            self.recording.missed.append(
                (str(Site(path, 0)), "a softmax of its own over 4 dims, which may be attention")
            )

    def see(self, make: Callable[[], Seen], out: Any = None) -> None:
        """Observe a call that has just run. Whatever goes wrong here is noted, and never reaches the model."""
        if silent() or not self._stack or _in_backward():
            return  # not the model's, or the recomputation of a call that was seen
        self.met += 1
        frame = self._stack[-1]
        site = Site(frame.path, self._turns[frame.path])
        self._turns[frame.path] += 1
        if site not in self.recording.sites:
            self.recording.sites.append(site)
        layer = self.recording.sites.index(site)
        if self.layers is not None and not self.layers & {layer, frame.path, str(site)}:
            return
        try:
            with silence(), torch.inference_mode(False), torch.no_grad():
                call = self._record(make(), frame, site, layer, out)
        except Unseen as reason:
            self.recording.missed.append((str(site), str(reason)))
        except Exception as error:
            self.recording.missed.append((str(site), f"{type(error).__name__}: {_short(error)}"))
        else:
            self._bytes += call.bytes
            self.recording.calls.append(call)
            if self.on_call is not None:
                self.on_call(call)

    def _record(self, seen: Seen, frame: Frame, site: Site, layer: int, out: Any) -> Recorded:
        if _transforms() is not None:
            raise Unseen("inside a torch.func transform")
        if seen.query.is_meta:
            raise Unseen("on the meta device there are no values")
        if not seen.query.numel() or not seen.key.numel():
            raise Unseen("it has no queries, keys or items")
        if self.memory_limit is not None and self._bytes >= self.memory_limit:
            raise Unseen(f"the memory limit of {self.memory_limit} bytes was reached")
        kind = "cross" if frame.is_cross(seen.keys) else "self"
        seen, phase = self._placed(seen, kind, site)
        if not self.count_padding:
            seen = without_padding(seen, self._stack, kind)
        heads = list(range(seen.query.shape[1])) if self.heads is None else self.heads
        if any(not -seen.query.shape[1] <= head < seen.query.shape[1] for head in heads):
            raise Unseen(f"it has {seen.query.shape[1]} heads, and heads={heads} were asked for")
        heads = [head % seen.query.shape[1] for head in heads]
        if self.heads is not None and (seen.mask is None or seen.mask.heads == 1):
            seen, kept = seen.only(heads), list(range(len(heads)))
        else:
            kept = heads
        found = seen.observe(self.want)
        if out is not None:
            _check_same(found, out, heads if self.heads is not None and kept != heads else None, seen)
        return self._written(seen, found, kept, tuple(heads), site, layer, kind, phase)

    def _written(
        self,
        seen: Seen,
        found: Observation,
        kept: list[int],
        heads: tuple[int, ...],
        site: Site,
        layer: int,
        kind: str,
        phase: str,
    ) -> Recorded:
        parts = {"lse": found.lse, **{name: part for name, part in vars(found).items() if name in _STATISTICS}}
        if kept != list(range(found.lse.shape[1])):
            parts = {name: part[:, kept] for name, part in parts.items()}
        if "top_keys" in parts:
            parts["top_keys"] = parts["top_keys"].to(torch.int32)
        permitted = seen.permitted()
        if permitted.shape[1] > 1 and permitted.shape[1] != len(heads):
            permitted = permitted[:, kept]
        offset = seen.keys - seen.queries if seen.offset is None else seen.offset
        positions = offset.to(torch.int64) if isinstance(offset, Tensor) else torch.tensor([offset])
        return Recorded(
            site=site,
            layer=layer,
            number=self.passes - 1,
            kind=kind,
            phase=phase,
            keys=seen.keys,
            heads=heads,
            positions=positions.cpu(),
            permitted=permitted.cpu(),
            parts={name: (part.cpu() if self.keep_on_cpu else part).contiguous() for name, part in parts.items()},
        )

    def _placed(self, seen: Seen, kind: str, site: Site) -> tuple[Seen, str]:
        """The call with the place of its queries among its keys, and its phase.

        A call that has more keys than queries continues a sequence. Its queries stand at the end of the keys that the
        last one may see: a cache that is allocated whole has unused keys after them.
        """
        if kind == "cross":
            offset = seen.offset if seen.placed else 0
            return seen._replace(offset=offset), "decode" if self._decoding else "prefill"
        longer = seen.queries < seen.keys
        again = any(call.site == site for call in reversed(self.recording.calls[-2 * len(self.recording.sites) :]))
        decode = longer and (seen.queries == 1 or again)
        self._decoding = decode
        if longer and not seen.placed:
            last = seen.last_key()
            if last is not None:
                seen = seen._replace(offset=(last - seen.queries + 1).clamp_min(0))
        return seen, "decode" if decode else "prefill"


_STATISTICS = frozenset(
    ("entropy", "max_weight", "key_mass", "map", "top_keys", "top_weights", "distance", "first_mass", "weights")
)


def _calls_itself(module: nn.Module) -> bool:
    """Whether a call of the module runs inside another of its own."""
    calls, frame = 0, inspect.currentframe()
    while frame is not None:
        calls += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls > 1


def _short(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0][:200]


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _check_same(found: Observation, out: Any, heads: list[int] | None, seen: Seen) -> None:
    """A model's own function may do more than its arguments say (ALiBi inside, say). Then its output is another one,
    and the statistics would be wrong."""
    theirs = (out[0] if isinstance(out, tuple) else out).detach()  # [batch, token, head, dim]
    ours = found.out.transpose(1, 2)
    if theirs.dim() == 3:
        theirs = theirs.unflatten(-1, (-1, ours.shape[-1]))
    if theirs.shape[2] != ours.shape[2] and heads is not None:
        theirs = theirs[:, :, heads]
    if theirs.shape != ours.shape:
        raise Unseen(f"its attention function gave {list(theirs.shape)} where {list(ours.shape)} was expected")
    apart = (theirs - ours).abs().masked_fill((found.lse == -torch.inf).transpose(1, 2).unsqueeze(-1), 0.0)
    allowed = (1e-4 if ours.dtype in (torch.float32, torch.float64) else 3e-2) * (seen.value.abs().amax() + 1e-6)
    if not bool((apart <= allowed).all()):
        raise Unseen("its attention function does more than its arguments say")
