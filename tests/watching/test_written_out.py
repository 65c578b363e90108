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


def heads_folded_first(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[head · batch, query, key], of which each part has the items of one head."""
    q, k, v = (torch.cat(x.unbind(1)) for x in (q, k, v))
    weights = torch.bmm(q, k.mT).softmax(-1)
    kept(m, weights.unflatten(0, (3, -1)).transpose(0, 1))
    return torch.cat(torch.bmm(weights, v).chunk(3), -1)


def divided_by_sum(e: Tensor) -> Tensor:
    return e / e.sum(-1, keepdim=True)


def divided(logits: Tensor) -> Tensor:
    return divided_by_sum(exponentials(logits))


def exponentials(logits: Tensor) -> Tensor:
    return (logits - logits.amax(-1, keepdim=True)).exp()


def less_1_and_divided_afterwards(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = q @ k.mT
    e = (logits - logits.amax(-1, keepdim=True)).expm1_() + 1
    kept(m, divided_by_sum(e))
    return joined(e @ v / e.sum(-1, keepdim=True))


def divided_afterwards(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = exponentials(q @ k.mT)
    kept(m, e / e.sum(-1, keepdim=True))
    return joined(e @ v / e.sum(-1, keepdim=True))


def taken_twice(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = q @ k.mT
    kept(m, logits.softmax(-1))
    return joined((logits.exp() @ v) / logits.exp().sum(-1, keepdim=True))


def folded_and_divided_afterwards(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[batch · head, query, key] times values, and a sum that is laid out otherwise."""
    e = exponentials(q @ k.mT)
    kept(m, e / e.sum(-1, keepdim=True))
    out = torch.bmm(e.flatten(0, 1), v.flatten(0, 1)).unflatten(0, (2, 3)).transpose(1, 2)
    return (out / e.sum(-1).transpose(1, 2).unsqueeze(-1)).reshape(2, 7, 30)


def scaled_summed_and_divided(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = (q @ k.mT).exp()
    kept(m, e / e.sum(-1, keepdim=True))
    return joined((e.unsqueeze(-1) * v.unsqueeze(2)).sum(3) / e.sum(-1)[..., None])


def by_one_over(logits: Tensor) -> Tensor:
    e = logits.exp2()
    return e * (1 / e.sum(-1, keepdim=True))


def masked_and_divided(logits: Tensor) -> Tensor:
    e = logits.exp() * torch.ones(7, 7).tril()
    return e / (e.sum(-1, keepdim=True) + 1e-9)


def masked_and_divided_again(logits: Tensor) -> Tensor:
    weights = logits.softmax(-1) * torch.ones(7, 7).tril()
    return weights / weights.sum(-1, keepdim=True)


def in_place(logits: Tensor) -> Tensor:
    logits -= logits.amax(-1, keepdim=True)
    logits.exp_()
    logits /= logits.sum(-1, keepdim=True)
    return logits


def hidden_with_care(logits: Tensor) -> Tensor:
    """No row without keys meets an infinity."""
    seen = torch.ones(7, 7, dtype=torch.bool).tril()
    largest = logits.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
    largest = torch.where(largest > -torch.inf, largest, 0.0).detach()
    e = torch.where(seen, torch.where(seen, logits - largest, 0.0).exp(), 0.0)
    return e / e.sum(-1, keepdim=True).clamp_min(1e-9)


def with_one_more(logits: Tensor) -> Tensor:
    """A sink that is not there: 1 is added to the sum of the exponentials."""
    largest = logits.amax(-1, keepdim=True)
    e = (logits - largest).exp()
    return e / (e.sum(-1, keepdim=True) + (-largest).exp())


def slots(logits: Tensor) -> Tensor:
    """The queries compete for each key, and then share what they got of all keys."""
    weights = logits.softmax(-2) + 1e-8
    return weights / weights.sum(-1, keepdim=True)


FORMS: dict[str, Callable[..., Tensor]] = {
    "method": four(lambda s: s.softmax(-1)),
    "dim 3": four(lambda s: torch.softmax(s, dim=3)),
    "functional": four(lambda s: F.softmax(s, -1, dtype=torch.float32)),
    "module": four(nn.Softmax(-1)),
    "special": four(lambda s: torch.special.softmax(s, -1)),
    "aten": four(lambda s: torch.ops.aten._softmax(s, -1, False)),
    "logsumexp": four(lambda s: (s - s.logsumexp(-1, keepdim=True)).exp()),
    "logsumexp of others": four(lambda s: (s - s.clone().logsumexp(-1, keepdim=True)).exp()),
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
    "heads folded first": heads_folded_first,
    "exp2": four(lambda s: s.exp2() / s.exp2().sum(-1, keepdim=True)),
    "a power": four(lambda s: 3**s / (3**s).sum(-1, keepdim=True)),
    "a power of less than 1": four(lambda s: divided_by_sum(0.4**-s)),
    "a power of a tensor": four(lambda s: divided_by_sum(nn.Parameter(torch.tensor(3.0)) ** s)),
    "exponentials less 1": four(lambda s: divided_by_sum(s.expm1() + 1)),
    "exponentials less 1, twice": four(lambda s: (1 + s.expm1()) / (torch.expm1(s) + torch.ones(())).sum(-1, True)),
    "times one over the sum": four(by_one_over),
    "normalize": four(lambda s: F.normalize(s.exp(), p=1, dim=-1)),
    "masked and divided": four(masked_and_divided),
    "masked and divided again": four(masked_and_divided_again),
    "hidden with care": four(hidden_with_care),
    "slots": four(slots),
}
# Forms that are read, and that an edit cannot take apart.
FIXED: dict[str, Callable[..., Tensor]] = {
    "one more in the sum": four(with_one_more),
    "divided afterwards": divided_afterwards,
    "exponentials less 1, divided afterwards": less_1_and_divided_afterwards,
    "exponentials taken twice": taken_twice,
    "folded and divided afterwards": folded_and_divided_afterwards,
    "scaled, summed and divided": scaled_summed_and_divided,
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", [*FORMS, *FIXED])
def test_every_form_is_read_as_batch_head_query_key(name: str, mode: Any) -> None:
    model = Made({**FORMS, **FIXED}[name])
    with mode():
        expected = model(X)
        with regard.watch(model) as recording:
            out = model(X)
    assert torch.equal(out, expected)
    assert recording.missed == []
    (call,) = recording
    assert call.written_out and call.path == "(root)" and model.weights is not None
    check_statistics(call, model.weights.clone())


def test_the_log_sum_exp_of_exponentials_that_are_divided_is_that_of_the_logits() -> None:
    model = Made(folded)
    q, k, _ = (part.unflatten(-1, (3, 10)).transpose(1, 2) for part in model.qkv(X).chunk(3, -1))
    lse = (q * 10**-0.5 @ k.mT).logsumexp(-1)
    late = [
        divided_afterwards,
        less_1_and_divided_afterwards,
        taken_twice,
        folded_and_divided_afterwards,
        scaled_summed_and_divided,
    ]
    for attend in (four(divided), four(in_place), *late):
        model.attend = attend
        with torch.no_grad(), regard.watch(model) as recording:
            model(X)
        torch.testing.assert_close(recording.calls[0].lse, lse.detach())
    model.attend = four(hidden_with_care)
    with torch.no_grad(), regard.watch(model) as recording:
        model(X)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    lse = (q * 10**-0.5 @ k.mT).masked_fill(hidden, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(recording.calls[0].lse, lse.detach())


def in_chunks(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    above = below = torch.zeros(())
    for part in (slice(0, 4), slice(4, 7)):
        e = (q @ k[:, :, part].mT).exp()
        above, below = above + e @ v[:, :, part], below + e.sum(-1, keepdim=True)
    return joined(above / below)


def summed_by_a_value_of_one(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = (q @ k.mT).exp() @ F.pad(v, (0, 1), value=1.0)
    return joined(out[..., :-1] / out[..., -1:])


def summed_by_a_product(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = exponentials(q @ k.mT)
    return joined((e / (e @ torch.ones(7, 1))) @ v)


def less_the_logarithm_of_the_sum(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = q @ k.mT
    return joined((logits - logits.exp().sum(-1, keepdim=True).log()).exp() @ v)


def of_the_largest(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = q @ k.mT
    largest, at = logits.topk(3, -1)
    return joined(torch.zeros_like(logits).scatter(-1, at, largest.softmax(-1)) @ v)


def over_the_queries(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return joined((q @ k.mT).softmax(-2) @ v)


def sparse(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.sparse.softmax((q[0, 0] @ k[0, 0].mT).to_sparse(), -1)
    return torch.sparse.mm(weights, v[0, 0]).repeat(2, 1, 3)


def below_0(m: Made, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = (q @ k.mT).exp() * torch.randn(7, 7)
    return joined((e / e.sum(-1, keepdim=True)) @ v)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (in_chunks, "divided where it cannot be followed"),
        (summed_by_a_value_of_one, "divided where it cannot be followed"),
        (summed_by_a_product, "divided where it cannot be followed"),
        (less_the_logarithm_of_the_sum, "divided where it cannot be followed"),
        (of_the_largest, "moved by scatter"),
        (over_the_queries, "its softmax is not over the keys"),
        (sparse, "torch.sparse.softmax"),
        (below_0, "numbers that are below 0"),
    ],
)
def test_attention_that_cannot_be_read_is_listed_once_when_others_are_seen(attend: Any, reason: str, mode: Any) -> None:
    model = Stack(ByHand(30), Made(attend))
    with mode(), pytest.warns(UserWarning, match="missed some attention calls"), regard.watch(model) as recording:
        model(X)
    assert [call.path for call in recording] == ["layers.0"]
    ((path, why),) = recording.missed
    assert path == "layers.1" and reason in why


def grouped_by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bkgid,bkjd->bkgij", q, k).softmax(-1)
    return torch.einsum("bkgij,bkjd->bkgid", weights, v)


def grouped_by_broadcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout((q @ k.unsqueeze(2).mT).softmax(-1), 0.3) @ v.unsqueeze(2)


def grouped_as_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q.flatten(2, 3) @ k.mT).softmax(-1) @ v).unflatten(2, (2, -1))


def grouped_and_divided_afterwards(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.einsum("bkgid,bkjd->bkgij", q, k).exp()
    return torch.einsum("bkgij,bkjd->bkgid", e, v) / e.sum(-1, keepdim=True)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(
    "attend", [grouped_by_einsum, grouped_by_broadcast, grouped_as_rows, grouped_and_divided_afterwards]
)
def test_heads_that_share_values_have_their_lengths(attend: Any, queries: int) -> None:
    class Grouped(nn.Module):  # four heads, two of keys and values
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.out = 4, nn.Linear(40, 30)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = self.out(attend(q.unflatten(1, (2, 2)), k, v).flatten(1, 2).transpose(1, 2).flatten(2))
            return out

    q, k, v = torch.randn(2, 4, queries, 10), torch.randn(2, 2, 7, 10), torch.randn(2, 2, 7, 10)
    model = Grouped().train()
    with torch.no_grad(), regard.watch(model, want=regard.Want(weights="all", value_mass=True)) as recording:
        model(q, k, v)
    (call,) = recording
    lengths = torch.einsum("bhjd,ohd->bhjo", v.repeat_interleave(2, 1), model.out.weight.view(30, 4, 10)).norm(dim=-1)
    torch.testing.assert_close(call.value_length, lengths.detach())
    torch.testing.assert_close(call.value_mass, call.weights.sum(2) * lengths.detach())


@pytest.mark.parametrize("form", ["bhij,bhjd->bhid", "bihj,bhjd->bihd"])
@pytest.mark.parametrize(("queries", "keys"), [(5, 7), (1, 7), (5, 1), (1, 1)])
def test_values_of_a_single_number_are_values(form: str, queries: int, keys: int) -> None:
    class Numbers(nn.Module):
        num_heads = 3

        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            weights = torch.einsum(f"bhid,bhjd->{form[:4]}", q, k).softmax(-1)
            return torch.einsum(form, weights, k[..., :1])

    q, k = torch.randn(2, 3, queries, 10), torch.randn(2, 3, keys, 10)
    with regard.watch(model := Numbers()) as recording:
        model(q, k)
    assert [(tuple(call.lse.shape), call.keys) for call in recording] == [((2, 3, queries), keys)]


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
            return torch.bmm(torch.bmm(q, k.mT).softmax(-1), k).view(2, 3, 7, 10)

    model = Folded()
    with pytest.warns(UserWarning, match="axis of the heads is not clear"), regard.watch(model) as recording:
        model(torch.randn(6, 7, 10), torch.randn(6, 5, 10))
    assert not recording.calls and len(recording.missed) == 1


class Unnamed(nn.Module):
    """Three heads, whose number no attribute names, before or behind the items; a function says what follows."""

    def __init__(self, first: bool, use: Callable[[Unnamed, Tensor, int], Tensor]) -> None:
        super().__init__()
        self.first, self.use = first, use
        self.qkv, self.out, self.weights = nn.Linear(30, 90), nn.Linear(10, 30), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (3, 10)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        weights = (q @ k.mT).softmax(-1)
        self.weights = weights.transpose(0, 1) if self.first else weights
        return self.use(self, weights @ v, 0 if self.first else 1)


USES: dict[str, Callable[[Unnamed, Tensor, int], Tensor]] = {
    "laid together": lambda m, out, heads: out.movedim(heads, -2).flatten(-2),
    "laid together one by one": lambda m, out, heads: torch.cat(out.unbind(heads), -1),
    "picked": lambda m, out, heads: torch.cat([out.select(heads, n) for n in range(3)], -1),
    "averaged": lambda m, out, heads: out.mean(heads),
    "moved next to the values": lambda m, out, heads: torch.cat([out.movedim(heads, -2)] * 2, -2),
    "normalized": lambda m, out, heads: (out * out.pow(2).mean(-1, True).rsqrt()).movedim(heads, -2).flatten(-2),
}


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("use", list(USES))
def test_what_becomes_of_the_output_tells_the_heads_whatever_the_number_of_items(
    use: str, first: bool, batch: int
) -> None:
    model = Unnamed(first, USES[use])
    with torch.no_grad(), regard.watch(model) as recording:
        model(torch.randn(batch, 7, 30))
    check_statistics(recording.calls[0], model.weights)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("use", [lambda m, out, heads: out, lambda m, out, heads: m.out(out).amax(heads)])
def test_the_number_of_items_tells_the_heads_unless_there_are_as_many(use: Any, first: bool) -> None:
    model = Unnamed(first, use)
    for batch in (1, 2, 7):
        with torch.no_grad(), regard.watch(model) as recording:
            model(torch.randn(batch, 7, 30))
        check_statistics(recording.calls[0], model.weights)
    with torch.no_grad(), pytest.warns(UserWarning, match="heads_dim"), regard.watch(model) as recording:
        model(torch.randn(3, 7, 30))
    assert len(recording) == 0
    with torch.no_grad(), regard.watch(model, heads_dim=0 if first else 1) as recording:
        model(torch.randn(3, 7, 30))
    check_statistics(recording.calls[0], model.weights)


def test_a_module_that_only_attends_leaves_it_to_the_one_around_it_to_show_the_heads() -> None:
    class Attend(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            weights = (q @ k.mT).softmax(-1)
            return weights @ v, weights

    class Around(Unnamed):
        def __init__(self) -> None:
            super().__init__(False, USES["averaged"])
            self.attend = Attend()

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (3, 10)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            out, self.weights = self.attend(q, k, v)
            return out.transpose(1, 2).flatten(2)

    with torch.no_grad(), regard.watch(model := Around()) as recording:
        model(torch.randn(3, 7, 30))
    (call,) = recording
    assert call.path == "attend"
    check_statistics(call, model.weights)


def test_items_of_two_axes_are_no_heads_where_each_goes_into_a_matrix() -> None:
    class Grid(nn.Module):  # [item, row, token, dim]: one head
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out, self.weights = nn.Linear(30, 90), nn.Linear(30, 30), torch.empty(0)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            self.weights = (q @ k.mT).softmax(-1)
            return self.out(self.weights @ v)

    with torch.no_grad(), regard.watch(model := Grid()) as recording:
        model(torch.randn(2, 5, 7, 30))
    check_statistics(recording.calls[0], model.weights.reshape(10, 1, 7, 7))


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


def experts(m: Any, x: Tensor) -> Tensor:
    gates = m.router(x).softmax(-1)
    best, at = gates.topk(2, -1)
    best = best / best.sum(-1, keepdim=True)
    return sum(expert(x) * (best * (at == n)).sum(-1, keepdim=True) for n, expert in enumerate(m.experts))  # type: ignore[return-value]


def scattered(m: Any, x: Tensor) -> Tensor:
    logits = m.router(x)
    best, at = logits.topk(2, -1)
    gates = torch.zeros_like(logits).scatter(-1, at, best.softmax(-1))
    return gates.unsqueeze(-2) @ torch.stack([expert(x) for expert in m.experts], -2)


def losses(m: Any, x: Tensor) -> Tensor:
    logits, none = m.router(x), torch.zeros(14, dtype=torch.long)
    by_hand = -(logits.exp() / logits.exp().sum(-1, keepdim=True)).log().mean()
    pooled = F.normalize(x.mean(1), dim=-1)
    contrast = (pooled @ pooled.T).exp()
    spread = F.kl_div(logits.log_softmax(-1), logits.softmax(-1), reduction="batchmean")
    return (
        F.cross_entropy(logits.flatten(0, 1), none) + by_hand + spread + (contrast.diagonal() / contrast.sum(-1)).sum()
    )


def kernel(m: Any, x: Tensor) -> Tensor:
    return (-torch.cdist(x, x)).exp() @ x


def clusters(m: Any, x: Tensor) -> Tensor:
    return (x @ m.codes.T).softmax(-1).mT @ x


def expectation(m: Any, x: Tensor) -> Tensor:
    return (m.router(x).softmax(-1) * torch.arange(5.0)).sum(-1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("more", [experts, scattered, losses, kernel, clusters, expectation])
def test_softmaxes_and_exponentials_that_are_no_attention_give_no_alarm(more: Any, mode: Any) -> None:
    class Other(ByHand):
        def __init__(self) -> None:
            super().__init__(30)
            self.router, self.codes = nn.Linear(30, 5), nn.Parameter(torch.randn(5, 30))
            self.experts = nn.ModuleList(nn.Linear(30, 30) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = more(self, super().forward(x))
            return out

    with mode(), regard.watch(model := Other()) as recording:
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


@pytest.mark.parametrize("items", [1, 2, 7])
@pytest.mark.parametrize("axis", [0, 1])
def test_the_items_that_are_pooled_are_not_taken_for_queries(items: int, axis: int) -> None:
    """One score for each token, and the mean of the tokens by them."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(30, 1)

        def forward(self, x: Tensor) -> Tensor:
            return (self.score(x).softmax(axis) * x).sum(axis)

    x = torch.randn((items, 7, 30) if axis else (7, items, 30))
    with torch.no_grad(), regard.watch(model := Pooled()) as recording:
        model(x)
        weights = model.score(x).softmax(axis).squeeze(-1)
    (call,) = recording
    check_statistics(call, (weights if axis else weights.T).reshape(items, 1, 1, 7))
