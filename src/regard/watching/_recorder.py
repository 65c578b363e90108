"""What is written down of a call: the statistics that were asked for, of the heads that were asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.recording import Recorded, Site
from regard.watching._chunks import Chunks
from regard.watching._follower import Asked
from regard.watching._in_memory import InMemory
from regard.watching._index import index_of
from regard.watching._modules import Frame, inside_transform, is_cross
from regard.watching._padding import real_queries
from regard.watching._placing import Places
from regard.watching._projection import Projection, Waiting
from regard.watching._seen import Seen, Unseen, check_same
from regard.watching._tokens import Tokens, reads_text

# bytes of statistics that may wait on a device
_MOST_TO_MOVE = 1 << 26


class Recorder:
    """The calls of one watch, as they come."""

    def __init__(self, asked: Asked, places: Places) -> None:
        self.asked, self.places = asked, places
        self.heads = None if asked.heads is None else list(asked.heads)
        self.most_heads = 0
        self.bytes = 0  # of all that was written
        self._tokens = Tokens()
        self._chunks = Chunks()
        self._to_move: list[Recorded] = []  # to the CPU
        self._bytes_to_move = 0

    def ready(
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
        if queries == keys and self.places.at_whole_texts(seen, keys, site, stack):
            return seen, ("self", "prefill", 0)
        kind = "cross" if is_cross(stack, queries, keys) else "self"
        seen, phase, start = self.places.placed(seen, kind, site, stack)
        if not self.asked.count_padding:
            real = real_queries(seen, stack, kind)
            seen = seen if real is None else seen.without(real)
        return seen, (kind, phase, start)

    def record(self, call: Waiting, projection: Projection | None) -> Recorded:
        seen, what = self.ready(call.seen, call.stack, call.site)
        count, chunk = seen.shape[1], self._chunks.start(seen, what, call.stack)
        want = self.asked.want
        if want.scores is not False:
            known = want.scores
            known = known if isinstance(known, Tensor) else self._tokens.of(seen, call.stack, call.site, what)
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
            lengths = None if lengths is None else lengths[:, index_of(tuple(heads), lengths.device)]
        else:
            kept = heads
        permitted = seen.permitted()
        parts = seen.statistics(want, permitted, lengths)
        others = {} if chunk is None else self._chunks.parts(seen, chunk, want, permitted)
        if call.out is not None and isinstance(seen, Seen):
            check_same(seen, call.out, heads if kept != heads else None)
        if kept != list(range(parts["lse"].shape[1])):
            at = index_of(tuple(kept), parts["lse"].device)
            parts, others = ({name: part[:, at].clone() for name, part in some.items()} for some in (parts, others))
        for where in {"top_keys", "value_top_keys"} & set(parts):
            parts[where] = parts[where].to(torch.int32)
        if permitted.shape[1] > 1 and permitted.shape[1] != len(heads):
            permitted = permitted[:, index_of(tuple(kept), permitted.device)]
        offset = seen.keys - seen.queries if seen.offset is None else seen.offset
        positions = offset.to(torch.int64, copy=True) if isinstance(offset, Tensor) else torch.tensor([offset])
        kind, phase, start = what
        made = Recorded(
            site=call.site,
            layer=call.layer,
            number=call.number,
            kind=kind,
            phase=phase,
            keys=seen.keys,
            heads=tuple(heads),
            positions=positions,
            permitted=permitted,
            parts={name: part.contiguous() for name, part in parts.items()},
            written_out=seen.written_out,
            first_key=start,
            projection=None if projection is None or lengths is None else projection.path,
            of_text=reads_text(call.stack),
        )
        if chunk is not None:
            others = {name: part.contiguous() for name, part in others.items()}
            self._chunks.add(made, chunk, others, call.stack, seen)
        self.note(made, seen.device)
        return made

    def note(self, made: Recorded, device: torch.device) -> None:
        """A call was written down, on the device where it ran."""
        size = made.bytes
        self.bytes += size
        if device.type != "cpu":
            self._to_move.append(made)
            self._bytes_to_move += size

    def move(self, *, all_of_it: bool) -> None:
        """Statistics to the CPU. Each move waits for the device: they are moved when a pass has ended, or where many
        have come together."""
        if all_of_it or self._bytes_to_move > _MOST_TO_MOVE:
            moved, self._to_move, self._bytes_to_move = self._to_move, [], 0
            for call in moved:
                call.positions, call.permitted = call.positions.cpu(), call.permitted.cpu()
                if self.asked.keep_on_cpu:
                    call.parts = {name: part.cpu() for name, part in call.parts.items()}

    def _check_memory(self, seen: Seen | InMemory) -> None:
        limit, weights = self.asked.memory_limit, self.asked.want.weights
        if limit is None:
            return
        if self.bytes >= limit:
            raise Unseen(f"the memory limit of {limit} bytes was reached")
        if weights is not None:
            batch, heads, queries, keys = seen.shape
            sizes = [len(range(size)[span]) for span, size in zip(weights, (queries, keys), strict=True)]
            more = 4 * batch * (heads if self.heads is None else len(self.heads)) * sizes[0] * sizes[1]
            if self.bytes + more > limit:
                raise Unseen(f"its weights take {more} bytes, past the memory limit of {limit}")
