"""`regard explain`: which backend a call would use, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli import calls, complete, options, terminal
from regard.cli.options import about

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def explain(
    query: calls.Query,
    key: calls.Key = None,
    value: calls.Value = None,
    mask: calls.Mask = None,
    bias: Annotated[str | None, about("Shape of an additive bias: four sizes.")] = None,
    softcap: calls.Softcap = None,
    scale: Annotated[float | None, about("Scale of the logits.")] = None,
    dropout: Annotated[float, about("Probability that a weight is dropped.")] = 0.0,
    sinks: Annotated[bool, about("Add one sink logit per head.", "--sinks")] = False,
    offset: Annotated[
        int | None,
        about("Position of the first query among the keys (default: keys − queries).", "--query-offset"),
    ] = None,
    grad: Annotated[bool, about("Plan for training: the inputs require gradients.", "--grad")] = False,
    dtype: calls.Dtype = "float32",
    device: calls.Device = "cpu",
    backend: Annotated[str, options.one_of(complete.BACKENDS, "Backend, or auto to choose one.")] = "auto",
    as_json: Annotated[bool, about("Print the plan as JSON.", "--json")] = False,
) -> None:
    """Show how a call would run: which backend, why not the others, and what it costs. Computes nothing.

    Examples:
      regard explain 2,8,4096,64
      regard explain 2,8,4096,64 --mask 'causal() & window(left=256)'
      regard explain 1,32,1,128 --key 1,8,100000,128 --dtype bfloat16
    """
    import regard
    from regard.cli import parse, show

    with terminal.one_line(ValueError, TypeError, options=calls.OPTIONS, impossible="this call cannot be planned here"):
        call = calls.read(query, key, value, mask, dtype, device)
        kind, where = call.dtype, call.device
        plan = regard.explain(
            *(_unmade(shape, kind, where).requires_grad_(grad) for shape in call.shapes),
            mask=call.mask,
            bias=None if bias is None else _unmade(parse.shape(bias, "--bias"), kind, where),
            softcap=softcap,
            scale=scale,
            dropout=dropout,
            sinks=_unmade(call.shapes[0][1:2], kind, where) if sinks else None,
            query_offset=offset,
            backend=backend,
        )
        if as_json:
            terminal.data(show.plan(plan))
        else:
            typer.echo(str(plan))


def _unmade(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """A tensor of this shape that holds one row only, and that unwritten: a plan looks at sizes, never at numbers."""
    import torch

    return torch.empty((1,) * (len(shape) - 1) + shape[-1:], dtype=dtype, device=device).expand(shape)
