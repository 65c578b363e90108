from __future__ import annotations

import subprocess
import sys
from itertools import product
from typing import Any

import mpmath
import numpy as np
import pytest

from regard import reference

# The published grid of rule 25: (batch, heads, kv heads, queries, keys, Dk, Dv) by the modifiers of a call.
SHAPES = [(1, 1, 1, 1, 1, 1, 1), (2, 3, 3, 5, 7, 11, 3), (1, 6, 2, 3, 5, 7, 5), (1, 4, 1, 7, 11, 63, 5)]
MODIFIERS = ["plain", "mask", "bias", "softcap", "sinks", "scale 0", "scale -0.7", "all"]


def draw(shape: tuple[int, ...], modifier: str, seed: int = 0) -> tuple[list[np.ndarray], dict[str, Any]]:
    batch, heads, kv_heads, queries, keys, width, value_width = shape
    rng = np.random.default_rng(seed)
    arrays = [
        rng.standard_normal((batch, heads, queries, width)),
        rng.standard_normal((batch, kv_heads, keys, width)),
        rng.standard_normal((batch, kv_heads, keys, value_width)),
    ]
    mask = rng.random((batch, 1, queries, keys)) < 0.6
    mask[..., -1:, :] = False
    keywords: dict[str, Any] = {}
    if modifier in ("mask", "all"):
        keywords["mask"] = mask
    if modifier in ("bias", "all"):
        bias = rng.standard_normal((1, heads, queries, keys))
        bias[..., 0] = -np.inf
        keywords["bias"] = bias
    if modifier in ("softcap", "all"):
        keywords["softcap"] = 1.5
    if modifier in ("sinks", "all"):
        keywords["sinks"] = rng.standard_normal(heads)
    if modifier.startswith("scale"):
        keywords["scale"] = float(modifier.split()[1])
    return arrays, keywords


def exact(q, k, v, mask=None, bias=None, scale=None, softcap=None, sinks=None):
    """The formula in mpmath numbers, entry by entry; returns nested output and log-sum-exp arrays of mpf."""
    batch, heads, queries, width = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    out = np.empty((batch, heads, queries, v.shape[-1]), dtype=object)
    lse = np.empty((batch, heads, queries), dtype=object)
    factor = 1 / mpmath.sqrt(width) if scale is None else mpmath.mpf(scale)
    for b, h, i in product(range(batch), range(heads), range(queries)):
        g = h * kv_heads // heads
        logits = {}
        for j in range(keys):
            permitted = mask is None or np.broadcast_to(mask, (batch, heads, queries, keys))[b, h, i, j]
            added = 0.0 if bias is None else np.broadcast_to(bias, (batch, heads, queries, keys))[b, h, i, j]
            if not permitted or added == -np.inf:
                continue
            s = factor * mpmath.fdot((number(x), number(y)) for x, y in zip(q[b, h, i], k[b, g, j], strict=True))
            if softcap is not None:
                s = softcap * mpmath.tanh(s / softcap)
            logits[j] = s + number(added)
        total = mpmath.fsum(mpmath.exp(z) for z in logits.values())
        if logits and sinks is not None:
            total += mpmath.exp(number(sinks[h]))
        lse[b, h, i] = mpmath.log(total) if logits else -mpmath.inf
        for d in range(v.shape[-1]):
            pairs = ((mpmath.exp(z), number(v[b, g, j, d])) for j, z in logits.items())
            out[b, h, i, d] = mpmath.fdot(pairs) / total if logits else mpmath.mpf(0)
    return out, lse


def number(x):
    return x if isinstance(x, mpmath.mpf) else mpmath.mpf(float(x))


def worst(exact_values, values) -> float:
    pairs = zip(np.ravel(exact_values), np.ravel(values), strict=True)
    return max((float(abs(a - number(b))) if a != number(b) else 0.0 for a, b in pairs), default=0.0)


@pytest.mark.parametrize("modifier", MODIFIERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_agree_with_50_digit_arithmetic(shape, modifier):
    arrays, keywords = draw(shape, modifier)
    with mpmath.workdps(50):
        out, lse = exact(*arrays, **keywords)
        result = reference.attention(*arrays, return_weights=True, **keywords)
        assert worst(out, result.out) <= 1e-13
        assert worst(lse, result.lse) <= 1e-13


@pytest.mark.parametrize("modifier", MODIFIERS)
def test_gradients_agree_with_50_digit_differences(modifier):
    shape = (1, 2, 1, 3, 5, 3, 2)
    (q, k, v), keywords = draw(shape, modifier)
    grad_out = np.random.default_rng(1).standard_normal((1, 2, 3, 2))
    given = {"q": q, "k": k, "v": v, **{name: keywords[name] for name in ("bias", "sinks") if name in keywords}}
    result = reference.gradients(q, k, v, grad_out, **keywords)
    found = dict(zip(("q", "k", "v", "bias", "sinks"), result, strict=True))
    assert (found["bias"] is None) == ("bias" not in keywords)
    assert (found["sinks"] is None) == ("sinks" not in keywords)
    with mpmath.workdps(50):
        for name, array in given.items():
            assert found[name].shape == array.shape
            differences = np.array([difference(given, keywords, grad_out, name, at) for at in np.ndindex(array.shape)])
            assert worst(differences, found[name]) <= 1e-13, name


def difference(given, keywords, grad_out, name, at):
    """Central difference with a step of 1e-18, whose error at 50 digits is far below 1e-13."""
    if not np.isfinite(given[name][at]):
        return mpmath.mpf(0)
    step = mpmath.mpf(10) ** -18
    values = []
    for sign in (1, -1):
        moved = {key: array.astype(object) for key, array in given.items()}
        moved[name][at] = number(moved[name][at]) + sign * step
        rest = {key: moved.get(key, value) for key, value in keywords.items()}
        out, _ = exact(moved["q"], moved["k"], moved["v"], **rest)
        values.append(mpmath.fdot((a, number(b)) for a, b in zip(out.ravel(), grad_out.ravel(), strict=True)))
    return (values[0] - values[1]) / (2 * step)


def test_gradients_with_dropout_agree_with_differences():
    (q, k, v), keywords = draw((1, 2, 1, 3, 5, 3, 2), "all")
    keep = (np.random.default_rng(2).random((1, 2, 3, 5)) < 0.7) / 0.7
    grad_out = np.random.default_rng(1).standard_normal((1, 2, 3, 2))
    found = reference.gradients(q, k, v, grad_out, keep=keep, **keywords)
    for gradient, array in zip(found[:3], (q, k, v), strict=True):
        for at in np.ndindex(array.shape):
            step = np.zeros_like(array)
            step[at] = 1e-6
            ends = [
                (reference.attention(*(x + s * step if x is array else x for x in (q, k, v)), keep=keep, **keywords)
                 * grad_out).sum()
                for s in (1, -1)
            ]  # fmt: skip
            assert abs((ends[0] - ends[1]) / 2e-6 - gradient[at]) < 1e-8


def test_weights_are_those_before_dropout():
    (q, k, v), _ = draw(SHAPES[1], "plain")
    keep = np.zeros((1, 1, 1, 1))
    plain = reference.attention(q, k, v, return_weights=True)
    dropped = reference.attention(q, k, v, keep=keep, return_weights=True)
    assert np.array_equal(plain.weights, dropped.weights)
    assert not dropped.out.any()


def test_softmax_gives_the_published_numbers():  # FACTS M2
    assert np.round(reference.softmax([2.3, 9.1, 0.5]), 5).tolist() == [0.00111, 0.99870, 0.00018]


def test_softmax_neither_overflows_nor_underflows():
    assert np.allclose(reference.softmax([1e300, 1e300, -1e300]), [0.5, 0.5, 0.0])
    assert np.allclose(reference.softmax([-1e6, -1e6]), [0.5, 0.5])


def test_softmax_takes_the_axis_asked_for():
    x = np.random.default_rng(0).standard_normal((3, 5, 7))
    for axis in (0, 1, 2, -2):
        assert np.allclose(reference.softmax(x, axis=axis).sum(axis=axis), 1.0)


def test_each_row_of_weights_sums_to_one():  # FACTS M1
    (q, k, v), _ = draw(SHAPES[1], "plain")
    result = reference.attention(q, k, v, return_weights=True)
    assert result.weights.shape == (2, 3, 5, 7)
    assert np.allclose(result.weights.sum(-1), 1.0, atol=1e-15)
    assert np.allclose(result.weights, np.exp(result.logits - result.lse[..., None]))


def test_two_token_example_without_scaling():  # FACTS E1
    x = np.array([[1.0, 0, 1, 0], [0, 1, 0, 1]])
    result = reference.attention(x, x, x, scale=1.0, return_weights=True)
    assert result.logits.tolist() == [[2, 0], [0, 2]]
    assert np.round(result.weights, 4).tolist() == [[0.8808, 0.1192], [0.1192, 0.8808]]
    assert np.round(result.out, 4).tolist() == [[0.8808, 0.1192] * 2, [0.1192, 0.8808] * 2]


def test_two_token_example_with_scaling():  # FACTS E1
    x = np.array([[1.0, 0, 1, 0], [0, 1, 0, 1]])
    weights = reference.attention(x, x, x, return_weights=True).weights
    assert np.round(weights, 4).tolist() == [[0.7311, 0.2689], [0.2689, 0.7311]]


def test_two_head_example():  # FACTS E2
    x = np.array([[[1, 0.5, -1, 2], [-0.5, 1, 0.3, -2]]])
    first = np.array([[0.1, 0.4], [-0.2, 0.3], [1, -0.5], [0.5, 0.2]])
    second = np.array([[-0.3, 0.2], [1.1, 0.6], [-0.4, 0.8], [0.7, -0.1]])
    out = [[0.5, -0.2, 1.1, 0.3], [0.1, 0.8, -0.4, 0.6], [-0.3, 0.7, 0.2, 1], [0.9, -0.5, 0.3, -0.8]]
    joined = np.concatenate([first, second], axis=1)
    steps = reference.trace(x, x, x, {"q": joined, "k": joined, "v": joined, "out": out}, num_heads=2)
    assert np.allclose(steps["query_heads"][0, 0], [[0, 1.45], [-0.95, -0.45]], atol=1e-15)
    assert np.allclose(steps["query_heads"][0, 1], [[2.05, -0.5], [-0.27, 0.94]], atol=1e-15)
    heads = [reference.attention(x[0] @ w, x[0] @ w, x[0] @ w) for w in (first, second)]
    assert np.allclose(steps["output"][0], np.concatenate(heads, axis=1) @ np.array(out), atol=1e-15)


def test_trace_names_every_step_with_its_shape():  # FACTS M4
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 20, 512))
    weights = {name: rng.standard_normal((512, 512)) / 23 for name in ("q", "k", "v", "out")}
    steps = reference.trace(x, x, x, weights, num_heads=8)
    assert steps.shapes == {
        "query": (32, 20, 512),
        "key": (32, 20, 512),
        "value": (32, 20, 512),
        "query_heads": (32, 8, 20, 64),
        "key_heads": (32, 8, 20, 64),
        "value_heads": (32, 8, 20, 64),
        "raw_scores": (32, 8, 20, 20),
        "scores": (32, 8, 20, 20),
        "logits": (32, 8, 20, 20),
        "weights": (32, 8, 20, 20),
        "heads": (32, 8, 20, 64),
        "concat": (32, 20, 512),
        "output": (32, 20, 512),
    }
    assert "query_heads  [32, 8, 20, 64]" in str(steps)
    assert np.array_equal(steps["output"], reference.multi_head_attention(x, x, x, weights, num_heads=8))


def test_heads_that_do_not_divide_a_projection_are_named():
    x, weights = np.ones((1, 3, 6)), dict.fromkeys(("q", "k", "v", "out"), np.eye(6))
    for heads, kv_heads, message in (
        (5, None, "query is projected to width 6, which 5"),
        (6, 4, "key .* which 4"),
        (0, 1, "which 0"),
    ):
        with pytest.raises(ValueError, match=message):
            reference.trace(x, x, x, weights, num_heads=heads, num_kv_heads=kv_heads)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"weights": {"q": np.eye(6)}}, ValueError, "weights has no k, v, out; expected q, k, v, out"),
        ({"weights": {"q_bais": np.ones(6)}}, ValueError, "weights has 'q_bais', which nothing reads"),
        ({"weights": {"v": np.eye(5)}}, ValueError, r"weights\['v'\] is \[5, 5\], and what it projects is \[1, 3, 6\]"),
        ({"weights": {"out": np.ones(6)}}, ValueError, r"weights\['out'\] is \[6\]"),
        ({"num_heads": 2.0}, TypeError, "query is to have 2.0 heads; expected a whole number"),
        ({"mask": np.ones((2, 3), bool)}, ValueError, r"mask is \[2, 3\]; expected .* the scores, \[1, 2, 3, 3\]"),
        ({"bias": np.ones((3, 5))}, ValueError, r"bias is \[3, 5\]; expected what broadcasts"),
    ],
)
def test_what_cannot_be_traced_is_named(changed, error, message):
    whole = dict.fromkeys(("q", "k", "v", "out"), np.eye(6))
    weights = changed.pop("weights", whole)
    if weights.keys() != {"q"}:
        weights = {**whole, **weights}
    x = np.ones((1, 3, 6))
    with pytest.raises(error, match=message):
        reference.trace(x, x, x, weights, **{"num_heads": 2, **changed})


def test_multi_head_takes_biases_widths_and_grouped_heads():
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal(s) for s in ((3, 5, 7), (3, 11, 9), (3, 11, 13)))
    weights = {
        "q": rng.standard_normal((7, 4 * 3)), "q_bias": rng.standard_normal(12),
        "k": rng.standard_normal((9, 2 * 3)), "k_bias": rng.standard_normal(6),
        "v": rng.standard_normal((13, 2 * 5)), "v_bias": rng.standard_normal(10),
        "out": rng.standard_normal((4 * 5, 7)), "out_bias": rng.standard_normal(7),
    }  # fmt: skip
    mask = rng.random((5, 11)) < 0.5
    out = reference.multi_head_attention(query, key, value, weights, num_heads=4, num_kv_heads=2, mask=mask)
    q, k, v = (x @ weights[n] + weights[f"{n}_bias"] for n, x in (("q", query), ("k", key), ("v", value)))
    heads = [
        reference.attention(
            q[..., 3 * h : 3 * h + 3], k[..., 3 * g : 3 * g + 3], v[..., 5 * g : 5 * g + 5], mask=mask
        )
        for h, g in ((0, 0), (1, 0), (2, 1), (3, 1))
    ]  # fmt: skip
    assert np.allclose(out, np.concatenate(heads, axis=-1) @ weights["out"] + weights["out_bias"], atol=1e-13)


def test_the_oracle_draws_nothing():
    (q, k, v), keywords = draw(SHAPES[1], "all")
    first, second = (reference.attention(q, k, v, **keywords) for _ in range(2))
    assert np.array_equal(first, second)


@pytest.mark.parametrize("how", ["mask", "bias", "both", "no keys"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_empty_rows_give_zeros_and_minus_infinity(how, with_sinks):
    (q, k, v), _ = draw((2, 3, 3, 5, 7, 11, 3), "plain")
    mask, bias = np.ones((5, 7), dtype=bool), np.zeros((5, 7))
    rows = [1, 3]
    if how == "mask":
        mask[rows] = False
    elif how == "bias":
        bias[rows] = -np.inf
    elif how == "both":
        mask[rows, :3] = False
        bias[rows, 3:] = -np.inf
    else:
        k, v, mask, bias, rows = k[:, :, :0], v[:, :, :0], mask[:, :0], bias[:, :0], [0, 1, 2, 3, 4]
    keywords = {"mask": mask, "bias": bias, "sinks": np.arange(3.0) if with_sinks else None}
    result = reference.attention(q, k, v, return_weights=True, **keywords)
    assert not result.out[:, :, rows].any()
    assert not result.weights[:, :, rows].any()
    assert (result.lse[:, :, rows] == -np.inf).all()
    grad_out = np.ones(result.out.shape)
    found = reference.gradients(q, k, v, grad_out, **keywords)
    assert not found.query[:, :, rows].any()
    grad_out[:, :, rows] = 1e6
    again = reference.gradients(q, k, v, grad_out, **keywords)
    assert all(np.array_equal(a, b) for a, b in zip(found, again, strict=True) if a is not None)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("by_bias", [False, True])
def test_what_is_masked_cannot_leak(poison, by_bias):
    (q, k, v), keywords = draw((2, 6, 3, 5, 7, 11, 3), "all")
    mask = np.ones((5, 7), dtype=bool)
    mask[2:, 4] = False  # rows 0 and 1 may see key 4, the others not
    keywords["mask"] = True if by_bias else mask
    keywords["bias"] = np.where(mask, 0.0, -np.inf) if by_bias else None
    clean = reference.attention(q, k, v, return_weights=True, **keywords)
    grad_out = np.zeros((2, 6, 5, 3))
    grad_out[:, :, 2:] = 1.0
    clean_gradients = reference.gradients(q, k, v, grad_out, **keywords)
    k[:, :, 4], v[:, :, 4] = poison, poison
    found = reference.attention(q, k, v, return_weights=True, **keywords)
    assert np.array_equal(found.out[:, :, 2:], clean.out[:, :, 2:])
    assert np.array_equal(found.lse[:, :, 2:], clean.lse[:, :, 2:])
    assert not np.isfinite(found.out[:, :, :2]).any()
    poisoned = reference.gradients(q, k, v, grad_out, **keywords)
    assert np.array_equal(poisoned.query[:, :, 2:], clean_gradients.query[:, :, 2:])


def test_gradients_ignore_a_key_that_no_row_may_see():
    (q, k, v), keywords = draw((2, 6, 3, 5, 7, 11, 3), "all")
    mask = np.ones((5, 7), dtype=bool)
    mask[:, 4] = False
    keywords["mask"] = mask
    grad_out = np.random.default_rng(3).standard_normal((2, 6, 5, 3))
    clean = reference.gradients(q, k, v, grad_out, **keywords)
    k[:, :, 4], v[:, :, 4] = np.nan, np.inf
    poisoned = reference.gradients(q, k, v, grad_out, **keywords)
    assert all(np.array_equal(a, b) for a, b in zip(clean, poisoned, strict=True))
    assert not poisoned.key[:, :, 4].any() and not poisoned.value[:, :, 4].any()


def test_nan_in_a_permitted_value_reaches_exactly_the_rows_that_use_it():
    (q, k, v), _ = draw((2, 3, 3, 5, 7, 11, 3), "plain")
    mask = np.tri(5, 7, k=2, dtype=bool)
    v[1, 2, 4, 0] = np.nan
    out = reference.attention(q, k, v, mask=mask)
    expected = np.zeros(out.shape, dtype=bool)
    expected[1, 2, 2:, 0] = True
    assert np.array_equal(np.isnan(out), expected)


def test_query_head_uses_the_kv_head_below_its_share():
    (q, k, v), _ = draw((2, 6, 2, 5, 7, 11, 3), "plain")
    grouped = reference.attention(q, k, v)
    for head in range(6):
        alone = reference.attention(q[:, head], k[:, head * 2 // 6], v[:, head * 2 // 6])
        assert np.allclose(grouped[:, head], alone, atol=1e-15)


def test_heads_that_do_not_divide_are_refused_with_both_counts():
    (q, k, v), _ = draw((1, 6, 1, 3, 5, 7, 3), "plain")
    with pytest.raises(ValueError, match="4 heads.*6"):
        reference.attention(q, np.repeat(k, 4, 1), np.repeat(v, 4, 1))


def test_a_mask_that_is_not_boolean_is_refused():
    (q, k, v), _ = draw(SHAPES[1], "plain")
    with pytest.raises(TypeError, match="mask is int64; expected bool"):
        reference.attention(q, k, v, mask=np.ones((5, 7), dtype=np.int64))


def test_a_mask_never_enlarges_the_call():
    (q, k, v), _ = draw((1, 1, 1, 1, 7, 3, 3), "plain")
    with pytest.raises(ValueError, match="broadcast"):
        reference.attention(q, k, v, mask=np.ones((5, 7), dtype=bool))


def test_one_permitted_key_gives_its_value():
    (q, k, v), _ = draw((2, 3, 3, 5, 7, 11, 3), "plain")
    mask = np.zeros((5, 7), dtype=bool)
    mask[:, 4] = True
    assert np.array_equal(reference.attention(q, k, v, mask=mask), np.broadcast_to(v[:, :, 4:5], (2, 3, 5, 3)))


@pytest.mark.parametrize("sizes", [(0, 3, 3, 5, 7), (2, 3, 3, 0, 7), (2, 3, 3, 5, 0), (2, 6, 3, 5, 0)])
def test_empty_axes_give_results_of_the_right_shape(sizes):
    (q, k, v), keywords = draw((*sizes, 11, 3), "sinks")
    out = reference.attention(q, k, v, **keywords)
    assert out.shape == (sizes[0], sizes[1], sizes[3], 3)
    assert not out.any() or sizes[4]
    found = reference.gradients(q, k, v, out, **keywords)
    assert [x.shape for x in found[:3]] == [q.shape, k.shape, v.shape]


def test_it_imports_without_torch():
    code = "import sys; sys.modules['torch'] = None; import regard.reference as r; print(r.softmax([0.0, 0.0])[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0.5"
