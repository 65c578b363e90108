"""Who computes the statistics of a call: the kernels of a GPU what they can, torch operations the rest."""

from __future__ import annotations

from torch import Tensor

from regard.backends._base import accumulation, has_triton
from regard.backends._meter import peak_bytes, without_values
from regard.observation._pairs import weights_of_pairs
from regard.observation._rows import observe_rows
from regard.spec import Call, CallSpec
from regard.statistics import Want


def observe_call(call: Call, lse: Tensor, want: Want, lengths: Tensor | None = None) -> dict[str, Tensor]:
    """The wanted statistics of a call that has run, by name; ``lengths`` [B, H, S] are those of values."""
    by_kernels = not kernel_refusals(call.spec, want.usual)
    found = {}
    if by_kernels and want.usual.asks:
        from regard._triton.observing import observe as observe_by_kernels

        found = observe_by_kernels(call, lse, want.usual)
    rest = want.unusual if by_kernels and want.asks_unusual else None if by_kernels else want
    if rest is not None and rest.asks_tiles:
        more = observe_rows(call, lse, rest, lengths)
        found |= {name: part for name, part in more.items() if name not in found}
    if want.pairs is not None:
        found["pairs"] = weights_of_pairs(call, lse, want.pairs)
    return found


def observer_of(spec: CallSpec, want: Want) -> str:
    """Who will observe a call, in words."""
    if refusals := kernel_refusals(spec, want.usual):
        return f"torch operations: {'; '.join(refusals)}"
    more = "; value mass, pairs and scores by torch operations, as the kernels have none of them"
    return f"triton kernels{more if want.asks_unusual else ''}"


def observing_peak(call: Call, want: Want) -> int:
    """Bytes alive at the peak of an observation, its result included."""
    kernels, rest = 0, want
    if not kernel_refusals(call.spec, want.usual):
        from regard._triton.observing import layout_of

        kernels, rest = layout_of(call.spec, want.usual).nbytes, want.unusual
    if not rest.but(pairs=None).asks:
        return kernels
    bare, spec = without_values(call), call.spec
    lse = bare.query.new_empty(spec.batch, spec.heads, spec.queries, dtype=accumulation(spec.dtype))
    lengths = lse.new_empty(spec.batch, spec.heads, spec.keys) if want.value_mass else None
    return kernels + peak_bytes(lambda: observe_rows(bare, lse, rest, lengths), (*bare, lse))


def kernel_refusals(spec: CallSpec, want: Want) -> list[str]:
    """Why the statistics are not folded by the observation kernels, but by torch operations, tile by tile."""
    if spec.device != "cuda":
        return ["the observation kernels run on CUDA devices"]
    if not has_triton():
        return ["triton is not installed"]
    from regard._triton.observing import refuse

    return refuse(spec, want)
