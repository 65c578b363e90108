"""What an edit would do only in part, or not at all, is refused with the argument that says so."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.editing.by_hand import IDS, model_of, run
from tests.watching.models import ByHand, Stack
from torch import Tensor, nn

import regard
from regard import edits, masks
from regard.cli.acting import typed

X = torch.randn(2, 7, 21, generator=torch.Generator().manual_seed(1))
ZERO = edits.ablate("zero")


def small() -> Stack:
    torch.manual_seed(4)
    return Stack(ByHand(), ByHand(is_causal=True))


class WritesOut(nn.Module):
    """Causal attention of three heads, by hand; ``after`` masks the weights and not the logits."""

    def __init__(self, after: bool = False) -> None:
        super().__init__()
        self.after, self.qkv, self.num_heads = after, nn.Linear(21, 63), 3

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (3, 7)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        logits = q @ k.transpose(-1, -2)
        if self.after:
            weights = logits.softmax(-1).masked_fill(later, 0.0)
        else:
            weights = logits.masked_fill(later, -torch.inf).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ({"heads": []}, ValueError, "heads is an empty list"),
        ({"heads": {0: []}}, ValueError, "heads is an empty list"),
        ({"heads": {}}, ValueError, "heads is an empty mapping"),
        ({"layers": []}, ValueError, "layers is an empty list"),
        ({"heads": [True]}, TypeError, r"heads must be a list of head numbers, got \[True\]"),
        ({"heads": {0: [False]}}, TypeError, "heads must be a list of head numbers"),
        ({"layers": [True]}, TypeError, r"layers must be a list of layer numbers or module paths, got \[True\]"),
        ({"heads": {True: [0]}}, TypeError, "layers must be a list of layer numbers"),
        ({"layers": {1: [0]}}, TypeError, r"layers must be a list of layer numbers .* got \{1: \[0\]\}"),
        ({"heads": torch.tensor([1.0])}, TypeError, "heads must be a list of head numbers"),
        ({"heads": torch.tensor([True])}, TypeError, "heads must be a list of head numbers"),
        ({"heads": torch.tensor(1)}, TypeError, "heads must be a list of head numbers"),
        ({"heads": 1.5}, TypeError, "heads must be a list of head numbers, got 1.5"),
        ({"layers": [-1]}, ValueError, r"layers=\[-1\]: .* do not count from the end"),
        ({"layers": ["layers.0", "layers"]}, ValueError, r"layers=\['layers'\] .* made no attention call; those that"),
    ],
)
def test_layers_and_heads_that_name_nothing_are_refused(where: dict[str, Any], error: type, message: str) -> None:
    model = small()
    with pytest.raises(error, match=message), regard.edit(model, ZERO, **where):
        model(X)


def test_heads_and_layers_are_taken_from_integer_tensors() -> None:
    model = small()
    with regard.edit(model, ZERO, layers=torch.tensor([1]), heads=torch.tensor([0, -1])) as report:  # type: ignore[arg-type]
        model(X)
    assert report.heads == [(1, 0), (1, 2)]
    with regard.edit(model, ZERO, heads={0: torch.tensor([1])}) as report:  # type: ignore[dict-item]
        model(X)
    assert report.heads == [(0, 1)]
    with regard.watch(model, heads=torch.tensor([2]), layers=torch.tensor([0])) as recording:  # type: ignore[arg-type]
        model(X)
    assert [call.heads for call in recording] == [(2,)]


@pytest.mark.parametrize("first", [True, False])
def test_an_edit_of_a_list_that_changed_nothing_is_named(first: bool) -> None:
    model, idle = small(), edits.cut(keys=99)
    given: list[Any] = [idle, ZERO] if first else [ZERO, idle]
    with (
        pytest.raises(
            edits.CannotEdit, match=r"^cut\(keys=99\) changed nothing, where other edits of the list did: no"
        ),
        regard.edit(model, given),
    ):
        model(X)
    with regard.edit(model, given):  # the second pass has so many tokens
        model(X)
        model(torch.randn(1, 101, 21))


def causal(kind: str) -> tuple[Any, Any]:
    """A causal model and what it is given."""
    if kind in ("sdpa", "eager"):
        return model_of("llama"), lambda model: run(model, how=kind)
    torch.manual_seed(4)
    made = {"is_causal": ByHand(is_causal=True), "written out": WritesOut(), "own": Own()}
    return made[kind], lambda model: model(X)


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (3, 7)).transpose(1, 2)
        return regard.attention(x, x, x, mask=masks.causal()).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("kind", ["is_causal", "written out", "own", "sdpa", "eager"])
@torch.no_grad()
def test_a_cut_of_edges_that_a_causal_model_does_not_have_changed_nothing(kind: str) -> None:
    model, forward = causal(kind)
    for nothing in (edits.cut(queries=0, keys=5), edits.cut(queries=slice(0, 3), keys=[3, 6])):
        with pytest.raises(edits.CannotEdit, match="with an edge between them"), regard.edit(model, nothing):
            forward(model)
    plain = forward(model)
    with regard.edit(model, edits.cut(queries=[0, 5], keys=[2, 6])) as report:  # 5 → 2 is there
        assert not torch.equal(forward(model), plain)
    assert len(report) == (2 if kind in ("sdpa", "eager") else 1)


@pytest.mark.parametrize("kind", ["is_causal", "written out", "own", "sdpa", "eager"])
@torch.no_grad()
def test_blocks_that_cut_the_same_edge_both_did(kind: str) -> None:
    model, forward = causal(kind)
    one = edits.cut(queries=5, keys=2)
    with regard.edit(model, one):
        expected = forward(model)
    with regard.edit(model, one) as outer, regard.edit(model, one) as inner:
        found = forward(model)
    torch.testing.assert_close(found, expected)
    assert len(outer) == len(inner) > 0


@torch.no_grad()
def test_a_cut_is_counted_where_a_zero_does_not_mean_that_the_edge_was_missing() -> None:
    torch.manual_seed(4)
    model = WritesOut(after=True)
    plain = model(X)
    with regard.edit(model, edits.cut(queries=0, keys=5)):
        assert not torch.equal(model(X), plain)  # 5 had a share of the softmax, which the others get
    open_model, both = ByHand(), ByHand(is_causal=True)
    both.load_state_dict(open_model.state_dict())
    with regard.watch(open_model, keep=("pattern",)) as recording:
        expected = open_model(X)
    with regard.edit(both, [edits.patch(recording, "pattern"), edits.cut(queries=0, keys=5)]):
        found = both(X)  # the edge comes with the pattern
    assert not torch.allclose(found[:, 0], expected[:, 0]) and torch.allclose(found[:, 1:], expected[:, 1:], atol=1e-6)


@torch.no_grad()
def test_another_thread_that_runs_the_edited_model_is_told() -> None:
    model, raised = small(), []

    def elsewhere() -> None:
        try:
            model(X)
        except edits.CannotEdit as error:
            raised.append(str(error))

    with regard.edit(model, ZERO):
        model(X)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert len(raised) == 1 and "runs on another thread than the one that opened the edit" in raised[0]


@torch.no_grad()
def test_a_budget_holds_its_first_tokens() -> None:
    with pytest.raises(ValueError, match="first=9 is more than budget=4, which includes them"):
        edits.keep("recent", budget=4, first=9)
    with pytest.raises(ValueError, match="first=9 is more than budget=4"):
        edits.keep("key_mass", budget=4, first=9)
    model, weights = model_of("llama"), regard.Want(weights="all")
    model.set_attn_implementation("sdpa")
    with regard.edit(model, edits.keep("recent", budget=3, first=3)), regard.watch(model, want=weights) as recording:
        cache = model(input_ids=IDS[:, :5], use_cache=True).past_key_values
        for n in (5, 6):
            cache = model(input_ids=IDS[:, n : n + 1], past_key_values=cache, use_cache=True).past_key_values
    seen = (recording.calls[-1].weights > 0).any(0).any(0)[0].tolist()
    assert seen == [True] * 3 + [False] * 3 + [True]  # the first three and the token itself


def test_a_seed_is_an_int() -> None:
    for seed in ("a", 1.5, True, None):
        with pytest.raises(TypeError, match="seed must be an int, got"):
            edits.ablate("resample", seed=seed)  # type: ignore[arg-type]


def test_a_typed_cut_has_one_arrow() -> None:
    with pytest.raises(ValueError, match="'it>cat>dog' has more than one '>'; expected KEYS or QUERIES>KEYS"):
        typed(["it>cat>dog"], [])
    for text, expected in {
        "it>cat": edits.cut(queries="it", keys="cat"),
        '">">1': edits.cut(queries=">", keys=1),
        'it>"a>b"': edits.cut(queries="it", keys="a>b"),
        "2>": edits.cut(queries=2),
        ">0:4": edits.cut(keys=slice(0, 4)),
    }.items():
        assert typed([text], [])[0].edit == expected
    with pytest.raises(ValueError, match="names no tokens"):
        typed([">"], [])
