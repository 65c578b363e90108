"""Value mass, single pairs, relations, and gradients through statistics, against the oracle's whole matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests import forced
from torch import Tensor

import regard
from core_calls import bias_with_holes, differ, every_mask, oracle, prepare, tensors
from memory import peak_bytes
from regard import bias, masks, statistics
from regard.observation import _rows
from regard.observation._effects import edge_effects, weighted_key_mass

B, H, G, L, S = 2, 4, 2, 13, 37
WANT = regard.Want(map=(5, 7), top_k=6, queries=slice(2, -1), value_mass=True)

NAMES_OF_ALL = ("lse", "entropy", "key_mass", "map", "top_keys", "top_weights", "distance", "first_mass")


MODIFIERS: list[dict[str, Any]] = [
    {"sinks": torch.tensor([-2.0, 0.0, 1.0, 5.0]).double()},
    {"softcap": 1.3},
    {"bias": bias_with_holes(B, H, L, S)},
    {"bias": bias.alibi(H), "mask": masks.causal()},
    {"bias": bias_with_holes(B, H, L, S), "mask": masks.causal(), "sinks": torch.zeros(H).double(), "softcap": 2.0},
    {"query_offset": torch.tensor([20, -3]), "mask": masks.window(left=4)},
    {"query_offset": torch.tensor([20, -3]), "bias": bias.alibi(H)},
]
CALLS = [{"mask": mask} for mask in every_mask(B, H, L, S).values()] + MODIFIERS
NAMES = [*every_mask(B, H, L, S), *("+".join(given) for given in MODIFIERS)]
each_call = pytest.mark.parametrize("given", CALLS, ids=NAMES)


def exact_weights(inputs: tuple[Tensor, ...], given: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    rule = given.get("bias")
    if isinstance(rule, bias.Bias):
        offset = given.get("query_offset", S - L)
        given = given | {"bias": rule.tile(range(L), range(S), L, S, offset=offset, dtype=torch.float64)}
    exact, _ = oracle(*inputs, **given)
    return exact.weights, exact.logits > -np.inf


def lengths_by_hand(value: Tensor, output: Tensor) -> np.ndarray:
    """‖v_j W_O‖ with each head's own block, [B, H, S]."""
    dim = value.shape[-1]
    found = np.empty((value.shape[0], H, value.shape[2]))
    for head in range(H):
        block = output[:, head * dim : (head + 1) * dim].numpy()
        found[:, head] = np.linalg.norm(value[:, head * value.shape[1] // H].numpy() @ block.T, axis=-1)
    return found


@each_call
def test_value_mass_is_the_same_sums_of_weights_times_lengths(given: dict[str, Any]) -> None:
    check_value_mass(tensors(B, H, G, L, S), given)


def check_value_mass(inputs: tuple[Tensor, Tensor, Tensor], given: dict[str, Any]) -> None:
    keys = inputs[1].shape[2]
    output = torch.randn(11, H * inputs[2].shape[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    seen = regard.observe(*inputs, want=WANT, output=output, **given)
    weights, allowed = exact_weights(inputs, given)
    lengths = lengths_by_hand(inputs[2], output)
    carried = weights * lengths[:, :, None]
    some = carried[:, :, 2:-1]
    assert differ(seen.value_length, lengths) < 1e-12
    assert differ(seen.value_mass, some.sum(2)) < 1e-11
    assert differ(seen.value_sum, carried.sum(-1)) < 1e-11
    down, across = ([c * size // cells for c in range(cells + 1)] for size, cells in ((some.shape[2], 5), (keys, 7)))
    for r in range(5):
        for c in range(7):
            cell = some[:, :, down[r] : down[r + 1], across[c] : across[c + 1]].mean((-2, -1))
            assert differ(seen.value_map[:, :, r, c], cell) < 1e-11
    order = np.argsort(np.where(allowed, -carried, np.inf), axis=-1, kind="stable")[..., :6]
    found = np.take_along_axis(allowed, order, -1)
    assert differ(seen.value_top_lengths, np.where(found, np.take_along_axis(carried, order, -1), 0.0)) < 1e-11
    at = np.where(found, order, -1)
    assert (seen.value_top_keys.numpy() == at).mean() > 0.999  # two products may tie within rounding


def test_lengths_may_be_given_and_are_those_of_the_values_when_nothing_is_said() -> None:
    inputs = tensors(B, H, G, L, S)
    plain = regard.observe(*inputs, want=WANT)
    assert differ(plain.value_length, inputs[2].norm(dim=-1).repeat_interleave(2, 1)) < 1e-12
    given = torch.rand(1, G, S, dtype=torch.float64)
    seen = regard.observe(*inputs, want=WANT, value_norms=given)
    assert differ(seen.value_length, given.repeat_interleave(2, 1).expand(B, H, S)) == 0.0
    assert differ(seen.value_mass, plain.key_mass * given.repeat_interleave(2, 1)) < 1e-12


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"value_norms": torch.ones(2, 3, 37).double()}, r"value_norms must be \[batch, head, key\]"),
        ({"value_norms": 3.0}, "value_norms must be a floating-point tensor"),
        ({"output": torch.ones(5, 7).double()}, "output must be"),
        ({"output": torch.ones(5, 7), "value_norms": torch.ones(1, 1, 37)}, "not both"),
        ({"want": regard.Want(), "output": torch.ones(5, 7)}, "value_mass=True"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        regard.observe(*tensors(B, H, G, L, S), **{"want": WANT, **given})


def test_a_value_behind_a_mask_reaches_no_sum() -> None:
    query, key, value = tensors(B, H, G, L, S)
    mask = masks.keep(torch.arange(S) != 20)
    clean = regard.observe(query, key, value, mask=mask, want=WANT)
    key[:, :, 20], value[:, :, 20] = torch.nan, torch.inf
    seen = regard.observe(query, key, value, mask=mask, want=WANT)
    for name in ("value_mass", "value_sum", "value_map", "value_top_lengths", "value_top_keys"):
        assert torch.allclose(getattr(seen, name), getattr(clean, name), rtol=0, atol=1e-12), name


@each_call
def test_pairs_are_single_weights(given: dict[str, Any]) -> None:
    inputs = tensors(B, H, G, L, S)
    draw = torch.Generator().manual_seed(4)
    pairs = torch.stack([torch.randint(-L, L, (211,), generator=draw), torch.randint(-S, S, (211,), generator=draw)], 1)
    seen = regard.observe(*inputs, want=regard.Want.none().but(pairs=pairs), **given)
    weights, _ = exact_weights(inputs, given)
    assert differ(seen.pairs, weights[:, :, pairs[:, 0].numpy(), pairs[:, 1].numpy()]) < 1e-12


@pytest.mark.parametrize("sizes", [(L, S), (331, 511)], ids=["at once", "in pieces"])
def test_all_pairs_are_all_weights(sizes: tuple[int, int]) -> None:
    inputs, pairs = tensors(B, H, G, *sizes), torch.cartesian_prod(*map(torch.arange, sizes))
    whole = regard.observe(*inputs, want=regard.Want(pairs=pairs, weights="all"))
    assert differ(whole.pairs, whole.weights.flatten(2)) < 1e-14
    assert torch.equal(regard.observe(*inputs, want=regard.Want(pairs=pairs[7:11])).pairs, whole.pairs[..., 7:11])
    assert regard.observe(*inputs, want=regard.Want(pairs=[])).pairs.shape == (B, H, 0)


@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        ([(0, 37)], ValueError, r"names the pair \(0, 37\), and the call has 13 queries and 37 keys"),
        ([(-14, 0)], ValueError, "names the pair"),
        ([(0.5, 1.0)], TypeError, "numbers of torch.float32"),
        ([(0, 1, 2)], ValueError, r"\[n, 2\], got \[1, 3\]"),
        ("all", TypeError, "got str"),
    ],
)
def test_pairs_that_are_none_are_refused(pairs: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        regard.observe(*tensors(B, H, G, L, S), want=regard.Want(pairs=pairs))


def relations_by_hand(weights: np.ndarray, allowed: np.ndarray, tokens: np.ndarray, offsets: list[int]) -> np.ndarray:
    found = np.full((*weights.shape[:3], len(statistics.RELATIONS)), np.nan)
    for b, h, row in np.ndindex(weights.shape[:3]):
        t, i = tokens[b % len(tokens)], row + offsets[b]

        def at(place: int, t: np.ndarray = t) -> int | None:
            return int(t[place]) if 0 <= place < len(t) else None

        keys: dict[str, list[int]] = {name: [] for name in statistics.RELATIONS[:5]}
        for j in np.flatnonzero(allowed[b, h, row]).tolist():
            keys["previous"] += [j] * (j == i - 1)
            keys["next"] += [j] * (j == i + 1)
            keys["duplicate"] += [j] * (at(i) == at(j) and j != i)
            keys["induction"] += [j] * (j > 0 and at(i) == at(j - 1) and j - 1 != i)
            keys["copying"] += [j] * (at(i + 1) == at(j) and j != i + 1)
        for n, some in enumerate(keys.values()):
            if some:
                found[b, h, row, n] = weights[b, h, row, some].sum()
        if keys["copying"]:
            found[b, h, row, 5] = float(weights[b, h, row].argmax() in keys["copying"])
    return found


@each_call
def test_relations_are_the_weight_on_keys_in_that_relation(given: dict[str, Any]) -> None:
    check_relations(tensors(B, H, G, L, S), given)


def check_relations(inputs: tuple[Tensor, Tensor, Tensor], given: dict[str, Any]) -> None:
    items, rows, keys = inputs[0].shape[0], inputs[0].shape[2], inputs[1].shape[2]
    tokens = torch.randint(0, 5, (items, keys), generator=torch.Generator().manual_seed(6))
    seen = regard.observe(*inputs, want=regard.Want(scores=tokens), **given)
    weights, allowed = exact_weights(inputs, given)
    offset = given.get("query_offset", keys - rows)
    offsets = offset.tolist() if isinstance(offset, Tensor) else [offset] * items
    expected = relations_by_hand(weights, allowed, tokens.numpy(), offsets)
    assert differ(seen.relations, expected) < 1e-12
    alone = regard.observe(*inputs, want=regard.Want(scores=True), **given).relations
    assert differ(alone, expected[..., :2]) < 1e-12


def test_tokens_that_do_not_fit_the_keys_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has tokens \[36\], and the call has 2 items of 37 keys"):
        regard.observe(*tensors(B, H, G, L, S), want=regard.Want(scores=torch.zeros(36, dtype=torch.int64)))
    with pytest.raises(TypeError, match="tokens as integers"):
        regard.Want(scores="the cat")


@pytest.mark.parametrize("given", [{}, {"mask": masks.causal()}], ids=["plain", "causal"])
def test_so_many_keys_that_rows_are_taken_in_several_tiles(given: dict[str, Any]) -> None:
    inputs = tensors(1, H, G, 67, 2111)
    check_value_mass(inputs, given)
    check_relations(inputs, given)


def test_wishes_are_values() -> None:
    assert regard.Want(pairs=[(1, 2)]) == regard.Want(pairs=torch.tensor([[1, 2]]))
    assert regard.Want(pairs=[(1, 2)]) != regard.Want(pairs=[(2, 1)])
    assert regard.Want() == regard.Want() != regard.Want(value_mass=True)
    assert hash(regard.Want(scores=[1, 2])) == hash(regard.Want(scores=[1, 2]))


def test_the_plan_counts_what_the_new_statistics_take() -> None:
    inputs = tensors(B, H, G, L, S)
    plain, more = (regard.explain(*inputs, want=want).cost.peak_bytes for want in (WANT.usual, WANT))
    assert more > plain
    assert "torch operations" in str(regard.explain(*inputs, want=WANT))


def dense(inputs: tuple[Tensor, Tensor, Tensor], given: dict[str, Any], n: int) -> dict[str, Tensor]:
    """Entropy, key mass (of queries 2 … −2) and first mass by plain operations on the whole matrix."""
    query, key, _ = inputs
    logits = query @ key.repeat_interleave(H // G, 1).transpose(-2, -1) * given.get("scale", query.shape[-1] ** -0.5)
    if "softcap" in given:
        logits = torch.tanh(logits / given["softcap"]) * given["softcap"]
    if "bias" in given:
        logits = logits + given["bias"]
    if "mask" in given:
        offset = given.get("query_offset", S - L)
        permitted = given["mask"].tile(range(L), range(S), L, S, offset=offset)
        logits = logits.masked_fill(~permitted, -torch.inf)
    logits = logits.expand(B, H, L, S)
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    logits = logits.masked_fill(empty, 0.0)
    if "sinks" in given:
        logits = torch.cat([logits, given["sinks"].view(1, H, 1, 1).expand(B, H, L, 1)], -1)
    p = logits.softmax(-1)[..., :S].masked_fill(empty, 0.0)
    entropy = -(p * p.masked_fill(p == 0, 1.0).log()).sum(-1)
    return {"entropy": entropy, "key_mass": p[:, :, 2:-1].sum(2), "first_mass": p[..., :n].sum(-1)}


TRAINED: list[dict[str, Any]] = [
    {},
    {"mask": masks.causal()},
    {"mask": masks.padding([0, 30]) & masks.window(left=4)},
    {"mask": every_mask(B, H, L, S)["keep by head"]},
    {"mask": masks.strided(3)},
    *(given for given in MODIFIERS if not isinstance(given.get("bias"), bias.Bias)),
]


@pytest.mark.parametrize("names", [("entropy",), ("key_mass",), ("first_mass",), ("entropy", "key_mass", "first_mass")])
@pytest.mark.parametrize("given", TRAINED, ids=lambda given: "+".join(given) or "plain")
def test_gradients_through_statistics_are_those_of_the_dense_computation(
    given: dict[str, Any], names: tuple[str, ...]
) -> None:
    inputs = tuple(tensor.requires_grad_() for tensor in tensors(B, H, G, L, S))
    given = {n: t.clone().requires_grad_() if n in ("bias", "sinks") else t for n, t in given.items()}
    learned = [*inputs[:2], *(given[name] for name in ("bias", "sinks") if name in given)]
    want = regard.Want(first=3, queries=slice(2, -1))
    seen = regard.observe(*inputs, want=want, differentiable=True, **given)
    expected = dense(inputs, given, 3)
    losses = []
    for found in ({name: getattr(seen, name) for name in names}, {name: expected[name] for name in names}):
        draw = torch.Generator().manual_seed(7)
        loss = torch.zeros((), dtype=torch.float64)
        for part in found.values():
            weight = torch.randn(part.shape, generator=draw, dtype=torch.float64)
            loss = loss + (torch.nan_to_num(part) * weight).sum() + (torch.nan_to_num(part) ** 2).sum()
        losses.append(loss)
    assert abs((losses[0] - losses[1]).item()) < 1e-9
    for mine, exact in zip(*(torch.autograd.grad(loss, learned) for loss in losses), strict=True):
        assert differ(mine, torch.nan_to_num(exact)) < 1e-11


@pytest.mark.parametrize("names", [("entropy",), ("key_mass",), ("first_mass",), ("entropy", "key_mass", "first_mass")])
@pytest.mark.parametrize("given", TRAINED, ids=lambda given: "+".join(given) or "plain")
def test_gradients_through_statistics_as_those_of_an_attention_call(
    given: dict[str, Any], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of a GPU, for calls that can go it."""
    plain = not given.keys() & {"bias", "softcap", "sinks"}
    used = forced.statistics_by_attention(monkeypatch, always=False)
    test_gradients_through_statistics_are_those_of_the_dense_computation(given, names)
    assert bool(used) == plain


def test_a_rule_as_bias_is_trained_on_through_its_table() -> None:
    query, key, value = tensors(B, H, G, L, S)
    rule = bias.T5Bias(H).double()
    entropy = regard.observe(query, key, value, bias=rule, differentiable=True).entropy
    exact = dense(
        (query, key, value), {"bias": rule.tile(range(L), range(S), L, S, offset=S - L, dtype=torch.float64)}, 1
    )
    for mine, theirs in zip(
        torch.autograd.grad(entropy.sum(), list(rule.parameters())),
        torch.autograd.grad(exact["entropy"].sum(), list(rule.parameters())),
        strict=True,
    ):
        assert float(theirs.abs().max()) > 0
        assert differ(mine, theirs) < 1e-11


def test_gradients_of_statistics_do_not_meet_what_is_hidden() -> None:
    query, key, value = tensors(B, H, G, L, S)
    mask = masks.keep(torch.arange(S) != 20)
    found = []
    for poison in (0.0, torch.nan):
        key = key.detach().clone()
        key[:, :, 20] = poison
        query, key = query.detach().requires_grad_(), key.requires_grad_()
        seen = regard.observe(query, key, value, mask=mask, differentiable=True)
        found.append(torch.autograd.grad((seen.entropy**2).sum() + (seen.key_mass**2).sum(), (query, key)))
    for clean, poisoned in zip(*found, strict=True):
        assert differ(clean, poisoned) < 1e-12


def test_an_entropy_penalty_changes_what_a_layer_learns() -> None:
    torch.manual_seed(0)
    query = torch.randn(1, 2, 11, 5, requires_grad=True)
    key, value = torch.randn(1, 2, 11, 5), torch.randn(1, 2, 11, 5)
    before = regard.observe(query, key, value).entropy.mean()
    for _ in range(20):
        loss = regard.observe(query, key, value, differentiable=True).entropy.mean()
        (step,) = torch.autograd.grad(loss, query)
        query = (query - 50.0 * step).detach().requires_grad_()
    assert regard.observe(query, key, value).entropy.mean() < 0.5 * before


@pytest.mark.parametrize("name", ["entropy", "key_mass", "first_mass"])
def test_a_second_derivative_of_statistics_is_refused(name: str) -> None:
    inputs = tensors(B, H, G, L, S)
    seen = regard.observe(inputs[0].requires_grad_(), *inputs[1:], want=regard.Want(first=2), differentiable=True)
    statistic = getattr(seen, name).nansum()  # linear in it: torch would take the gradient for a constant
    other = inputs[0].sin().sum()
    (found,) = torch.autograd.grad(statistic + other, inputs[0], create_graph=True)
    with pytest.raises(regard.Refused, match=r"differentiable=True\) has no second derivative"):
        torch.autograd.grad(found.sum(), inputs[0])
    (plain,) = torch.autograd.grad(
        getattr(regard.observe(*inputs, want=regard.Want(first=2), differentiable=True), name).nansum(), inputs[0]
    )
    assert differ(found.detach(), plain + inputs[0].detach().cos()) < 1e-12


def test_gradients_of_other_terms_may_be_differentiated_again() -> None:
    query, key, value = (each.requires_grad_() for each in tensors(B, H, G, L, S))
    free = torch.randn(3, dtype=query.dtype, requires_grad=True)
    loss = regard.observe(query, key, value, differentiable=True).key_mass.sum() * 0.5 + (free**3).sum()
    _, of_free = torch.autograd.grad(loss, (query, free), create_graph=True)
    (twice,) = torch.autograd.grad(of_free.sum(), free)
    assert torch.equal(twice, 6 * free)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("of_mass", ["common to all keys", "larger than half precision holds"])
def test_half_precision_gradients_by_fused_kernels(
    dtype: torch.dtype, of_mass: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are on a GPU: as exact as by tiles, whatever the size of what comes in."""
    torch.manual_seed(3)
    shape = (1, 2, 64, 64)
    inputs = [torch.randn(shape).to(dtype) for _ in range(3)]
    grad = torch.randn(1, 2, 64) + 50 if of_mass == "common to all keys" else 131_072 * torch.rand(1, 2, 64)

    def found(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves = [tensor.requires_grad_() for tensor in tensors]
        mass = regard.observe(*leaves, mask=masks.causal(), differentiable=True).key_mass
        return torch.autograd.grad(mass, leaves[:2], grad.to(mass.dtype))

    exact = found([tensor.double() for tensor in inputs])
    forced.statistics_by_attention(monkeypatch)
    for one, other in zip(found(inputs), exact, strict=True):
        assert (one.double() - other).norm() < 4 * torch.finfo(dtype).eps * other.norm()


def test_a_mask_that_changes_before_the_gradients_are_asked_for_is_noticed() -> None:
    query, key, value = tensors(B, H, G, L, S)
    lengths = torch.full((B,), 3)
    seen = regard.observe(query.requires_grad_(), key, value, mask=masks.padding(lengths), differentiable=True)
    lengths += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        seen.entropy.sum().backward()


def test_only_what_was_asked_for_can_be_trained_on() -> None:
    inputs = tensors(B, H, G, L, S)
    with pytest.raises(ValueError, match="want asks for none of them"):
        regard.observe(*inputs, want=regard.Want.none(), differentiable=True)
    seen = regard.observe(inputs[0].requires_grad_(), *inputs[1:], want=regard.Want(first=2), differentiable=True)
    assert seen.entropy.requires_grad and seen.key_mass.requires_grad and seen.first_mass.requires_grad
    assert not seen.map.requires_grad and not seen.max_weight.requires_grad
    assert not regard.observe(*inputs).entropy.requires_grad


LONG = 4096
WHOLE = 4 * LONG * LONG  # bytes of one head's matrix of weights


@pytest.mark.parametrize(
    "want",
    [
        regard.Want.none().but(value_mass=True, map=(64, 64), top_k=4),
        regard.Want.none().but(scores=torch.arange(LONG) % 97),
        regard.Want.none().but(pairs=torch.randint(0, LONG, (5000, 2))),
    ],
    ids=["value mass", "scores", "pairs"],
)
def test_no_whole_matrix_is_made(want: regard.Want) -> None:
    inputs = [torch.randn(1, 1, LONG, 8) for _ in range(3)]
    assert peak_bytes(lambda: regard.observe(*inputs, mask=masks.causal(), want=want)) < WHOLE // 2


def test_no_whole_matrix_is_made_for_gradients_and_effects() -> None:
    query, key, value = (torch.randn(1, 1, LONG, 8, requires_grad=True) for _ in range(3))

    def penalty() -> None:
        seen = regard.observe(
            query, key, value, mask=masks.causal(), want=regard.Want(map=None, top_k=0), differentiable=True
        )
        torch.autograd.grad(seen.entropy.sum() + seen.key_mass.square().sum(), (query, key))

    assert peak_bytes(penalty) < WHOLE // 2
    call = prepare(*(t.detach() for t in (query, key, value)), masks.causal(), None, None, None, None, 0.0, None)
    lse = regard.observe(query, key, value, mask=masks.causal(), want=regard.Want.none()).lse
    assert peak_bytes(lambda: edge_effects(call, lse, value.detach(), (64, 64), 20)) < WHOLE // 2
    rows = torch.rand(1, 3, LONG)
    assert peak_bytes(lambda: weighted_key_mass(call, lse, rows)) < WHOLE // 2


def test_where_kernels_observe_the_rest_is_computed_next_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the kernels fold what they have, and say so when asked for what they have not."""
    inputs = tensors(B, H, G, L, S)
    want = WANT.but(scores=torch.arange(S) % 5, pairs=[(3, 4)], first=2)
    expected = regard.observe(*inputs, want=want)
    asked: list[regard.Want] = []

    def by_kernels(call: Any, lse: Tensor, wanted: regard.Want) -> dict[str, Tensor]:
        asked.append(wanted)
        return _rows.observe_rows(call, lse, wanted)

    forced.statistics_by_kernels(monkeypatch, by_kernels, 1000)
    seen = regard.observe(*inputs, want=want)
    assert asked == [want.usual] and not want.usual.asks_unusual
    for name in (*NAMES_OF_ALL, "pairs", "relations", "value_mass", "value_sum", "value_map", "value_top_keys"):
        assert torch.equal(getattr(seen, name).nan_to_num(-1), getattr(expected, name).nan_to_num(-1)), name
    assert "value mass, pairs and scores by torch operations" in str(seen.plan)
    assert seen.plan.cost.peak_bytes > 1000


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_and_lengths_in_every_precision_are_as_near_as_plain_arithmetic(
    dtype: torch.dtype, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fused:
        forced.statistics_by_attention(monkeypatch)
    query, key, value = (t.to(dtype) for t in tensors(B, H, G, L, S))
    exact = tuple(t.double().requires_grad_() for t in (query, key, value))
    plain = tuple(t.clone().requires_grad_() for t in (query, key, value))
    given: dict[str, Any] = {"mask": masks.causal()}
    want = regard.Want(first=3, queries=slice(2, -1), value_mass=True)
    mine = tuple(t.clone().requires_grad_() for t in (query, key, value))
    seen = regard.observe(*mine, want=want, differentiable=True, **given)
    assert seen.entropy.dtype == seen.value_mass.dtype == torch.float32
    assert differ(seen.value_length, value.double().norm(dim=-1).repeat_interleave(H // G, 1)) < 1e-5
    losses = [dense(inputs, given, 3)["entropy"].sum() for inputs in (exact, plain)] + [seen.entropy.sum()]
    truth, naive, found = (
        torch.autograd.grad(loss, inputs[:2]) for loss, inputs in zip(losses, (exact, plain, mine), strict=True)
    )
    for right, usual, ours in zip(truth, naive, found, strict=True):
        assert ours.dtype == dtype
        assert differ(ours, right) <= 3 * differ(usual, right) + 1e-5  # what rule 28 allows gradients
