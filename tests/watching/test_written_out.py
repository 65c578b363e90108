"""Attention that a model writes out: a softmax and a product, of any rank and in any words (rule 68)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.watching.models import ByHand, Stack, check_statistics
from torch import Tensor, nn

import regard

X = torch.randn(2, 7, 30, generator=torch.Generator().manual_seed(1))


class Made(nn.Module):
    """Three heads; the logits become the output by a function that is given, which leaves the weights behind."""

    def __init__(self, attend: Callable[[Made, Tensor, Tensor, Tensor], Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        self.attend, self.num_heads = attend, 3
        self.qkv, self.drop, self.mix = nn.Linear(30, 90), nn.Dropout(dropout), nn.Linear(3, 3)
        self.weights: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (3, 10)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.attend(self, q * 10**-0.5, k, v)


def kept(module: Made, weights: Tensor) -> Tensor:
    module.weights = weights.detach().clone()
    return weights


def joined(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(2)


def four(softmax: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda m, q, k, v: joined(m.drop(kept(m, softmax(q @ k.mT))) @ v)


def folded(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[batch · head, query, key], as torch's module and older code have it."""
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    weights = torch.baddbmm(torch.zeros(6, 7, 7), q, k.mT).softmax(-1)
    kept(m, weights.unflatten(0, (2, 3)))
    return torch.bmm(weights, v).unflatten(0, (2, 3)).transpose(1, 2).reshape(2, 7, 30)


def sequence_first(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[query, key, batch, head], as XLNet has it."""
    logits = torch.einsum("bnid,bnjd->ijbn", q, k)
    weights = logits.softmax(1)
    kept(m, weights.permute(2, 3, 0, 1))
    return torch.einsum("ijbn,bnjd->bind", weights, v).reshape(2, 7, 30)


def windows(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[batch, head, window, query, key]."""
    q, k, v = (x[:, :, :6].unflatten(2, (2, 3)) for x in (q, k, v))
    weights = (q @ k.mT).softmax(-1)
    kept(m, weights.transpose(1, 2).flatten(0, 1))
    return (weights @ v).permute(0, 2, 3, 1, 4).reshape(2, 6, 30)


def shared_keys(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[batch, query, head, key]: one head of keys, the heads of the queries next to the queries."""
    q, k, v = q.transpose(1, 2), k[:, 0], v[:, 0]
    weights = (q.reshape(2, 21, 10) @ k.mT).view(2, 7, 3, 7).softmax(-1)
    kept(m, weights.transpose(1, 2))
    return (weights.view(2, 21, 7) @ v).view(2, 7, 30)


def grouped(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[batch, kv head, group, query, key]."""
    weights = torch.einsum("bgid,bjd->bgij", q, k[:, 0]).softmax(-1)
    kept(m, weights)
    return joined(torch.einsum("bgij,bjd->bgid", weights, v[:, 0]))


def scaled_and_summed(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = kept(m, (q @ k.mT).softmax(-1))
    return joined((weights.unsqueeze(-1) * v.unsqueeze(2)).sum(3))


def with_sinks(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = torch.cat([q @ k.mT, torch.ones(2, 3, 7, 1)], -1)
    return joined(kept(m, logits.softmax(-1)[..., :-1]) @ v)


def hidden_afterwards(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Masked before and after, as DeBERTa does it: a query that sees nothing has weights of 0."""
    hidden = torch.zeros(2, 1, 7, 7, dtype=torch.bool)
    hidden[1, :, 5:] = True
    weights = (q @ k.mT).masked_fill(hidden, torch.finfo(q.dtype).min).softmax(-1)
    weights.masked_fill_(hidden, 0)
    return joined(kept(m, weights) @ v)


def heads_one_by_one(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[batch, query, head, key], and heads that are laid side by side by hand."""
    weights = torch.einsum("bhid,bhjd->bihj", q, k).softmax(-1)
    kept(m, weights.transpose(1, 2))
    return torch.cat(torch.einsum("bihj,bhjd->bhid", weights, v).unbind(1), -1)


def heads_first(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[head, batch, query, key], of which only the module's number of heads tells what is what."""
    weights = torch.einsum("bhid,bhjd->hbij", q, k).softmax(-1)
    kept(m, weights.transpose(0, 1))
    return torch.cat(torch.einsum("hbij,bhjd->hbid", weights, v).unbind(0), -1)


def divided(logits: Tensor) -> Tensor:
    e = (logits - logits.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


FORMS: dict[str, Callable[..., Tensor]] = {
    "method": four(lambda s: s.softmax(-1)),
    "dim 3": four(lambda s: torch.softmax(s, dim=3)),
    "functional": four(lambda s: F.softmax(s, -1, dtype=torch.float32)),
    "module": four(nn.Softmax(-1)),
    "special": four(lambda s: torch.special.softmax(s, -1)),
    "aten": four(lambda s: torch.ops.aten._softmax(s, -1, False)),
    "logsumexp": four(lambda s: (s - s.logsumexp(-1, keepdim=True)).exp()),
    "log softmax": four(lambda s: s.log_softmax(-1).exp()),
    "divided": four(divided),
    "other axis": four(lambda s: s.mT.softmax(2).mT),
    "folded": folded,
    "sequence first": sequence_first,
    "windows": windows,
    "shared keys": shared_keys,
    "grouped": grouped,
    "scaled and summed": scaled_and_summed,
    "sinks": with_sinks,
    "heads one by one": heads_one_by_one,
    "heads first": heads_first,
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", list(FORMS))
def test_every_form_is_read_as_batch_head_query_key(name: str, mode: Any) -> None:
    model = Made(FORMS[name])
    with mode():
        expected = model(X)
        with regard.watch(model) as recording:
            out = model(X)
    assert torch.equal(out, expected)
    assert recording.missed == []
    (call,) = recording
    assert call.written_out and call.path == "(root)" and model.weights is not None
    check_statistics(call, model.weights.clone())


@pytest.mark.parametrize("form", ["bhij,bhjd->bhid", "bihj,bhjd->bihd", "sum"])
@pytest.mark.parametrize("queries", [1, 5])
def test_a_single_key_is_seen_though_torch_has_nothing_to_sum_then(queries: int, form: str) -> None:
    class First(nn.Module):  # as a decoder at its first token, or cross attention to a summary
        num_heads = 3

        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            if form == "sum":
                weights = (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1).softmax(-1)
                return joined((weights.unsqueeze(-1) * k.unsqueeze(2)).sum(3))
            first, _, last = form.replace("->", ",").split(",")
            weights = torch.einsum(f"bhid,bhjd->{first}", q, k).softmax(-1)
            out = torch.einsum(form, weights, k)
            return joined(out) if last == "bhid" else out.flatten(2)

    model = First()
    q, k = torch.randn(2, 3, queries, 10), torch.randn(2, 3, 1, 10)
    with regard.watch(model) as recording:
        model(q, k)
    assert [(tuple(call.lse.shape), call.keys) for call in recording] == [((2, 3, queries), 1)]


def test_an_axis_of_items_and_heads_that_was_cut_is_not_taken_for_items() -> None:
    class Folded(nn.Module):  # nothing says how many heads there are, and none is laid next to the values' dim
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            out = torch.bmm(torch.bmm(q, k.mT).softmax(-1), k).view(2, 3, 7, 10)
            return torch.cat(out.unbind(1), -1)

    model = Folded()
    with pytest.warns(UserWarning, match="axis of the heads is not clear"), regard.watch(model) as recording:
        model(torch.randn(6, 7, 10), torch.randn(6, 5, 10))
    assert not recording.calls and len(recording.missed) == 1


def test_rows_that_are_hidden_afterwards_are_missing() -> None:
    model = Made(hidden_afterwards)
    with regard.watch(model) as recording:
        model(X)
    real = torch.ones(2, 7, dtype=torch.bool)
    real[1, 5:] = False
    assert model.weights is not None
    check_statistics(recording.calls[0], model.weights, real=real)


@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_in_training_leaves_the_statistics_those_of_the_softmax(inplace: bool) -> None:
    model = Made(FORMS["method"], dropout=0.4).train()
    model.drop.inplace = inplace
    torch.manual_seed(3)
    with torch.no_grad() if inplace else torch.enable_grad():
        expected = model(X)
        torch.manual_seed(3)
        with regard.watch(model) as recording:
            out = model(X)
    assert torch.equal(out, expected) and recording.missed == []
    assert model.weights is not None
    check_statistics(recording.calls[0], model.weights)


def talking(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return joined(m.mix(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) @ v)


def gated(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return joined(((q @ k.mT).softmax(-1) * q.sigmoid().mean(-1, keepdim=True)) @ v)


def moved(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return joined(F.pad((q @ k.mT).softmax(-1), (0, 1)) @ F.pad(v, (0, 0, 0, 1)))


def head_by_head(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.stack([(q[:, n] @ k[:, n].mT).softmax(-1) for n in range(3)], 1)
    return joined(weights @ v)


def in_turns(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return torch.cat([part[:, 0] @ v[:, n] for n, part in enumerate(weights.split(1, 1))], -1)


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (head_by_head, "moved by stack"),
        (in_turns, "cut into parts"),
        (talking, "mixed across heads by a product"),
        (gated, "multiplied by something"),
        (moved, "moved by constant_pad_nd"),
    ],
)
def test_weights_that_are_changed_before_the_product_are_listed_with_the_reason(attend: Any, reason: str) -> None:
    model = Stack(ByHand(30), Made(attend))
    with pytest.warns(UserWarning, match="missed some attention calls"), regard.watch(model) as recording:
        model(X)
    assert [call.path for call in recording] == ["layers.0"]
    ((path, why),) = recording.missed
    assert path == "layers.1" and reason in why
    assert reason in str(recording.summary())


class Bare(nn.Module):
    """Windows of one head each, which nothing lays next to the values' dim."""

    num_heads = 5

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


def test_an_axis_that_cannot_be_told_is_listed_and_can_be_said() -> None:
    model, x = Bare(), torch.randn(2, 5, 5, 7, 4)
    with pytest.warns(UserWarning, match="heads_dim"), regard.watch(model) as recording:
        model(x)
    assert len(recording) == 0
    for given in (1, {"": 1}):
        with regard.watch(model, heads_dim=given) as recording:
            model(x)
        weights = (x @ x.mT).softmax(-1).transpose(1, 2).flatten(0, 1)
        check_statistics(recording.calls[0], weights)


@pytest.mark.parametrize("heads", [1, 2])
def test_windows_of_torchs_function_with_five_dims_are_no_heads(heads: int) -> None:
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads, self.qkv = heads, nn.Linear(30, 90)

        def forward(self, x: Tensor) -> Tensor:  # [batch, head, window, token, dim]
            q, k, v = self.qkv(x).view(2, 4, 3, 3, self.heads, -1).permute(3, 0, 4, 2, 1, 5)
            return F.scaled_dot_product_attention(q, k, v).permute(0, 3, 2, 1, 4).reshape(2, 12, 30)

    with regard.watch(model := Windows()) as recording:
        model(torch.randn(2, 12, 30))
    (call,) = recording
    assert (call.batch, len(call.heads), call.queries, call.keys) == (6, heads, 4, 4)


def test_torchs_function_with_three_dims_has_the_heads_that_its_module_lays_side_by_side() -> None:
    class Folded(Made):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (3, 10)).transpose(1, 2).flatten(0, 1) for part in self.qkv(x).chunk(3, -1))
            out = F.scaled_dot_product_attention(q, k, v)
            return out.view(2, 3, 7, 10).transpose(1, 2).reshape(2, 7, 30)

    model = Folded(folded)
    with regard.watch(model) as recording:
        model(X)
    (call,) = recording
    assert (call.batch, len(call.heads), call.queries, call.written_out) == (2, 3, 7, False)


def test_other_softmaxes_and_products_are_no_attention() -> None:
    class Routed(ByHand):
        def __init__(self) -> None:
            super().__init__(30)
            self.router, self.codes = nn.Linear(30, 5), nn.Parameter(torch.randn(5, 30))

        def forward(self, x: Tensor) -> Tensor:
            gates = self.router(x).softmax(-1)
            best = gates.topk(2, -1).values.sum(-1, keepdim=True)
            return super().forward(x * best + gates @ self.codes)

    model = Routed()
    with regard.watch(model) as recording:
        model(X)
    assert len(recording) == 1 and recording.missed == []


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_called_directly_is_seen() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    class Flexible(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s - (i - j).abs())

    model, q = Flexible(), torch.randn(2, 3, 7, 8)
    with torch.no_grad(), regard.watch(model) as recording:
        model(q)
    apart = (torch.arange(7)[:, None] - torch.arange(7)).abs()
    assert recording.missed == []
    check_statistics(recording.calls[0], (q @ q.mT * 8**-0.5 - apart).softmax(-1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_function_is_seen() -> None:
    @torch.jit.script
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-1, -2)), dim=-1), v)

    model = Made(lambda m, q, k, v: joined(attend(q, k, v)))
    for _ in range(3):  # the third time an optimised form of the code runs
        with regard.watch(model) as recording:
            model(X)
        assert [(len(call.heads), call.queries) for call in recording] == [(3, 7)]


def test_calling_forward_itself_runs_no_hooks_and_is_seen_all_the_same() -> None:
    inner = nn.MultiheadAttention(30, 3, batch_first=True)
    model = Stack(Made(FORMS["method"]))
    with regard.watch(inner) as recording:
        inner.forward(X, X, X)
    assert [call.path for call in recording] == ["(root)"]
    with regard.watch(model) as recording:
        model.layers[0].forward(X)
        model.layers[0].forward(X[:, :5])
    assert [(call.path, call.number, call.queries) for call in recording] == [("layers.0", 0, 7), ("layers.0", 1, 5)]


def test_a_method_that_does_not_call_its_module_self_is_seen_too() -> None:
    class Named(nn.Module):
        def forward(module, x: Tensor) -> Tensor:
            return (x @ x.mT).softmax(-1) @ x

    class Other(nn.Module):
        def forward(self, x: Tensor, model: nn.Module) -> Tensor:
            return helper(model, x)

    def helper(model: nn.Module, x: Tensor) -> Tensor:  # no method: what it computes is not the model's
        return (x @ x.mT).softmax(-1) @ x

    model = Named()
    with regard.watch(model) as recording:
        model.forward(X)
        helper(model, X)
        Other()(X, model)
    assert [(call.path, call.queries) for call in recording] == [("(root)", 7)]


def test_a_softmax_into_memory_that_is_given_is_seen() -> None:
    model = Made(four(lambda s: torch.softmax(s, -1, out=torch.empty_like(s))))
    with torch.no_grad(), regard.watch(model) as recording:
        model(X)
    assert model.weights is not None
    check_statistics(recording.calls[0], model.weights)


def test_what_a_transform_hides_is_listed_and_warns() -> None:
    model = Made(FORMS["method"])
    x = torch.randn(3, 2, 7, 30)
    with pytest.warns(UserWarning, match="inside a torch.func transform"), regard.watch(model) as recording:
        torch.func.vmap(model)(x)
    assert len(recording) == 0


def test_weights_can_be_added_by_hand() -> None:
    weights = torch.randn(2, 3, 7, 9).softmax(-1)
    recording = regard.Recording("mine")
    call = recording.add(weights, "decoder.3", kind="cross")
    check_statistics(call, weights)
    assert recording["decoder.3", 1].call.kind == "cross"
    assert "decoder.3" in str(recording.summary())
    with pytest.raises(TypeError, match=r"\[batch, head, query, key\]"):
        recording.add(weights[0], "x")
    with pytest.raises(ValueError, match="at most 1 in sum"):
        recording.add(2 * weights, "x")
    with pytest.raises(ValueError, match="kind must be one of self, cross"):
        recording.add(weights, "x", kind="both")


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("form", ["product", "sum"])
def test_the_items_of_a_batch_are_not_taken_for_queries(queries: int, form: str) -> None:
    """A decode step has one query, of which the shapes of its product keep no trace."""

    def attend(module: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = kept(module, torch.softmax(q[:, :, -queries:] @ k.mT, -1))
        return joined(weights @ v if form == "product" else (weights.unsqueeze(-1) * v.unsqueeze(2)).sum(3))

    model = Made(attend)
    with torch.no_grad(), regard.watch(model, want=regard.Want(weights="all")) as recording:
        model(X)
    assert model.weights is not None
    torch.testing.assert_close(recording.calls[0].weights, model.weights)
