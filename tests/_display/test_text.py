"""Texts in two languages, and columns that line up where characters are two columns wide."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
from rich.cells import cell_len

from regard._display.texts import beginning, breaks, language, left, right, text, visible

WORDS = {"rows": ("{count} rows", "{count} 行"), "plain": ("a set {1, 2}", "集合 {1, 2}")}


def test_a_text_is_given_in_the_language_asked_for_with_its_values() -> None:
    assert text(WORDS, "en", "rows", count=3) == "3 rows"
    assert text(WORDS, "zh", "rows", count=3) == "3 行"
    assert text(WORDS, "zh", "plain") == "集合 {1, 2}"


def test_an_unknown_key_or_language_is_an_error_and_never_another_text() -> None:
    with pytest.raises(KeyError):
        text(WORDS, "en", "columns")
    with pytest.raises(ValueError, match="--lang is 'de'; expected en"):
        language("de")
    assert [language(lang) for lang in ("en", "zh")] == ["en", "zh"]


@pytest.mark.parametrize("shown", ["", "cat", "猫", "猫 cat", "坐在垫子上", "e\u0301t\u00e9", "🐈"])
@pytest.mark.parametrize("fitted", [left, right])
@pytest.mark.parametrize("columns", [1, 3, 7, 11])
def test_every_text_takes_exactly_the_columns_it_is_given(shown: str, fitted: object, columns: int) -> None:
    assert callable(fitted)
    assert cell_len(fitted(shown, columns)) == columns


def test_what_does_not_fit_is_cut_with_an_ellipsis_and_the_rest_stays() -> None:
    assert left("坐在垫子上", 7) == "坐在垫…"
    assert left("坐在垫子上", 6) == "坐在 …"
    assert right("猫", 5) == "   猫"


def folded(line: str, columns: int) -> list[str]:
    ends = [0, *breaks(line, columns), len(line)]
    return [line[start:end].rstrip(" ") for start, end in pairwise(ends)]


def test_chinese_is_broken_between_characters_and_english_between_words() -> None:
    assert folded("the cat sat on the mat", 11) == ["the cat sat", "on the mat"]
    assert folded("每个头 d_k = 4 列。每个头在自己的小空间里比较", 15) == [
        "每个头 d_k = 4",
        "列。每个头在自",
        "己的小空间里比",
        "较",
    ]
    assert folded("", 5) == [""]
    assert folded("incomprehensible", 7) == ["incompr", "ehensib", "le"]


def test_no_line_begins_with_a_closing_sign_or_ends_with_an_opening_one() -> None:
    line = "注意力（attention）把每一行变成总和为 1 的比例，再乘以值，得到输出。" * 3
    for columns in range(14, 63):
        pieces = folded(line, columns)
        assert all(cell_len(piece) <= columns for piece in pieces)
        assert "".join(pieces).replace(" ", "") == line.replace(" ", "")
        assert not any(piece[0] in "，。）" or piece[-1] == "（" for piece in pieces)


def test_control_characters_are_shown_and_nothing_turns_the_line_around() -> None:
    assert visible("\x1b[31m\n\u202eabc\udc80") == "␛[31m↵\ufffdabc\ufffd"
    assert visible("猫 cat") == "猫 cat"


def test_the_beginning_of_a_text_is_one_line_that_can_be_shown() -> None:
    assert beginning(" The cat\n\tsat. ") == "The cat sat."
    assert beginning("\x1b[31mred") == "␛[31mred"
    assert beginning("猫" * 61) == "猫" * 59 + "…" and beginning("猫" * 60) == "猫" * 60
    assert beginning("a cat sat", most=7) == "a cat…"
    assert beginning("a " * 100, most=7) == "a a a…" and beginning("a " * 4, most=7) == "a a a a"


def test_of_a_long_text_only_the_beginning_is_read() -> None:
    calls: list[object] = []
    sys.setprofile(lambda frame, event, given: calls.append(event))
    try:
        beginning("the cat " * 1000)
        beginning("a" * 1000)
    finally:
        sys.setprofile(None)
    assert len(calls) < 1000
