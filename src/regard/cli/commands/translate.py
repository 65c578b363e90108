"""`regard translate`: sentences through a model that `regard train` made."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli import options, terminal
from regard.cli.options import about

if TYPE_CHECKING:
    from regard.train import Translation, Translator


def translate(
    sentences: Annotated[
        list[str] | None, typer.Argument(help="Sentences to translate (default: standard input).")
    ] = None,
    model: options.Trained = None,
    file: Annotated[Path | None, about("Read one sentence per line from this file (.gz too; - is stdin).")] = None,
    out: Annotated[Path | None, about("Write to this file (default: standard output).")] = None,
    beams: Annotated[int | None, about("Beam width; 1 is greedy search (default: 5).")] = None,
    best: Annotated[int, about("Number of translations per sentence, best first.")] = 1,
    length_penalty: options.LengthPenalty = 1.0,
    temperature: Annotated[float, about("Sampling temperature; above 0, tokens are sampled without beams.")] = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: Annotated[int | None, about("Seed for sampling; the same seed gives the same translations.")] = None,
    scores: Annotated[bool, about("Print the score before each translation.", "--scores")] = False,
    show: Annotated[bool, about("Show the alignment of each sentence and write a page.", "--show")] = False,
    page: Annotated[
        Path | None,
        about(
            "With --show: file name of the page (default: alignment.html); further sentences get NAME-2.html and so on."
        ),
    ] = None,
    batch_tokens: Annotated[int, about("Batch size: source tokens × beams.")] = 6_000,
    device: options.Device = "cpu",
    as_json: Annotated[bool, about("Print one JSON object per sentence.", "--json")] = False,
) -> None:
    """Translate sentences, a file or standard input, one line per sentence.

    Examples:
      regard translate --model runs/en-de "A man rides a bike."
      regard translate --model runs/en-de --file test.en --out test.out --beams 5
      regard translate --model runs/toy --show "the small dog sees a red bird."
    """
    from regard import train as engine
    from regard.cli import parse

    with terminal.one_line(ValueError, TypeError, options=options.WRITING):
        if not model:
            raise ValueError("--model FOLDER is missing: a run of regard train")
        if page is not None and not show:
            raise ValueError("--page names the page that --show writes; give --show too")
        sampled = temperature > 0
        if sampled and beams is not None and beams != 1:
            raise ValueError(
                f"--beams {beams} and --temperature {temperature:g} were both given: tokens are sampled "
                "without beams; give one"
            )
        beams = 5 if beams is None else beams
        how: dict[str, Any] = {
            "beams": 1 if sampled else beams,
            "best": best,
            "length_penalty": length_penalty,
            "batch_tokens": batch_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "seed": seed,
        }
        _check_counts(beams, best, batch_tokens, sampled)
        check_place("--out", out)
        check_place("--page", page)
        lines = _lines(sentences, file)
        with terminal.saying(f"loading {', '.join(map(str, model))}"):
            translator = engine.Translator.load(*model, device=parse.device(device))
        _tell_of_long(translator, lines, model[0])
        with terminal.progress() as bars:
            bar = bars.add_task("translating", total=len(lines))
            found = translator(lines, progress=lambda done: bars.update(bar, completed=done), **how)
        written = _written(lines, found, scores, as_json)
        if out is not None:
            from regard._files.write import write_atomically

            write_atomically(out, [written.encode()])
        elif not show or best > 1 or scores or as_json:  # a drawing has the best translation above it
            sys.stdout.write(written)
        if show:
            drawn = [(line, several[0]) for line, several in zip(lines, found, strict=True) if line.strip()]
            first = page if page is not None else Path("alignment.html")
            # next to JSON a drawing goes where messages go
            with redirect_stdout(sys.stderr) if as_json and out is None else nullcontext():
                for number, (line, one) in enumerate(drawn, 1):
                    name = first if number == 1 else first.with_stem(f"{first.stem}-{number}")
                    show_alignment(translator, line, name, one)


def check_place(option: str, file: Path | None) -> None:
    """Before hours of work go into a file that cannot be written."""
    if file is not None and not file.parent.is_dir():
        raise ValueError(f"{option} names the folder {file.parent}, which is not there")
    if file is not None and file.is_dir():
        raise ValueError(f"{option} names {file}, which is a folder; give the name of a file")


def _tell_of_long(translator: Translator, lines: list[str], folder: Path) -> None:
    """A line far longer than any the model has seen takes long, and is translated badly: said before it begins."""
    from regard import train as engine

    held = folder / "settings.json"
    if not held.is_file():
        return
    try:
        most = engine.read_settings(held).max_tokens
    except (OSError, ValueError):
        return  # nothing that is translated depends on it
    lengths = [len(ids) for ids in translator.words.encode(lines)]
    if lengths and max(lengths) >= most:
        at = lengths.index(max(lengths))
        print(
            f"line {at + 1} has {lengths[at]} tokens; the model learnt from sentences of fewer than {most}, so this "
            "may take long and read badly: give a sentence per line",
            file=sys.stderr,
        )


def _check_counts(beams: int, best: int, batch_tokens: int, drawn: bool) -> None:
    for name, value in (("--beams", beams), ("--best", best), ("--batch-tokens", batch_tokens)):
        if value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1")
    if best > (1 if drawn else beams):
        raise ValueError(
            f"--best {best} needs as many beams; {'a temperature draws one' if drawn else f'--beams is {beams}'}"
        )


def _lines(sentences: list[str] | None, file: Path | None) -> list[str]:
    from regard.train import read_lines, split_lines

    if sentences and file is not None:
        raise ValueError("sentences and --file were both given; give one")
    if sentences:
        return [terminal.readable(each, "a sentence") for each in sentences]
    if file is not None and str(file) != "-":
        return read_lines(file)
    if sys.stdin.isatty():
        raise ValueError("there is nothing to translate: give sentences, --file, or a pipe")
    return split_lines(sys.stdin.buffer.read(), "standard input")


def _written(lines: list[str], found: list[list[Translation]], scores: bool, as_json: bool) -> str:
    import json

    rows = []
    for line, several in zip(lines, found, strict=True):
        if as_json:
            best = [
                {"text": each.text, "score": each.score, "log_probability": each.log_probability} for each in several
            ]
            rows.append(json.dumps({"source": line, "translations": best}, ensure_ascii=False))
            continue
        rows += [f"{each.score:.4f}\t{each.text}" if scores else each.text for each in several]
    return "".join(f"{row}\n" for row in rows)


def show_alignment(
    translator: Translator, line: str, page: Path | None, translation: Translation | None = None
) -> None:
    """A translation (the best when not given), and which source pieces its pieces attend to: darker is more weight."""
    from rich.cells import cell_len

    from regard import train as engine

    aligned = engine.align(translator, line, translation=translation)
    typer.echo(f"{line}\n{aligned.text}")
    console = terminal.console(width=160)
    width = max((cell_len(each) for each in aligned.target), default=0)
    # a source piece is written down its column, sign by sign; some are two cells wide, some join the one before
    columns = [_signs(each) for each in aligned.source]
    tall = max(map(len, columns), default=0)
    for at in range(tall):
        signs = "".join(f" {signs[at - tall + len(signs)]}" if at >= tall - len(signs) else "   " for signs in columns)
        console.print(" " * (width + 1) + signs, markup=False, highlight=False)
    for piece, row in zip(aligned.target, aligned.weights, strict=True):
        cells = "".join(SHADES[min(int(weight * len(SHADES)), len(SHADES) - 1)] * 3 for weight in row)
        console.print(f"{' ' * (width - cell_len(piece))}{piece} {cells}", markup=False, highlight=False)
    if page is not None:
        # the page opens where the alignment is clearest: at the head whose rows have the largest weights on source
        # words, </s> apart
        cross = [call for call in aligned.recording if "cross_attention" in call.path]
        clear = {
            (call.layer, head): float(weights[:, :-1].amax(-1).mean())
            for call in cross
            for head, weights in enumerate(call.map[0])
        }
        layer, head = max(clear, key=clear.__getitem__)
        aligned.recording.to_html(page, layer=layer, head=head)
        typer.echo(f"wrote {page}")


def _signs(piece: str) -> list[str]:
    """The signs of a piece, each with the marks that join it, two cells wide."""
    from rich.cells import cell_len

    found: list[str] = []
    for sign in piece:
        if found and cell_len(sign) == 0:
            found[-1] += sign
        else:
            found.append(sign)
    return [each + " " * (2 - cell_len(each)) for each in found]


SHADES = " ░▒▓█"
