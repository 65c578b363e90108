"""Texts in two languages, and columns that line up where characters are two columns wide."""

from __future__ import annotations

import pytest

from regard import _text
from regard._text import centred, left, right, text, width

WORDS = {"rows": ("{count} rows", "{count} 行"), "plain": ("a set {1, 2}", "集合 {1, 2}")}


def test_a_text_is_given_in_the_language_asked_for_with_its_values() -> None:
    assert text(WORDS, "en", "rows", count=3) == "3 rows"
    assert text(WORDS, "zh", "rows", count=3) == "3 行"
    assert text(WORDS, "zh", "plain") == "集合 {1, 2}"


def test_an_unknown_key_or_language_is_an_error_and_never_another_text() -> None:
    with pytest.raises(KeyError):
        text(WORDS, "en", "columns")
    with pytest.raises(ValueError, match="--lang is 'de'; expected en"):
        _text.language("de")
    assert [_text.language(lang) for lang in _text.LANGUAGES] == ["en", "zh"]


def test_a_catalogue_with_a_gap_or_other_names_in_one_language_is_found() -> None:
    assert _text.problems({"rows": WORDS["rows"]}) == []
    wrong = {"gap": ("something", " "), "names": ("{count} rows", "{number} 行")}
    assert [line.split(":")[0] for line in _text.problems(wrong)] == ["gap", "names"]


@pytest.mark.parametrize("shown", ["", "cat", "猫", "猫 cat", "坐在垫子上", "e\u0301t\u00e9", "🐈"])
@pytest.mark.parametrize("fitted", [left, right, centred])
@pytest.mark.parametrize("columns", [1, 3, 7, 11])
def test_every_text_takes_exactly_the_columns_it_is_given(shown: str, fitted: object, columns: int) -> None:
    assert callable(fitted)
    assert width(fitted(shown, columns)) == columns


def test_what_does_not_fit_is_cut_with_an_ellipsis_and_the_rest_stays() -> None:
    assert left("坐在垫子上", 7) == "坐在垫…"
    assert left("坐在垫子上", 6) == "坐在 …"
    assert right("猫", 5) == "   猫"
    assert centred("猫", 6) == "  猫  "
