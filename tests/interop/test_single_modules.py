"""One attention module of another library (FACTS S6), and the plain torch module of the notes (FACTS S16)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from tests.interop.hub import SMALL, Plain
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.distilbert import modeling_distilbert as distilbert
from transformers.models.roberta.modeling_roberta import RobertaSelfAttention
from transformers.models.vit.modeling_vit import ViTAttention

from regard import masks
from regard.interop import from_hf, from_torch, to_hf
from regard.nn import MultiHeadAttention


class ViTSelfAttention(nn.Module):
    """The class as transformers 4 has it and notes copy it: three linear layers, and no output projection."""

    def __init__(self, width: int, heads: int, qkv_bias: bool) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size = heads, width // heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=qkv_bias) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (
            layer(x).view(*x.shape[:2], self.num_attention_heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        weights = self.dropout(torch.softmax(q @ k.mT / math.sqrt(self.attention_head_size), -1))
        return (weights @ v).transpose(1, 2).flatten(2), weights


def bert_config(**more: Any) -> Any:
    return transformers.BertConfig(**SMALL, attn_implementation="sdpa", **more)


MADE = {
    "BertSelfAttention": lambda: BertSelfAttention(bert_config()),
    "RobertaSelfAttention": lambda: RobertaSelfAttention(
        transformers.RobertaConfig(**SMALL, attn_implementation="sdpa")
    ),
    "ViTAttention": lambda: ViTAttention(
        transformers.ViTConfig(hidden_size=42, num_attention_heads=6, attn_implementation="sdpa")
    ),
    "ViTAttention without bias": lambda: ViTAttention(
        transformers.ViTConfig(hidden_size=42, num_attention_heads=6, qkv_bias=False, attn_implementation="sdpa")
    ),
    "ViTSelfAttention": lambda: ViTSelfAttention(42, 6, True),
    "ViTSelfAttention without bias": lambda: ViTSelfAttention(42, 6, False),
    "DistilBERT": lambda: getattr(
        distilbert, "DistilBertSelfAttention", getattr(distilbert, "MultiHeadSelfAttention", None)
    )(transformers.DistilBertConfig(dim=42, n_heads=6, attn_implementation="sdpa")),
}


@pytest.mark.parametrize("name", MADE)
def test_a_single_attention_gives_the_same_outputs_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    theirs = MADE[name]().eval().double()
    ours = from_hf(theirs)
    assert isinstance(ours, MultiHeadAttention) and not ours.training
    x = torch.randn(3, 11, 42, dtype=torch.float64)
    results = []
    for module in (theirs, ours):
        given = x.clone().requires_grad_()
        out = module(given)
        out = out[0] if isinstance(out, tuple) else out
        results.append((out, *torch.autograd.grad((out * torch.arange(42)).sum(), given)))
    for found, expected in zip(*results[::-1], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    seen = ours.observe(x)
    torch.testing.assert_close(seen.out, results[1][0])
    assert from_hf(theirs, dtype=torch.float32).q_proj.weight.dtype == torch.float32
    with pytest.raises(ValueError, match="this is an attention module"):
        from_hf(theirs, layer=1)
    if name == "ViTSelfAttention without bias":
        with pytest.raises(ValueError, match="qkv_bias=False without an output projection, which BertSelfAttention"):
            to_hf(ours)
        return
    back = to_hf(ours)  # a BertSelfAttention, or a ViTAttention where there is an output projection
    assert type(back) in (BertSelfAttention, ViTAttention) and not back.training
    given, expected = back.state_dict(), theirs.state_dict()
    assert len(given) == len(expected) and all(
        torch.equal(one, other) for one, other in zip(sorted_values(given), sorted_values(expected), strict=True)
    )
    torch.testing.assert_close(back(x)[0], results[0][0], rtol=0, atol=1e-11)
    assert all(torch.equal(one, from_hf(back).state_dict()[at]) for at, one in ours.state_dict().items())


def sorted_values(state: dict[str, Tensor]) -> list[Tensor]:
    """Weights by what they hold: classes name them differently."""
    return sorted(state.values(), key=lambda one: (one.dim(), float(one.sum())))


def test_what_no_single_module_of_theirs_does_is_refused_by_name() -> None:
    for how in ({"num_kv_heads": 2}, {"head_dim": 5}, {"packed": True}, {"softcap": 3.0}, {"sinks": True}):
        with pytest.raises(ValueError, match="which ViTAttention cannot express"):
            to_hf(MultiHeadAttention(42, 6, **how))


def test_the_plain_module_of_the_notes_loads_by_name_and_gives_the_same_outputs() -> None:  # FACTS S16
    torch.manual_seed(0)
    notes = Plain(6, 42).eval().double()
    by_name = MultiHeadAttention(42, 6, dtype=torch.float64).eval()
    by_name.load_state_dict(notes.state_dict())
    packed = MultiHeadAttention(42, 6, packed=True, dtype=torch.float64).eval()
    packed.load_state_dict(notes.state_dict())
    whole = from_torch(notes)
    assert whole.dropout == 0.1 and not whole.training
    x, memory = torch.randn(3, 7, 42, dtype=torch.float64), torch.randn(3, 9, 42, dtype=torch.float64)
    seen = (torch.rand(3, 7, 9) > 0.3).long()
    seen[..., 0] = 1
    seen[1, 2] = 0
    for ours in (by_name, packed, whole):
        torch.testing.assert_close(ours(x), notes(x, x, x), rtol=0, atol=1e-12)
        found = ours(x, memory, memory, mask=masks.keep(seen[:, None] != 0))
        expected = notes(x, memory, memory, seen)
        some = torch.ones(3, 7, dtype=torch.bool)
        some[1, 2] = False
        torch.testing.assert_close(found[some], expected[some], rtol=0, atol=1e-12)
        # a row where all is forbidden: zeros before the output projection here, the mean of all values there
        torch.testing.assert_close(found[1, 2], notes.out.bias)
        torch.testing.assert_close(expected[1, 2], notes.out(notes.v_linear(memory[1]).mean(0)))
    with pytest.raises(TypeError, match="from_torch takes a torch.nn.MultiheadAttention"):
        from_torch(nn.Linear(3, 3))
