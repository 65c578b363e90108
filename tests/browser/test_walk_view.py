"""The walk in the page: every number is the oracle's, and changes with the switches."""

from __future__ import annotations

import numpy as np
import pytest
from tests.browser.recordings import sentence

from regard import reference


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
    np.testing.assert_allclose(matrix(opened, "raw"), steps["raw_scores"][0], atol=1e-10)
    np.testing.assert_allclose(matrix(opened, "attention"), steps["weights"][0], atol=1e-12)
    np.testing.assert_allclose(matrix(opened, "heads"), steps["heads"][0], atol=1e-10)
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
    answers = opened.page.eval_on_selector_all(".exercise details p", "all => all.map(one => one.textContent)")
    assert "its weight is 1.00" in answers[0]
    assert "largest difference 0.0000" in answers[2]
    assert "5 × 8" in answers[3] and "256" in answers[3]
    assert "13 of 25" in answers[4]
    opened.page.click(".exercise .chip >> nth=0")
    opened.settle()
    assert opened.page.get_attribute('[data-switch="mask:causal"]', "aria-pressed") == "true"
    np.testing.assert_array_equal(matrix(opened, "attention")[:, 0], [[1, 0, 0, 0, 0]] * 2)


def test_the_walk_speaks_chinese(open_page) -> None:
    opened = open_page(sentence(), lang="zh")
    opened.view("walk")
    assert "词嵌入" in opened.page.inner_text('[data-step="embeddings"] h2')
