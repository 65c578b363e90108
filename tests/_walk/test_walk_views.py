"""A walk in the terminal and as a page: what is shown, that it lines up, and that token text is data (rule 61)."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from dataclasses import replace
from functools import partial
from html import escape
from typing import Literal

import numpy as np
import pytest
from rich.console import Console
from tests.lab.quick import story_of
from tests.page_tree import Tree

from regard._display import texts
from regard._display.texts import LANGUAGES, width
from regard._walk import BY_NAME, Begin, Panel, Settings, Step, Story, View, html, walk_text
from regard._walk._colours import smaller, strengths
from regard._walk._story import decimals, number, plain
from regard._walk._terminal import Page
from regard._walk._words import STEPS
from regard.lab._story import EXPERIMENTS

CAT = "The cat sat on the mat."
NASTY = (
    "</title><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</style><style>*{}", "<!--", "]]>",
    "\x00\x1b[31m\n", "\u202eevil\udc80",
)  # fmt: skip


def printed(
    story: Story, lang: str = "en", columns: int = 80, colours: Literal["standard", "256"] | None = None
) -> str:
    out = io.StringIO()
    console = Console(file=out, width=columns, force_terminal=colours is not None, color_system=colours)
    console.print(View(story, lang))
    return out.getvalue()


def renamed(story: Story, tokens: tuple[str, ...]) -> Story:
    """The same numbers under other words."""
    names = dict(zip(story.steps[0].panels[0].columns, tokens, strict=True))

    def panel(given: Panel) -> Panel:
        rows, columns = (tuple(names.get(name, name) for name in side) for side in (given.rows, given.columns))
        return replace(given, rows=rows, columns=columns)

    def step(given: Step) -> Step:
        panels, links = (tuple(map(panel, several)) for several in (given.panels, given.links))
        worked = tuple(re.sub(r"word\d", lambda found: names[found[0]], line) for line in given.worked)
        return replace(given, panels=panels, links=links, worked=worked)

    return replace(story, steps=tuple(map(step, story.steps)))


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("columns", [44, 80, 120])
@pytest.mark.parametrize("name", [*BY_NAME, *EXPERIMENTS])
def test_no_line_is_wider_than_the_terminal(name: str, columns: int, lang: str) -> None:
    lines = printed(story_of(name, lang), lang, columns).splitlines()
    assert max(width(line) for line in lines) <= columns


def upto(line: str, columns: int) -> str:
    """What stands in the first so many columns of the terminal."""
    end = next(at for at in range(len(line) + 1) if width(line[:at]) >= columns)
    assert width(line[:end]) == columns, f"a character of {line!r} lies across column {columns}"
    return line[:end]


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("text", [CAT, "猫坐在垫子上，睡着了。", "The 猫 sat on 垫子 with 🐈 cats."])
def test_columns_line_up_under_wide_characters(text: str, lang: str) -> None:
    story = walk_text(text, Settings(heads=1, d_model=5), lang)
    page = Page(120, False, partial(texts.text, STEPS, lang))
    for panel in (panel for step in story.steps for panel in step.panels if panel.kind != "plain"):
        lines = [line.plain for line in page.panel(panel)]
        assert len({width(line) for line in lines}) == 1
        side = max(width(name) for name in panel.rows) + 1
        cell = (max(width(line.rstrip()) for line in lines[1:]) - side) // len(panel.columns)
        digits = decimals(panel.values, panel.kind)
        for line, row in zip(lines[2:], panel.values, strict=True):
            for at, value in enumerate(row, 1):
                assert upto(line, side + at * cell).endswith(f" {number(value, digits)}")
        for at, name in enumerate(panel.columns, 1):
            assert upto(lines[1], side + at * cell).endswith(f" {name}")
    tokens = [line.plain for line in page.panel(story.steps[0].panels[0])]
    assert len({width(line) for line in tokens}) == 1 and len(tokens) == 3


def test_small_matrices_are_numbers_and_large_ones_heatmaps_with_their_shape() -> None:
    story = walk_text(CAT, Settings(heads=7, d_model=63))
    plain_text = printed(story)
    assert "E  [7, 63]" in plain_text and "█" in plain_text
    assert "each cell is the mean" not in plain_text  # 63 columns have room at one character each
    wide = printed(walk_text(CAT, Settings(heads=1, d_model=111)))
    assert re.search(r"\d to \d\.\d\d; each cell is the mean of up to 1 × 2 numbers", wide)
    assert re.search(r"The +-?\d\.\d\d", printed(walk_text(CAT, Settings())))


def test_colours_follow_sign_and_size_and_are_absent_in_a_pipe() -> None:
    story = walk_text(CAT, Settings(causal=True))
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
    text = printed(walk_text(CAT, Settings(heads=11, d_model=22)), columns=120)
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
    text = printed(renamed(walk_text("word0 word1 word2 word3 word4 word5 word6", Settings()), NASTY))
    assert "\x1b" not in text and "\x00" not in text and "\u202e" not in text
    assert "␛" in text


def begin(words: tuple[str, ...], settings: Settings) -> Begin:
    return Begin(settings=settings, text=" ".join(words), words=words)


@pytest.mark.parametrize("tokens", [NASTY, ("",) * 7, ("猫",) * 7], ids=["nasty", "empty", "same"])
def test_the_elements_of_the_page_are_the_same_for_any_tokens(tokens: tuple[str, ...]) -> None:
    settings = Settings(causal=True)
    story = walk_text("word0 word1 word2 word3 word4 word5 word6", settings)
    plain_page, other = (
        Tree(html(begin(words, settings), told, "en"))
        for words, told in ((("word",) * 7, story), (tokens, renamed(story, tokens)))
    )
    assert other.elements == plain_page.elements
    assert other.attributes == plain_page.attributes
    assert "\x1b" not in "".join(other.text)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("name", ["E1", "E4", "E6"])
def test_the_page_stands_alone_and_its_policy_allows_nothing_else(name: str, lang: str) -> None:
    story = story_of(name, lang)
    page = html(Begin(settings=Settings(), example=name), story, lang)
    tree = Tree(page)
    names = {tag for tag, _ in tree.elements}
    assert names.isdisjoint({"iframe", "object", "embed", "link", "base", "form", "video", "use", "image", "img"})
    assert not any(
        attribute.startswith("on") or attribute in ("style", "src", "href") for attribute, _ in tree.attributes
    )
    policy = next(value or "" for key, value in tree.attributes if key == "content" and "default-src" in (value or ""))
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy and "http" not in policy
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert style is not None and "url(" not in style[1]
    assert base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode() in policy
    assert f'<html lang="{"zh-CN" if lang == "zh" else "en"}">' in page
    plain_text = page.split("<noscript>")[1].split("</noscript>")[0]  # what readers without scripts get
    assert all(escape(step.title) in plain_text for step in story.steps)


def test_a_page_that_would_be_too_wide_to_compute_is_refused() -> None:
    settings = Settings(d_model=1024)
    with pytest.raises(ValueError, match="--d-model is 1024; a page computes layers up to 512 wide"):
        html(begin(("a",), settings), walk_text("a", Settings()), "en")


@pytest.mark.parametrize("count", [20, 22, 47])
def test_every_line_of_a_heatmap_has_a_name_and_queries_that_are_left_out_are_counted(count: int) -> None:
    words = [f"w{n}" for n in range(count)]
    story = walk_text(" ".join(words), Settings(heads=1, d_model=5))
    lines = printed(story, columns=90).split("9 · Attention weights")[1].splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("head 0"))
    names = [line.split()[0] for line in lines[start + 1 : start + 21]]
    assert names == [words[row * count // 20] for row in range(20)]
    listed = lines.index("Who looks at whom most")
    assert [line.split()[0] for line in lines[listed + 2 : listed + 22]] == words[:20]
    after = lines[listed + 22]
    assert after == ("" if count == 20 else f"… and {count - 20} more, in the page (--html) and in --json.")
