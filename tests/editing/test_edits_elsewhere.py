"""Edits of torch's own modules, of code that writes attention out in every form that a watch reads, of regard's own
models, and of Hugging Face models on regard's attention: each against the same edit made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.editing.by_hand import IDS, by_hand, model_of, only, run
from tests.watching.models import ByHand
from tests.watching.test_written_out import FIXED, FORMS, Made
from torch import Tensor, nn

import regard
from regard import edits, masks

X = torch.randn(2, 7, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def cut_keys(logits: Tensor) -> Tensor:
    return logits.masked_fill(torch.tensor([1, 0, 1, 0, 0, 0, 0]).bool()[: logits.shape[-1]], -torch.inf)


def hands(heads: list[int], count: int) -> Tensor:
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[heads] = True
    return chosen[None, :, None, None]


# torch's modules


class Encoder:
    """torch.nn.TransformerEncoder, and the same by hand."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        layer = nn.TransformerEncoderLayer(30, 5, 32, batch_first=True, dropout=0.0)
        self.model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()

    def by_hand(self, x: Tensor, logits_edit: Callable[..., Tensor], output_edit: Callable[..., Tensor]) -> Tensor:
        for n, layer in enumerate(self.model.layers):
            inner: Any = layer
            w = inner.self_attn
            q, k, v = nn.functional.linear(x, w.in_proj_weight, w.in_proj_bias).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (5, 6)).transpose(1, 2) for part in (q, k, v))
            weights = logits_edit(n, q @ k.mT / 6**0.5).softmax(-1)
            out = output_edit(n, weights @ v).transpose(1, 2).flatten(2)
            x = inner.norm1(x + w.out_proj(out))
            x = inner.norm2(x + inner.linear2(inner.linear1(x).relu()))
        return x


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_torchs_encoder_leaves_its_fused_path_and_is_edited(mode: Any) -> None:
    encoder = Encoder()
    model = encoder.model
    expected = encoder.by_hand(X, only([0, 4], [1], cut_keys), only([2], [0], torch.zeros_like))
    with mode():
        plain = model(X)
        with (
            regard.edit(model, edits.cut(keys=[0, 2]), heads={"layers.1.self_attn": [0, 4]}) as one,
            regard.edit(model, edits.ablate("zero"), layers=[0], heads=[2]) as other,
        ):
            out = model(X)
        again = model(X)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    assert one.heads == [(1, 0), (1, 4)] and other.heads == [(0, 2)]
    assert torch.equal(again, plain) and (out - plain).abs().max() > 1e-3


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_module_with_and_without_its_weights(need_weights: bool, batch_first: bool) -> None:
    torch.manual_seed(2)
    module = nn.MultiheadAttention(30, 5, batch_first=batch_first).double().eval()
    x = X if batch_first else X.transpose(0, 1)
    q, k, v = nn.functional.linear(X, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (5, 6)).transpose(1, 2) for part in (q, k, v))
    logits = q @ k.mT / 6**0.5
    weights = torch.where(hands([3], 5), cut_keys(logits), logits).softmax(-1)
    expected = module.out_proj((weights @ v).transpose(1, 2).flatten(2))
    with regard.edit(module, edits.cut(keys=[0, 2]), heads=[3]) as report:
        out, _ = module(x, x, x, need_weights=need_weights)
    torch.testing.assert_close(out if batch_first else out.transpose(0, 1), expected, rtol=1e-10, atol=1e-10)
    assert report.heads == [(0, 3)]


# written out


def by_hand_of(model: Made, heads: list[int], edit: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Weights [batch, head, query, key] that a form would use after an edit of its logits."""
    q, k, _ = (part.unflatten(-1, (3, 10)).transpose(1, 2) for part in model.qkv(x).chunk(3, -1))
    return torch.where(hands(heads, 3), edit(q @ k.mT * 10**-0.5), q @ k.mT * 10**-0.5).softmax(-1)


@pytest.mark.parametrize("name", list(FORMS))
@pytest.mark.parametrize("grad", [False, True])
def test_every_form_of_written_out_attention_is_cut(name: str, grad: bool) -> None:
    """What a form does with its weights is not known here: the weights of an edited run, put in by hand, must give its
    output. They are those of the plain run where nothing was cut, and add up to 1 again where something was."""
    torch.manual_seed(0)
    model = Made(FORMS[name])
    x = X.float()
    model(x)
    assert model.weights is not None
    plain = model.weights.clone()
    with torch.set_grad_enabled(grad), regard.edit(model, edits.cut(keys=[0, 2]), heads=[1]) as report:
        with regard.watch(model, want=regard.Want(weights="all")) as recording:
            out = model(x)
        ablated = edits.ablate("zero")
        with regard.edit(model, ablated, heads=[0, 2]):
            left = model(x)
    (call,) = recording
    expected = plain.clone()
    expected[:, 1, :, [0, 2]] = 0.0
    sinks = 1 - plain.sum(-1, keepdim=True) if name == "sinks" else torch.zeros(1)
    expected[:, 1] /= (expected.sum(-1, keepdim=True) + sinks)[:, 1]
    expected = expected.nan_to_num()  # a query that saw nothing else
    torch.testing.assert_close(call.weights, expected, rtol=1e-5, atol=1e-6)
    assert report.heads == [(0, 1)] and out.requires_grad == grad
    # the second head alone, of which the output is its part of the whole
    assert (left[..., :10] == 0).all() and (left[..., 20:] == 0).all()
    torch.testing.assert_close(left[..., 10:20], out[..., 10:20])


@pytest.mark.parametrize("name", list(FIXED))
def test_weights_that_are_divided_by_something_else_or_too_late_are_refused(name: str) -> None:
    model = Made(FIXED[name])
    reason = "by more than their sum" if name == "one more in the sum" else "only after the product with values"
    with pytest.raises(edits.CannotEdit, match=reason), regard.edit(model, edits.cut(keys=[0, 2])):
        model(X.float())


def test_a_product_that_leaves_the_model_as_it_is() -> None:
    class Plain(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, str]:
            return (q @ k.mT).softmax(-1) @ v, "more"

    q, k, v = X[:, :, :10], X[:, :, 10:20], X[:, :, 20:]
    model = Plain()
    with regard.edit(model, edits.cut(keys=[0, 2])):
        out, more = model(q, k, v)
    torch.testing.assert_close(out, cut_keys(q @ k.mT).softmax(-1) @ v)
    assert more == "more"


def test_heads_that_are_joined_by_cat() -> None:
    class Cat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([(x[..., :15] @ x[..., 15:].mT).softmax(-1) @ x[..., n::2] for n in range(2)], -1)

    model = Cat()
    weights = cut_keys(X[..., :15] @ X[..., 15:].mT).softmax(-1)
    with regard.edit(model, edits.cut(keys=[0, 2])):
        out = model(X)
    torch.testing.assert_close(out, torch.cat([weights @ X[..., n::2] for n in range(2)], -1))


def test_a_product_with_relative_positions_beside_that_with_values_uses_the_same_edited_weights() -> None:
    class Relative(nn.Module):
        num_heads = 3

        def __init__(self) -> None:
            super().__init__()
            self.far = nn.Parameter(torch.randn(7, 7, 10).double())

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (x.unflatten(-1, (3, 10)).transpose(1, 2),) * 3
            weights = (q @ k.mT).softmax(-1)
            near = torch.einsum("bhij,ijd->bhid", weights, self.far * 1.0)
            return (weights @ v + near).transpose(1, 2).flatten(2)

    model = Relative()
    x = X.unflatten(-1, (3, 10)).transpose(1, 2)
    weights = cut_keys(x @ x.mT).softmax(-1)
    expected = (weights @ x + torch.einsum("bhij,ijd->bhid", weights, model.far)).transpose(1, 2).flatten(2)
    with regard.edit(model, edits.cut(keys=[0, 2])):
        torch.testing.assert_close(model(X), expected)
    silent = model(X)
    silent[..., :10] = 0
    with regard.edit(model, edits.ablate("zero"), heads=[0]):
        torch.testing.assert_close(model(X), silent)
    with regard.watch(model, keep=["output"]) as kept:
        whole = model(X)
    (call,) = next(iter(kept.kept.values()))
    torch.testing.assert_close(call.output.transpose(1, 2).flatten(2), whole)  # both products, as they leave the call


# regard's own, and torch's function of other ranks


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_regards_own_models_are_edited_as_hugging_faces_are_by_hand(name: str) -> None:
    theirs = model_of(name)
    model = regard.interop.from_hf(theirs)
    i, j = torch.arange(7)[:, None], torch.arange(7)
    edges = (j == 1) & (i > 2)
    expected = by_hand(
        theirs,
        logits_edit=only([1], [0, 1], lambda x: x.masked_fill(edges, -torch.inf) + 0.9 * (j == 3)),
        output_edit=only([3], [1], torch.zeros_like),
    )
    both = [edits.cut(queries=slice(3, None), keys=1), edits.steer(3, 0.9)]
    with (
        regard.edit(model, both, heads=[1]) as report,
        regard.edit(model, edits.ablate("zero"), heads={1: [3]}),
    ):
        out = model(IDS)
    plain = by_hand(theirs)
    assert (expected - plain).abs().max() > 1e-2  # and loading the model alone moves the last digits of float32
    torch.testing.assert_close(out.logits if hasattr(out, "logits") else out, expected, rtol=1e-5, atol=1e-6)
    assert report.heads == [(0, 1), (1, 1)]


@torch.no_grad()
def test_hugging_face_on_regards_attention() -> None:
    regard.interop.register_hf()
    model = model_of("llama")
    expected = by_hand(model, logits_edit=only([1, 2], [1], lambda x: x + 2.0 * (torch.arange(7) == 3)))
    with regard.edit(model, edits.steer(3, 2.0), heads={1: [1, 2]}):
        out = run(model, how="regard")
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_torchs_function_of_every_rank(rank: int) -> None:
    class Ranks(nn.Module):
        num_heads = 3

        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    lead = {2: (), 3: (6,), 4: (2, 3), 5: (2, 2, 3)}[rank]
    generator = torch.Generator().manual_seed(rank)
    q, k, v = (torch.randn(*lead, 7, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    logits = q @ k.mT / 5**0.5
    mask = torch.rand(*lead, 7, 7, generator=generator) > 0.2
    model = Ranks()
    for given in (None, mask, torch.where(mask, 0.7, -torch.inf).double()):
        more = 0.0 if given is None else torch.where(mask, 0.0, -torch.inf)
        expected = cut_keys(logits + more).softmax(-1).nan_to_num(0.0) @ v
        with regard.edit(model, edits.cut(keys=[0, 2])):
            torch.testing.assert_close(model(q, k, v, given), expected, rtol=1e-9, atol=1e-9)
    if rank > 2:
        with regard.edit(model, edits.ablate("zero"), heads=[1]):
            out = model(q, k, v, mask)
        assert (out.reshape(-1, 3, 7, 5)[:, 1] == 0).all() and (out.reshape(-1, 3, 7, 5)[:, 2] != 0).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_steer_is_exact_in_half_precision_too(dtype: torch.dtype) -> None:
    model = ByHand(width=24, heads=3, scale=0.37).to(dtype)
    x = torch.randn(1, 7, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    q, k, v = (part.double() for part in model.split(x))
    more = torch.zeros(7, dtype=torch.float64)
    more[[1, 5]] = 1.2345
    expected = (q @ k.mT * 0.37 + more).softmax(-1) @ v
    with (
        regard.edit(model, edits.steer([1, 5], 1.2345)),
        regard.watch(model, want=regard.Want(weights="all")) as recording,
    ):
        out = model(x)
    # as close as the call without a steer is: what is added is no coarser than float32
    close = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected.transpose(1, 2).flatten(2), rtol=close, atol=close)
    weights = (q @ k.mT * 0.37 + more).softmax(-1)
    torch.testing.assert_close(recording.calls[0].weights.double(), weights, rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("written_out", [False, True])
@pytest.mark.parametrize("amount", [-1e6, 1e6])
def test_an_amount_that_half_precision_does_not_hold_is_no_nan(amount: float, written_out: bool) -> None:
    """A steer by it is a cut of those edges, or of all others."""

    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not written_out:
                return nn.functional.scaled_dot_product_attention(x, x, x)
            return (x @ x.mT * 0.25).softmax(-1) @ x

    model, x = Attention(), torch.randn(1, 2, 7, 16).half()
    cut = edits.cut(keys=3) if amount < 0 else ~edits.cut(keys=3)
    late = edits.cut(masks.rule(lambda b, h, i, j: i >= 2))
    with regard.edit(model, cut & late, heads_dim=1 if written_out else None):
        expected = model(x)
    with regard.edit(model, edits.steer(3, amount, queries=slice(2, None)), heads_dim=1 if written_out else None):
        torch.testing.assert_close(model(x), expected, rtol=2e-3, atol=2e-3)


def test_softcap_keeps_its_meaning_beside_a_steer() -> None:
    class Capped(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return regard.attention(q, k, v, softcap=2.0, mask=masks.causal())

    q, k, v = (torch.randn(1, 3, 7, 5, dtype=torch.float64) * 2 for _ in range(3))
    more = torch.zeros(7, 7, dtype=torch.float64)
    more[4:, 1] = -1.5
    logits = 2.0 * torch.tanh(q @ k.mT / 5**0.5 / 2.0) + more
    expected = logits.masked_fill(~torch.ones(7, 7).tril().bool(), -torch.inf).softmax(-1) @ v
    model = Capped()
    with regard.edit(model, edits.steer(1, -1.5, queries=slice(4, None))):
        torch.testing.assert_close(model(q, k, v), expected)
