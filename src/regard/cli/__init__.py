"""The `regard` command. Commands parse options, call the library and print; bad input exits with status 2."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from regard.cli import options
from regard.cli.commands.bench import bench
from regard.cli.commands.check import check
from regard.cli.commands.convert import convert
from regard.cli.commands.cost import cost
from regard.cli.commands.evaluate import evaluate
from regard.cli.commands.explain import explain
from regard.cli.commands.generate import generate
from regard.cli.commands.info import info
from regard.cli.commands.lab import lab
from regard.cli.commands.look import look
from regard.cli.commands.models import models
from regard.cli.commands.serve import serve
from regard.cli.commands.train import train
from regard.cli.commands.translate import translate
from regard.cli.commands.walk import walk
from regard.cli.group import Command, Commands

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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    lang: Annotated[str, options.language("Language of this help, en or zh.")] = "en",
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
for panel, shown in PANELS.items():
    for command in shown:
        app.command(cls=Command, rich_help_panel=panel)(command)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an output without ≤ or ■ loses those signs, not the command
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `regard models | head -1` ends quietly, as other commands do
    app(prog_name="regard")
