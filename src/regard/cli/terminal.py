"""Output that all commands share: one line per error, progress bars, tables that fit the terminal."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from regard._display.texts import reason

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

WIDTH = 120  # of a table in a pipe or a file, which have none of their own


def stop(message: str) -> NoReturn:
    """End the command: one line on stderr, status 2."""
    typer.echo(f"regard: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)


@contextlib.contextmanager
def one_line(
    *kinds: type[Exception],
    file: object = "standard output",
    options: Iterable[str] | Mapping[str, str] = (),
    impossible: str = "",
) -> Iterator[None]:
    """End the command so where these are raised, or where a file cannot be read or written; `file` is meant by an error
    that names none. `options` are arguments of the library that the command takes as options: of the same name, or of
    the one that a mapping gives. `impossible` says what a machine without the memory or the operation cannot do."""
    try:
        yield
    except kinds as error:
        stop(_by_options(str(error), options))
    except OSError as error:
        stop(f"{error.filename or file}: {error.strerror or error}")
    except (RuntimeError, MemoryError) as error:
        if impossible:
            stop(f"{impossible}: {reason(error, otherwise='out of memory')}")
        if not is_out_of_memory(error):
            raise
        stop("there is not enough memory for this; give less at once, or a smaller model")


def flag(name: str) -> str:
    """The option of a parameter: `--kv-heads` of `kv_heads`."""
    return f"--{name.replace('_', '-')}"


def _by_options(message: str, names: Iterable[str] | Mapping[str, str]) -> str:
    """The library names its arguments; who types a command knows its options."""
    for name in names:
        option = flag(names[name] if isinstance(names, Mapping) else name)
        message = re.sub(rf"(?<![\w.-]){name}=True\b", option, message)
        message = re.sub(rf"(?<![\w.-]){name}=", f"{option} ", message)
        message = re.sub(rf"(?<![\w.-]){name}(?![\w.])" if "_" in name else rf"^{name}\b", option, message)
    return message


def is_out_of_memory(error: Exception) -> bool:
    """Torch has a class for a GPU's memory, and only words for that of the machine."""
    kind = type(error).__name__
    return isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "can't allocate memory" in str(error)


def readable(text: str, name: str = "the text") -> str:
    """The text itself; ValueError where a shell gave bytes that are no UTF-8, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{name} has bytes that are no UTF-8; type it again, or change your terminal to UTF-8"
        ) from None
    return text


def data(found: Any, *, indent: int | None = 2) -> None:
    """Print what a command found as JSON, for other programs: nothing is lost where the output has ASCII only, and a
    number that is missing (NaN) is null, which JSON has."""
    utf8 = (sys.stdout.encoding or "ascii").lower().replace("-", "") == "utf8"
    typer.echo(json.dumps(_finite(found), indent=indent, ensure_ascii=not utf8, allow_nan=False))


def _finite(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _finite(value) for name, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [_finite(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def console(width: int = WIDTH) -> Console:
    """For stdout: as wide as the terminal, or `width` where there is none; no colours there."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width)


def saying(what: str) -> contextlib.AbstractContextManager[object]:
    """A line that says what takes its time, for someone who sits there."""
    from rich.console import Console
    from rich.markup import escape

    # a terminal itself, not one that FORCE_COLOR makes of a file; and this stream, also while another takes its place
    console = Console(file=sys.stderr)
    return console.status(f"{escape(what)} …") if sys.stderr.isatty() else contextlib.nullcontext()


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """Bars on stderr, gone when the work is done, and none at all where nobody watches it."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bars:
        yield bars
