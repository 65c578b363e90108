"""`regard evaluate`: the quality of a model's translations of a test set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli import options, terminal
from regard.cli.commands.translate import check_place
from regard.cli.options import about


def evaluate(
    test: Annotated[tuple[Path, Path], about("Two files: source sentences and reference translations.")],
    model: options.Trained = None,
    system: Annotated[Path | None, about("Instead of --model: file with translations.")] = None,
    against: Annotated[
        Path | None, about("File with another system's translations to compare with, by paired bootstrap.")
    ] = None,
    beams: Annotated[int | None, about("Beam width (default: 5).")] = None,
    length_penalty: Annotated[
        float | None, about("Length penalty α: scores are log P / ((5 + length) / 6)^α (default: 1).")
    ] = None,
    samples: Annotated[int | None, about("With --against: number of bootstrap samples (default: 1000).")] = None,
    out: Annotated[Path | None, about("Write the translations to this file.")] = None,
    device: options.Device = "cpu",
    as_json: Annotated[bool, about("Print the scores as JSON.", "--json")] = False,
) -> None:
    """Compute sacreBLEU and chrF, lower-cased and cased, with their signatures, and compare with another system.

    Examples:
      regard evaluate --model runs/en-de --test test.en test.de
      regard evaluate --model runs/en-de --test test.en test.de --against other.out
      regard evaluate --system mine.out --test test.en test.de --json
    """
    from regard import train as engine

    with terminal.one_line(ValueError, TypeError, file=out, options=options.WRITING):
        if (system is None) == (not model):
            raise ValueError("give --model FOLDER or --system FILE, one of the two")
        for name, value in (("--beams", beams), ("--length-penalty", length_penalty)):
            if system is not None and value is not None:
                raise ValueError(f"{name} is for --model; the translations of --system are there already: leave it out")
        if against is None and samples is not None:
            raise ValueError("--samples is for --against FILE, which is missing")
        for name, count in (("--beams", beams), ("--samples", samples)):
            if count is not None and count < 1:
                raise ValueError(f"{name} is {count}; expected at least 1")
        pairs = engine.read_pairs(*test)
        theirs = None if against is None else engine.read_lines(against)
        if theirs is not None and len(theirs) != len(pairs.target):
            raise ValueError(
                f"--against names {against}, which has {len(theirs)} lines; expected {len(pairs.target)}, one for each "
                "line of the test"
            )
        check_place("--out", out)
        asked = {"beams": beams, "length_penalty": length_penalty}
        how = {name: value for name, value in asked.items() if value is not None}
        lines = _translations(model or [], system, pairs.source, device, how)
        found = engine.scores(lines, pairs.target)
        compared = []
        if theirs is not None:
            samples = 1000 if samples is None else samples
            with terminal.saying(f"drawing {samples} test sets"):
                compared = engine.compare(lines, theirs, pairs.target, samples=samples)
        if out is not None:
            from regard._files.write import write_atomically

            write_atomically(out, [f"{line}\n".encode() for line in lines])
    if as_json:
        terminal.data({"scores": [each._asdict() for each in found], "compared": [each._asdict() for each in compared]})
        return
    if all(line == line.lower() for line in lines) and any(line != line.lower() for line in pairs.target):
        typer.echo("all translations are lower-cased: the cased scores count each capital as an error", err=True)
    for each in found:
        typer.echo(f"{each.name:18} {each.score:6.2f}   {each.signature}")
    for other in compared:
        low, high = other.interval
        typer.echo(
            f"{other.name:18} {other.ours:6.2f} (95 %: {low:.2f} … {high:.2f})  other {other.theirs:6.2f}  "
            f"p = {other.p_value:.4f}"
        )


def _translations(
    model: list[Path], system: Path | None, lines: list[str], device: str, how: dict[str, Any]
) -> list[str]:
    from regard import train as engine
    from regard.cli import parse

    if system is not None:
        return engine.read_lines(system)
    with terminal.saying(f"loading {', '.join(map(str, model))}"):
        translator = engine.Translator.load(*model, device=parse.device(device))
    with terminal.progress() as bars:
        bar = bars.add_task("translating", total=len(lines))
        found = translator(lines, progress=lambda done: bars.update(bar, completed=done), **how)
    return [each[0].text for each in found]
