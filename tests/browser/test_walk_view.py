"""The walk in the page: every number is the oracle's, and changes with the switches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.browser.conftest import Opened
from tests.browser.recordings import sentence
from tests.browser.test_accessibility import violations
from typer.testing import CliRunner

from regard import reference
from regard._walk._draws import Draws
from regard.cli import app


def matrix(opened, step: str, name: str | None = None) -> np.ndarray:
    """A matrix of a step, in full precision; all of them stacked where no name is given."""
    found = opened.page.eval_on_selector_all(
        f'[data-step="{step}"] figure[data-matrix]',
        """all => all.map(one => [one.dataset.matrix, [...one.querySelectorAll('tbody tr')].map(
          row => [...row.querySelectorAll('td')].map(cell => Number(cell.dataset.v)))])""",
    )
    chosen = [values for title, values in found if name is None or title == name]
    return np.array(chosen[0] if name is not None else chosen)


def switch(opened, name: str) -> None:
    opened.page.click(f'[data-switch="{name}"]')
    opened.settle()


@pytest.mark.parametrize(
    "switches",
    [
        [],
        ["mask:causal", "heads:4"],
        ["mask:window", "width:16", "heads:1", "scale:false"],
        ["positions:false", "width:4", "seed:2"],
    ],
    ids=["as it opens", "causal", "window without scale", "without positions"],
)
def test_every_step_is_what_the_reference_computes(open_page, switches: list[str]) -> None:
    opened = open_page(sentence())
    opened.view("walk")
    for name in switches:
        switch(opened, name)
    given = dict(name.split(":") for name in switches)
    heads = int(given.get("heads", "2"))
    x = matrix(opened, "positions", "X = E + P")
    np.testing.assert_allclose(x, matrix(opened, "embeddings", "E") + matrix(opened, "positions", "P"), atol=1e-12)
    weights = {name: matrix(opened, "projections", f"W^{name.upper()}") for name in "qkv"} | {
        "out": matrix(opened, "output", "W^O")
    }
    place = np.arange(len(x))
    mask = {
        "none": None,
        "causal": place[None, :] <= place[:, None],
        "window": abs(place[None, :] - place[:, None]) <= 1,
    }[given.get("mask", "none")]
    scale = 1.0 if given.get("scale") == "false" else None
    steps = reference.trace(x[None], x[None], x[None], weights, num_heads=heads, mask=mask, scale=scale)
    np.testing.assert_allclose(matrix(opened, "projections", "Q"), steps["query"][0], atol=1e-10)
    np.testing.assert_allclose(matrix(opened, "raw_scores"), steps["raw_scores"][0], atol=1e-10)
    np.testing.assert_allclose(matrix(opened, "weights"), steps["weights"][0], atol=1e-12)
    np.testing.assert_allclose(matrix(opened, "heads"), steps["heads"][0], atol=1e-10)
    if heads > 1:
        np.testing.assert_allclose(matrix(opened, "concat", "C"), steps["concat"][0], atol=1e-10)
    output = steps["output"][0]
    np.testing.assert_allclose(matrix(opened, "output", "Y"), output, atol=1e-10)
    residual = x + output
    np.testing.assert_allclose(matrix(opened, "residual", "R = X + Y"), residual, atol=1e-10)
    normed = (residual - residual.mean(-1, keepdims=True)) / np.sqrt(residual.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(matrix(opened, "normed", "N"), normed, atol=1e-10)


def test_another_sentence_is_walked_through_and_the_same_word_is_the_same_vector(open_page) -> None:
    opened = open_page(sentence())
    opened.view("walk")
    opened.page.fill("#walk-text", "one two one")
    embeddings = matrix(opened, "embeddings", "E")
    assert embeddings.shape == (3, 8)
    np.testing.assert_array_equal(embeddings[0], embeddings[2])
    assert abs(embeddings[0] - embeddings[1]).max() > 0.1


def test_the_answers_of_the_exercises_are_computed(open_page) -> None:
    opened = open_page(sentence())
    opened.view("walk")
    opened.page.fill("#walk-text", "the cat and the dog")
    for summary in opened.page.query_selector_all(".exercise summary"):
        summary.click()
    opened.wait_until("[...document.querySelectorAll('.exercise details p')].every(one => one.textContent)")
    answers = opened.page.eval_on_selector_all(".exercise details p", "all => all.map(one => one.textContent)")
    assert "its weight is 1.00" in answers[0]
    assert "largest difference 0.0000" in answers[2]
    assert "5 × 8" in answers[3] and "256" in answers[3]
    assert "13 of 25" in answers[4]
    opened.page.click(".exercise .chip >> nth=0")
    opened.settle()
    assert opened.page.get_attribute('[data-switch="mask:causal"]', "aria-pressed") == "true"
    np.testing.assert_array_equal(matrix(opened, "weights")[:, 0], [[1, 0, 0, 0, 0]] * 2)
    # a causal mask would tell the two places apart: the exercise about positions takes it away
    assert "largest difference 0.0000" in opened.page.inner_text('[data-answer="2"]')
    opened.page.click(".exercise .chip >> nth=2")
    opened.settle()
    found = matrix(opened, "weights")
    np.testing.assert_array_equal(found[:, 0], found[:, 3])


def test_the_walk_speaks_chinese(open_page) -> None:
    opened = open_page(sentence(), lang="zh")
    opened.view("walk")
    assert "词嵌入" in opened.page.inner_text('[data-step="embeddings"] h2')


@pytest.fixture
def open_walk(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Write a page as `regard walk --html` does, open it, and see that it said nothing and asked for nothing."""
    opened, contexts = [], []

    def opener(*given: str) -> Opened:
        file = tmp_path / f"walk{len(opened)}.html"
        result = CliRunner().invoke(app, ["walk", *given, "--html", str(file)])
        assert result.exit_code == 0, result.output
        contexts.append(browser.new_context(viewport={"width": 1300, "height": 900}))
        found = Opened(contexts[-1].new_page())
        opened.append(found)
        found.page.goto(file.as_uri())
        found.page.wait_for_selector("[data-step]")
        return found

    yield opener
    for found in opened:
        assert found.said == [] and len(found.asked) == 1
    for context in contexts:
        context.close()


def arrays(*given: str) -> dict[str, dict[str, np.ndarray]]:
    """What `regard walk --json` says, by step."""
    result = CliRunner().invoke(app, ["walk", *given, "--json"])
    return {
        step["name"]: {name: np.array(held["values"], dtype=float) for name, held in step["arrays"].items()}
        for step in json.loads(result.stdout)["steps"]
    }


def the_same_steps(opened: Opened, said: dict[str, dict[str, np.ndarray]]) -> None:
    """The matrices of the page's steps are those that the command computes."""
    for step in ("raw_scores", "weights", "heads"):
        np.testing.assert_allclose(matrix(opened, step), said[step][step], atol=1e-9)
    np.testing.assert_allclose(matrix(opened, "output", "Y"), said["output"]["output"], atol=1e-9)


@pytest.mark.parametrize(
    "given",
    [
        ["The cat sat on the mat.", "--causal", "--heads", "4", "--d-model", "12", "--seed", "7"],
        ["猫坐在垫子上。", "--window", "2", "--no-scale", "--lang", "zh"],
        ["The cat sat.", "--cross", "Die Katze saß da."],
        ["one two three", "--causal", "--window", "1"],
    ],
    ids=["causal", "window", "cross", "both"],
)
def test_the_page_of_a_walk_shows_the_numbers_of_the_command(open_walk, given: list[str]) -> None:
    the_same_steps(open_walk(*given), arrays(*given))


@pytest.mark.parametrize(
    "given",
    [
        ["The cat sat.", "--causal", "--heads", "4"],
        ["猫坐在垫子上。", "--window", "2", "--no-scale", "--heads", "1", "--lang", "zh"],
        ["The cat sat.", "--cross", "Die Katze saß da."],
    ],
    ids=["causal", "window", "cross"],
)
def test_the_page_of_a_walk_says_what_the_command_says(open_walk, given: list[str]) -> None:
    opened = open_walk(*given)
    steps = json.loads(CliRunner().invoke(app, ["walk", *given, "--json"]).stdout)["steps"]
    for step in steps:
        texts = opened.page.eval_on_selector_all(
            f'[data-step="{step["name"]}"] > p', "all => all.map(one => one.textContent)"
        )
        # of the weights the page says more: that a pointer follows their lines
        assert any(text.startswith(step["says"]) for text in texts), step["name"]


def test_a_trained_layer_is_walked_in_the_page_with_its_own_numbers(open_walk) -> None:
    given = ["The cat sat.", "--model", "minilm", "--layer", "5"]
    opened = open_walk(*given)
    said = arrays(*given)
    np.testing.assert_allclose(matrix(opened, "weights"), said["weights"]["weights"], atol=1e-9)
    assert "layer 5" in opened.page.inner_text(".lead")
    low, high = map(float, opened.page.get_attribute('[data-step="output"] [data-range]', "data-range").split())
    output = said["output"]["output"]
    np.testing.assert_allclose([low, high], [output.min(), output.max()], atol=1e-9)
    switch(opened, "mask:causal")
    logits = np.where(np.tri(len(output), dtype=bool), said["scores"]["scores"], -np.inf)
    np.testing.assert_allclose(matrix(opened, "weights"), reference.softmax(logits), atol=1e-9)


def test_every_worked_example_opens_and_those_that_are_walked_show_the_numbers_of_the_command(open_walk) -> None:
    """FACTS E1 to E10, one after the other in one page."""
    opened = open_walk("E1")
    for name in (f"E{at}" for at in range(1, 11)):
        opened.page.click(f'[data-example="{name}"]')
        opened.settle()
        assert opened.page.get_attribute(f'[data-example="{name}"]', "aria-pressed") == "true"
        if name in ("E1", "E2", "E6", "E9"):
            the_same_steps(opened, arrays(name))
        else:
            assert f"regard lab {name}" in opened.page.inner_text(".lead")
    # of E10
    assert set(matrix(opened, "heads", "")[1]) == {4 * 8**2}
    np.testing.assert_allclose(matrix(opened, "matrices", "W^Q"), arrays("E6")["projections"]["W_q"], atol=1e-12)


def test_the_small_runs_of_the_experiments_are_what_numpy_computes(open_walk) -> None:
    """The lab runs the experiments; the page has a small run of each, whose numbers change with its switches."""
    opened = open_walk("E3", "--seed", "2")
    draws = Draws(2)
    q, k = draws.normal(2, 7, 64)
    np.testing.assert_allclose(matrix(opened, "raw_scores", "S"), q @ k.T, atol=1e-9)
    raw = [(draws.normal(1000, width) * draws.normal(1000, width)).sum(1).var() for width in (4, 16, 64, 256, 1024)]
    np.testing.assert_allclose(matrix(opened, "widths", "")[0], raw, rtol=1e-9)
    np.testing.assert_allclose(raw, [4, 16, 64, 256, 1024], rtol=0.3)  # five deviations of 1000 draws
    opened.page.click('[data-example="E4"]')
    switch(opened, "seed:1")
    draws = Draws(1)
    scores = draws.normal(512, 512) @ draws.normal(64, 512).T
    for row, divisor in enumerate((1, np.sqrt(512))):
        p = reference.softmax(scores / divisor)
        entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(1)
        expected = [p.max(1).mean(), entropy.mean(), (p * (1 - p)).mean()]
        np.testing.assert_allclose(matrix(opened, "means", "")[row], expected, rtol=1e-9)
    opened.page.click('[data-example="E5"]')
    opened.settle()
    sentence_of_e6 = arrays("E6")
    logits = np.where(np.tri(7, dtype=bool), -np.inf, sentence_of_e6["scores"]["scores"])
    wrong = np.zeros_like(logits)
    wrong[:, :-1] = reference.softmax(logits[:, :-1])  # the last token sees nothing
    np.testing.assert_allclose(matrix(opened, "inverted_weights"), wrong, atol=1e-12)
    opened.page.click('[data-example="E8"]')
    opened.settle()
    blurred = sentence_of_e6["weights"]["weights"].mean(0)
    np.testing.assert_allclose(matrix(opened, "mean", "mean of the heads"), blurred, atol=1e-12)


def test_examples_are_reached_by_keyboard_and_a_typed_sentence_is_cut_with_a_word(open_walk) -> None:
    opened = open_walk("one two")
    opened.page.focus('[data-example="E2"]')
    opened.page.keyboard.press("Enter")
    opened.settle()
    assert opened.page.inner_text(".lead h2").startswith("E2")
    assert opened.page.evaluate("document.activeElement.dataset.example") == "E2"
    opened.page.click('[data-example="E6"]')
    opened.page.fill("#walk-text", "a b c d e f g h i j k l m n o p q r s t")
    opened.settle()
    assert "first 16 tokens" in opened.page.inner_text(".steps > .note")
    assert matrix(opened, "embeddings", "E").shape == (16, 8)
    opened.page.fill("#walk-cross", "x y")
    opened.settle()
    assert matrix(opened, "weights").shape == (2, 16, 2)


def test_a_step_is_reached_from_the_list_of_all_steps(open_walk) -> None:
    opened = open_walk("one two three")
    names = opened.page.eval_on_selector_all("[data-jump]", "all => all.map(one => one.dataset.jump)")
    assert names == opened.page.eval_on_selector_all("[data-step]", "all => all.map(one => one.dataset.step)")
    opened.page.click("[data-jump=weights]")
    opened.settle()
    top = "name => document.querySelector(name).getBoundingClientRect().top"
    assert abs(opened.page.evaluate(top, "[data-step=weights]") - opened.page.evaluate(top, ".steps")) < 12


def test_axe_finds_nothing_in_the_page_of_a_walk(open_walk, axe: str) -> None:
    opened = open_walk("E4")  # pictures and a table
    assert violations(opened, axe) == []
    opened.page.click('[data-tool="theme"]')
    opened.page.click('[data-tool="language"]')
    assert violations(opened, axe) == []
