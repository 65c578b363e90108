"""Parallel text from files, plain or gzip, UTF-8: line i of one file translates line i of the other."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import NamedTuple

Lines = list[str]


class Pairs(NamedTuple):
    """Sentences and their translations, in order."""

    source: Lines
    target: Lines


class Data(NamedTuple):
    """What a folder holds."""

    train: Pairs
    valid: Pairs


def read_lines(path: str | Path) -> Lines:
    """The lines of a text file (`.gz` is unpacked), split at newlines only, without a byte-order mark.

    Raises:
        ValueError: bytes that are not UTF-8, or a damaged gzip file; the message names the file and the line.
        OSError: the file cannot be read.
    """
    path = Path(path)
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as packed:
                raw = packed.read()
        else:
            raw = path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a whole gzip file: {error}") from None
    return split_lines(raw, str(path))


def split_lines(raw: bytes, name: str) -> Lines:
    """The lines of a UTF-8 text; `name` says in errors where it comes from."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        kind = "UTF-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"
        raise ValueError(
            f"{name}, line {line}: byte {raw[error.start]:#04x} is not UTF-8; convert the text, "
            f"for example with iconv -f {kind} -t UTF-8"
        ) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ValueError(
            f"{name}, line {line}: a NUL byte, which no UTF-8 text has; convert the text, for example with "
            "iconv -f UTF-16LE -t UTF-8"
        )
    lines = text.split("\n")
    if lines and not lines[-1]:
        lines.pop()  # what follows the last newline is no line
    return [line.rstrip("\r") for line in lines]


def read_pairs(source: str | Path, target: str | Path) -> Pairs:
    """Two files that translate each other, line by line.

    Raises:
        ValueError: unequal numbers of lines, an empty line, or a file without lines; names file and line.
    """
    pairs = Pairs(read_lines(source), read_lines(target))
    if len(pairs.source) != len(pairs.target):
        raise ValueError(
            f"{source} has {len(pairs.source)} lines and {target} has {len(pairs.target)}: line i of one must "
            "translate line i of the other"
        )
    if not pairs.source:
        raise ValueError(f"{source} and {target} are empty: expected one sentence per line")
    for path, lines in ((source, pairs.source), (target, pairs.target)):
        for number, line in enumerate(lines, 1):
            if not line.strip():
                raise ValueError(f"{path}, line {number} is empty; remove the line from both files")
    return pairs


def find(folder: str | Path, name: str, language: str) -> Path | None:
    """The file `name.language` or `name.language.gz` of a folder, or the only one that begins with `name`."""
    folder = Path(folder)
    for path in (folder / f"{name}.{language}", folder / f"{name}.{language}.gz"):
        if path.is_file():
            return path
    found = sorted({*folder.glob(f"{name}*.{language}"), *folder.glob(f"{name}*.{language}.gz")})
    if len(found) > 1:
        raise ValueError(f"{folder} has several {name} files of {language}: {', '.join(each.name for each in found)}")
    return found[0] if found else None


def read_folder(folder: str | Path, source: str, target: str, *, held_out: int = 1000) -> Data:
    """Training and validation text of a folder: `train.en`, `train.de`, `val.en`, `val.de`, each also as `.gz`.

    Without validation files, the last sentences (at most `held_out`, and a tenth of all) are held out.

    Raises:
        ValueError: a file is missing or damaged; the message says which.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; expected one with train.{source} and train.{target}")
    train = _pairs(folder, ("train",), source, target)
    if train is None:
        raise ValueError(
            f"{folder} has no train.{source} and train.{target} (or .gz); it holds "
            f"{', '.join(sorted(each.name for each in folder.iterdir())[:8]) or 'nothing'}"
        )
    valid = _pairs(folder, ("val", "valid", "dev"), source, target)
    return Data(train, valid) if valid is not None else split(train, held_out)


def split(pairs: Pairs, held_out: int = 1000) -> Data:
    """The last sentences for validation, the others for training."""
    count = min(held_out, max(1, len(pairs.source) // 10))
    if count >= len(pairs.source):
        raise ValueError(f"expected at least two sentences, to hold one out for validation; got {len(pairs.source)}")
    return Data(
        Pairs(pairs.source[:-count], pairs.target[:-count]), Pairs(pairs.source[-count:], pairs.target[-count:])
    )


def _pairs(folder: Path, names: tuple[str, ...], source: str, target: str) -> Pairs | None:
    for name in names:
        files = find(folder, name, source), find(folder, name, target)
        if files[0] is not None and files[1] is not None:
            return read_pairs(files[0], files[1])
        if files[0] is not None or files[1] is not None:
            there, missing = (source, target) if files[1] is None else (target, source)
            raise ValueError(f"{folder} has {name}.{there} but no {name}.{missing}")
    return None
