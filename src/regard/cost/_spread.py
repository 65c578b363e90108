"""What an attention call costs on several GPUs when its tokens lie in parts on them: work, bytes received, time.

It counts what `regard.attention` does with DTensors: each process computes one range of rows, cut so that all have the
same number of kept pairs, and receives the queries of its rows, the keys and values that those rows may see, and the
results of the rows whose queries it holds.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

from regard.cost import _given
from regard.cost._describe import causal_pairs
from regard.cost._devices import Device
from regard.cost._roofline import AttentionCall, roofline

Span = tuple[int, int]


@dataclass(frozen=True)
class Spread:
    """A call on several GPUs; bytes and seconds are those of the GPU that has most.

    Args:
        gpus: how many.
        pairs: that one GPU computes.
        computing: the least seconds of its share.
        received: bytes that it receives.
        from_machines: of those, what comes from other machines.
        receiving: seconds for that, what comes from within and from outside at the same time.
        room: bytes of the keys and values that it holds at once: all of them.
    """

    gpus: int
    pairs: int
    computing: float
    received: int
    from_machines: int
    receiving: float
    room: int

    @property
    def seconds(self) -> float:
        """Computing after receiving, as is done here: nothing overlaps."""
        return self.computing + self.receiving

    def to_dict(self) -> dict[str, Any]:
        """As what JSON holds."""
        return asdict(self) | {"seconds": self.seconds}


def spread(
    call: AttentionCall,
    device: Device,
    gpus: int,
    *,
    link: float = 450e9,
    between: float = 50e9,
    machine: int = 8,
    backward: bool = False,
) -> Spread:
    """What a call costs on `gpus` devices that each hold the same number of its tokens.

    Args:
        call: the whole call.
        device: of each.
        gpus: how many.
        link: bytes/s that a GPU receives from others of its machine (NVLink of an H200: 450 GB/s each way).
        between: bytes/s that a GPU receives from other machines (one 400 Gbit/s link per GPU: 50 GB/s).
        machine: GPUs of a machine.
        backward: the backward pass alone: gradients go the ways back, so that as many bytes move.
    """
    _given.check_counts(gpus=gpus, machine=machine)
    for name, rate in (("link", link), ("between", between)):
        if not 0 < rate < float("inf"):
            raise ValueError(f"{name} must be a number of bytes/s above 0, got {rate}")
    step = -(-call.length // gpus)
    held = [(min(at * step, call.length), min((at + 1) * step, call.length)) for at in range(gpus)]
    rows = row_shares(call, gpus)
    size = _given.SIZES[call.dtype]
    of_query = call.batch * call.heads * call.head_dim * size  # and of an output
    of_key = 2 * call.batch * call.shared_heads * call.head_dim * size
    worst = (0, 0)
    receiving = 0.0
    for rank, (own, mine) in enumerate(zip(held, rows, strict=True)):
        first, last = rank // machine * machine, min(rank // machine * machine + machine, gpus) - 1
        near, near_rows = (held[first][0], held[last][1]), (rows[first][0], rows[last][1])
        wanted = ((mine, own, near, of_query), (_keys(call, mine), own, near, of_key), (own, mine, near_rows, of_query))
        outside = sum((_size(span) - _common(span, around)) * each for span, _, around, each in wanted)
        inside = sum((_common(span, around) - _common(span, here)) * each for span, here, around, each in wanted)
        worst = max(worst, (inside + outside, outside))
        receiving = max(receiving, inside / link, outside / between)
    return Spread(
        gpus=gpus,
        pairs=-(-call.pairs // gpus),
        computing=roofline(call, device, backward=backward).seconds / gpus,
        received=worst[0],
        from_machines=worst[1],
        receiving=receiving,
        room=call.length * of_key,
    )


def row_shares(call: AttentionCall, count: int) -> list[Span]:
    """The rows of each process: as many kept pairs for all, within one row."""
    total, cuts = _pairs(call, call.length), [0]
    for at in range(1, count):
        low, high = cuts[-1], call.length
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if _pairs(call, middle) * count >= at * total else (middle + 1, high)
        cuts.append(low)
    return list(itertools.pairwise([*cuts, call.length]))


def _pairs(call: AttentionCall, rows: int) -> int:
    """Of the first rows of one head."""
    return causal_pairs(rows, call.window) if call.causal else rows * call.length


def _keys(call: AttentionCall, rows: Span) -> Span:
    """What these rows may see."""
    if rows[0] == rows[1]:
        return rows
    if not call.causal:
        return 0, call.length
    return 0 if call.window is None else max(0, rows[0] - call.window), rows[1]


def _size(span: Span) -> int:
    return span[1] - span[0]


def _common(one: Span, other: Span) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))
