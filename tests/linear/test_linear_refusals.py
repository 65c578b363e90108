"""What linear attention cannot do it refuses by name, and a plan says what runs and what does not."""

from __future__ import annotations

import pickle

import pytest
import torch
from tests.memory import peak_bytes

import regard
from regard import linear_attention, masks
from regard.linear import LinearState, RandomFeatures

TENSORS = [torch.randn(2, 4, 9, 5), torch.randn(2, 2, 9, 5), torch.randn(2, 2, 9, 3)]
UNABLE = {
    "window": (masks.causal() & masks.window(left=3), r"window\(left=3\) forgets a key.*decay="),
    "strided": (masks.strided(2), "let rows|lets rows see different keys"),
    "prefix": (masks.causal() | masks.prefix(3), "lets rows see different keys"),
    "own rows": (masks.keep(torch.ones(9, 9, dtype=torch.bool)), "lets rows see different keys"),
    "heads": (masks.keep(torch.ones(1, 4, 1, 9, dtype=torch.bool)), "from head to head"),
    "come back": (masks.documents(ids=[0, 0, 1, 1, 0, 0, 2, 2, 2]), "comes back after another"),
    "two documents": (masks.documents(lengths=[4, 5]) & masks.documents(lengths=[2, 7]), "two masks of documents"),
}


@pytest.mark.parametrize("name", UNABLE)
def test_a_mask_that_a_sum_cannot_honour_is_refused_with_the_reason_and_the_way_out(name):
    mask, words = UNABLE[name]
    for form in ("auto", "chunked"):
        with pytest.raises(regard.Refused, match=words) as refused:
            linear_attention(*TENSORS, mask=mask, form=form)
        assert "quadratic" in str(refused.value)


@pytest.mark.parametrize("name", UNABLE)
def test_the_quadratic_form_takes_any_mask(name):
    mask, _ = UNABLE[name]
    query, key, value = TENSORS
    weights = (torch.nn.functional.elu(query) + 1) @ (torch.nn.functional.elu(key) + 1).repeat_interleave(2, 1).mT
    weights = weights * mask.dense(9, 9)
    exact = weights @ value.repeat_interleave(2, 1) / weights.sum(-1, keepdim=True)
    assert torch.allclose(linear_attention(*TENSORS, mask=mask, form="quadratic"), exact, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"feature_map": "cosine"}, ValueError, "'elu', 'relu', 'identity'.*got 'cosine'"),
        ({"feature_map": 3}, TypeError, "feature_map must be.*got int"),
        ({"feature_map": lambda x: x.sum(-1)}, ValueError, "feature_map must turn"),
        ({"scale": 2.0}, ValueError, "scale=2.0 has no meaning with feature_map='elu'"),
        ({"normalize": 1}, TypeError, "normalize must be True or False"),
        ({"decay": [0.5] * 4}, ValueError, "masks.causal"),
        ({"decay": [0.5] * 3, "mask": masks.causal()}, ValueError, r"\[num_heads\] = \[4\].*got \[3\]"),
        ({"decay": [0.5, 0.5, 0.5, 0.0], "mask": masks.causal()}, ValueError, "above 0 and at most 1"),
        ({"decay": [0.5, 0.5, 0.5, 1.5], "mask": masks.causal()}, ValueError, "above 0 and at most 1"),
        ({"decay": torch.ones(4, dtype=torch.int64), "mask": masks.causal()}, TypeError, "decay must hold floats"),
        ({"log_gate": torch.zeros(2, 4, 9)}, ValueError, "masks.causal"),
        ({"log_gate": torch.zeros(2, 4, 8), "mask": masks.causal()}, ValueError, r"\[2, 4, 9\].*got \[2, 4, 8\]"),
        ({"log_gate": torch.ones(2, 4, 9), "mask": masks.causal()}, ValueError, "at most 0.*got 1.0"),
        ({"log_gate": torch.full((2, 4, 9), -torch.inf), "mask": masks.causal()}, ValueError, "finite.*got -inf"),
        ({"log_gate": [0.0], "mask": masks.causal()}, TypeError, "log_gate must be a float tensor.*got list"),
        ({"form": "fast"}, ValueError, "form must be.*whole, fused, chunked, recurrent, quadratic.*'fast'"),
        ({"form": None}, TypeError, "form must be"),
        ({"form": "recurrent"}, regard.Refused, "only a causal call can go token by token. Able: whole"),
        ({"form": "whole", "mask": masks.causal()}, regard.Refused, "the mask is causal"),
        ({"mask": torch.ones(9, 9, dtype=torch.bool)}, TypeError, "masks.keep"),
        ({"query_offset": torch.tensor([0, 1]), "mask": masks.causal()}, ValueError, "query_offset must be an int"),
    ],
)
def test_wrong_arguments_are_named(given, error, words):
    with pytest.raises(error, match=words):
        linear_attention(*TENSORS, **given)


def test_offsets_of_items_do_not_matter_where_no_row_asks_for_its_place():
    given = {"mask": masks.padding([3, 9])}
    plain = linear_attention(*TENSORS, **given)
    assert torch.equal(linear_attention(*TENSORS, query_offset=torch.tensor([0, 7]), **given), plain)


def test_wrong_shapes_and_nested_tensors_are_refused_as_everywhere():
    with pytest.raises(ValueError, match="must divide"):
        linear_attention(TENSORS[0][:, :3], *TENSORS[1:])
    nested = torch.nested.nested_tensor([torch.randn(3, 5), torch.randn(2, 5)], layout=torch.jagged)
    with pytest.raises(TypeError, match="query is nested.*LinearAttention"):
        linear_attention(nested, *TENSORS[1:])


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({}, "whole"),
        ({"mask": masks.causal()}, "chunked"),
        ({"mask": masks.documents(lengths=[4, 5])}, "chunked"),
        ({"mask": masks.causal(), "backend": "recurrent"}, "recurrent"),
        ({"mask": masks.window(left=2), "backend": "quadratic"}, "quadratic"),
        ({"mask": masks.causal(), "decay": [0.9] * 4, "feature_map": RandomFeatures(5, 17)}, "chunked"),
    ],
)
def test_explain_tells_what_runs_and_prints_it(given, form):
    plan = regard.explain(*TENSORS, kind="linear", **given)
    assert isinstance(plan, regard.Plan)
    assert plan.backend == form
    assert form not in plan.refusals
    text = str(plan)
    assert f"{form}:" in text and "whatever the length" in text
    assert all(f"not {other}" in text for other in {"whole", "chunked", "recurrent", "quadratic"} - {form})
    assert str(pickle.loads(pickle.dumps(plan))) == text


def test_a_single_token_with_a_state_goes_by_the_recurrent_form():
    token = [x[:, :, :1] for x in TENSORS]
    plan = regard.linear.explain(*token, mask=masks.causal(), state=LinearState())
    assert plan.backend == "recurrent" and "single token" in plan.reason


def test_the_plan_counts_state_flops_and_pairs():
    query, key, value = (torch.randn(1, 8, n, 64) for n in (4096, 4096, 4096))
    plan = regard.explain(query, key, value, kind="linear", mask=masks.causal())
    assert plan.state_bytes == 8 * 64 * 65 * 4
    assert plan.cost.kept_pairs == 8 * 4096 * 4097 // 2
    longer = regard.explain(*(torch.randn(1, 8, 8192, 64) for _ in range(3)), kind="linear", mask=masks.causal())
    assert longer.cost.flops == 2 * plan.cost.flops
    assert longer.state_bytes == plan.state_bytes


@pytest.mark.parametrize(
    "given",
    [
        {"mask": masks.causal()},
        {"mask": masks.causal(), "decay": [0.9] * 4},
        {},
        {"mask": masks.documents(lengths=[400, 600])},
        {"mask": masks.causal(), "form": "quadratic"},
    ],
)
def test_the_plan_foresees_the_peak_of_memory(given):
    tensors = [torch.randn(1, 4, 1000, 16) for _ in range(3)]
    with torch.no_grad():
        measured = peak_bytes(lambda: linear_attention(*tensors, **given))
    assert 0.75 < regard.linear.explain(*tensors, **given).cost.peak_bytes / measured < 1.33


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"kind": "cubic"}, ValueError, "kind must be 'softmax' or 'linear', got 'cubic'"),
        ({"kind": "linear", "softcap": 3.0}, TypeError, "linear attention has no softcap"),
        ({"kind": "linear", "dropout": 0.5}, TypeError, "linear attention has no dropout"),
        ({"kind": "linear", "feature": "elu"}, TypeError, "no argument feature; it has"),
        ({"feature_map": "elu"}, TypeError, "attention has no argument feature_map.*kind='linear'"),
    ],
)
def test_explaining_a_call_that_does_not_exist_is_refused(given, error, words):
    with pytest.raises(error, match=words):
        regard.explain(TENSORS[0], TENSORS[0], TENSORS[0], **given)
