"""Queries that are padding: missing in what is recorded, unless they are asked for."""

from __future__ import annotations

import pytest
import torch
from tests.watching.models import check_statistics, dense
from torch import Tensor, nn
from transformers import BartConfig, BartModel

import regard
from regard import masks

X = torch.randn(2, 11, 21, generator=torch.Generator().manual_seed(5))


class Own(nn.Module):
    def __init__(self, mask: masks.Mask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        return regard.attention(x, x, x, mask=self.mask)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("count_padding", [False, True])
def test_padding_by_regards_own_rule_is_missing_unless_it_is_asked_for(count_padding: bool, side: str) -> None:
    mask = masks.padding([11, 5], side=side) & masks.window(left=10, right=3)
    model = Own(mask)
    with regard.watch(model, count_padding=count_padding) as recording:
        out = model(X)
    assert torch.equal(out, model(X))
    real = torch.arange(11) < torch.tensor([[11], [5]])
    real = real if side == "right" else real.flip(1)
    weights = dense(X[:, None], X[:, None], mask.dense(11, 11)).nan_to_num()  # some padding queries see nothing at all
    empty = weights.sum(-1)[:, 0] == 0
    check_statistics(recording.calls[0], weights, real=~empty if count_padding else real)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_padding_of_a_transformer_is_that_of_the_side_which_asks() -> None:
    model = nn.Transformer(24, 4, 1, 1, 33, batch_first=True).eval()
    x = torch.randn(2, 11, 24)
    source, target, none = (torch.zeros(2, 11, dtype=torch.bool) for _ in range(3))
    source[0, 8:] = target[1, 5:] = True
    of_source = {"src_key_padding_mask": source, "memory_key_padding_mask": source}
    with torch.no_grad(), regard.watch(model) as recording:  # torch would take its nested fast path here
        model(x, x, **of_source, tgt_key_padding_mask=target)
        model(x, x, **of_source)
    for call, pads in zip(recording, (source, target, target, source, none, none), strict=True):
        assert torch.equal(call.entropy.isnan(), pads[:, None].expand(-1, 4, -1)), call


def test_padding_of_a_target_is_missing_in_its_cross_attention_where_the_source_has_none() -> None:
    torch.manual_seed(0)
    target = torch.zeros(2, 7, dtype=torch.bool)
    target[1, 4:] = True
    sizes = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_layers": 1, "decoder_layers": 1}
    bart = BartModel(
        BartConfig(vocab_size=50, d_model=24, encoder_attention_heads=4, decoder_attention_heads=4, **sizes)
    )
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(24, 4, 33, batch_first=True), 1)
    ids, x = torch.randint(3, 50, (2, 11)), torch.randn(2, 11, 24)
    for model, args, told in (
        (
            bart.eval(),
            (),
            {"input_ids": ids, "decoder_input_ids": ids[:, :7], "decoder_attention_mask": 1 - target.long()},
        ),
        (decoder.eval(), (x[:, :7], x), {"tgt_key_padding_mask": target}),
    ):
        with torch.no_grad(), regard.watch(model) as recording:
            model(*args, **told)
        for call in recording.calls[-2:]:
            assert torch.equal(call.entropy.isnan(), target[:, None].expand(-1, 4, -1)), call
        assert recording.calls[-1].kind == "cross"


def test_learned_queries_that_look_at_an_image_are_not_padded_by_the_text() -> None:
    class Resampler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents = nn.Parameter(torch.randn(1, 11, 24))
            self.attend = nn.MultiheadAttention(24, 4, batch_first=True)

        def forward(self, image_features: Tensor) -> Tensor:
            latents = self.latents.expand(len(image_features), -1, -1)
            return self.attend(latents, image_features, image_features, need_weights=False)[0]

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.resampler = Resampler()

        def forward(self, image: Tensor, encoder_hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
            return self.resampler(image) + encoder_hidden_states

    told = torch.ones(2, 11, dtype=torch.long)
    told[0, 8:] = 0
    model = Reader().eval()
    with torch.no_grad(), regard.watch(model) as recording:
        model(torch.randn(2, 7, 24), torch.randn(2, 11, 24), attention_mask=told)
    assert recording.calls[0].kind == "cross"
    assert not recording.calls[0].entropy.isnan().any()


def test_a_mask_of_other_size_or_meaning_says_nothing_about_the_queries() -> None:
    class Told(nn.Module):
        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])

    model = Told()
    additive = torch.zeros(2, 11).index_fill_(1, torch.tensor([3]), -1e9)
    for given in (additive, torch.zeros(2, 7), torch.zeros(3, 11), torch.zeros(2, 1, 11, 11)):
        with regard.watch(model) as recording:
            model(X, attention_mask=given)
        assert not recording.calls[0].entropy.isnan().any()


def test_queries_after_a_cache_are_looked_up_at_their_own_places() -> None:
    class Continued(nn.Module):
        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x[:, None, 8:], x[:, None], x[:, None])

    told = torch.ones(2, 11, dtype=torch.int64)
    told[0, :4] = told[1, 9:] = 0
    model = Continued()
    with regard.watch(model) as recording:
        model(X, attention_mask=told)
    assert recording.calls[0].entropy[:, 0].isnan().tolist() == [[False] * 3, [False, True, True]]
