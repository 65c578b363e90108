from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from regard import masks
from regard.interop import from_torch, to_torch
from regard.nn import MultiHeadAttention


def theirs(**keywords):
    module = nn.MultiheadAttention(44, 4, batch_first=True, dtype=torch.float64, **keywords)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.normal_()
    return module


def ours(**keywords):
    module = MultiHeadAttention(44, 4, dtype=torch.float64, **keywords)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.normal_()
    return module


def inputs(kdim=None, vdim=None):
    sizes = ((7, 44), (11, kdim or 44), (11, vdim or 44))
    return [torch.randn(3, *size, dtype=torch.float64, requires_grad=True) for size in sizes]


def run(module, three, **keywords):
    out = module(*three, **keywords)
    return out[0] if isinstance(module, nn.MultiheadAttention) else out


def agree(torch_module, our_module, three, torch_keywords=None, our_keywords=None):
    """Outputs and gradients of inputs, and of parameters joined to torch's packed form, are the same."""
    results = []
    for module, keywords in ((torch_module, torch_keywords), (our_module, our_keywords)):
        for parameter in module.parameters():
            parameter.grad = None
        out = run(module, three, **(keywords or {}))
        grads = torch.autograd.grad(out.square().sum(), three, retain_graph=True)
        out.square().sum().backward(inputs=list(module.parameters()))
        results.append((out, *grads, *parameter_gradients(module)))
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def parameter_gradients(module):
    if isinstance(module, nn.MultiheadAttention):
        found = [module.in_proj_weight] if module.in_proj_weight is not None else [
            module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
        ]  # fmt: skip
        weights = [p.grad.reshape(-1) for p in found]
        biases = [] if module.in_proj_bias is None else [module.in_proj_bias.grad]
    else:
        parts = [module.qkv_proj] if module.packed else [module.q_proj, module.k_proj, module.v_proj]
        weights = [p.weight.grad.reshape(-1) for p in parts]
        biases = [] if parts[0].bias is None else [torch.cat([p.bias.grad for p in parts])]
    last = [module.out_proj.weight.grad]
    last += [] if module.out_proj.bias is None else [module.out_proj.bias.grad]
    return [torch.cat(weights), *biases, *last]


VARIANTS = [
    {"bias": bias, **dims}
    for bias, dims in itertools.product((True, False), ({}, {"kdim": 9, "vdim": 13}, {"kdim": 9}, {"vdim": 13}))
]


@pytest.mark.parametrize("keywords", VARIANTS, ids=str)
def test_from_torch_gives_the_same_outputs_and_gradients(keywords):
    module = theirs(**keywords)
    agree(module, from_torch(module), inputs(keywords.get("kdim"), keywords.get("vdim")))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_to_torch_gives_the_same_outputs_and_gradients(packed, bias):
    module = ours(packed=packed, qkv_bias=bias, out_bias=bias)
    agree(to_torch(module), module, inputs())


def test_to_torch_with_widths_of_their_own():
    module = ours(key_dim=9, value_dim=13)
    agree(to_torch(module), module, inputs(9, 13))


@pytest.mark.parametrize("keywords", VARIANTS, ids=str)
def test_there_and_back_changes_no_bit(keywords):
    module = theirs(**keywords)
    state, again = module.state_dict(), to_torch(from_torch(module)).state_dict()
    assert list(state) == list(again)
    assert all(torch.equal(state[name], again[name]) for name in state)


def test_self_attention_agrees_on_the_fast_path_too():
    module = theirs().eval()
    x = torch.randn(3, 7, 44, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(from_torch(module)(x), module(x, x, x)[0], rtol=0, atol=1e-12)


def test_masks_convert_as_the_docstring_says():
    module = theirs()
    converted, three = from_torch(module), inputs()
    forbidden = torch.rand(7, 11) < 0.4
    forbidden[:, 0] = False
    padding = torch.arange(11) >= torch.tensor([11, 3, 5])[:, None]
    per_head = (torch.rand(12, 7, 11) < 0.4).index_fill(2, torch.tensor(0), False)
    added = torch.randn(7, 11, dtype=torch.float64)
    cases = [
        ({"attn_mask": forbidden}, {"mask": masks.drop(forbidden)}),
        ({"key_padding_mask": padding}, {"mask": masks.drop(padding[:, None, None, :])}),
        ({"attn_mask": per_head}, {"mask": masks.drop(per_head.view(3, 4, 7, 11))}),
        ({"attn_mask": added}, {"bias": added}),
        (
            {"attn_mask": forbidden, "key_padding_mask": padding},
            {"mask": masks.drop(forbidden) & masks.drop(padding[:, None, None, :])},
        ),
    ]
    for torch_keywords, our_keywords in cases:
        agree(module, converted, three, torch_keywords | {"need_weights": False}, our_keywords)


def test_rows_that_torch_turns_into_nan_are_the_output_bias():
    module = theirs()
    three = inputs()
    forbidden = torch.zeros(7, 11, dtype=torch.bool)
    forbidden[2] = True
    out, expected = (
        from_torch(module)(*three, mask=masks.drop(forbidden)),
        module(*three, attn_mask=forbidden, need_weights=False)[0],
    )
    rest = torch.arange(7) != 2
    torch.testing.assert_close(out[:, rest], expected[:, rest], rtol=0, atol=1e-12)
    torch.testing.assert_close(out[:, 2], module.out_proj.bias.expand(3, 44), rtol=0, atol=1e-12)


def test_sequence_first_modules_convert_and_take_batch_first_input():
    module = nn.MultiheadAttention(44, 4, dtype=torch.float64)
    x = torch.randn(3, 7, 44, dtype=torch.float64)
    expected = module(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1)
    torch.testing.assert_close(from_torch(module)(x), expected, rtol=0, atol=1e-12)
    back = to_torch(from_torch(module), batch_first=False)
    assert not back.batch_first and to_torch(from_torch(module)).batch_first


def test_mode_dropout_dtype_and_what_is_frozen_are_kept():
    module = nn.MultiheadAttention(44, 4, dropout=0.25, dtype=torch.bfloat16).eval()
    module.in_proj_weight.requires_grad_(False)
    converted = from_torch(module)
    assert (converted.dropout, converted.training) == (0.25, False)
    assert converted.qkv_proj.weight.dtype == torch.bfloat16
    assert not converted.qkv_proj.weight.requires_grad and converted.qkv_proj.bias.requires_grad
    back = to_torch(converted.train())
    assert (back.dropout, back.training) == (0.25, True)
    assert not back.in_proj_weight.requires_grad and back.in_proj_bias.requires_grad


def test_conversion_shares_nothing_and_draws_no_random_number():
    module = theirs()
    state = torch.get_rng_state()
    converted = from_torch(module)
    to_torch(converted)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        converted.qkv_proj.weight.zero_()
    assert module.in_proj_weight.any()


def test_dropout_acts_on_the_weights_in_training_only():
    module = nn.MultiheadAttention(44, 4, dropout=1.0, batch_first=True, dtype=torch.float64)
    x = torch.randn(3, 7, 44, dtype=torch.float64)
    converted = from_torch(module)
    torch.testing.assert_close(converted(x), module(x, x, x)[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(converted.eval()(x), module.eval()(x, x, x)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("keyword", ["add_bias_kv", "add_zero_attn"])
def test_modules_that_add_a_key_are_refused(keyword):
    with pytest.raises(ValueError, match=f"{keyword}=True"):
        from_torch(nn.MultiheadAttention(44, 4, **{keyword: True}))


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads=2"),
        ({"head_dim": 5}, "head_dim=5"),
        ({"value_head_dim": 7}, "value_head_dim=7"),
        ({"qk_norm": True}, "qk_norm=True"),
        ({"out_dropout": 0.1}, "out_dropout=0.1"),
        ({"out_bias": False}, "qkv_bias=True with out_bias=False"),
        ({"positions": lambda query, key, *, query_offset: (query, key)}, "positions"),
    ],
)
def test_what_torch_cannot_express_is_refused_by_name(keywords, named):
    with pytest.raises(ValueError, match=f"module has {named}, which torch.nn.MultiheadAttention cannot express"):
        to_torch(MultiHeadAttention(44, 4, **keywords))


def test_other_modules_are_refused():
    with pytest.raises(TypeError, match=r"torch\.nn\.MultiheadAttention, got Linear"):
        from_torch(nn.Linear(3, 5))
    with pytest.raises(TypeError, match=r"regard\.nn\.MultiHeadAttention, got Linear"):
        to_torch(nn.Linear(3, 5))
