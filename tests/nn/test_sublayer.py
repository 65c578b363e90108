from __future__ import annotations

import pytest
import torch
from tests.nn.helpers import close, gradients, random
from torch import nn

import regard
from regard import masks
from regard.nn import AttentionSublayer


def build(**keywords):
    layer = AttentionSublayer(44, 4, dtype=torch.float64, **keywords)
    with torch.no_grad():
        layer.norm.weight.normal_()
        layer.norm.bias.normal_()
    return layer


def test_post_norm_is_the_norm_of_the_sum():  # FACTS M10
    layer, x, memory = build(), random(3, 7, 44), random(3, 11, 44)
    assert layer.norm.eps == 1e-6
    assert close(layer(x, mask=masks.causal()), layer.norm(x + layer.attention(x, mask=masks.causal())))
    assert close(layer(x, memory), layer.norm(x + layer.attention(x, memory)))


def test_pre_norm_is_the_sum_with_attention_of_the_norm():  # FACTS M10
    layer, x, memory = build(norm="pre"), random(3, 7, 44), random(3, 11, 44)
    normed = layer.norm(x)
    assert close(layer(x, mask=masks.causal()), x + layer.attention(normed, mask=masks.causal()))
    assert close(layer(x, x, x), x + layer.attention(normed))
    assert close(layer(x, memory), x + layer.attention(normed, memory))
    assert close(layer(x, memory, 2 * memory), x + layer.attention(normed, memory, 2 * memory))


def test_a_call_says_how_to_attend():
    layer, x = build(), random(3, 7, 44)
    assert close(layer(x, softcap=0.5), layer.norm(x + layer.attention(x, softcap=0.5)))
    assert not close(layer(x, softcap=0.5), layer(x), 1e-4)
    assert close(layer(x, softcap=0.5), layer.observe(x, softcap=0.5).out)


def test_another_norm_is_refused():
    with pytest.raises(ValueError, match="norm must be 'post' or 'pre', got 'sandwich'"):
        build(norm="sandwich")


class Annotated(nn.Module):
    """The semantics of the Transformer implementation of FACTS S2, in our words: a temperature of √d_k, projections
    without bias, d_k apart from d_v, mask == 0 means hidden, residual and LayerNorm inside, weights returned."""

    def __init__(self, heads, width, d_k, d_v):
        super().__init__()
        self.heads, self.d_k, self.d_v = heads, d_k, d_v
        self.q = nn.Linear(width, heads * d_k, bias=False, dtype=torch.float64)
        self.k = nn.Linear(width, heads * d_k, bias=False, dtype=torch.float64)
        self.v = nn.Linear(width, heads * d_v, bias=False, dtype=torch.float64)
        self.out = nn.Linear(heads * d_v, width, bias=False, dtype=torch.float64)
        self.norm = nn.LayerNorm(width, eps=1e-6, dtype=torch.float64)

    def forward(self, query, key, value, mask=None):
        q, k, v = (
            f(x).view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)
            for f, x in ((self.q, query), (self.k, key), (self.v, value))
        )
        scores = (q / self.d_k**0.5) @ k.transpose(2, 3)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        weights = scores.softmax(-1)
        heads = (weights @ v).transpose(1, 2).flatten(2)
        return self.norm(query + self.out(heads)), weights


@pytest.mark.parametrize("packed", [False, True])
def test_the_annotated_transformers_sublayer_is_reachable(packed):  # FACTS S2
    theirs = Annotated(4, 44, 5, 7)
    ours = build(
        head_dim=5, value_head_dim=7, qkv_bias=False, out_bias=False, packed=packed, dropout=0.1, out_dropout=0.1
    )
    ours.load_state_dict(
        {f"attention.{name}_proj.weight": getattr(theirs, name).weight for name in ("q", "k", "v", "out")}
        | {"norm.weight": theirs.norm.weight, "norm.bias": theirs.norm.bias}
    )
    ours.eval()
    x, memory = random(3, 7, 44, grad=True), random(3, 11, 44, grad=True)
    causal = torch.ones(7, 7).tril()[None, None]
    cases = [((x, x, x), causal, masks.causal()), ((x, memory, memory), None, None)]
    for inputs, their_mask, our_mask in cases:
        expected, weights = theirs(*inputs, mask=their_mask)
        assert close(ours(*inputs, mask=our_mask), expected)
        seen = ours.observe(*inputs, mask=our_mask, want=regard.Want.all())
        assert close(seen.out, expected) and close(seen.weights, weights.detach())
        leaves = list({id(t): t for t in inputs}.values())
        one, other = (
            gradients(m, m(*inputs, mask=mask) if m is ours else m(*inputs, mask=mask)[0], *leaves)
            for m, mask in ((ours, our_mask), (theirs, their_mask))
        )
        assert all(close(one[f"input {i}"], other[f"input {i}"], 1e-11) for i in range(len(leaves)))
