"""`regard lab`: the worked examples and experiments, their numbers and their figures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard import lab as experiments
from regard._display import texts
from regard.cli import complete, options, terminal
from regard.cli.options import about

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from regard.lab import Result

WORDS = {
    "run": (
        "one of them: regard lab E3; all of them: regard lab all --out folder",
        "运行其中一个：regard lab E3；全部运行：regard lab all --out folder",
    ),
    "look": ("What to look at", "看什么"),
    "claim": ("Wrong", "错误说法"),
    "right": ("Right", "正确说法"),
    "why": ("Why", "原因"),
    "wrote": ("wrote {what}", "已写入 {what}"),
    "with": (
        "{index}, with the figures and the numbers of {count} experiments",
        "{index}，含 {count} 个实验的图和数据",
    ),
}
NAMES = (*experiments.TOPICS, "all")


def lab(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="E1 … E14, X1 … X6, M20, M21, S15, a topic such as rnn, or all. Without a name, lists them.",
            autocompletion=complete.one_of(NAMES),
        ),
    ] = None,
    out: Annotated[
        Path | None,
        about("Write figures and JSON into this folder; it is created if needed. Needs matplotlib.", file_okay=False),
    ] = None,
    kind: Annotated[
        str | None,
        options.one_of(
            ("png", "svg"), "Format of the figures that --out writes: png or svg (default: png).", "--format"
        ),
    ] = None,
    lang: Annotated[str, options.language("Language of tables, texts and figures: en or zh.")] = "en",
    as_json: Annotated[bool, about("Print the numbers as JSON.", "--json")] = False,
) -> None:
    """Run worked examples and experiments on attention: their numbers, what to look at, and what notes get wrong.

    Examples:
      regard lab
      regard lab E3
      regard lab two-relations --lang zh
      regard lab E7 --json
      regard lab all --out folder
    """
    with terminal.one_line(ValueError, ImportError):
        lang = texts.language(lang)
        chosen = _chosen(names or [])
        ending = _check_out(out, kind, chosen, lang)
    if not chosen:
        _list(lang, as_json)
        return
    with terminal.one_line(ImportError):
        found = _run(chosen, out, ending, lang)
    if as_json:
        rows = [one.to_dict(lang) for one in found]
        terminal.data(rows[0] if len(rows) == 1 else rows)
    else:
        console = terminal.console()
        for one in found:
            _print(console, one, lang)
    if out is not None:
        if len(found) > 1:
            from regard.lab._folder import write_index

            write_index(found, out, ending, lang)
        what = f"{out}: {found[0].name}.json, {found[0].name}.{ending}"
        if len(found) > 1:
            what = texts.text(WORDS, lang, "with", index=out / "index.html", count=len(found))
        typer.echo(texts.text(WORDS, lang, "wrote", what=what), err=True)


def _chosen(given: list[str]) -> list[str]:
    """Names of experiments, in the order given, none twice."""
    found: list[str] = []
    for one in given:
        found += experiments.names() if one.strip().lower() == "all" else [experiments.find(one)]
    return list(dict.fromkeys(found))


def _check_out(out: Path | None, kind: str | None, chosen: list[str], lang: str) -> str:
    """How the figures' names end. What would fail after minutes of work is said before it."""
    from regard.lab._folder import FORMATS

    if kind is not None and kind not in FORMATS:
        raise ValueError(f"--format is {kind!r}; expected png or svg")
    if out is None:
        if kind is not None:
            raise ValueError(f"--format {kind} is of the figures that --out writes; give --out too")
        return ""
    if not chosen:
        raise ValueError("--out was given and no experiment; name one, or all")
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("figures need matplotlib: pip install matplotlib")
    if lang == "zh":
        from regard._display.figures import lettered

        with lettered(lang):  # raises where no font has Chinese letters
            pass
    out.mkdir(parents=True, exist_ok=True)
    return kind or FORMATS[0]


def _run(chosen: list[str], out: Path | None, kind: str, lang: str) -> list[Result]:
    found = []
    with terminal.progress() as bars:
        task = bars.add_task("", total=len(chosen))
        for name in chosen:
            title = texts.text(experiments.words(name), lang, "title")
            bars.update(task, description=f"{name} {title}")
            found.append(experiments.run(name))
            if out is not None:
                from regard.lab._folder import write

                write(found[-1], out, kind, lang)
            bars.advance(task)
    return found


def _list(lang: str, as_json: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    rows: list[dict[str, Any]] = [
        {"name": name, "topic": topic.replace("_", "-"), "title": texts.text(experiments.words(name), lang, "title")}
        for name, topic in experiments.TOPICS.items()
    ]
    if as_json:
        terminal.data(rows)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for row in rows:
        table.add_row(f"[bold]{row['name']}[/bold]", f"[dim]{row['topic']}[/dim]", row["title"])
    console = terminal.console()
    console.print(table)
    console.print()
    _say(console, Text(texts.text(WORDS, lang, "run")))


def _print(console: Console, found: Result, lang: str) -> None:
    from rich.text import Text

    console.print()
    _say(console, Text(f"{found.name}  {found.say('title', lang)}", style="bold"))
    _say(console, Text(found.say("question", lang)))
    for shown in found.tables(lang):
        console.print()
        _say(console, Text(shown.title, style="bold"))
        console.print(shown.terminal())
    for key in ("look", "claim", "right", "why"):
        if key in found.words():
            console.print()
            heading = Text.assemble((texts.text(WORDS, lang, key), "bold"), "  ")
            _say(console, heading + texts.with_code(found.say(key, lang)))


def _say(console: Console, lines: Text) -> None:
    for line in lines.split("\n", allow_blank=True):
        for piece in texts.folded(line, console.width):
            console.print(piece, highlight=False)
