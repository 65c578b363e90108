"""The `regard` command. Every command parses, calls the library and prints; bad input ends with status 2."""

from __future__ import annotations

import functools
import json
import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from regard._cli.look import look

if TYPE_CHECKING:
    from torch import Tensor

    from regard.testing import Report

app = typer.Typer(
    name="regard",
    help="Attention you can see.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(look)


@app.command()
def check(
    backend: Annotated[str, typer.Option(help="regard's backends, with commas; all by default.")] = "",
    rules: Annotated[str, typer.Option(help="Numbers of rules, such as 3,5,7-9; all by default.")] = "",
    dtype: Annotated[str, typer.Option(help="float64, float32, float16, bfloat16; all by default.")] = "",
    device: Annotated[str, typer.Option(help="Where the tensors live.")] = "cpu",
    against: Annotated[str, typer.Option(help="Peers to run the suite on as well: torch, flex, … with commas.")] = "",
    details: Annotated[bool, typer.Option("--details", help="List what failed in the peers too, row by row.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every row as JSON.")] = False,
) -> None:
    """Run the conformance suite on regard's backends, and on others beside them.

    The status is 1 when something of regard's own fails; what fails in a peer is shown and does not change it.
    """
    from regard._cli import parse

    try:
        where = parse.device(device)
        kinds = parse.dtypes(dtype) if dtype else None
        numbers = parse.rules(rules) if rules else None
        ours = _own(backend, where, against)
        theirs = _peers(against)
    except (ValueError, ImportError) as error:
        _stop(str(error))
    from regard import testing

    found: list[Report] = []
    for name, fn in {**ours, **theirs}.items():
        try:
            found.append(testing.check(fn, rules=numbers, device=where, dtype=kinds, name=name))
        except ValueError as error:
            _stop(str(error))
    if as_json:
        typer.echo(json.dumps([json.loads(report.to_json()) for report in found], indent=2, ensure_ascii=False))
    else:
        _print_reports(found, set(ours) | (set(theirs) if details else set()))
    if any(not report.ok for report in found if report.name in ours):
        raise typer.Exit(1)


@app.command()
def info() -> None:
    """Versions, devices and backends of this machine."""
    from regard._cli import show

    lines = show.machine()
    width = max(len(name) for name, _ in lines)
    for name, what in lines:
        typer.echo(f"{name:<{width}}  {what}")


@app.command()
def explain(
    query: Annotated[str, typer.Argument(help="Shape of query: batch,head,token,dim, such as 2,8,128,64.")],
    key: Annotated[str, typer.Option(help="Shape of key; query's by default.")] = "",
    value: Annotated[str, typer.Option(help="Shape of value; key's by default.")] = "",
    mask: Annotated[str, typer.Option(help="Such as 'causal() & window(left=256)'.")] = "",
    bias: Annotated[str, typer.Option(help="Shape of a bias, four sizes.")] = "",
    softcap: Annotated[float | None, typer.Option(help="Softcap of the logits.")] = None,
    scale: Annotated[float | None, typer.Option(help="Scale of the logits.")] = None,
    dropout: Annotated[float, typer.Option(help="Probability that a weight is dropped.")] = 0.0,
    sinks: Annotated[bool, typer.Option("--sinks", help="With one sink logit a head.")] = False,
    offset: Annotated[int | None, typer.Option("--query-offset", help="Position of the first query.")] = None,
    grad: Annotated[bool, typer.Option("--grad", help="As in training: the inputs require gradient.")] = False,
    dtype: Annotated[str, typer.Option(help="float64, float32, float16 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="Where the tensors live.")] = "cpu",
    backend: Annotated[str, typer.Option(help="A backend's name, or auto.")] = "auto",
) -> None:
    """Print how a call would run: which backend, why not the others, what it costs. Nothing is computed."""
    import torch

    import regard
    from regard._cli import parse

    try:
        where, (kind, *more) = parse.device(device), parse.dtypes(dtype)
        if more:
            raise ValueError(f"--dtype is {dtype!r}; expected one dtype")
        shapes = [parse.shape(query, "the shape of query")]
        shapes.append(parse.shape(key, "--key") if key else shapes[0])
        shapes.append(parse.shape(value, "--value") if value else shapes[1])
        tensors = [torch.empty(shape, dtype=kind, device=where, requires_grad=grad) for shape in shapes]
        plan = regard.explain(
            *tensors,
            mask=parse.mask(mask) if mask else None,
            bias=torch.zeros(parse.shape(bias, "--bias"), dtype=kind, device=where) if bias else None,
            softcap=softcap,
            scale=scale,
            dropout=dropout,
            sinks=torch.zeros(shapes[0][1], dtype=kind, device=where) if sinks else None,
            query_offset=offset,
            backend=backend,
        )
        typer.echo(str(plan))
    except (ValueError, TypeError) as error:
        _stop(str(error))
    except (RuntimeError, MemoryError) as error:
        _stop(f"the tensors of this call cannot be made here: {str(error).splitlines()[0]}")


def main() -> None:
    app()


def _own(backend: str, device: str, against: str) -> dict[str, functools.partial[Tensor]]:
    """regard's backends by name. Beside peers, only what a plain call of regard's runs, unless one is named."""
    import regard

    there = ["auto", *regard.backends.available(device.partition(":")[0])]
    names = [name.strip() for name in backend.split(",")] if backend else ["auto"] if against else there
    for name in names:
        if name not in there:
            raise ValueError(f"--backend holds {name!r}; expected some of {', '.join(there)} on {device}")
    return {f"regard {name}": functools.partial(regard.attention, backend=name) for name in names}


def _peers(against: str) -> dict[str, functools.partial[Tensor]]:
    from regard.testing import peers

    names = [name.strip() for name in against.split(",")] if against else []
    return {name: functools.partial(peers.load(name)) for name in names}


def _print_reports(found: list[Report], detailed: set[str]) -> None:
    from rich.console import Console

    from regard._cli import show

    # A pipe has no width: nothing is cut there.
    show.reports(Console(width=None if sys.stdout.isatty() else 120 + 14 * len(found)), found, detailed)


def _stop(message: str) -> NoReturn:
    typer.echo(f"regard: {message}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    main()
