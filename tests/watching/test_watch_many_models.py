"""What watching must not confuse: towers that share a length, cross and self, windows of a cache, chunks of a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tests.watching.models import ByHand, Stack, check_statistics
from torch import Tensor, nn

import regard
from regard.models import Transformer, TransformerConfig

IDS = torch.randint(5, 90, (2, 17), generator=torch.Generator().manual_seed(0))
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}


def test_padding_of_the_text_hides_no_patches_of_the_image() -> None:
    text = {**SMALL, "max_position_embeddings": 40, **TOKENS}
    vision = {**SMALL, "image_size": 16, "patch_size": 4}
    vision.pop("vocab_size")
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision)).eval()
    mask = torch.ones_like(IDS)
    mask[1, 9:] = 0  # 17 tokens, and 16 patches with one for the class
    with torch.no_grad(), regard.watch(model) as recording:
        model(input_ids=IDS, attention_mask=mask, pixel_values=torch.randn(2, 3, 16, 16))
    assert {call.queries for call in recording} == {17}
    for call in recording:
        missing = call.entropy[:, 0].isnan()
        assert torch.equal(missing, mask == 0) if call.path.startswith("text") else not missing.any()


class Function(nn.Module):
    """Attention as a module without weights, which is handed queries and keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.attend = nn.Linear(24, 24), nn.Linear(24, 48), Function()

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        k, v = self.kv(x if context is None else context).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (3, 8)).transpose(1, 2) for t in (self.q(x), k, v))
        return self.attend(q, k, v).transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.across = Attends(), Attends()

    def forward(self, x: Tensor, context: Tensor, attention_mask: Tensor) -> Tensor:
        return self.across(self.own(x), context=context, mask=attention_mask)


@pytest.mark.parametrize("length", [5, 11, 13])
def test_cross_attention_is_told_by_the_module_around_the_function_and_its_mask_is_of_the_keys(length: int) -> None:
    model, x, context = Decoder(), torch.randn(2, 11, 24), torch.randn(2, length, 24)
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, 3:] = False
    with torch.no_grad(), regard.watch(model) as recording:
        model(x, context, mask)
    assert [(call.path, call.kind) for call in recording] == [("own.attend", "self"), ("across.attend", "cross")]
    assert not recording.calls[1].entropy.isnan().any()


def test_a_cache_that_keeps_a_window_labels_its_keys_with_the_tokens_they_are() -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SMALL, num_key_value_heads=3, sliding_window=4, **TOKENS)
    model = transformers.MistralForCausalLM(config).eval()
    with torch.no_grad(), regard.watch(model) as recording:
        model.generate(IDS[:1, :10], max_new_tokens=4, min_new_tokens=4, do_sample=False)
    recording.tokens = [f"t{n}" for n in range(14)]
    for step, call in enumerate(recording.at(0)[1:]):
        assert (call.phase, call.queries) == ("decode", 1)
        assert recording.query_tokens(call) == [f"t{10 + step}"]
        assert recording.key_tokens(call)[-call.keys :] == [f"t{n}" for n in range(11 + step - call.keys, 11 + step)]
    assert recording.at(0)[-1].keys == 4


def test_a_module_that_attends_in_chunks_is_one_layer_however_many_it_makes() -> None:
    class Chunked(ByHand):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([super(Chunked, self).forward(part) for part in x.split(4, 1)], 1)

    model = Stack(Chunked(), ByHand())
    for length, chunks in ((8, 2), (15, 4)):
        with regard.watch(model) as recording:
            model(torch.randn(2, length, 21))
        assert [str(site) for site in recording.sites] == ["layers.0", "layers.1"]
        assert [call.layer for call in recording] == chunks * [0] + [1]


def test_a_query_that_pools_is_no_decoding() -> None:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.attend = (
                nn.Parameter(torch.randn(1, 1, 24)),
                nn.MultiheadAttention(24, 3, batch_first=True),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.attend(self.query.expand(len(x), -1, -1), x, x, need_weights=False)[0]

    class First(ByHand):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)
            return nn.functional.scaled_dot_product_attention(q[:, :, :1], k, v)

    with regard.watch(model := Pool()) as recording:
        for _ in range(2):
            model(torch.randn(2, 9, 24))
    assert [(call.kind, call.phase) for call in recording] == 2 * [("cross", "prefill")]
    with regard.watch(model := First()) as recording:
        for _ in range(2):
            model(torch.randn(2, 9, 21))
    assert [call.phase for call in recording] == 2 * ["prefill"]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_model_in_training_is_seen_before_dropout(implementation: str) -> None:
    config = transformers.BertConfig(**SMALL, attention_probs_dropout_prob=0.3, hidden_dropout_prob=0.0)
    model = transformers.BertModel(config)
    model.set_attn_implementation("eager")
    expected = model.eval()(IDS, output_attentions=True).attentions[0]
    model.set_attn_implementation(implementation)
    model.train()
    torch.manual_seed(1)
    without = model(IDS)[0]
    torch.manual_seed(1)
    with regard.watch(model) as recording:
        out = model(IDS)[0]
    assert torch.equal(out, without)
    assert recording.missed == [] and len(recording) == 2
    check_statistics(recording.calls[0], expected.detach())


def test_layers_heads_and_tokens_that_are_not_there_are_refused() -> None:
    model, x = Stack(ByHand(), ByHand()), torch.randn(2, 11, 21)
    with pytest.raises(ValueError, match=r"layers=\[77\] were asked for, and the layers that attend are 0 … 1"):  # noqa: SIM117
        with regard.watch(model, layers=[0, 77]):
            model(x)
    with pytest.raises(ValueError, match=r"heads=\[77\] were asked for, and the heads are 0 … 2"):  # noqa: SIM117
        with regard.watch(model, heads=[77]):
            model(x)
    with (
        pytest.raises(ValueError, match=r"'layers\.7'.*the nearest are layers"),
        regard.watch(model, layers=["layers.7"]),
    ):
        pass
    with pytest.raises(TypeError, match="layers must be a list"), regard.watch(model, layers=1):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="tokens has 3 entries for one item, and the model read 11"):  # noqa: SIM117
        with regard.watch(model, tokens=["a", "b", "c"]):
            model(x)
    with regard.watch(model) as recording:
        model(x)
    with pytest.raises(ValueError, match="give one string for each token"):
        recording.tokens = [["a"] * 11, ["a"] * 12, ["a"] * 10]
    recording.tokens = ["a"] * 11
    assert recording[0, 0].query_tokens == ["a"] * 11


def test_weights_say_how_they_are_asked_for_and_all_of_them_can_be() -> None:
    model, x = ByHand(), torch.randn(2, 11, 21)
    with regard.watch(model) as recording:
        model(x)
    with pytest.raises(AttributeError, match=r'regard.watch\(model, want=regard.Want\(weights="all"\)\)'):
        _ = recording[0, 2].weights
    assert {"entropy", "key_mass", "top_keys"} <= set(dir(recording[0, 2])) and "weights" not in dir(recording[0, 2])
    with regard.watch(model, want=regard.Want(weights="all")) as recording:
        model(x)
    assert recording[0, 2].weights.shape == (11, 11) and "weights" in dir(recording[0, 2])
    unseen = pytest.warns(UserWarning, match="past the memory limit")
    with unseen, regard.watch(model, want=regard.Want(weights="all"), memory_limit=2000):
        model(x)
    with pytest.raises(TypeError, match="or 'all'"):
        regard.Want(weights="some")


@pytest.mark.parametrize(("queries", "keys"), [(5, 3), (3, 7)])
def test_queries_of_our_own_cross_attention_are_named_by_their_own_text(queries: int, keys: int) -> None:
    """A call aligns its last query with its last key by default; that says nothing of two texts."""
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=11, embed_dim=12, num_layers=1, num_heads=3, ff_dim=8)
    model = Transformer(config).eval()
    with torch.no_grad(), regard.watch(model) as recording:
        model(torch.randint(4, 11, (1, keys)), torch.randint(4, 11, (1, queries)))
    recording.tokens = [[f"q{at}" for at in range(queries)]]
    recording.source_tokens = [[f"k{at}" for at in range(keys)]]
    [cross] = [call for call in recording if call.kind == "cross"]
    assert (
        recording.query_tokens(cross) == recording.tokens[0]
        and recording.key_tokens(cross) == recording.source_tokens[0]
    )
