"""The walkthrough: its numbers are the oracle's, step by step, and the examples give what they are known to give."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.lab.quick import story_of, told

from regard import lab, masks, positions, reference
from regard.cli.commands.walk import NAMES as EXAMPLES

CAT = "The cat sat on the mat."
NAMES = [
    "tokens", "embeddings", "positions", "projections", "split", "raw_scores", "scores", "mask", "weights", "heads",
    "concat", "output",
]  # fmt: skip


def step(story: Any, name: str) -> Any:
    (found,) = [step for step in story.steps if step.name == name]
    return found


def arrays(story: Any) -> dict[str, Any]:
    """Everything that the steps computed, by name."""
    return {name: values for found in story.steps for name, values in found.arrays.items()}


@pytest.mark.parametrize(
    "settings",
    [
        {"heads": 2, "d_model": 8},
        {"heads": 3, "d_model": 15, "causal": True, "seed": 7},
        {"heads": 5, "d_model": 35, "window": 2, "scale": False},
        {"heads": 1, "d_model": 7, "causal": True, "window": 1, "seed": 11},
        {"heads": 2, "d_model": 6, "cross": "Die Katze saß auf der alten Matte da."},
    ],
    ids=["plain", "causal", "window, unscaled", "both", "cross"],
)
def test_the_steps_are_what_multi_head_attention_computes(settings: dict[str, Any]) -> None:
    story = told(CAT, **settings)
    assert [found.name for found in story.steps] == NAMES
    shown = arrays(story)
    x, mask = shown["x"], shown.get("mask")
    memory = shown.get("x_keys", x)
    weights = {name: shown[f"W_{name}"] for name in ("q", "k", "v", "out")}
    out = reference.multi_head_attention(
        x[None], memory[None], memory[None], weights, num_heads=settings["heads"],
        mask=mask, scale=None if settings.get("scale", True) else 1.0,
    )  # fmt: skip
    assert np.array_equal(step(story, "output").arrays["output"], out[0])
    assert np.array_equal(step(story, "output").panels[0].values, out[0])

    # and once more by hand, head by head
    q, k, v = (source @ weights[name] for name, source in {"q": x, "k": memory, "v": memory}.items())
    d = settings["d_model"] // settings["heads"]
    heads = []
    for head in range(settings["heads"]):
        own = slice(head * d, (head + 1) * d)
        raw = q[:, own] @ k[:, own].T
        logits = raw / np.sqrt(d) if settings.get("scale", True) else raw
        if mask is not None:
            logits = np.where(mask, logits, -np.inf)
        shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        assert np.allclose(step(story, "raw_scores").arrays["raw_scores"][head], raw, atol=1e-13)
        assert np.allclose(step(story, "weights").panels[head].values, shares, atol=1e-14)
        heads.append(shares @ v[:, own])
    assert np.allclose(step(story, "concat").arrays["concat"], np.concatenate(heads, axis=1), atol=1e-13)
    assert np.allclose(out[0], np.concatenate(heads, axis=1) @ weights["out"], atol=1e-13)


def test_masks_and_positions_are_those_of_the_library() -> None:
    expected = {
        (True, None): masks.causal(),
        (False, 2): masks.window(left=2, right=2),
        (True, 3): masks.causal() & masks.window(left=3, right=3),
        (False, 0): masks.window(left=0, right=0),
    }
    for (causal, window), mask in expected.items():
        shown = arrays(told(CAT, causal=causal, window=window))
        assert np.array_equal(shown["mask"], mask.dense(7, 7).numpy())
    assert "mask" not in arrays(told(CAT))
    import torch

    for width in (5, 8):
        shown = arrays(told("word " * 11, heads=1, d_model=width))
        expected_positions = positions.sinusoidal(11, width, dtype=torch.float64)
        assert np.allclose(shown["positions"], expected_positions, atol=1e-15)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (CAT, ["The", "cat", "sat", "on", "the", "mat", "."]),
        ("猫坐在 mat 上。", ["猫", "坐", "在", "mat", "上", "。"]),
        ("e\u0301t\u00e9, x_1 = 3.5", ["\u00e9t\u00e9", ",", "x_1", "=", "3", ".", "5"]),
        ("\u0915\u093f\u0924\u093e\u092c", ["\u0915\u093f\u0924\u093e\u092c"]),
        ("a\x1b[31m\n b", ["a", "\x1b", "[", "31m", "b"]),
    ],
)
def test_text_is_cut_into_words_signs_and_single_chinese_characters(text: str, tokens: list[str]) -> None:
    assert told(text).settings["tokens"] == tokens


def test_a_word_has_its_number_and_its_vector_wherever_it_stands() -> None:
    def shown(text: str, seed: int, cross: str | None = None) -> dict[str, Any]:
        return arrays(told(text, heads=1, d_model=7, seed=seed, cross=cross))

    assert shown(CAT, 3)["ids"].tolist() == [0, 1, 2, 3, 0, 4, 5]
    there = shown(CAT, 3)["embeddings"]
    assert np.array_equal(there[0], there[4])
    assert np.array_equal(there[1], shown("mat cat", 3)["embeddings"][1])
    assert not np.array_equal(there[1], shown("cat", 4)["embeddings"][0])
    assert shown("the cat", 3, cross="cat Katze")["ids_keys"].tolist() == [1, 2]


def drawn_in_e9(seed: int) -> list[Any]:
    shown = arrays(told("E9", seed=seed))
    return [shown[f"W_{name}"] for name in "qkv"]


def test_the_draws_are_normal_and_go_on_where_they_stopped() -> None:
    # the matrices of a text are drawn from the seed after its own, scaled; those of E9 from its own
    shown, of_e9 = arrays(told("word", heads=1, d_model=87, seed=6)), drawn_in_e9(7)
    drawn_at_once = np.concatenate([shown[f"W_{name}"].ravel() * 87**0.5 for name in ("q", "k", "v", "out")])
    assert drawn_at_once.size > 30_000
    assert np.allclose(np.concatenate([matrix.ravel() for matrix in of_e9]), drawn_at_once[:27], rtol=1e-15)
    ranks = np.sort(drawn_at_once)
    assert abs(drawn_at_once.mean()) < 5 / np.sqrt(ranks.size) and abs(drawn_at_once.var() - 1) < 5 * np.sqrt(
        2 / ranks.size
    )
    assert np.allclose(ranks[[ranks.size // 6, ranks.size // 2]], [-0.967, 0], atol=0.03)
    assert abs(np.corrcoef(drawn_at_once[1:], drawn_at_once[:-1])[0, 1]) < 5 / np.sqrt(ranks.size)


def test_the_same_seed_gives_the_same_walk_and_another_seed_another() -> None:
    first, again, other = (told(CAT, seed=seed).data() for seed in (5, 5, 6))
    assert first == again
    assert first["steps"] != other["steps"]


def test_two_tokens_by_hand() -> None:  # FACTS E1
    story = told("E1")
    assert step(story, "raw_scores").arrays["raw_scores"].tolist() == [[[2, 0], [0, 2]]]
    assert step(story, "weights").panels[0].values.round(4).tolist() == [[0.8808, 0.1192], [0.1192, 0.8808]]
    out = step(story, "output").arrays["output"].round(4)
    assert out.tolist() == [[0.8808, 0.1192, 0.8808, 0.1192], [0.1192, 0.8808, 0.1192, 0.8808]]
    scaled = step(story, "with_scaling").arrays["weights"][0].round(4)
    assert scaled.tolist() == [[0.7311, 0.2689], [0.2689, 0.7311]]
    assert step(story, "weights").worked == ("head 0, x2 → x2: e^2 / (e^0 + e^2) ≈ 0.8808",)
    assert any("0.1192" in line for line in story.intro)


def test_two_heads_by_hand() -> None:  # FACTS E2
    queries = step(told("E2"), "split").arrays["query_heads"]
    assert np.allclose(queries[0], [[0, 1.45], [-0.95, -0.45]], atol=1e-15)
    assert np.allclose(queries[1], [[2.05, -0.5], [-0.27, 0.94]], atol=1e-15)
    story = told("E2", "zh")
    assert step(story, "split").panels[3].name == "Q，头 1"


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("name", ["E3", "E4", "E5", "E8", "E10"])  # FACTS; of E7, which is trained, see the lab's tests
def test_an_experiment_is_computed_by_the_lab_and_shown_by_the_walk(name: str, lang: str) -> None:
    found = lab.run(name)
    story = told(name, lang)
    assert story.settings["example"] == name
    assert story.data()["numbers"] == found.to_dict(lang)["numbers"]
    measured, look, *note = story.steps
    assert measured.says == found.say("question", lang) and look.says == found.say("look", lang)
    shown = [panel.name for panel in measured.panels] + [table.title for table in measured.tables]
    assert shown == [table.title for table in found.tables(lang)]
    for key in {"claim", "right", "why"} & set(found.words()):
        assert found.say(key, lang) in note[0].says


def test_weights_of_an_experiment_are_drawn_as_a_matrix_and_its_seed_is_taken() -> None:
    (measured, *_) = told("E5", seed=3).steps
    found = lab.causal(seed=3)
    assert [panel.kind for panel in measured.panels] == ["weights", "weights"]
    assert np.array_equal(measured.panels[1].values, found.mistaken)
    assert measured.panels[0].columns == tuple(f"key {at}" for at in range(5))


def test_the_sentence_is_walked_whole_with_every_option() -> None:  # FACTS E6
    settings = {"heads": 4, "d_model": 12, "causal": True, "seed": 2}
    assert told("E6", **settings).steps[-1].arrays.keys() == {"output", "W_out"}
    assert step(told("E6", cross="Die Katze"), "weights").arrays["weights"].shape == (2, 7, 2)
    assert np.array_equal(
        step(told("E6", **settings), "output").arrays["output"],
        step(told(CAT, **settings), "output").arrays["output"],
    )


def test_from_scratch_is_reproducible_by_seed() -> None:  # FACTS E9
    story = told("E9", seed=5)
    x = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9], [0.5, 0.2, 0.4]])
    out = reference.attention(*(x @ matrix for matrix in drawn_in_e9(5)))
    assert np.allclose(step(story, "output").arrays["output"], out, atol=1e-15)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_every_example_is_told_in_both_languages_with_numbers_that_json_holds(name: str, lang: str) -> None:
    story = story_of(name, lang)
    assert story.title.startswith(f"{name} · ")
    data = json.loads(json.dumps(story.data(), allow_nan=False))
    for found, shown in zip(data["steps"], story.steps, strict=True):
        assert found["title"] and found["says"]
        for array, values in shown.arrays.items():
            held = np.array(found["arrays"][array]["values"], dtype=float)
            assert list(values.shape) == found["arrays"][array]["shape"]
            assert np.array_equal(np.where(np.isnan(held), -np.inf, held), values)
    written = [*story.intro, *(shown.says for shown in story.steps), *(shown.title for shown in story.steps)]
    has_chinese = [any("\u4e00" <= letter <= "\u9fff" for letter in line) for line in written]
    assert all(has_chinese) if lang == "zh" else not any(has_chinese)


def test_what_an_example_does_not_have_is_refused() -> None:
    for options in ({"heads": 1}, {"causal": True}, {"window": 0}, {"scale": False}, {"seed": 1}, {"cross": "x"}):
        with pytest.raises(ValueError, match="does not apply to E1"):
            told("E1", **options)
    with pytest.raises(ValueError, match="--cross does not apply to E5"):
        told("E5", cross="x")
    with pytest.raises(ValueError, match="no example E99; expected one of E1"):
        told("E99")


def test_a_number_that_is_worked_out_is_the_one_in_the_matrix() -> None:
    story = told(CAT, causal=True, seed=9)
    for name, panel in (("raw_scores", 0), ("scores", 0), ("weights", 0), ("heads", 0), ("output", 0)):
        found = step(story, name)
        result = float(found.worked[0].replace("=", "≈").split("≈")[-1])
        assert np.abs(found.panels[panel].values - result).min() < 5e-5, found.worked


def test_the_walkthrough_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from regard.cli import app;"
        f"app(['walk', {CAT!r}, '--lang', 'zh', '--html', {str(tmp_path / 'walk.html')!r}], standalone_mode=False);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
