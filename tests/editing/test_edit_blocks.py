"""What a block of `regard.edit` promises: it nests, is undone however it ends, says what it did, and never misses."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from tests.editing.by_hand import IDS, model_of, run
from tests.watching.models import ByHand, Stack
from torch import Tensor, nn

import regard
from regard import edits, masks

X = torch.randn(2, 7, 21, generator=torch.Generator().manual_seed(1))
WEIGHTS = regard.Want(weights="all")


def small() -> Stack:
    torch.manual_seed(4)
    return Stack(ByHand(), ByHand(is_causal=True))


@pytest.mark.parametrize("how", ["sdpa", "eager"])
@torch.no_grad()
def test_a_watch_records_what_really_ran_in_either_order(how: str) -> None:
    model = model_of("llama")
    with regard.edit(model, edits.cut(keys=2), layers=[1]), regard.watch(model, want=WEIGHTS) as inner:
        one = run(model, how=how)
    with regard.watch(model, want=WEIGHTS) as outer, regard.edit(model, edits.cut(keys=2), layers=[1]):
        other = run(model, how=how)
    with regard.watch(model, want=WEIGHTS) as plain:
        run(model, how=how)
    assert torch.equal(one, other) and not inner.missed and not outer.missed
    for recording in (inner, outer):
        assert [call.layer for call in recording] == [0, 1]
        assert [str(site) for site in recording.sites] == [str(site) for site in plain.sites]
        assert torch.equal(recording.calls[0].weights, plain.calls[0].weights)
        weights = recording.calls[1].weights
        assert (weights[..., 2] == 0).all() and (plain.calls[1].weights[..., 2] > 0).any()
        expected = plain.calls[1].weights.index_fill(-1, torch.tensor(2), 0.0)
        torch.testing.assert_close(weights, expected / expected.sum(-1, keepdim=True), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_several_blocks_are_one_list() -> None:
    model = small()
    first, second = edits.cut(keys=0), edits.steer(3, 2.0)
    with regard.edit(model, [first, second]):
        expected = model(X)
    with regard.edit(model, first), regard.edit(model, second):
        one = model(X)
    with regard.edit(model, second), regard.edit(model, first):
        other = model(X)
    torch.testing.assert_close(one, expected)
    torch.testing.assert_close(other, expected)
    assert (expected - model(X)).abs().max() > 1e-3


@torch.no_grad()
def test_the_model_is_as_it_was_however_the_block_ends() -> None:
    model = small()
    plain, hooks = model(X), [len(module._forward_hooks) for module in model.modules()]
    attend = torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(KeyError), regard.edit(model, edits.ablate("zero")):
        model(X)
        raise KeyError
    with pytest.raises(edits.CannotEdit, match="no token"), regard.edit(model, edits.cut(keys="cat")):
        raise edits.CannotEdit("no token")
    assert torch.equal(model(X), plain)
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert torch.nn.functional.scaled_dot_product_attention is attend
    assert torch.overrides._get_current_function_mode() is None


@torch.no_grad()
def test_other_models_and_other_threads_are_left_alone() -> None:
    model, other = small(), small()
    plain, found = other(X), []
    with regard.edit(model, edits.ablate("zero")):
        assert not torch.equal(model(X), plain)
        assert torch.equal(other(X), plain)
        thread = threading.Thread(target=lambda: found.append(other(X)))
        thread.start()
        thread.join()
        attended = torch.nn.functional.scaled_dot_product_attention(X, X, X)
    assert torch.equal(found[0], plain)
    assert torch.equal(attended, torch.nn.functional.scaled_dot_product_attention(X, X, X))


def test_a_copy_that_is_made_in_the_block_has_no_edit() -> None:
    model = small()
    plain = model(X)
    with regard.edit(model, edits.ablate("zero")):
        model(X)
        other = copy.deepcopy(model)
    assert torch.equal(other(X), plain)


@torch.no_grad()
def test_a_compiled_model_is_edited_as_the_plain_one() -> None:
    model = small()
    with regard.edit(model, edits.cut(keys=1)):
        expected = model(X)
    compiled: Any = torch.compile(model, backend="eager")
    plain = compiled(X)
    with regard.edit(compiled, edits.cut(keys=1)):
        out = compiled(X)
    torch.testing.assert_close(out, expected)
    assert torch.equal(compiled(X), plain)


@torch.no_grad()
def test_what_an_edit_does_is_never_compiled() -> None:
    """The edited module is the one inside: torch's compiler then takes apart every function that is called below it."""
    model, graphs = small(), []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled: Any = torch.compile(model, backend=backend)
    compiled(X)
    graphs.clear()
    with regard.edit(model, [edits.cut(keys=1), edits.steer(2, 0.7)]):
        out = compiled(X)
    assert not graphs
    with regard.edit(model, [edits.cut(keys=1), edits.steer(2, 0.7)]):
        torch.testing.assert_close(out, model(X))


@torch.no_grad()
def test_the_report_says_what_was_changed() -> None:
    model = small()
    with regard.edit(model, edits.cut(keys=[0, 2]), heads={1: [2], "layers.0": [0, 1]}) as report:
        assert repr(report) == "cut(keys=[0, 2]): changed nothing yet"
        model(X)
        model(X)
    assert report.heads == [(0, 0), (0, 1), (1, 2)] and report.layers == [0, 1]
    assert [(call.path, call.number, call.kind) for call in report] == [
        ("layers.0", 0, "self"), ("layers.1", 0, "self"), ("layers.0", 1, "self"), ("layers.1", 1, "self"),
    ]  # fmt: skip
    assert str(report) == "cut(keys=[0, 2]): changed 4 calls, layers 0, 1, 3 heads"


def test_layers_and_heads_that_are_not_there_are_refused() -> None:
    model = small()
    with (
        pytest.raises(ValueError, match=r"layers=\[2\] were asked for, and the layers that attend are 0 … 1"),
        regard.edit(model, edits.ablate("zero"), layers=[0, 2]),
    ):
        model(X)
    with (
        pytest.raises(ValueError, match=r"heads=\[3\] were asked for, and layers.0 \(layer 0\) has 3 heads"),
        regard.edit(model, edits.ablate("zero"), heads=[3]),
    ):
        model(X)
    with (
        pytest.raises(ValueError, match="'layers.7', and the model has no module of that path; the nearest"),
        regard.edit(model, edits.ablate("zero"), layers=["layers.7"]),
    ):
        pass
    with (
        pytest.raises(ValueError, match="layers is given together with heads by layer"),
        regard.edit(model, edits.ablate("zero"), layers=[0], heads={0: [1]}),
    ):
        pass
    with (
        pytest.raises(TypeError, match="edits must be a value of regard.edits"),
        regard.edit(model, masks.causal()),  # type: ignore[arg-type]
    ):
        pass
    with (
        pytest.raises(ValueError, match="empty list"),
        regard.edit(model, []),
    ):
        pass
    with (
        pytest.raises(TypeError, match="model must be a torch.nn.Module, got str"),
        regard.edit("model", edits.ablate("zero")),  # type: ignore[arg-type]
    ):
        pass


def test_an_edit_that_changed_nothing_raises() -> None:
    model = small()
    with pytest.raises(edits.CannotEdit, match="the model did not run"), regard.edit(model, edits.ablate("zero")):
        pass
    linear = nn.Linear(21, 3)
    with pytest.raises(edits.CannotEdit, match="made no attention call"), regard.edit(linear, edits.cut(keys=0)):
        linear(X)
    with (
        pytest.raises(edits.CannotEdit, match=r"changed nothing in 2 calls: no call had these queries and keys"),
        regard.edit(model, edits.cut(keys=7)),
    ):
        model(X)


def test_tokens_by_their_text() -> None:
    model = small()
    tokens = [["The", " cat", " sat", " on", " the", " mat", "."], ["A", " dog", " sat", " by", " a", " cat", "."]]
    with (
        regard.edit(model, edits.cut(keys="cat", queries=["."]), layers=[0], tokens=tokens),
        regard.watch(model, want=WEIGHTS, layers=[0]) as recording,
    ):
        model(X)
    weights = recording.calls[0].weights
    gone = (weights == 0).any(1).nonzero().tolist()
    assert gone == [[0, 6, 1], [1, 6, 5]]
    with (
        pytest.raises(ValueError, match="keys names the token 'catt', which is not among the tokens; the nearest"),
        regard.edit(model, edits.cut(keys="catt"), tokens=tokens),
    ):
        model(X)
    with (
        pytest.raises(edits.CannotEdit, match="the tokens are not known: pass regard.edit"),
        regard.edit(model, edits.cut(keys="cat")),
    ):
        model(X)


@torch.no_grad()
def test_tokens_of_a_tokenizer() -> None:
    class Tokenizer:
        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [f"Ġ{n}" for n in ids]

    model = model_of("gpt2")
    with (
        regard.edit(model, edits.cut(keys=["26", "7"]), tokenizer=Tokenizer()) as report,
        regard.watch(model, want=WEIGHTS) as recording,
    ):
        run(model)
    weights = recording.calls[0].weights
    assert (weights[0, :, :, 4] == 0).all() and (weights[1, :, :, 2] == 0).all() and len(report) == 2
    assert IDS[0, 4] == 26 and IDS[1, 2] == 7


# It may not miss


class Written(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(1, 2)).softmax(-1) @ x


class Query(nn.Module):
    def __init__(self, inner: nn.MultiheadAttention) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, x, x)[0]


class Fused(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("kind", [Written, Fused])
@torch.no_grad()
def test_attention_inside_torchscript_raises(kind: type[nn.Module]) -> None:
    model = nn.Sequential(torch.jit.script(kind()))
    with (
        pytest.raises(edits.CannotEdit, match=r"\(layer 0\) cannot be edited"),
        regard.edit(model, edits.ablate("zero")),
    ):
        model(X[:, :, :4])


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::torch.jit.TracerWarning")
@torch.no_grad()
def test_a_reason_is_given_once_and_in_words() -> None:
    inner = nn.MultiheadAttention(8, 2).eval()
    model = nn.Sequential(torch.jit.trace(Query(inner), torch.randn(3, 1, 8)))
    with pytest.raises(edits.CannotEdit) as raised, regard.edit(model, edits.ablate("zero")):
        model(torch.randn(3, 1, 8))
    said = str(raised.value)
    assert said.count("cannot be edited") == 1 and "a function that cannot be taken apart" in said


@torch.no_grad()
def test_a_foreign_kernel_behind_hugging_faces_interface_raises() -> None:
    from transformers import AttentionInterface

    def kernel(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
        return query.transpose(1, 2).contiguous(), None

    AttentionInterface.register("foreign_kernel", kernel)
    model = model_of("gpt2")
    with (
        pytest.raises(edits.CannotEdit, match=r"transformer.h.0.attn \(layer 0\) cannot be edited.*'sdpa' or 'eager'"),
        regard.edit(model, edits.ablate("zero")),
    ):
        run(model, how="foreign_kernel")
    with regard.edit(model, edits.ablate("zero")):
        run(model, how="sdpa")


def test_gradient_checkpointing_raises() -> None:
    model = model_of("llama")
    # newer versions of transformers have another name for it
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model.train()
    try:
        with (
            pytest.raises(edits.CannotEdit, match="gradient checkpointing runs it again in the backward pass"),
            regard.edit(model, edits.cut(keys=0)),
        ):
            model(input_ids=IDS, use_cache=False)
    finally:
        getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
        model.eval()


def test_a_transform_of_torch_func_raises() -> None:
    model = small()
    with (
        pytest.raises(edits.CannotEdit, match=r"inside a torch\.func transform"),
        regard.edit(model, edits.cut(keys=0)),
    ):
        torch.vmap(lambda x: model(x[None])[0])(X)


def test_weights_that_are_mixed_across_heads_raise() -> None:
    class Talking(nn.Module):
        num_heads = 3

        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(3, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            q = x.unflatten(-1, (3, 7)).transpose(1, 2)
            weights = self.mix((q @ q.mT).softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            return (weights @ q).transpose(1, 2).flatten(2)

    model = Talking()
    with pytest.raises(edits.CannotEdit, match="mixed across heads"), regard.edit(model, edits.cut(keys=0)):
        model(X)
