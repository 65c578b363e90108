"""The group of all commands: whatever goes wrong ends with one line on stderr and a status, not with a traceback."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from regard.cli import chinese

OPTIONAL = ("matplotlib", "transformers", "safetensors", "tokenizers", "sacrebleu")  # packages that some commands need


class _Helping:
    """Flags show no type, and `--lang zh` gives the help in Chinese."""

    def get_params(self, ctx: Any) -> Any:
        return _untyped_flags(super().get_params(ctx))  # type: ignore[misc]

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        if chinese.asked_for(args):
            ctx.meta["regard.lang"] = "zh"  # also seen by the commands inside
        return super().parse_args(ctx, args)  # type: ignore[misc]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if ctx.meta.get("regard.lang") == "zh" and chinese.has_help(ctx):
            formatter.write(chinese.page(self, ctx))
        else:
            super().format_help(ctx, formatter)  # type: ignore[misc]


class Command(_Helping, TyperCommand):
    pass


class Commands(_Helping, TyperGroup):
    """Exits with 0, with 1 where a check failed, with 2 on bad input, and with 130 after Ctrl-C."""

    def main(self, *args: Any, standalone_mode: bool = True, **named: Any) -> Any:
        named["standalone_mode"] = False
        if not standalone_mode:
            return super().main(*args, **named)
        try:
            status = super().main(*args, **named)
            sys.stdout.flush()  # a full disk shows here, while it can still be said
        except (typer.Abort, KeyboardInterrupt):
            status = 130
        except OSError as error:
            status = _print_error(f"{error.filename or 'the output'}: {error.strerror or error}")
            _give_up_output()
        except ImportError as error:
            status = _print_error(_missing(error))
        except Exception as error:
            # the parser's own errors, by what they can do: their classes have moved between versions of typer
            if not hasattr(error, "format_message"):
                raise
            status = _print_error(_about(error))
        sys.exit(status if isinstance(status, int) else 0)


def _untyped_flags(params: list[Any]) -> list[Any]:
    """A flag takes no value, so its help shows no type."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


def _give_up_output() -> None:
    """What cannot be written must not be tried again when Python ends: that would change the status."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _missing(error: ImportError) -> str:
    package = (error.name or "").split(".")[0]
    return f"this needs {package}: pip install {package}" if package in OPTIONAL else str(error)


def _about(error: Any) -> str:
    """What was wrong with the words of a command, and where to read more."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return ""  # the help itself was the answer
    context = getattr(error, "ctx", None)
    more = f" (see {context.command_path} --help)" if context is not None else ""
    return f"{error.format_message().rstrip('.')}{more}"


def _print_error(message: str) -> int:
    if message:
        typer.echo(f"regard: {' '.join(message.split())}", err=True)
    return 2
