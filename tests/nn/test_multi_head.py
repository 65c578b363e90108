from __future__ import annotations

import pytest
import torch
from tests.nn.helpers import build, close, gradients, oracle, random
from torch import nn

import regard
from regard import masks
from regard.nn import MultiHeadAttention

VARIANTS = {
    "plain": {},
    "packed": {"packed": True},
    "no biases": {"qkv_bias": False, "out_bias": False},
    "qkv bias only": {"out_bias": False},
    "packed without qkv bias": {"packed": True, "qkv_bias": False},
    "grouped": {"num_kv_heads": 2},
    "multi-query, packed": {"num_kv_heads": 1, "packed": True},
    "own head width": {"head_dim": 5},
    "d_k other than d_v": {"head_dim": 3, "value_head_dim": 7, "packed": True, "num_kv_heads": 2},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_self_attention_equals_the_oracle(variant):
    module = build(44, 4, **variant)
    x = random(3, 7, 44)
    assert close(module(x), oracle(module, x, x, x))


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_cross_attention_equals_the_oracle(variant):
    module = build(44, 4, **variant)
    x, memory, other = random(3, 7, 44), random(3, 11, 44), random(3, 11, 44)
    assert close(module(x, memory), oracle(module, x, memory, memory))
    assert close(module(x, memory, other), oracle(module, x, memory, other))


def test_inputs_of_different_widths():  # FACTS M6, S4
    module = build(44, 4, key_dim=9, value_dim=13, head_dim=5)
    x, key, value = random(3, 7, 44), random(3, 11, 9), random(3, 11, 13)
    assert close(module(x, key, value), oracle(module, x, key, value))


def test_value_is_the_key_and_has_its_width_when_left_out():
    module = build(44, 4, key_dim=9)
    x, memory = random(3, 7, 44), random(3, 11, 9)
    assert close(module(x, memory), oracle(module, x, memory, memory))


KINDS = {
    "self": (None, None),
    "causal": (None, masks.causal),
    "local": (None, lambda: masks.causal() & masks.window(left=2)),
    "cross": (11, None),
    "cross with causal, end-aligned": (11, masks.causal),
    "cross, local": (11, lambda: masks.window(left=2, right=1)),
}


@pytest.mark.parametrize(("length", "rule"), KINDS.values(), ids=KINDS)
def test_each_kind_of_attention_works_multi_head(length, rule):  # FACTS M5
    module = build(44, 4, num_kv_heads=2)
    x = random(3, 7, 44)
    key = x if length is None else random(3, length, 44)
    mask = None if rule is None else rule()
    seen = None if mask is None else mask.dense(7, key.shape[1]).numpy()
    assert close(module(x, None if length is None else key, mask=mask), oracle(module, x, key, key, mask=seen))


def test_bias_reaches_the_logits_and_gets_its_gradient():  # FACTS M12
    module = build(44, 4)
    x, bias = random(3, 7, 44), random(1, 4, 7, 7, grad=True)
    out = module(x, bias=bias)
    assert close(out, oracle(module, x, x, x, bias=bias.detach().numpy()))
    (gradient,) = torch.autograd.grad(out.square().sum(), bias)
    assert gradient.shape == bias.shape and gradient.abs().min() > 0


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_gradients_pass_gradcheck(variant):
    module = build(8, 4, **(variant | {"head_dim": 2}))
    x = random(2, 3, 8, grad=True)
    names = [name for name, _ in module.named_parameters()]

    def run(x, *parameters):
        named = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(module, named, (x,), {"mask": masks.causal()})

    assert torch.autograd.gradcheck(run, (x, *module.parameters()))


def test_packed_and_separate_projections_agree_in_values_and_gradients():
    packed = build(44, 4, packed=True, num_kv_heads=2, value_head_dim=7)
    separate = build(44, 4, num_kv_heads=2, value_head_dim=7)
    separate.load_state_dict(packed.state_dict())
    x, memory = random(3, 7, 44, grad=True), random(3, 11, 44, grad=True)
    for inputs in ((x,), (x, memory), (x, memory, x[:, :1].expand(3, 11, 44))):
        leaves = inputs[:2]
        one, other = (gradients(module, module(*inputs), *leaves) for module in (packed, separate))
        assert close(packed(*inputs), separate(*inputs))
        for kind in ("weight", "bias"):
            joined = torch.cat([other[f"{name}_proj.{kind}"] for name in "qkv"])
            assert close(one[f"qkv_proj.{kind}"], joined)
        assert all(close(one[name], other[name]) for name in one if "qkv" not in name)


def test_qk_norm_makes_every_head_of_unit_mean_square_before_its_gain():
    module = build(44, 4, qk_norm=True, num_kv_heads=2)
    plain = build(44, 4, num_kv_heads=2)
    plain.load_state_dict({name: p for name, p in module.state_dict().items() if "norm" not in name})
    x = random(3, 7, 44)
    heads = [f(x).unflatten(-1, (-1, 11)).transpose(1, 2) for f in (plain.q_proj, plain.k_proj)]
    normed = [h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() for h in heads]
    q, k = (h * norm.weight for h, norm in zip(normed, (module.q_norm, module.k_norm), strict=True))
    weights = (q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 11**0.5).softmax(-1)
    v = plain.v_proj(x).unflatten(-1, (-1, 11)).transpose(1, 2).repeat_interleave(2, 1)
    assert close(module(x), plain.out_proj((weights @ v).transpose(1, 2).flatten(2)))


def test_shapes_of_the_usual_layer():  # FACTS M3, M4
    module = MultiHeadAttention(512, 8)
    assert (module.head_dim, module.value_head_dim) == (64, 64)
    assert module(torch.randn(32, 20, 512)).shape == (32, 20, 512)


def test_sixteen_heads_over_four():  # FACTS M9
    module = build(48, 16, num_kv_heads=4)
    assert module.k_proj.weight.shape == module.v_proj.weight.shape == (12, 48)
    x = random(3, 7, 48)
    assert close(module(x), oracle(module, x, x, x))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_heads", [1, 8])
def test_a_layer_without_biases_has_four_d_model_squared_parameters(packed, num_heads):  # FACTS M17, E10
    module = MultiHeadAttention(512, num_heads, qkv_bias=False, out_bias=False, packed=packed)
    assert sum(p.numel() for p in module.parameters()) == 4 * 512**2


def test_weights_start_as_those_of_torch():
    ours, theirs = MultiHeadAttention(512, 8, packed=True), nn.MultiheadAttention(512, 8)
    pairs = ((ours.qkv_proj, theirs.in_proj_weight), (ours.out_proj, theirs.out_proj.weight))
    for projection, weight in pairs:
        assert projection.weight.abs().max().item() == pytest.approx(weight.abs().max().item(), rel=1e-3)
        assert projection.weight.std().item() == pytest.approx(weight.std().item(), rel=0.01)
        assert not projection.bias.any()
    separate = MultiHeadAttention(512, 8)
    bound = (6 / (512 + 512)) ** 0.5
    for projection in (separate.q_proj, separate.k_proj, separate.v_proj):
        assert projection.weight.abs().max().item() == pytest.approx(bound, rel=1e-3)
        assert not projection.bias.any()


def test_masks_are_never_ignored():  # the quoted tutorial accepts attn_mask and drops it
    module = build(44, 4)
    x = random(3, 7, 44)
    for mask in (masks.causal(), masks.window(left=1), masks.keep(torch.eye(7, dtype=torch.bool)), masks.columns(2)):
        assert close(module(x, mask=mask), oracle(module, x, x, x, mask=mask.dense(7, 7).numpy()))
        assert not close(module(x, mask=mask), module(x), 1e-3)


def test_a_bare_tensor_as_mask_is_refused():
    with pytest.raises(TypeError, match=r"masks\.keep"):
        build(44, 4)(random(3, 7, 44), mask=torch.ones(7, 7, dtype=torch.bool))


class TestDropout:
    @pytest.mark.parametrize("keyword", ["dropout", "out_dropout"])
    def test_is_off_in_eval(self, keyword):
        module = build(44, 4, **{keyword: 0.5}).eval()
        x = random(3, 7, 44)
        assert torch.equal(module(x), module(x))
        assert close(module(x), oracle(module, x, x, x))

    @pytest.mark.parametrize("keyword", ["dropout", "out_dropout"])
    def test_is_on_in_training_and_follows_the_seed(self, keyword):
        module = build(44, 4, **{keyword: 0.5})
        x = random(3, 7, 44)
        torch.manual_seed(1)
        first, second = module(x), module(x)
        torch.manual_seed(1)
        assert not torch.equal(first, second)
        assert torch.equal(first, module(x))

    def test_of_weights_leaves_the_output_bias(self):
        module = build(44, 4, dropout=1.0)
        assert close(module(random(3, 7, 44)), module.out_proj.bias.expand(3, 7, 44))

    def test_of_the_output_drops_entries_and_scales_the_rest(self):
        module = build(44, 4, out_dropout=0.25)
        x = random(30, 7, 44)
        dropped, full = module(x), module.eval()(x)
        kept = dropped != 0
        assert abs(kept.double().mean().item() - 0.75) < 5 * (0.25 * 0.75 / kept.numel()) ** 0.5
        assert close(dropped[kept], full[kept] / 0.75)


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((44, 3), {}, "embed_dim=44 is not a multiple of num_heads=3; give head_dim"),
        ((44, 4), {"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
        ((44, 0), {}, "num_heads must be at least 1, got 0"),
        ((44, 4), {"dropout": 1.5}, "dropout must be in \\[0, 1\\], got 1.5"),
        ((44, 4), {"out_dropout": -0.1}, "out_dropout must be in"),
        ((44, 4), {"packed": True, "key_dim": 9}, "packed=True needs one width.*key_dim 9"),
    ],
)
def test_impossible_sizes_are_refused(arguments, keywords, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(*arguments, **keywords)


def test_wrong_inputs_are_refused_by_name():
    module = build(44, 4, key_dim=9)
    with pytest.raises(ValueError, match=r"query must be \[batch, token, dim\], got shape \[7, 44\]"):
        module(random(7, 44))
    with pytest.raises(ValueError, match="query has width 43; the module was built with embed_dim=44"):
        module(random(3, 7, 43), random(3, 7, 9))
    with pytest.raises(ValueError, match="key has width 44; the module was built with key_dim=9"):
        module(random(3, 7, 44))
    with pytest.raises(ValueError, match="value was given without key"):
        module(random(3, 7, 44), value=random(3, 7, 9))
    with pytest.raises(ValueError, match="batch"):
        module(random(3, 7, 44), random(2, 7, 9))


def test_half_precision_and_autocast_give_the_dtype_asked_for():
    module = MultiHeadAttention(44, 4)
    x = torch.randn(3, 7, 44)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x).dtype == torch.bfloat16
    assert module.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


def test_empty_batches_and_sequences_work():
    module = build(44, 4)
    assert module(random(0, 7, 44)).shape == (0, 7, 44)
    assert module(random(3, 0, 44)).shape == (3, 0, 44)
    no_keys = module(random(3, 7, 44), random(3, 0, 44))
    assert close(no_keys, module.out_proj.bias.expand(3, 7, 44))


def test_a_module_measures_its_values_behind_its_own_output_projection() -> None:
    torch.manual_seed(0)
    module = MultiHeadAttention(20, 4, num_kv_heads=2, value_head_dim=7, dtype=torch.float64).eval()
    x = torch.randn(2, 11, 20, dtype=torch.float64)
    seen = module.observe(x, want=regard.Want(value_mass=True))
    value = module.v_proj(x).view(2, 11, 2, 7).transpose(1, 2).repeat_interleave(2, 1)
    blocks = module.out_proj.weight.view(20, 4, 7)
    lengths = torch.einsum("bhsd,mhd->bhsm", value, blocks).norm(dim=-1)
    torch.testing.assert_close(seen.value_length, lengths.detach(), rtol=0, atol=1e-12)


def test_a_penalty_on_entropy_reaches_the_projections_of_a_module() -> None:
    torch.manual_seed(0)
    module = MultiHeadAttention(20, 4, num_kv_heads=2, dtype=torch.float64)
    x = torch.randn(2, 11, 20, dtype=torch.float64)
    module.observe(x, mask=masks.causal(), differentiable=True).entropy.sum().backward()
    assert float(module.q_proj.weight.grad.abs().max()) > 0 and float(module.k_proj.weight.grad.abs().max()) > 0
    assert module.v_proj.weight.grad is None
