"""Decoding under torch.compile: one graph for all tokens, the same numbers, and no word of warning."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from regard import masks, models
from regard.cache import BlockPool, KVCache, LatentCache, PagedCache, RollingCache
from regard.nn import LatentAttention, MultiHeadAttention
from regard.positions import Rotary

CACHES: dict[str, Any] = {
    "KVCache": lambda: KVCache(29),
    "RollingCache": lambda: RollingCache(5, sinks=2),
    "PagedCache": lambda: PagedCache(BlockPool(23, 3)),
    "LatentCache": lambda: LatentCache(29),
}
TOKENS = 12  # more than the graphs that torch makes of one function before it gives up


class Block(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.attention: Any = (
            LatentAttention(14, 2, kv_lora_rank=5, nope_dim=3, rope_dim=4)
            if name == "LatentCache"
            else MultiHeadAttention(14, 2, num_kv_heads=1, head_dim=6, positions=Rotary(6))
        )
        self.after = nn.Sequential(nn.LayerNorm(14), nn.Linear(14, 14), nn.GELU())

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        x = x + self.attention(x, mask=getattr(cache, "mask", masks.causal()), cache=cache)
        return self.after(x) + x


@pytest.fixture(autouse=True)
def counting(caplog: pytest.LogCaptureFixture) -> Any:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", CACHES)
def test_no_token_needs_a_graph_of_its_own(name: str) -> None:
    torch.manual_seed(0)
    block = Block(name).eval()
    compiled = torch.compile(block, backend="eager")
    held, plain = CACHES[name](), CACHES[name]()
    x = torch.randn(2, 5 + TOKENS, 14)
    with torch.no_grad():
        assert torch.equal(compiled(x[:, :5], held), block(x[:, :5], plain))  # the prompt
        made = []
        for at in range(5, 5 + TOKENS):
            token = x[:, at : at + 1]
            assert torch.equal(compiled(token, held), block(token, plain))
            made.append(graphs())
    assert made[0] >= 1 and set(made[2:]) == {made[2]}
    assert held.lengths == plain.lengths


def test_a_compiled_decoder_decodes_with_a_handful_of_graphs() -> None:
    config = models.config("gpt2", num_layers=3, embed_dim=12, num_heads=3, vocab_size=31, max_tokens=29)
    torch.manual_seed(0)
    decoder = models.build(config).eval()
    compiled = torch.compile(decoder, backend="eager")
    held, plain = decoder.caches(25), decoder.caches(25)
    ids = torch.randint(31, (1, 5 + TOKENS))
    with torch.no_grad():
        compiled(ids[:, :5], caches=held)
        decoder(ids[:, :5], caches=plain)
        made = []
        for at in range(5, 5 + TOKENS):
            token = ids[:, at : at + 1]
            one, other = compiled(token, caches=held), decoder(token, caches=plain)
            torch.testing.assert_close(one, other, rtol=0, atol=0)
            made.append(graphs())
    assert set(made[2:]) == {made[2]}
