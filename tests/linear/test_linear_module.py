"""The module: projections around linear attention, called as MultiHeadAttention is."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tests.linear.linear_oracle import attend

from regard import masks
from regard.linear import LinearState, RandomFeatures
from regard.nn import LinearAttention, MultiHeadAttention

KINDS = {
    "plain": {},
    "grouped": {"num_kv_heads": 2, "head_dim": 3, "value_head_dim": 7},
    "retention": {"decay": "retention", "normalize": False, "feature_map": "identity", "out_norm": True},
    "gated": {"gate": True, "qk_norm": True},
    "random features": {"feature_map": RandomFeatures(5, 31)},
}
CUTS = [[1] * 23, [5, 7, 1, 10], [23]]


def build(kind="plain", **keywords):
    module = LinearAttention(20, 4, **{**KINDS[kind], **keywords}).double()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.normal_()
    return module


def sequence(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def heads(module, x, projection, count):
    return projection(x).unflatten(-1, (count, -1)).transpose(1, 2)


def test_the_module_is_its_projections_around_the_formula():
    module = LinearAttention(20, 4, num_kv_heads=2, key_dim=7, value_dim=11, decay=[0.9, 0.5, 1.0, 0.7]).double()
    query, key, value = sequence(3, 23, 20), sequence(3, 23, 7), sequence(3, 23, 11)
    q = heads(module, query, module.q_proj, 4)
    k, v = heads(module, key, module.k_proj, 2), heads(module, value, module.v_proj, 2)
    fade = module.decay.log()[None, :, None].expand(3, 4, 23)
    out = module.out_proj(attend(q, k, v, masks.causal(), log_gate=fade).transpose(1, 2).flatten(2))
    assert torch.allclose(module(query, key, value, mask=masks.causal()), out, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cuts", CUTS, ids=["tokens", "chunks", "one"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_cut_into_calls_with_a_state_equals_one_call(kind, cuts):
    module, x = build(kind), sequence(3, 23, 20)
    state = LinearState()
    parts = [module(piece, mask=masks.causal(), cache=state) for piece in x.split(cuts, 1)]
    assert torch.allclose(torch.cat(parts, 1), module(x, mask=masks.causal()), rtol=0, atol=1e-12)
    assert state.position == 23


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("kind", "causal"), [("plain", True), ("plain", False), ("gated", True), ("grouped", True), ("grouped", False)]
)
def test_a_padded_batch_equals_each_sequence_alone_whatever_the_padding_holds(kind, causal, side):
    module, x, lengths = build(kind), sequence(3, 23, 20), [23, 5, 11]
    rule = masks.causal() if causal else masks.everything()
    real = masks.padding(lengths, side=side).dense(1, 23)[:, 0, 0]
    spoilt = x.masked_fill(~real.unsqueeze(-1), torch.nan)
    out = module(spoilt, mask=rule & masks.padding(lengths, side=side))
    assert (out[~real] == 0).all()
    for item in range(3):
        alone = module(x[item : item + 1, real[item]], mask=rule)
        assert torch.allclose(out[item, real[item]], alone[0], rtol=0, atol=1e-12)
    out.sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in module.parameters() if parameter.grad is not None)


def test_a_padded_prefill_decodes_as_each_sequence_alone():
    module, x = build("retention"), sequence(3, 14, 20)
    lengths = torch.tensor([11, 4, 7])
    state = LinearState()
    module(x[:, :11], mask=masks.causal() & masks.padding(lengths), cache=state)
    for step in range(3):
        new = torch.stack([x[item, length + step] for item, length in enumerate(lengths)]).unsqueeze(1)
        out = module(new, mask=masks.causal(), cache=state)
        for item, length in enumerate(lengths):
            alone = module(x[item : item + 1, : length + step + 1], mask=masks.causal())
            assert torch.allclose(out[item, 0], alone[0, -1], rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["whole", "causal"])
def test_nested_input_equals_each_item_alone(mask):
    module, lengths = build(), [5, 11, 1]
    items = [sequence(length, 20) for length in lengths]
    out = module(torch.nested.nested_tensor(items, layout=torch.jagged), mask=mask)
    for item, found in zip(items, out.unbind(), strict=True):
        assert torch.allclose(found, module(item.unsqueeze(0), mask=mask)[0], rtol=0, atol=1e-12)


def test_cross_attention_takes_nested_queries_and_keys_of_different_lengths():
    module = build()
    queries, keys = [sequence(n, 20) for n in (3, 7)], [sequence(n, 20) for n in (5, 2)]
    out = module(*(torch.nested.nested_tensor(x, layout=torch.jagged) for x in (queries, keys)))
    for query, key, found in zip(queries, keys, out.unbind(), strict=True):
        assert torch.allclose(found, module(query[None], key[None])[0], rtol=0, atol=1e-12)


def test_weights_of_multi_head_attention_load_packed_or_not():
    for packed in (False, True):
        other = MultiHeadAttention(20, 4, packed=packed)
        module = LinearAttention(20, 4)
        module.load_state_dict(other.state_dict())
        assert torch.equal(module.out_proj.weight, other.out_proj.weight)
    other.load_state_dict(module.state_dict())


def test_positions_turn_queries_and_keys_where_the_state_stands():
    calls = []

    def positions(query, key, *, query_offset):
        calls.append(query_offset)
        angle = (torch.arange(query.shape[2], dtype=torch.float64) + query_offset)[:, None]
        return query + angle.sin(), key + angle.cos()

    module, x, state = build(positions=positions), sequence(2, 9, 20), LinearState()
    whole = module(x, mask=masks.causal())
    parts = [module(piece, mask=masks.causal(), cache=state) for piece in x.split([5, 1, 3], 1)]
    assert torch.allclose(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    assert calls == [0, 0, 5, 6]


def test_half_precision_does_not_round_the_decay():
    module = LinearAttention(32, 16, decay="retention").bfloat16()
    assert torch.equal(module.decay, 1 - torch.exp2(-5.0 - torch.arange(16, dtype=torch.float64)))
    assert module(torch.randn(1, 3, 32, dtype=torch.bfloat16), mask=masks.causal()).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_modules_copy_pickle_print_and_explain(kind):
    module, x = build(kind), sequence(1, 7, 20)
    expected = module(x, mask=masks.causal())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x, mask=masks.causal()), expected)
    assert "embed_dim=20" in repr(module)
    plan = module.explain(x, mask=masks.causal())
    assert plan.backend == "chunked" and "linear attention B=1 H=4" in str(plan)


def test_every_parameter_gets_a_gradient():
    for kind in KINDS:
        module = build(kind)
        module(sequence(2, 11, 20), mask=masks.causal()).square().sum().backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters())


def test_out_dropout_is_for_training_only():
    module, x = LinearAttention(20, 4, out_dropout=0.9), torch.randn(1, 11, 20)
    assert (module(x) == 0).float().mean() > 0.5
    assert torch.equal(module.eval()(x), module(x))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"num_kv_heads": 3}, ValueError, "num_kv_heads=3 must divide num_heads=4"),
        ({"head_dim": 0}, ValueError, "head_dim must be at least 1"),
        ({"decay": "fast"}, ValueError, "'retention'.*got 'fast'"),
        ({"decay": [0.5]}, ValueError, r"\[num_heads\] = \[4\].*\[1\]"),
        ({"decay": [1, 1, 1, 1]}, TypeError, "decay must hold floats"),
        ({"decay": [0.5, 0.5, 0.5, 2.0]}, ValueError, "at most 1"),
        ({"out_dropout": 2.0}, ValueError, "out_dropout"),
        ({"positions": 3}, TypeError, "positions"),
    ],
)
def test_wrong_constructors_are_refused(given, error, words):
    with pytest.raises(error, match=words):
        LinearAttention(20, 4, **given)


def test_wrong_inputs_and_caches_are_refused():
    module, x = LinearAttention(20, 4), torch.randn(2, 5, 20)
    with pytest.raises(TypeError, match="LinearState, got dict.*not their keys and values"):
        module(x, mask=masks.causal(), cache={})
    with pytest.raises(ValueError, match="width 7.*embed_dim=20"):
        module(torch.randn(2, 5, 7))
    with pytest.raises(TypeError, match="float64"):
        module(x.double())
    with pytest.raises(ValueError, match="window"):
        module(x, mask=masks.window(left=2))
    with pytest.raises(ValueError, match="masks.causal"):
        module(x, cache=LinearState())
    nested = torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
    with pytest.raises(ValueError, match="cache takes padded"):
        module(nested, mask=masks.causal(), cache=LinearState())
