"""The worked examples give the numbers that the project's facts state, to the digits printed there."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.lab.quick import story_of

import regard
from regard import lab, masks, nn, reference


def walked(name: str) -> dict[str, np.ndarray]:
    """What `regard walk` computes for an example, by name."""
    return {key: values for step in story_of(name, "en").steps for key, values in step.arrays.items()}


def close(found, stated, digits):
    np.testing.assert_allclose(found, stated, rtol=0, atol=0.5 * 10**-digits)


def test_e1_gives_the_scores_weights_and_outputs_worked_by_hand():
    found = lab.two_tokens()
    assert found.scores == ((2.0, 0.0), (0.0, 2.0))
    close(found.weights, [[0.8808, 0.1192], [0.1192, 0.8808]], 4)
    close(found.out, [[0.8808, 0.1192, 0.8808, 0.1192], [0.1192, 0.8808, 0.1192, 0.8808]], 4)
    close(found.scaled_weights, [[0.7311, 0.2689], [0.2689, 0.7311]], 4)
    assert found.weights[0][0] == pytest.approx(math.e**2 / (math.e**2 + 1), rel=1e-15)


def test_e2_gives_the_queries_of_both_heads():
    found = lab.two_heads()
    np.testing.assert_allclose(found.q1, [[0, 1.45], [-0.95, -0.45]], atol=1e-15)
    np.testing.assert_allclose(found.q2, [[2.05, -0.5], [-0.27, 0.94]], atol=1e-15)
    assert found.packed_difference < 1e-15


def test_e2_goes_on_to_the_output_as_the_reference_does():
    given = walked("E2")
    weights = {name: given[f"W_{name}"] for name in ("q", "k", "v", "out")}
    steps = reference.trace(given["x"], given["x"], given["x"], weights, num_heads=2)
    found = lab.two_heads()
    np.testing.assert_allclose([found.weights1, found.weights2], steps["weights"], atol=1e-14)
    np.testing.assert_allclose(found.output, steps["output"], atol=1e-14)


@pytest.mark.parametrize("threads", [1, 2])
def test_e3_gives_all_digits_of_both_variances(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = lab.variance()
    finally:
        torch.set_num_threads(before)
    assert found.raw == 63.867000579833984
    assert found.scaled == 0.997921884059906
    assert sum(found.scaled_histogram) == pytest.approx(1.0)


def test_e3_has_the_variance_of_the_width_at_other_widths_too():
    found = lab.variance(head_dim=111, pairs=20_000, seed=3)
    assert found.raw == pytest.approx(111, rel=0.05)
    assert found.scaled == pytest.approx(1, rel=0.05)


def test_e4_saturates_without_the_scale():
    found = lab.saturation()
    assert [round(found.raw.largest, 2), round(found.scaled.largest, 2)] == [0.92, 0.11]
    assert [round(found.raw.entropy, 2), round(found.scaled.entropy, 2)] == [0.19, 3.68]
    assert [round(found.raw.slope, 4), round(found.scaled.slope, 4)] == [0.0017, 0.0150]
    assert 0.25 < found.scaled.outside < 0.4  # scaling does not bring the scores into [−1, 1]


def test_e4_differs_in_the_second_digit_from_seed_to_seed_as_its_text_says():
    largest = [lab.saturation(seed=seed).raw.largest for seed in range(10)]
    assert round(min(largest), 2) == 0.91 and round(max(largest), 2) == 0.94
    assert "0.91 to 0.94" in lab.words("E4")["look"][0]


def test_e5_sees_the_past_and_the_mistaken_mask_sees_the_future():
    found = lab.causal()
    weights, mistaken = np.array(found.weights), np.array(found.mistaken)
    assert (weights > 0).tolist() == np.tri(5, dtype=bool).tolist()
    assert (mistaken > 0).tolist() == (~np.tri(5, dtype=bool)).tolist()
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-15)
    assert found.last_out == (0.0,) * 8
    assert found.same_as_drop
    assert found.future == 1.0
    assert "masks.keep" in found.refusal and "masks.drop" in found.refusal


def test_e6_has_the_numbers_of_the_walk():
    found = lab.sentence()
    assert found.tokens == ("The", "cat", "sat", "on", "the", "mat", ".")
    given = walked("E6")
    drawn = {name: given[f"W_{name}"] for name in ("q", "k", "v", "out")}
    for mask, weights in ((None, found.weights), (np.tri(7, dtype=bool), found.causal_weights)):
        steps = reference.trace(given["x"], given["x"], given["x"], drawn, num_heads=2, mask=mask)
        np.testing.assert_allclose(weights, steps["weights"], atol=1e-14)
    np.testing.assert_allclose(found.entropy, -(np.array(found.weights) * np.log(found.weights)).sum(-1), atol=1e-12)


def test_e9_is_the_same_every_time_and_as_fast_code_gives_it():
    found = lab.from_scratch()
    assert found == lab.from_scratch()
    assert found.again == 0.0
    assert found.fast < 1e-14
    assert found.redrawn > 0.1
    assert lab.from_scratch(seed=1).out != found.out
    x = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9], [0.5, 0.2, 0.4]])
    given = walked("E9")
    q, k, v = (x @ given[f"W_{name}"] for name in "qkv")
    scores = q @ k.T / np.sqrt(3)
    weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    np.testing.assert_allclose(found.out, weights @ v, atol=1e-14)


def test_e10_counts_four_square_matrices_whatever_the_heads():
    found = lab.parameters()
    assert found.counted == tuple(4 * width**2 for width in found.widths)
    assert set(found.by_heads) == {4 * 512**2}
    assert found.with_biases == 4 * 512**2 + 4 * 512
    assert (
        sum(p.numel() for p in nn.MultiHeadAttention(63, 7, qkv_bias=False, out_bias=False).parameters()) == 4 * 63**2
    )


def test_a_mask_that_sees_nothing_is_shown_as_zeros_not_as_a_number():
    empty = masks.keep(torch.zeros(5, 5, dtype=torch.bool))
    query, key, value = (torch.randn(1, 1, 5, 3) for _ in range(3))
    want = regard.Want(weights=(slice(None), slice(None)))
    assert regard.observe(query, key, value, mask=empty, want=want).weights.tolist() == [[[[0.0] * 5] * 5]]


def test_m20_softmax_gives_shares_with_a_slope_where_scores_and_argmax_do_not():
    found = lab.why_softmax()
    close(found.weights["softmax"], [0.00111, 0.99870, 0.00018], 5)
    assert found.weights["raw"] == found.scores == (2.3, 9.1, 0.5) and found.weights["argmax"] == (0, 1, 0)
    assert sum(found.weights["softmax"]) == pytest.approx(1, abs=1e-15)
    np.testing.assert_allclose(found.lowered["softmax"], found.weights["softmax"], rtol=1e-12)
    assert min(found.lowered["raw"]) < 0 and found.slopes["argmax"] == (0, 0, 0) and found.slopes["raw"] == (0, 1, 0)
    p = np.array(found.weights["softmax"])
    np.testing.assert_allclose(found.slopes["softmax"], p[1] * (np.eye(3)[1] - p), atol=1e-15)


@pytest.mark.parametrize(("width", "heads"), [(64, 8), (30, 3)])
def test_m21_the_output_is_the_sum_of_what_heads_add(width, heads):
    found = lab.sum_over_heads(tokens=7, width=width, heads=heads, seed=3)
    assert found.difference < 1e-14 and found.without < 1e-14
    assert len(found.sizes) == heads and max(found.sizes) < found.whole * 2


def test_e11_has_the_shapes_of_one_head_and_of_eight_and_a_row_that_sums_to_one():
    found = lab.numpy_heads()
    assert found.one["weights"] == (1, 10, 10) and found.many["weights"] == (8, 10, 10)
    assert found.one["query_heads"] == (1, 10, 64) and found.many["query_heads"] == (8, 10, 8)
    assert found.one["output"] == found.many["output"] == (10, 64)
    for row in (found.first_row, found.first_row_of_one):
        assert len(row) == 10 and sum(row) == pytest.approx(1, abs=1e-14)
    draw = np.random.default_rng(0)
    x = draw.standard_normal((10, 64))
    q, k = (draw.standard_normal((64, 64)) / 8 for _ in range(2))
    scores = (x @ q)[0] @ (x @ k).T / 8
    np.testing.assert_allclose(found.first_row_of_one, np.exp(scores) / np.exp(scores).sum(), atol=1e-14)


def test_e14_states_what_each_step_changed():
    found = lab.line_of_work(tokens=1000)
    assert found.pairs == 1000**2 and found.first_sees == {"causal": 1, "everything": 1000}
    assert found.window_pairs == 256 * 1000 - sum(range(256))
    assert found.linear_state == 64 * 65 and found.cache == 2 * 1000 * 64
    assert found.bytes_["eager"] > 4 * 1000**2 > 4 * found.bytes_["fused"]
    assert found.kept == {"heads": 32768, "latent": 576}


def test_x5_computes_every_statement_again():
    found = lab.mistakes()
    close(found.softmax, [0.00111, 0.99870, 0.00018], 5)
    assert found.deviation == pytest.approx(512**0.5, rel=0.02) and found.outside == pytest.approx(0.33, abs=0.02)
    assert found.single == 1 and found.grown == 4 and found.head_shape == (512, 64)
    assert found.causal == ((1, 0, 0, 0), (1, 1, 0, 0), (1, 1, 1, 0), (1, 1, 1, 1))
    assert found.shared == 0 and found.bent < 1e-5 and found.angles[0] > 0.5
