"""`regard check`: the promises as tests, on regard's backends and on other implementations."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli import calls, complete, options, terminal
from regard.cli.options import about

if TYPE_CHECKING:
    from torch import Tensor

    from regard.testing import Report


def check(
    backend: Annotated[
        str | None,
        options.some_of(
            complete.BACKENDS,
            "Backends to check, comma-separated: auto (what a plain call uses) and the names that `regard info` lists "
            "(default: auto and every backend of the device; with --against, auto alone).",
        ),
    ] = None,
    rules: Annotated[str | None, about("Rules to check, such as 3,5,7-9 (default: all).")] = None,
    dtype: Annotated[
        str | None,
        options.some_of(
            complete.DTYPES, "Data types, comma-separated: float64, float32, float16, bfloat16 (default: all)."
        ),
    ] = None,
    device: calls.Device = "cpu",
    against: Annotated[
        str | None,
        options.some_of(
            complete.PEERS,
            "Other implementations to check too, comma-separated: torch, torch-math, torch-is_causal, "
            "nn.MultiheadAttention, flex, and where installed x-transformers, x-transformers-flash, "
            "transformers-sdpa, transformers-eager (default: none).",
        ),
    ] = None,
    details: Annotated[bool, about("Say what failed in the other implementations too.", "--details")] = False,
    as_json: Annotated[bool, about("Print every row as JSON.", "--json")] = False,
) -> None:
    """Run the conformance suite on regard's backends, and on other implementations.

    The exit status is 1 when one of regard's backends fails; failures of other implementations do not count.

    Examples:
      regard check
      regard check --rules 3,5,7-9 --dtype float32
      regard check --backend blockwise,sdpa --device cuda
      regard check --against torch,flex --rules 10
    """
    from regard import testing
    from regard.cli import parse

    with terminal.one_line(ValueError, ImportError):
        where = parse.device(device)
        kinds = None if dtype is None else parse.dtypes(dtype)
        numbers = None if rules is None else parse.rules(rules, testing.numbers())
        ours = _own(backend, where, against)
        theirs = _peers(against)

    found: list[Report] = []
    with _progress([*ours, *theirs], "" if rules else "; all rules take minutes") as of:
        for name, fn in {**ours, **theirs}.items():
            report = testing.check(fn, rules=numbers, device=where, dtype=kinds, name=name, progress=of(name))
            found.append(report)
            if not sys.stderr.isatty():  # bars say it elsewhere
                failed = sum(row.outcome == "fail" for row in report.rows)
                typer.echo(f"regard: {name}: {len(report.rows)} checks, {failed or 'none'} failed", err=True)
    if as_json:
        terminal.data([json.loads(report.to_json()) for report in found])
    else:
        _print(found, set(ours) | (set(theirs) if details else set()))
    if any(not report.ok for report in found if report.name in ours):
        raise typer.Exit(1)


def _own(backend: str | None, device: str, against: str | None) -> dict[str, functools.partial[Tensor]]:
    """regard's backends by name. With peers, only what a plain call of regard's runs, unless one is named."""
    import regard

    named = calls.backends(backend, device)
    names = named if backend is not None or not against else ["auto"]
    return {f"regard {name}": functools.partial(regard.attention, backend=name) for name in names}


def _peers(against: str | None) -> dict[str, functools.partial[Tensor]]:
    from regard.testing import peers

    names = [] if against is None else [name.strip() for name in against.split(",")]
    for name in names:
        if name not in peers.PEERS:
            raise ValueError(f"--against holds {name!r}; expected some of {', '.join(peers.PEERS)}")
    return {name: functools.partial(peers.load(name)) for name in names}


@contextlib.contextmanager
def _progress(names: list[str], note: str) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """A bar for each implementation where someone watches stderr; one line there otherwise, before the work begins."""
    if not sys.stderr.isatty():
        typer.echo(f"regard: checking {', '.join(names)}{note}", err=True)
    with terminal.progress() as bars:
        tasks = {name: bars.add_task(name, total=None) for name in names}
        yield lambda name: lambda done, total: bars.update(tasks[name], completed=done, total=total)


def _print(found: list[Report], detailed: set[str]) -> None:
    from regard.cli import show

    show.reports(terminal.console(120 + 14 * len(found)), found, detailed)
