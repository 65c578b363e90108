"""The `regard` command. Every command parses, calls the library and prints; bad input ends with status 2."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from regard._cli.bench import bench
from regard._cli.check import check
from regard._cli.convert import convert
from regard._cli.cost import cost
from regard._cli.evaluate import evaluate
from regard._cli.explain import explain
from regard._cli.generate import generate
from regard._cli.group import Commands
from regard._cli.info import info
from regard._cli.lab import lab
from regard._cli.look import look
from regard._cli.models import models
from regard._cli.serve import serve
from regard._cli.train import train
from regard._cli.translate import translate
from regard._cli.walk import walk

app = typer.Typer(
    cls=Commands,
    name="regard",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


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
    """Attention you can see.

    Examples:
      regard look minilm "The cat sat on the mat."
      regard explain 2,8,4096,64 --mask 'causal() & window(left=256)'
      regard check --rules 3-9
    """


PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Look and learn": (look, serve, walk, lab),
    "Plan": (cost, explain, bench, info),
    "Prove": (check,),
    "Models": (models, generate, convert),
    "Train and translate": (train, translate, evaluate),
}
for panel, commands in PANELS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an output without ≤ or ■ loses those signs, not the command
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `regard models | head -1` ends quietly, as other commands do
    app(prog_name="regard")


if __name__ == "__main__":
    main()
