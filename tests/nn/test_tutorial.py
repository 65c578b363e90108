"""PyTorch's tutorial module (FACTS S4): what it does is reachable, and its two bugs are not here."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.nn.helpers import build, close, random
from torch import nn

from regard import masks

E_Q, E_K, E_V, E_TOTAL, HEADS = 9, 11, 13, 40, 5


class Tutorial(nn.Module):
    """Widths E_q, E_k, E_v projected to E_total and split over heads, one packed projection if the inputs are the same,
    nested or padded input, causal or not: in our words."""

    def __init__(self, e_q, e_k, e_v, e_total, heads):
        super().__init__()
        self.heads = heads
        self.same = e_q == e_k == e_v
        made = {"dtype": torch.float64}
        if self.same:
            self.packed_proj = nn.Linear(e_q, 3 * e_total, **made)
        else:
            self.q_proj, self.k_proj = nn.Linear(e_q, e_total, **made), nn.Linear(e_k, e_total, **made)
            self.v_proj = nn.Linear(e_v, e_total, **made)
        self.out_proj = nn.Linear(e_total, e_q, **made)

    def forward(self, query, key, value, is_causal=False):
        if self.same and query is key is value:
            parts = self.packed_proj(query).chunk(3, dim=-1)
        elif self.same:
            weights, biases = self.packed_proj.weight.chunk(3), self.packed_proj.bias.chunk(3)
            parts = [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]
        else:
            parts = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        q, k, v = (x.unflatten(-1, [self.heads, -1]).transpose(1, 2) for x in parts)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(-2))


def pair(e_k=E_K, e_v=E_V):
    theirs = Tutorial(E_Q, e_k, e_v, E_TOTAL, HEADS)
    ours = build(E_Q, HEADS, key_dim=e_k, value_dim=e_v, head_dim=E_TOTAL // HEADS, packed=theirs.same)
    ours.load_state_dict({name.replace("packed", "qkv"): p for name, p in theirs.state_dict().items()})
    return theirs, ours


def test_widths_of_their_own():
    theirs, ours = pair()
    inputs = random(3, 7, E_Q), random(3, 5, E_K), random(3, 5, E_V)
    assert close(ours(*inputs), theirs(*inputs))


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_projection(is_causal):
    theirs, ours = pair(E_Q, E_Q)
    x = random(3, 7, E_Q)
    mask = masks.causal() if is_causal else None
    assert close(ours(x, mask=mask), theirs(x, x, x, is_causal=is_causal))
    memory = random(3, 7, E_Q)
    assert close(ours(x, memory), theirs(x, memory, memory))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # from inside torch's own attention
def test_nested_input():
    theirs, ours = pair()
    query = torch.nested.nested_tensor([random(n, E_Q) for n in (5, 7, 3)], layout=torch.jagged)
    key, value = (
        torch.nested.nested_tensor_from_jagged(random(15, width), offsets=query.offsets()) for width in (E_K, E_V)
    )
    assert close(ours(query, key, value).values(), theirs(query, key, value).values())


def test_a_mask_is_used_and_evaluation_drops_nothing():
    ours = build(E_Q, 3, dropout=0.9).eval()
    x = random(3, 7, E_Q)
    assert torch.equal(ours(x), ours(x))
    assert not close(ours(x, mask=masks.keep(torch.eye(7, dtype=torch.bool))), ours(x), 1e-3)
