"""Whether the weights that are asked for fit into memory, before anything is computed."""

from __future__ import annotations

import os

import torch

from regard._display.units import size
from regard.spec import CallSpec, Refused
from regard.statistics import Want


def check_weights_fit(want: Want, spec: CallSpec) -> None:
    if want.weights is None:
        return
    rows, columns = (len(range(n)[span]) for span, n in zip(want.weights, (spec.queries, spec.keys), strict=True))
    needed = spec.batch * spec.heads * rows * columns * (8 if spec.dtype == torch.float64 else 4)
    memory = _memory_of(spec.device)
    if memory is not None and needed > memory:
        raise Refused(
            f"want: {rows} × {columns} weights of {spec.batch * spec.heads} heads take {size(needed)}, and the "
            f"{'machine' if spec.device == 'cpu' else 'device'} has {size(memory)}: ask for a part, "
            "Want(weights=(slice(0, 1000), slice(0, 1000))), or for the statistics, which need none of it"
        )


def _memory_of(device: str) -> int | None:
    """Bytes in all; None where that is not known."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties().total_memory)
    if device != "cpu" or "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
