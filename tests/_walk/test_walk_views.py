"""A walk in the terminal and as a page: what is shown, that it lines up, and that token text is data (rule 61)."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html import escape
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from tests.lab.quick import page, printed, story_of, told
from tests.page_tree import Tree

from regard._walk import Panel
from regard._walk._colours import smaller, strengths
from regard._walk._story import decimals, number, plain
from regard.cli.commands.walk import NAMES as EXAMPLES

CAT = "The cat sat on the mat."
NASTY = (
    "</title><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</style><style>*{}", "<!--", "]]>",
    "\x00\x1b[31m\n", "\u202eevil\udc80",
)  # fmt: skip


def renamed(story: Any, tokens: tuple[str, ...]) -> Any:
    """The same numbers under other words."""
    names = dict(zip(story.steps[0].panels[0].columns, tokens, strict=True))

    def panel(given: Any) -> Any:
        rows, columns = (tuple(names.get(name, name) for name in side) for side in (given.rows, given.columns))
        return replace(given, rows=rows, columns=columns)

    def step(given: Any) -> Any:
        panels, links = (tuple(map(panel, several)) for several in (given.panels, given.links))
        worked = tuple(re.sub(r"word\d", lambda found: names[found[0]], line) for line in given.worked)
        return replace(given, panels=panels, links=links, worked=worked)

    return replace(story, steps=tuple(map(step, story.steps)))


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("columns", [44, 80, 120])
@pytest.mark.parametrize("name", EXAMPLES)
def test_no_line_is_wider_than_the_terminal(name: str, columns: int, lang: str) -> None:
    lines = printed(story_of(name, lang), lang, columns).splitlines()
    assert max(cell_len(line) for line in lines) <= columns


def upto(line: str, columns: int) -> str:
    """What stands in the first so many columns of the terminal."""
    end = next(at for at in range(len(line) + 1) if cell_len(line[:at]) >= columns)
    assert cell_len(line[:end]) == columns, f"a character of {line!r} lies across column {columns}"
    return line[:end]


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("text", [CAT, "猫坐在垫子上，睡着了。", "The 猫 sat on 垫子 with 🐈 cats."])
def test_columns_line_up_under_wide_characters(text: str, lang: str) -> None:
    story = told(text, lang, heads=1, d_model=5)
    for step, panel in [(each, panel) for each in story.steps for panel in each.panels]:
        alone = replace(story, steps=(replace(step, panels=(panel,)),))
        lines = printed(alone, lang, 120).splitlines()
        side = max(cell_len(name) for name in panel.rows) + 1
        if panel.kind == "plain":
            start = next(at for at, line in enumerate(lines) if line.startswith(panel.rows[0])) - 1
        else:
            start = lines.index(f"{panel.name}  {list(panel.values.shape)}") + 1
        head, *rows = (line.rstrip() for line in lines[start : start + 1 + len(panel.rows)])
        assert len({cell_len(line) for line in (head, *rows)}) == 1
        if panel.kind == "plain":
            continue
        cell = (cell_len(head) - side) // len(panel.columns)
        for line, row in zip(rows, panel.values, strict=True):
            for at, value in enumerate(row, 1):
                before, said = upto(line, side + at * cell), upto(line, side + at * cell).split(" ")[-1]
                digits = len(said.partition(".")[2])
                assert abs(float(said) - value) <= 0.5001 * 10**-digits and digits + (value == 0) > 0, before
        for at, name in enumerate(panel.columns, 1):
            assert upto(head, side + at * cell).endswith(f" {name}")


def test_small_matrices_are_numbers_and_large_ones_heatmaps_with_their_shape() -> None:
    story = told(CAT, heads=7, d_model=63)
    plain_text = printed(story)
    assert "E  [7, 63]" in plain_text and "█" in plain_text
    assert "each cell is the mean" not in plain_text  # 63 columns have room at one character each
    wide = printed(told(CAT, heads=1, d_model=111))
    assert re.search(r"\d to \d\.\d\d; each cell is the mean of up to 1 × 2 numbers", wide)
    assert re.search(r"The +-?\d\.\d\d", printed(told(CAT)))


def test_colours_follow_sign_and_size_and_are_absent_in_a_pipe() -> None:
    story = told(CAT, causal=True)
    assert "\x1b[" not in printed(story)
    assert printed(story, colours="256").count("\x1b[") > 500
    assert "[48;" not in printed(story, colours="standard")  # sixteen are too few: headings alone have some
    assert strengths(np.array([[-4.0, 2.0, 0.0, -np.inf]]), "signed").tolist() == [[-1.0, 0.5, 0.0, 0.0]]
    assert strengths(np.array([[-4.0, 2.0]]), "signed", 8.0).tolist() == [[-0.5, 0.25]]
    assert strengths(np.array([[0.25, 1.0]]), "weights").tolist() == [[0.5, 1.0]]


def test_a_smaller_picture_is_made_of_means_without_what_is_forbidden() -> None:
    values = np.arange(35.0).reshape(5, 7)
    values[0, 0] = -np.inf
    names = tuple("abcdefg")
    found, sides = smaller(Panel("", values, names[:5], names), 2, 3)
    assert sides == (3, 3)
    assert found.shape == (2, 3)
    assert found[0, 0] == np.mean([1, 7, 8])
    assert found[1, 2] == np.mean(values[2:, 4:])
    whole, sides = smaller(Panel("", values[1:], names[:4], names), 63, 63)
    assert sides == (1, 1) and np.array_equal(whole, values[1:])


def test_many_heads_are_shown_by_the_first_and_weights_by_all() -> None:
    text = printed(told(CAT, heads=11, d_model=22), columns=120)
    assert "… and 30 more" in text  # queries, keys and values of ten heads
    assert text.count("head 10") == 2  # its picture, and whom it looks at


def test_numbers_are_printed_as_a_reader_expects_them() -> None:
    assert [number(value, 2) for value in (-0.001, 1.005, -np.inf, 12345678.9)] == ["0.00", "1.00", "-∞", "1.2e+07"]
    assert [plain(value) for value in (3.0, 1048576, 0.25)] == ["3", "1048576", "0.2500"]
    assert decimals(np.array([[2.0, 0.0]])) == 0
    assert decimals(np.array([[0.8808, 0.1192]]), "weights") == 4
    assert decimals(np.full((3, 7), 0.1)) == 2
    assert decimals(np.full((3, 7), 0.1), "weights") == 3
    assert decimals(np.full((3, 7), 123.4)) == 1


def test_control_characters_do_not_reach_the_terminal() -> None:
    text = printed(renamed(told("word0 word1 word2 word3 word4 word5 word6"), NASTY))
    assert "\x1b" not in text and "\x00" not in text and "\u202e" not in text
    assert "␛" in text


@pytest.mark.parametrize("tokens", [NASTY, ("",) * 7, ("猫",) * 7], ids=["nasty", "empty", "same"])
def test_the_elements_of_the_page_are_the_same_for_any_tokens(tokens: tuple[str, ...]) -> None:
    story = told("word0 word1 word2 word3 word4 word5 word6", causal=True)
    plain_page, other = (
        Tree(page(shown, words=words, causal=True))
        for words, shown in ((("word",) * 7, story), (tokens, renamed(story, tokens)))
    )
    assert other.elements == plain_page.elements
    assert other.attributes == plain_page.attributes
    assert "\x1b" not in "".join(other.text)


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("name", ["E1", "E4", "E6"])
def test_the_page_stands_alone_and_its_policy_allows_nothing_else(name: str, lang: str) -> None:
    story = story_of(name, lang)
    written = page(story, lang, example=name)
    tree = Tree(written)
    names = {tag for tag, _ in tree.elements}
    assert names.isdisjoint({"iframe", "object", "embed", "link", "base", "form", "video", "use", "image", "img"})
    assert not any(
        attribute.startswith("on") or attribute in ("style", "src", "href") for attribute, _ in tree.attributes
    )
    policy = next(value or "" for key, value in tree.attributes if key == "content" and "default-src" in (value or ""))
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy and "http" not in policy
    style = re.search(r"<style>(.*?)</style>", written, re.DOTALL)
    assert style is not None and "url(" not in style[1]
    assert base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode() in policy
    assert f'<html lang="{"zh-CN" if lang == "zh" else "en"}">' in written
    plain_text = written.split("<noscript>")[1].split("</noscript>")[0]  # what readers without scripts get
    assert all(escape(step.title) in plain_text for step in story.steps)


def test_a_page_that_would_be_too_wide_to_compute_is_refused() -> None:
    with pytest.raises(ValueError, match="--d-model is 1024; a page computes layers up to 512 wide"):
        page(told("a"), words=("a",), d_model=1024)


@pytest.mark.parametrize("count", [20, 22, 47])
def test_every_line_of_a_heatmap_has_a_name_and_queries_that_are_left_out_are_counted(count: int) -> None:
    words = [f"w{n}" for n in range(count)]
    story = told(" ".join(words), heads=1, d_model=5)
    lines = printed(story, columns=90).split("9 · Attention weights")[1].splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("head 0"))
    names = [line.split()[0] for line in lines[start + 1 : start + 21]]
    assert names == [words[row * count // 20] for row in range(20)]
    listed = lines.index("Who looks at whom most")
    assert [line.split()[0] for line in lines[listed + 2 : listed + 22]] == words[:20]
    after = lines[listed + 22]
    assert after == ("" if count == 20 else f"… and {count - 20} more, in the page (--html) and in --json.")
