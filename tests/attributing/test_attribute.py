"""The effect of cutting edges: against really cutting them, and against dense formulas."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import regard
from regard.attributing import Edge


class Layer(nn.Module):
    """One layer of attention and nothing after it that is not linear: effects must be exact."""

    def __init__(self, written_out: bool, causal: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(13, 20, dtype=torch.float64)
        self.qkv, self.out = (nn.Linear(20, n, dtype=torch.float64) for n in (60, 20))
        self.written_out, self.causal = written_out, causal
        self.hidden: Tensor | None = None  # [head, query, key], edges that are cut

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = (t.view(*ids.shape, 4, 5).transpose(1, 2) for t in self.qkv(self.embed(ids)).chunk(3, -1))
        n = ids.shape[1]
        mask = torch.ones(4, n, n, dtype=torch.bool)
        mask = mask.tril() if self.causal else mask
        if self.hidden is not None:
            mask = mask & ~self.hidden
        if self.written_out:
            logits = (3.0 * q @ k.transpose(-2, -1)).masked_fill(~mask, -torch.inf)
            mixed = torch.nan_to_num(logits.softmax(-1)) @ v
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[None], scale=3.0)
        return self.out(mixed.transpose(1, 2).flatten(2))


IDS = torch.tensor([[3, 7, 3, 9, 7, 3, 11, 9, 3, 7, 2, 5, 5]])


def scalar(out: Tensor) -> Tensor:
    return (out[0] * torch.linspace(-1, 1, out[0].numel(), dtype=out.dtype).view_as(out[0])).sum()


@pytest.mark.parametrize("causal", [False, True], ids=["everything", "causal"])
@pytest.mark.parametrize("written_out", [False, True], ids=["fused", "written out"])
def test_within_a_layer_the_effect_of_every_edge_is_exact(written_out: bool, causal: bool) -> None:
    model = Layer(written_out, causal).eval()
    n = IDS.shape[1]
    found = regard.attribute(model, IDS, loss=scalar, top_k=n * n)
    (layer,) = found.layers
    before = scalar(model(IDS)).item()
    assert found.value == pytest.approx(before)
    exact = torch.zeros(4, n, n, dtype=torch.float64)
    with torch.no_grad():
        for head in range(4):
            for i in range(n):
                for j in range(i + 1 if causal else n):
                    model.hidden = torch.zeros(4, n, n, dtype=torch.bool)
                    model.hidden[head, i, j] = True
                    exact[head, i, j] = scalar(model(IDS)).item() - before
    edges = list(layer.edges())
    assert len(edges) == 4 * (n * (n + 1) // 2 if causal else n * n)
    for edge in edges:
        assert edge.effect == pytest.approx(float(exact[edge.head, edge.query, edge.key]), abs=1e-10)
    torch.testing.assert_close(layer.key_effect[0], exact.sum(1), rtol=0, atol=1e-9)
    torch.testing.assert_close(layer.map[0], exact, rtol=0, atol=1e-10)
    sizes = [abs(edge.effect) for edge in edges if edge.head == 2]
    assert sizes == sorted(sizes, reverse=True)


def gpt2() -> Any:
    torch.manual_seed(4)
    config = transformers.GPT2Config(vocab_size=29, n_embd=32, n_layer=3, n_head=4, n_positions=64)
    model = transformers.GPT2LMHeadModel(config).eval().double()
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight.mul_(12.0)
            block.attn.c_proj.weight.mul_(4.0)
    return model


@contextlib.contextmanager
def cut(monkeypatch: pytest.MonkeyPatch, edge: Edge) -> Iterator[None]:
    """The edge forbidden, by a boolean mask in the model's own call of torch's function."""
    real, calls = functional.scaled_dot_product_attention, []

    def without(query: Tensor, key: Tensor, value: Tensor, *args: Any, **given: Any) -> Tensor:
        calls.append(1)
        if len(calls) - 1 == edge.layer:
            length = query.shape[2]
            mask = torch.ones(query.shape[1], length, length, dtype=torch.bool).tril().repeat(len(query), 1, 1, 1)
            mask[edge.item, edge.head, edge.query, edge.key] = False
            given = {**given, "attn_mask": mask, "is_causal": False}
        return real(query, key, value, *args, **given)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", without)
        yield


def test_the_best_fifty_edges_do_when_cut_what_was_foretold(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2()
    ids = torch.randint(0, 29, (1, 24), generator=torch.Generator().manual_seed(2))

    def loss(out: Any) -> Tensor:
        return out.logits[0, -1, 7] - out.logits[0, -1, 8]

    found = regard.attribute(model, {"input_ids": ids, "use_cache": False}, loss=loss, top_k=50)
    edges = found.top(50)
    assert len({edge.layer for edge in edges}) > 1 and len({edge.head for edge in edges}) > 1
    before, told, real = found.value, [], []
    with torch.no_grad():
        for edge in edges:
            with cut(monkeypatch, edge):
                told.append(edge.effect)
                real.append(loss(model(input_ids=ids, use_cache=False)).item() - before)
    pair = torch.tensor([told, real])
    assert float(torch.corrcoef(pair)[0, 1]) > 0.95
    assert float((pair[0].sign() == pair[1].sign()).double().mean()) > 0.9


def test_gradient_times_attention_is_that_of_the_dense_weights() -> None:
    model = Layer(written_out=True, causal=False).eval()
    (fused,) = regard.attribute(Layer(False, False).eval(), IDS, loss=scalar).layers
    q, k, v = (t.view(1, -1, 4, 5).transpose(1, 2) for t in model.qkv(model.embed(IDS)).chunk(3, -1))
    weights = (3.0 * q @ k.transpose(-2, -1)).softmax(-1)
    out = model.out((weights @ v).transpose(1, 2).flatten(2))
    (grad,) = torch.autograd.grad(scalar(out), weights)
    expected = (grad * weights).clamp_min(0)
    torch.testing.assert_close(fused.key_gradient, expected.detach().sum(2), rtol=0, atol=1e-11)
    torch.testing.assert_close(fused.gradient_map, expected.detach(), rtol=0, atol=1e-11)


class Call(nn.Module):
    """One call of `regard.attention` on learned tensors, and nothing else."""

    def __init__(self, *tensors: Tensor, **how: Any) -> None:
        super().__init__()
        self.learned = nn.ParameterList(tensors)
        self.how = how

    def forward(self) -> Tensor:
        return regard.attention(*self.learned, **self.how)


def test_sinks_grouped_heads_and_a_rule_are_cut_as_by_hand() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, h, 9, 3, dtype=torch.float64) for h in (4, 2, 2)]
    grad = torch.randn(2, 4, 9, 3, dtype=torch.float64)
    causal = regard.masks.causal()
    given: dict[str, Any] = {"sinks": torch.randn(4, dtype=torch.float64), "softcap": 2.0}
    model = Call(*tensors, mask=causal, **given)
    (found,) = regard.attribute(model, {}, loss=lambda out: (out * grad).sum(), map=(9, 9)).layers
    before = regard.attention(*tensors, mask=causal, **given)
    for i in range(9):
        for j in range(i + 1):
            hidden = torch.zeros(9, 9, dtype=torch.bool)
            hidden[i, j] = True
            out = regard.attention(*tensors, mask=causal & regard.masks.drop(hidden), **given)
            exact = ((out - before) * grad)[:, :, i].sum(-1)
            torch.testing.assert_close(found.map[:, :, i, j], exact, rtol=0, atol=1e-11)


def test_an_edge_that_has_all_the_weight_keeps_its_digits() -> None:
    torch.manual_seed(0)
    key = torch.randn(1, 1, 5, 2)
    key[..., 0, :] = torch.tensor([9.0, 9.0])
    query, value, grad = torch.ones(1, 1, 5, 2), torch.randn(1, 1, 5, 3), torch.randn(1, 1, 5, 3)
    found = []
    for dtype in (torch.float32, torch.float64):
        tensors = [t.to(dtype) for t in (query, key, value)]
        assert float(regard.observe(*tensors).max_weight.min()) > 0.999
        of = regard.attribute(Call(*tensors), {}, loss=lambda out: (out * grad.to(out.dtype)).sum(), map=(5, 5))
        found.append(of.layers[0].map.double())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_a_frozen_model_is_thawed_for_the_pass_alone() -> None:
    model = gpt2().requires_grad_(False)
    found = regard.attribute(
        model, {"input_ids": torch.arange(9)[None]}, loss=lambda out: out.logits[0, -1, 3], layers=[2], map=(3, 3)
    )
    assert [layer.layer for layer in found.layers] == [2] and found.layers[0].map.shape == (1, 4, 3, 3)
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())
    assert len(found.by_head()) == 4


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (3, TypeError, "loss must be a function"),
        (lambda out: out.logits, TypeError, r"got a tensor \[1, 9, 29\]"),
        (lambda out: 1.0, TypeError, "got float"),
        (lambda out: out.logits.detach().sum(), ValueError, "does not depend on the model"),
    ],
)
def test_what_is_no_scalar_of_the_output_is_refused(loss: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        regard.attribute(gpt2(), {"input_ids": torch.arange(9)[None]}, loss=loss)


class Foreign(torch.autograd.Function):
    """A kernel that shows no operators: attention in NumPy, with its own backward pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        q, k, v = (x.numpy() for x in (query, key, value))
        logits = np.einsum("bhld,bhsd->bhls", q, k) * scaling
        p = np.exp(np.where(np.tri(*logits.shape[2:], dtype=bool), logits, -np.inf))
        p = p / p.sum(-1, keepdims=True)
        ctx.kept = p, q, k, v, scaling
        return torch.from_numpy(np.einsum("bhls,bhsd->blhd", p, v))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        p, q, k, v, scaling = ctx.kept
        d_out = grads[0].numpy()
        d_p = np.einsum("blhd,bhsd->bhls", d_out, v)
        ds = p * (d_p - (p * d_p).sum(-1, keepdims=True)) * scaling
        products = (("bhls,bhsd->bhld", ds, k), ("bhls,bhld->bhsd", ds, q), ("bhls,blhd->bhsd", p, d_out))
        return (*(torch.from_numpy(np.einsum(*each)) for each in products), None)


def foreign(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float = 1.0, **rest: Any) -> Any:
    return Foreign.apply(query, key, value, scaling), None


def test_a_foreign_kernel_behind_hugging_face_s_interface_is_followed_too() -> None:
    model, inputs = gpt2(), {"input_ids": torch.arange(11)[None], "use_cache": False}

    def loss(out: Any) -> Tensor:
        return out.logits[0, -1, 3]

    expected = regard.attribute(model, inputs, loss=loss)
    transformers.AttentionInterface.register("foreign kernel", foreign)
    try:
        model.set_attn_implementation("foreign kernel")
        found = regard.attribute(model, inputs, loss=loss)
        with torch.no_grad(), regard.watch(model, want=regard.Want(value_mass=True)) as recording:
            model(**inputs)
        transformers.AttentionInterface.register(
            "foreign kernel", lambda *given, **more: (2 * foreign(*given, **more)[0], None)
        )
        with pytest.raises(ValueError, match="could not be followed, the first in transformer.h.0.attn: its attention"):
            regard.attribute(model, inputs, loss=loss)
    finally:
        del transformers.AttentionInterface._global_mapping["foreign kernel"]
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        torch.testing.assert_close(ours.key_effect, theirs.key_effect, rtol=0, atol=1e-10)
    assert [call.projection for call in recording] == [f"transformer.h.{n}.attn.c_proj" for n in range(3)]


def test_edges_cut_by_an_edit_do_what_edges_cut_by_hand_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2()
    inputs = {
        "input_ids": torch.randint(0, 29, (1, 24), generator=torch.Generator().manual_seed(2)),
        "use_cache": False,
    }

    def loss(out: Any) -> Tensor:
        return out.logits[0, -1, 7] - out.logits[0, -1, 8]

    for edge in regard.attribute(model, inputs, loss=loss).top(3):
        with torch.no_grad():
            with cut(monkeypatch, edge):
                expected = loss(model(**inputs)).item()
            away = regard.edits.cut(queries=[edge.query], keys=[edge.key])
            with regard.edit(model, away, layers=[edge.layer], heads=[edge.head]):
                found = loss(model(**inputs)).item()
        assert found == pytest.approx(expected, abs=1e-10)
