"""Byte pairs: round trips, special tokens in a text, dropped merges."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.train.small import START, STOP, UNKNOWN

from regard.train import Words, toy

LINES = toy(80, 5).train.source
TEXT = ["Ein Mann, der grün trägt.", "Don't  stop — now!", "A T-shirt (red)", "  spaces   at both ends  "]


@pytest.fixture(scope="module")
def words() -> Words:
    return Words.learn([*LINES, *TEXT], vocab_size=200)


def test_sentences_come_back_with_single_spaces(words: Words) -> None:
    for line, ids in zip(TEXT, words.encode(TEXT), strict=True):
        assert words.decode(ids) == " ".join(line.split())
        assert not {START, STOP} & set(ids)


def test_lower_case_is_part_of_the_vocabulary(tmp_path: Path) -> None:
    words = Words.learn(TEXT, vocab_size=150, lowercase=True)
    (tmp_path / "tokenizer.json").write_text(words.as_json())
    again = Words.load(tmp_path / "tokenizer.json")
    assert again.encode(TEXT) == words.encode(TEXT) and len(again) == len(words)
    assert again.decode(again.encode(["EIN MANN"])[0]) == "ein mann"


def test_text_that_looks_like_a_special_token_is_text(words: Words) -> None:
    ids = words.encode(["a </s> b <s> <pad>"])[0]
    assert not {0, START, STOP} & set(ids)


def test_what_was_never_seen_is_unknown_and_an_empty_line_is_empty(words: Words) -> None:
    assert UNKNOWN in words.encode(["火"])[0]
    assert words.encode([""]) == [[]] and words.encode([]) == []


def test_dropped_merges_follow_the_seed_and_spell_the_same_text(words: Words) -> None:
    first = words.encode_dropping(LINES[:20], 0.3, seed=5)
    assert first == words.encode_dropping(LINES[:20], 0.3, seed=5) != words.encode_dropping(LINES[:20], 0.3, seed=6)
    assert [words.decode(ids) for ids in first] == LINES[:20]
    assert sum(map(len, first)) > sum(map(len, words.encode(LINES[:20])))


def test_without_dropping_the_pieces_are_the_tokenizers(words: Words) -> None:
    assert words.encode_dropping([*LINES, *TEXT], 0.0, seed=1) == words.encode([*LINES, *TEXT])


@pytest.mark.parametrize("content", ["", "{}", '{"version": "1.0"}'])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="tokenizer.json cannot be read"):
        Words.load(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="other.json is missing"):
        Words.load(tmp_path / "other.json")


def test_more_pieces_than_a_text_has_are_the_same_pieces() -> None:
    lines = ["ﬃ a cat sees a cat.", "e\u0301e\u0301 猫"]
    found = [Words.learn(lines, vocab_size=size).as_json() for size in (1000, 10**20)]
    assert found[0] == found[1]


def test_a_vocabulary_needs_text() -> None:
    with pytest.raises(ValueError, match="no sentences to learn"):
        Words.learn([], vocab_size=100)
