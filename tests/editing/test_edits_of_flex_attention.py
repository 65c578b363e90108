"""FlexAttention is edited as the same attention written out is: by a Hugging Face model, and called by itself with any
function of scores and pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tests.editing.by_hand import by_hand, model_of, only
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard
from regard import edits, masks

pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile:UserWarning",
    "ignore:_compile flag on create_block_mask:DeprecationWarning",
)
EDGES = torch.zeros(7, 7, dtype=torch.bool)
EDGES[3:, [0, 2]] = True


class Flex(nn.Module):
    """Causal attention of four heads that share two of keys, with a function of scores."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.kv, self.out = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.slope = nn.Parameter(torch.rand(4))
        self.kind = kind
        self.double()

    def scores(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if self.kind == "same":
            return score
        return 2.0 * torch.tanh(score / 2.0) - self.slope[h] * (i - j).abs()

    def heads(self, x: Tensor) -> list[Tensor]:
        both = self.kv(x).unflatten(-1, (4, 6)).transpose(1, 2)
        return [self.q(x).unflatten(-1, (4, 6)).transpose(1, 2), both[:, :2], both[:, 2:]]

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        block = create_block_mask(lambda b, h, i, j: j <= i, None, None, length, length, device="cpu")
        made: Any = flex_attention(*self.heads(x), score_mod=self.scores, block_mask=block, enable_gqa=True)
        return self.out(made.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def by_hand(self, x: Tensor, change: Any, heads: list[int]) -> Tensor:
        q, k, v = self.heads(x)
        k, v = (y.repeat_interleave(2, 1) for y in (k, v))
        scores, at = q @ k.mT / 6**0.5, torch.arange(x.shape[1])
        if self.kind != "same":
            far = self.slope[:, None, None] * (at[:, None] - at).abs()
            scores = 2.0 * torch.tanh(scores / 2.0) - far
        scores = only(heads, [0], change)(0, scores.masked_fill(at > at[:, None], -torch.inf))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@torch.no_grad()  # torch has no backward pass of it on a CPU
@pytest.mark.parametrize("kind", ["same", "bent"])
def test_flex_attention_called_by_itself_is_edited(kind: str) -> None:
    model, x = Flex(kind), torch.randn(2, 7, 24, dtype=torch.float64)
    more = torch.zeros(7, dtype=torch.float64)
    more[1] = 0.9
    expected = model.by_hand(x, lambda s: (s + more).masked_fill(EDGES, -torch.inf), [1, 2])
    both = [edits.cut(queries=slice(3, None), keys=[0, 2]), edits.steer(1, 0.9)]
    with regard.edit(model, both, heads=[1, 2]) as report:
        out = model(x)
    assert len(report) == 1
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    assert (out - model.by_hand(x, lambda s: s, [])).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("kind", ["same", "bent"])
def test_a_watch_records_the_edited_weights_and_other_calls_run_as_they_are(kind: str) -> None:
    model, x = Flex(kind), torch.randn(2, 7, 24, dtype=torch.float64)
    want = regard.Want(weights="all", map=None, top_k=0)
    with regard.watch(model, want=want) as recording, regard.edit(model, edits.cut(keys=2), heads=[3]):
        model(x)
    weights = recording.calls[0].weights
    assert len(recording) == 1 and (weights[:, 3, :, 2] == 0).all() and (weights[:, :3, 2:, 2] > 0).all()
    two = nn.Sequential(model, Flex(kind))
    with regard.edit(two, edits.ablate("zero"), layers=[1]) as report:
        out = two(x)
    torch.testing.assert_close(out, two[1].out.bias.expand_as(out))
    assert report.layers == [1]


@torch.no_grad()
def test_a_pattern_of_flex_attention_is_patched() -> None:
    model, (x, other) = Flex("bent"), torch.randn(2, 2, 7, 24, dtype=torch.float64)
    with regard.watch(model, keep=["pattern"], want=regard.Want(weights="all", map=None, top_k=0)) as recording:
        model(other)
    weights = recording.calls[0].weights
    expected = model.by_hand(x, lambda s: weights.log(), [0, 1])
    with regard.edit(model, edits.patch(recording, "pattern"), heads=[0, 1]):
        torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_flex_attention_that_gives_its_log_sum_exp_is_refused() -> None:
    class Sums(Flex):
        def forward(self, x: Tensor) -> Tensor:
            made, _ = flex_attention(*self.heads(x), enable_gqa=True, return_lse=True)
            return made

    model = Sums("same")
    message = "cannot be edited: it is FlexAttention that returns more than its output"
    with (
        pytest.warns(FutureWarning, match="return_lse"),
        pytest.raises(edits.CannotEdit, match=message),
        regard.edit(model, edits.cut(keys=0)),
    ):
        model(torch.randn(1, 5, 24, dtype=torch.float64))


@torch.no_grad()
def test_a_hugging_face_model_on_flex_attention() -> None:
    model = model_of("llama")
    ids = torch.tensor([[3, 14, 15, 9, 26, 5, 35], [8, 9, 7, 9, 3, 2, 38]])
    expected = by_hand(model, logits_edit=only([1, 3], [1], lambda x: x.masked_fill(EDGES, -torch.inf)))
    model.set_attn_implementation("flex_attention")
    try:
        with regard.edit(model, edits.cut(queries=slice(3, None), keys=[0, 2]), layers=[1], heads=[1, 3]):
            found = model(ids).logits
            cache = transformers.DynamicCache()
            parts = [
                model(ids[:, start:stop], past_key_values=cache).logits for start, stop in ((0, 4), (4, 6), (6, 7))
            ]
        with regard.edit(model, edits.cut(~masks.window(left=2))):
            windowed = model(ids).logits
    finally:
        model.set_attn_implementation("sdpa")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-9, atol=1e-9)
    with regard.edit(model, edits.cut(~masks.window(left=2))):
        torch.testing.assert_close(windowed, model(ids).logits, rtol=1e-9, atol=1e-9)
