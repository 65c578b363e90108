"""The `regard` command. Every command parses, calls the library and prints; bad input ends with status 2."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from regard._cli.convert import convert
from regard._cli.generate import generate
from regard._cli.look import look
from regard._cli.models import models

if TYPE_CHECKING:
    import torch
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
app.command()(generate)
app.command()(convert)
app.command()(models)


def _version(wanted: bool) -> None:
    if wanted:
        import regard

        typer.echo(f"regard {regard.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Attention you can see."""


@app.command()
def check(
    backend: Annotated[
        str | None,
        typer.Option(
            help="Which of regard's own run, with commas: auto (what a plain call uses), and the names that "
            "`regard info` lists. By default auto and every backend of the device; beside --against, auto alone."
        ),
    ] = None,
    rules: Annotated[str | None, typer.Option(help="Numbers of rules, such as 3,5,7-9; all by default.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Some of float64, float32, float16, bfloat16, with commas; all by default.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where the tensors live.")] = "cpu",
    against: Annotated[
        str | None,
        typer.Option(
            help="Other implementations that run beside regard's, with commas: torch, torch-math, torch-is_causal, "
            "nn.MultiheadAttention, flex, and where installed x-transformers, x-transformers-flash, "
            "transformers-sdpa, transformers-eager. None by default."
        ),
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="List what failed in the peers too, row by row.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every row as JSON.")] = False,
) -> None:
    """Run the conformance suite on regard's backends, and on others beside them.

    The status is 1 when something of regard's own fails; what fails in a peer is shown and does not change it.
    """
    from regard import testing
    from regard._cli import parse

    try:
        where = parse.device(device)
        kinds = None if dtype is None else parse.dtypes(dtype)
        numbers = None if rules is None else parse.rules(rules, testing.numbers())
        ours = _own(backend, where, against)
        theirs = _peers(against)
    except (ValueError, ImportError) as error:
        _stop(str(error))

    found: list[Report] = []
    with _progress([*ours, *theirs]) as of:
        for name, fn in {**ours, **theirs}.items():
            found.append(testing.check(fn, rules=numbers, device=where, dtype=kinds, name=name, progress=of(name)))
    if as_json:
        typer.echo(json.dumps([json.loads(report.to_json()) for report in found], indent=2, ensure_ascii=False))
    else:
        _print_reports(found, set(ours) | (set(theirs) if details else set()))
    if any(not report.ok for report in found if report.name in ours):
        raise typer.Exit(1)


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False) -> None:
    """Versions, devices and backends of this machine."""
    from regard._cli import show

    lines = show.machine()
    if as_json:
        typer.echo(json.dumps(dict(lines), indent=2, ensure_ascii=False))
        return
    width = max(len(name) for name, _ in lines)
    for name, what in lines:
        typer.echo(f"{name:<{width}}  {what}")


@app.command()
def explain(
    query: Annotated[str, typer.Argument(help="Shape of query: batch,head,token,dim, such as 2,8,128,64.")],
    key: Annotated[str | None, typer.Option(help="Shape of key; query's by default.")] = None,
    value: Annotated[str | None, typer.Option(help="Shape of value; key's by default.")] = None,
    mask: Annotated[str | None, typer.Option(help="Such as 'causal() & window(left=256)'; join with & | ~.")] = None,
    bias: Annotated[str | None, typer.Option(help="Shape of a bias, four sizes.")] = None,
    softcap: Annotated[float | None, typer.Option(help="Softcap of the logits.")] = None,
    scale: Annotated[float | None, typer.Option(help="Scale of the logits.")] = None,
    dropout: Annotated[float, typer.Option(help="Probability that a weight is dropped.")] = 0.0,
    sinks: Annotated[bool, typer.Option("--sinks", help="With one sink logit a head.")] = False,
    offset: Annotated[int | None, typer.Option("--query-offset", help="Position of the first query.")] = None,
    grad: Annotated[bool, typer.Option("--grad", help="As in training: the inputs require gradient.")] = False,
    dtype: Annotated[str, typer.Option(help="float64, float32, float16 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="Where the tensors live.")] = "cpu",
    backend: Annotated[str, typer.Option(help="A backend's name, or auto, which chooses.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Print how a call would run: which backend, why not the others, what it costs. Nothing is computed."""
    import regard
    from regard._cli import parse, show

    try:
        where, (kind, *more) = parse.device(device), parse.dtypes(dtype)
        if more:
            raise ValueError(f"--dtype is {dtype!r}; expected one dtype")
        shapes = [parse.shape(query, "the shape of query")]
        shapes.append(shapes[0] if key is None else parse.shape(key, "--key"))
        shapes.append(shapes[1] if value is None else parse.shape(value, "--value"))
        plan = regard.explain(
            *(_unmade(shape, kind, where).requires_grad_(grad) for shape in shapes),
            mask=None if mask is None else parse.mask(mask),
            bias=None if bias is None else _unmade(parse.shape(bias, "--bias"), kind, where),
            softcap=softcap,
            scale=scale,
            dropout=dropout,
            sinks=_unmade(shapes[0][1:2], kind, where) if sinks else None,
            query_offset=offset,
            backend=backend,
        )
        typer.echo(json.dumps(show.plan(plan), indent=2, ensure_ascii=False) if as_json else str(plan))
    except (ValueError, TypeError) as error:
        _stop(str(error))
    except (RuntimeError, MemoryError) as error:
        _stop(f"this call cannot be planned here: {(str(error).splitlines() or ['out of memory'])[0]}")


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an output without ≤ or ■ loses those signs, not the command
    app()


def _unmade(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """A tensor of this shape that holds one row only: a plan looks at sizes, never at numbers."""
    import torch

    return torch.zeros((1,) * (len(shape) - 1) + shape[-1:], dtype=dtype, device=device).expand(shape)


def _own(backend: str | None, device: str, against: str | None) -> dict[str, functools.partial[Tensor]]:
    """regard's backends by name. Beside peers, only what a plain call of regard's runs, unless one is named."""
    import regard

    there = ["auto", *regard.backends.available(device)]
    names = (["auto"] if against else there) if backend is None else [name.strip() for name in backend.split(",")]
    for name in names:
        if name not in there:
            raise ValueError(f"--backend holds {name!r}; expected some of {', '.join(there)} on {device}")
    return {f"regard {name}": functools.partial(regard.attention, backend=name) for name in names}


def _peers(against: str | None) -> dict[str, functools.partial[Tensor]]:
    from regard.testing import peers

    names = [] if against is None else [name.strip() for name in against.split(",")]
    return {name: functools.partial(peers.load(name)) for name in names}


@contextlib.contextmanager
def _progress(names: list[str]) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """A bar for each implementation where someone watches stderr; one line there otherwise, before the work begins."""
    from rich.console import Console
    from rich.progress import Progress

    watched = sys.stderr.isatty()
    if not watched:
        typer.echo(f"regard: checking {', '.join(names)}; all rules on all backends take minutes", err=True)
    with Progress(console=Console(stderr=True), transient=True, disable=not watched) as bars:
        tasks = {name: bars.add_task(name, total=None) for name in names}
        yield lambda name: lambda done, total: bars.update(tasks[name], completed=done, total=total)


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
