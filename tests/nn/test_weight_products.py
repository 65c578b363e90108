"""Products with weight matrices in generation: which kernel computes them, and that nothing else notices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from tests import forced
from tests.core_calls import Operators
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import regard
from regard import models
from regard.nn import _products

PROMPTS = [[3, 5, 7, 11, 2], [7, 3]]


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> models.Decoder:
    """A Llama whose feed-forward matrices (576 × 512) and output layer are large enough, on a processor of AMD."""
    forced.onednn_of_amd(monkeypatch)
    torch.manual_seed(0)
    changes: dict[str, Any] = {"vocab_size": 1111, "embed_dim": 512, "num_heads": 8, "num_kv_heads": 2, "ff_dim": 576}
    return models.Decoder(models.config("llama-2-7b", num_layers=2, max_tokens=63, **changes)).eval()


def products_of_onednn(run: Callable[[], object]) -> int:
    with Operators() as seen:
        run()
    return seen.names.count("mkldnn::_linear_pointwise")


def test_generation_takes_onednn_for_large_matrices_alone(decoder: models.Decoder) -> None:
    per_step = 2 * 5 + 1  # query, output (512 × 512) and three matrices of the feed-forward in two layers; the head
    assert products_of_onednn(lambda: decoder.generate(PROMPTS, max_new_tokens=4)) == 4 * per_step


def test_a_forward_pass_and_training_do_not(decoder: models.Decoder) -> None:
    tokens = torch.tensor([PROMPTS[0]])
    before = decoder(tokens)
    decoder.generate(PROMPTS, max_new_tokens=2)
    assert products_of_onednn(lambda: decoder(tokens).sum().backward()) == 0
    with torch.no_grad():
        assert products_of_onednn(lambda: decoder(tokens)) == 0
        assert torch.equal(decoder(tokens), before)


def test_the_logits_are_those_of_the_forward_pass(decoder: models.Decoder) -> None:
    tokens = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        plain = decoder(tokens)
        with _products.generating():
            assert products_of_onednn(lambda: decoder(tokens)) == 11
            torch.testing.assert_close(decoder(tokens), plain, rtol=0, atol=1e-5)
    assert decoder.generate(PROMPTS, max_new_tokens=8) == decoder.double().generate(PROMPTS, max_new_tokens=8)


def test_a_watched_generation_has_the_same_bits(decoder: models.Decoder) -> None:
    def logits(watched: bool) -> list[Tensor]:
        found: list[Tensor] = []
        handle = decoder.norm.register_forward_hook(lambda _, __, out: found.append(out.clone()))
        if watched:
            with regard.watch(decoder) as recording:
                decoder.generate(PROMPTS, max_new_tokens=3)
            assert recording[1, 7].entropy.shape and not recording.missed
        else:
            decoder.generate(PROMPTS, max_new_tokens=3)
        handle.remove()
        return found

    plain, watched = logits(False), logits(True)
    assert len(plain) == 3
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_layers_that_took_the_place_of_a_linear_one_run_as_they_are(decoder: models.Decoder) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    hooked: list[int] = []
    layer = decoder.layers[0].feed_forward
    layer.up.register_forward_hook(lambda *_: hooked.append(1))  # type: ignore[union-attr]
    doubled = Doubled(512, 576, bias=False)
    doubled.load_state_dict(layer.gate.state_dict())  # type: ignore[union-attr]
    layer.gate = doubled  # type: ignore[union-attr, assignment]
    tokens = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        plain = decoder(tokens)
        with _products.generating():
            torch.testing.assert_close(decoder(tokens), plain, rtol=0, atol=1e-5)
    assert len(hooked) == 2


@pytest.mark.filterwarnings("ignore")  # torch says that it will move these functions
def test_a_quantised_model_generates(decoder: models.Decoder) -> None:
    small = torch.ao.quantization.quantize_dynamic(decoder, {nn.Linear}, dtype=torch.qint8)
    assert products_of_onednn(lambda: small.generate(PROMPTS, max_new_tokens=2)) == 0


CHANGES = ["float64", "bfloat16", "gradients", "small", "one row", "no rows", "transposed", "sparse"]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("change", [*CHANGES, "strided bias", "one bias"])
def test_what_onednn_is_not_asked_for(decoder: models.Decoder, change: str) -> None:
    layer, x = nn.Linear(512, 576), torch.randn(3, 512)
    if change in ("float64", "bfloat16"):
        layer, x = layer.to(getattr(torch, change)), x.to(getattr(torch, change))
    elif change == "small":
        layer, x = nn.Linear(64, 63), torch.randn(3, 64)
    elif change == "transposed":
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    elif change in ("one row", "no rows"):
        x = x[: 1 if change == "one row" else 0]
    elif change == "sparse":
        layer.weight = nn.Parameter(layer.weight.detach().to_sparse_csr())
    elif change == "strided bias":
        layer.bias = nn.Parameter(torch.randn(2 * 576)[::2])
    elif change == "one bias":
        layer.bias = nn.Parameter(torch.randn(1))
    with torch.set_grad_enabled(change == "gradients"), _products.generating():
        out = _products.product(layer, x)
        assert products_of_onednn(lambda: _products.product(layer, x)) == 0
    assert torch.equal(out, layer(x))


def test_onednn_is_not_asked_where_it_is_switched_off(decoder: models.Decoder) -> None:
    layer, x = nn.Linear(512, 576), torch.randn(3, 512)
    was = torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
    try:
        with torch.no_grad(), _products.generating():
            assert products_of_onednn(lambda: _products.product(layer, x)) == 0
    finally:
        torch.backends.mkldnn.set_flags(*was)  # type: ignore[no-untyped-call]


def test_a_derivative_in_forward_mode_is_kept(decoder: models.Decoder) -> None:
    layer, x, along = nn.Linear(512, 576), torch.randn(3, 512), torch.randn(3, 512)
    with torch.no_grad(), _products.generating(), forward_ad.dual_level():
        out = _products.product(layer, forward_ad.make_dual(x, along))
        tangent = forward_ad.unpack_dual(out).tangent
    torch.testing.assert_close(tangent, along @ layer.weight.T)


@pytest.mark.parametrize("wrong", ["x", "bias", "dtype of the bias"])
def test_sizes_that_do_not_fit_are_refused_in_the_words_of_torch(decoder: models.Decoder, wrong: str) -> None:
    layer, x = nn.Linear(512, 576), torch.randn(3, 510 if wrong == "x" else 512)
    if wrong == "bias":
        layer.bias = nn.Parameter(torch.randn(7))
    elif wrong == "dtype of the bias":
        layer.bias = nn.Parameter(layer.bias.detach().double())
    with torch.no_grad(), pytest.raises(RuntimeError) as expected:
        layer(x)
    with torch.no_grad(), _products.generating(), pytest.raises(RuntimeError) as found:
        _products.product(layer, x)
    assert str(found.value) == str(expected.value)


def test_other_threads_do_not_notice(decoder: models.Decoder) -> None:
    layer, x = nn.Linear(512, 576), torch.randn(3, 512)
    found: list[int] = []

    def elsewhere() -> None:
        with torch.no_grad():
            found.append(products_of_onednn(lambda: _products.product(layer, x)))

    with torch.no_grad(), _products.generating():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        found.append(products_of_onednn(lambda: _products.product(layer, x)))
    assert found == [0, 1]


@pytest.mark.parametrize("place", ["alone", "in another"])
def test_a_compiled_layer_runs_as_it_was_compiled(decoder: models.Decoder, place: str) -> None:
    expected = decoder.generate(PROMPTS, max_new_tokens=3)
    layer: Any = decoder.layers[0].feed_forward.up
    before, after = CompileCounter(), CompileCounter()
    layer.compile(backend=before)
    with torch.no_grad():
        layer(torch.randn(1, 512))
    layer.compile(backend=after)
    if place == "in another":
        decoder.layers[0].feed_forward.up = nn.Sequential(layer)  # type: ignore[union-attr, assignment]
    assert decoder.generate(PROMPTS, max_new_tokens=3) == expected
    assert after.frame_count == before.frame_count  # nothing of ours is compiled with it


def test_a_layer_that_is_one_graph_generates(decoder: models.Decoder) -> None:
    expected = decoder.generate(PROMPTS, max_new_tokens=3)
    layer = decoder.layers[0].feed_forward.up
    decoder.layers[0].feed_forward.up = torch.compile(layer, backend="eager", fullgraph=True)  # type: ignore[union-attr, arg-type, assignment]
    assert decoder.generate(PROMPTS, max_new_tokens=3) == expected
