"""Parallel text from files: what is read, and what is refused with file and line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from regard.train import Pairs, read_folder, read_lines, read_pairs, split, toy


def write(folder: Path, **files: bytes) -> Path:
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


def test_lines_end_at_newlines_only_plain_and_packed(tmp_path: Path) -> None:
    text = "\ufeffone\u2028two\r\nthree\x0bfour\nfive"
    wanted = ["one\u2028two", "three\x0bfour", "five"]
    (tmp_path / "a.en").write_bytes(text.encode())
    (tmp_path / "a.en.gz").write_bytes(gzip.compress(text.encode()))
    assert read_lines(tmp_path / "a.en") == read_lines(tmp_path / "a.en.gz") == wanted
    (tmp_path / "empty").write_bytes(b"")
    assert read_lines(tmp_path / "empty") == []


def test_a_folder_gives_training_and_validation_text(tmp_path: Path) -> None:
    write(tmp_path, train__en=b"a\nb\n", train__de=b"A\nB\n", val__en=b"c\n", val__de=b"C\n")
    data = read_folder(tmp_path, "en", "de")
    assert data.train == (["a", "b"], ["A", "B"]) and data.valid == (["c"], ["C"])
    assert read_folder(tmp_path, "de", "en").train == (["A", "B"], ["a", "b"])


def test_without_validation_files_the_last_sentences_are_held_out(tmp_path: Path) -> None:
    lines = b"".join(b"%d\n" % number for number in range(25))
    write(tmp_path, train__en=lines, train__de=lines)
    data = read_folder(tmp_path, "en", "de")
    assert data.valid.source == ["23", "24"] and len(data.train.source) == 23


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train__en": b"a\nb\n", "train__de": b"A\n"}, "has 2 lines and .*train.de has 1: line i of one must"),
        ({"train__en": b"a\n  \n", "train__de": b"A\nB\n"}, "train.en, line 2 is empty; remove the line from both"),
        ({"train__en": b"a\nb\n", "train__de": b"A\nK\xfchn\n"}, "train.de, line 2: byte 0xfc is not UTF-8; convert"),
        ({"train__en": "a\n".encode("utf-16"), "train__de": b"A\n"}, "line 1: byte 0xff .*iconv -f UTF-16 -t UTF-8"),
        (
            {"train__en": "a\nb\n".encode("utf-16-le"), "train__de": "A\nB\n".encode("utf-16-le")},
            "train.en, line 1: a NUL byte, which no UTF-8 text has; convert the text",
        ),
        ({"train__en": b"a\n"}, "has train.en but no train.de"),
        ({"train__fr": b"a\n"}, "has no train.en and train.de .*it holds train.fr"),
        ({"train__en": b"", "train__de": b""}, "are empty: expected one sentence per line"),
        (
            {"train__en": b"a\n", "train__de": b"b\n"},
            "expected at least two sentences, to hold one out for validation; got 1",
        ),
        ({"train__en__gz": b"no gzip", "train__de": b"A\n"}, "train.en.gz is not a whole gzip file"),
        ({"train__en__gz": gzip.compress(b"a\n")[:-6], "train__de": b"A\n"}, "train.en.gz is not a whole gzip file"),
        ({"train1__en": b"a\n", "train2__en": b"a\n"}, "has several train files of en: train1.en, train2.en"),
    ],
)
def test_damaged_text_is_refused_by_file_and_line(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_folder(write(tmp_path, **files), "en", "de")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is not a folder; expected one with train.en and train.de"):
        read_folder(tmp_path / "nowhere", "en", "de")
    with pytest.raises(FileNotFoundError):
        read_pairs(tmp_path / "a", tmp_path / "b")


def test_no_validation_sentence_of_the_toy_language_is_trained_on() -> None:
    data = toy(200, 20)
    assert not set(data.valid.source) & set(data.train.source)
    assert data == toy(200, 20) and data != toy(200, 20, seed=2)
    assert len(data.valid.source) == 20 and len(data.train.source) == len(data.train.target) > 150


def test_a_split_needs_two_sentences() -> None:
    assert split(Pairs(["a", "b"], ["A", "B"])).valid == (["b"], ["B"])
