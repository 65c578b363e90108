"""What attribution and rollout cannot do is refused with its true reason; what some parameters learn makes no odds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.watching.models import ByHand, Stack
from torch import Tensor, nn

import regard

X = torch.randn(1, 7, 21, generator=torch.Generator().manual_seed(1))


def small() -> Stack:
    torch.manual_seed(4)
    return Stack(ByHand(), ByHand(is_causal=True))


def total(out: Tensor) -> Tensor:
    return out[0, -1].sum()


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        ([0, 7], ValueError, r"layers=\[7\] were asked for, and the layers that attend are 0 … 1"),
        ([-1], ValueError, "do not count from the end"),
        ([True], TypeError, "layers must be a list of layer numbers or module paths"),
        ([], ValueError, "layers is an empty list"),
        ([0, "layers"], ValueError, r"layers=\['layers'\] were asked for, and made no attention call"),
        (["layer.0"], ValueError, "no module of that path; the nearest are"),
    ],
)
@pytest.mark.parametrize("what", ["token", "map", "attribute"])
def test_layers_that_do_not_attend_are_refused(what: str, layers: Any, error: type, message: str) -> None:
    model = small()
    with pytest.raises(error, match=message):
        if what == "attribute":
            regard.attribute(model, X, loss=total, layers=layers)
        else:
            regard.rollout(model, X, layers=layers, **({"token": 0} if what == "token" else {"map": (2, 2)}))


@pytest.mark.parametrize("one", [np.int64(3), torch.tensor(3)])
def test_a_token_is_a_number_of_any_library(one: Any) -> None:
    expected = regard.rollout(small(), X, token=3)
    torch.testing.assert_close(regard.rollout(small(), X, token=one), expected)
    torch.testing.assert_close(regard.rollout(small(), X, token=[one])[:, 0], expected)


def test_a_token_is_a_number() -> None:
    for token in (True, [0, False]):
        with pytest.raises(ValueError, match="token must be a position among 7 tokens"):
            regard.rollout(small(), X, token=token)


@pytest.mark.parametrize("learns", ["layers.1", "layers.0", "nothing"])
def test_effects_do_not_depend_on_which_parameters_are_frozen(learns: str) -> None:
    model = small()
    expected = regard.attribute(model, X, loss=total)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(learns))
    before = [parameter.requires_grad for parameter in model.parameters()]
    with torch.no_grad():
        found = regard.attribute(model, X, loss=total)
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        assert torch.equal(ours.key_effect, theirs.key_effect) and ours.key_effect.abs().max() > 0
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_inference_mode_is_named() -> None:
    with torch.inference_mode(), pytest.raises(ValueError, match=r"torch.inference_mode\(\) is on: call it outside"):
        regard.attribute(small(), X, loss=total)
    with torch.inference_mode():
        made = small().requires_grad_(False)
    with pytest.raises(ValueError, match="parameters were made in torch.inference_mode"):
        regard.attribute(made, X, loss=total)


class Silent(Stack):
    def __init__(self, block: Any) -> None:
        super().__init__(ByHand(), ByHand())
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        with self.block():
            x = x + self.layers[0](x)
        return x.clone() + self.layers[1](x.clone())


@pytest.mark.parametrize(
    ("block", "message"),
    [(torch.no_grad, "a block without autograd"), (torch.inference_mode, r"it runs in torch.inference_mode\(\)")],
)
def test_a_layer_that_runs_without_autograd_is_named(block: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"layers.0: .*{message}"):
        regard.attribute(Silent(block), X, loss=total)


class Sinks(nn.Module):
    """One layer of written-out attention with a sink, as GPT-OSS writes it: a column of the softmax that is cut off."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.qkv, self.out = (nn.Linear(20, n, dtype=torch.float64) for n in (60, 20))
        self.sinks = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.hidden = torch.zeros(4, 9, 9, dtype=torch.bool)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 5)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        logits = (q @ k.transpose(-2, -1)).masked_fill(self.hidden, -torch.inf)
        sinks = self.sinks.view(1, 4, 1, 1).expand(*logits.shape[:3], 1)
        weights = torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def test_a_sink_that_the_model_cuts_off_takes_its_share_of_what_an_edge_gives_up() -> None:
    model, x = Sinks(), torch.randn(1, 9, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    weigh = torch.linspace(-1, 1, 180, dtype=torch.float64).view(9, 20)

    def loss(out: Tensor) -> Tensor:
        return (out[0] * weigh).sum()

    (layer,) = regard.attribute(model, x, loss=loss, map=(9, 9)).layers
    with torch.no_grad():
        before = loss(model(x))
        for head, query, key in ((0, 0, 0), (1, 3, 7), (2, 8, 1), (3, 5, 5)):
            model.hidden = torch.zeros(4, 9, 9, dtype=torch.bool)
            model.hidden[head, query, key] = True
            torch.testing.assert_close(layer.map[0, head, query, key], loss(model(x)) - before, rtol=0, atol=1e-10)


def test_gpt_oss_is_followed() -> None:
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=40, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, num_local_experts=2, num_experts_per_tok=1, sliding_window=4,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).eval()
    assert model.config._attn_implementation == "eager"
    given = {"input_ids": torch.arange(7)[None], "use_cache": False}
    found = regard.attribute(model, given, loss=lambda out: out.logits[0, -1, 3])
    assert [layer.key_effect.shape for layer in found.layers] == [(1, 4, 7)] * 2
    assert all(layer.key_effect.abs().max() > 0 for layer in found.layers)


class ByExponentials(ByHand):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        exponentials = (q @ k.transpose(-1, -2)).exp()
        return (exponentials / exponentials.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2)


def test_a_softmax_that_cannot_be_followed_comes_with_advice_that_can_be_taken() -> None:
    model = Stack(ByHand(), ByExponentials())
    with pytest.raises(ValueError, match="layers.1: its code takes the softmax with other functions") as raised:
        regard.attribute(model, X, loss=total)
    assert "sdpa" not in str(raised.value) and "layers=[…]" in str(raised.value)
    assert len(regard.attribute(model, X, loss=total, layers=[0]).layers) == 1
    model._supports_sdpa = True  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"set_attn_implementation\('sdpa'\)"):
        regard.attribute(model, X, loss=total)
