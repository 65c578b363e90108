"""Rule 67: a watched model's outputs have the bits of the unwatched one's, and nobody else's model is changed."""

from __future__ import annotations

import copy
import io
import threading
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.watching.models import ByHand, Stack, check_statistics, dense
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils._python_dispatch import TorchDispatchMode

import regard

X = torch.randn(2, 11, 24, generator=torch.Generator().manual_seed(3))
PADDING = torch.zeros(2, 11, dtype=torch.bool)
PADDING[1, 7:] = True
nested = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet() -> None:
    torch._dynamo.reset()  # what other tests compiled counts towards torch's limits


def encoder(**more: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 4, 31, batch_first=True, **more)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not layer.norm_first).eval()


def by_hand_of(layer: nn.TransformerEncoderLayer, x: Tensor, padding: Tensor | None) -> Tensor:
    """The weights of a layer, from torch's own module."""
    x = layer.norm1(x) if layer.norm_first else x
    return layer.self_attn(x, x, x, key_padding_mask=padding, average_attn_weights=False)[1].detach()


@nested
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
def test_torchs_fused_encoder_keeps_its_path_and_its_bits_and_is_seen(padding: Tensor | None, norm_first: bool) -> None:
    model = encoder(norm_first=norm_first)
    with torch.no_grad():
        expected = model(X, src_key_padding_mask=padding)
        with regard.watch(model) as recording:
            out = model(X, src_key_padding_mask=padding)
        assert torch.equal(out, expected)
        assert recording.missed == []
        assert [call.path for call in recording] == ["layers.0.self_attn", "layers.1.self_attn"]
        weights = by_hand_of(model.layers[0], X, padding)
    check_statistics(recording.calls[0], weights, real=None if padding is None else ~padding)


@nested
def test_a_padded_encoder_that_nobody_watches_is_not_changed_here_or_on_another_thread() -> None:
    watched, other = ByHand(24, 4), encoder()
    found = []

    def run() -> None:
        with torch.no_grad():
            found.append(other(X, src_key_padding_mask=PADDING))

    run()
    with regard.watch(watched):
        watched(X)
        run()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_torchs_causal_bias_means_under_a_watch_what_it_means_without(make: Any) -> None:
    class Aligned(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, k, attn_mask=make(q.shape[2], k.shape[2]))

    model, q, k = Aligned(), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 13, 8)
    for keys in (q, k):
        expected = model(q, keys)
        with regard.watch(model) as recording:
            out = model(q, keys)
        assert torch.equal(out, expected) and recording.missed == []
        last = 0 if make is causal_upper_left else keys.shape[2] - 9
        permitted = torch.ones(9, keys.shape[2], dtype=torch.bool).tril(last)
        check_statistics(recording.calls[0], dense(q, keys, permitted))


def _counting(runs: list[int]) -> Any:
    """A compiler that changes nothing, and notes the thread of every run of what it compiled."""

    def backend(graph: Any, inputs: Any) -> Any:
        def compiled(*args: Any) -> Any:
            runs.append(threading.get_ident())
            return graph.forward(*args)

        return compiled

    return backend


def test_compiled_models_that_nobody_watches_stay_compiled_on_every_thread() -> None:
    runs: list[int] = []
    other = torch.compile(nn.Linear(24, 24), backend=_counting(runs))
    with torch.no_grad():
        other(X)
        runs.clear()
        watched = ByHand(24, 4)
        with regard.watch(watched):
            other(X)
            thread = threading.Thread(target=lambda: torch.no_grad()(other)(X))
            thread.start()
            thread.join()
            watched(X)
    assert len(set(runs)) == 2


def test_a_model_that_nobody_watches_is_compiled_for_the_first_time_inside_the_block() -> None:
    runs: list[int] = []
    other, watched = torch.compile(nn.Linear(24, 24), backend=_counting(runs)), ByHand(24, 4)
    with torch.no_grad(), regard.watch(watched) as recording:
        other(X)
        other(X[:, :3])
        watched(X)
    assert len(runs) == 2 and len(recording) == 1


def test_the_compiler_leaves_the_watch_alone_where_it_gives_up_on_a_model() -> None:
    runs: list[int] = []
    other, watched = torch.compile(nn.Linear(24, 24), backend=_counting(runs)), ByHand(24, 4)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        other(X)
        with regard.watch(watched):
            # another dtype asks for a second compilation: the model runs as it is written, its calls still looked at
            other.to(torch.float64)(X.double())
            watched(X)
    assert len(runs) == 1


def test_a_model_that_did_not_run_warns() -> None:
    with (
        pytest.warns(UserWarning, match="did not see ByHand run in the block"),
        regard.watch(ByHand(24, 4)) as recording,
    ):
        pass
    assert len(recording) == 0


@pytest.mark.parametrize("compiled_before", [True, False])
def test_a_model_inside_a_compiled_function_is_seen_or_the_watch_warns(compiled_before: bool) -> None:
    model = ByHand(24, 4)
    around = torch.compile(lambda x: model(x) + 1, backend="eager")
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if compiled_before:
            around(X)
        with regard.watch(model) as recording:
            around(X)
    # what was compiled before has no place to look at, unless torch compiles it once more
    assert len(recording) == 1 or compiled_before
    assert [str(each.message).partition(":")[0] for each in said] == [
        "regard.watch did not see ByHand run in the block"
    ] * (1 - len(recording))


def test_a_part_of_a_watched_model_that_compiles_itself_is_seen() -> None:
    class Compiles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = ByHand(24, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.compile(self.inner, backend="eager")(x)

    model = Compiles()
    with regard.watch(model) as recording:
        model(X)
    assert len(recording) == 1 and recording.missed == []


def test_a_model_compiled_in_place_is_seen_and_compiled_again_afterwards() -> None:
    model = Stack(ByHand(24, 4), ByHand(24, 4))
    expected = model(X)
    model.compile(backend="eager")
    with regard.watch(model) as recording:
        out = model(X)
    assert torch.equal(out, expected) and len(recording) == 2
    assert model._compiled_call_impl is not None


def test_a_model_is_saved_and_copied_inside_the_block_without_the_watch() -> None:
    model = Stack(ByHand(24, 4))
    with regard.watch(model) as recording:
        file = io.BytesIO()
        torch.save(model, file)
        twin = copy.deepcopy(model)
        expected = model(X)
        assert torch.equal(twin(X), expected)
    assert len(recording) == 1
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(X), expected)
    with regard.watch(loaded) as again:
        loaded(X)
    assert len(again) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("rank", [3, 4, 5])
def test_every_rank_and_mode_keeps_its_bits(mode: Any, rank: int) -> None:
    class Ranked(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    model, shape = Ranked(), (2, 3, 5, 7, 8)[-rank:]
    with mode():
        q, k = torch.randn(shape), torch.randn(shape)
        expected = model(q, k)
        with regard.watch(model) as recording:
            out = model(q, k)
    assert torch.equal(out, expected) and len(recording) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_linear_layer_of_strided_tensors_keeps_its_bits(mode: Any) -> None:
    """Which product torch runs for it depends on whether its weight wants a gradient."""
    torch.manual_seed(0)
    model = nn.Linear(8, 5)
    with mode(), pytest.warns(UserWarning, match="saw no attention"):
        given = torch.randn(3, 8, 2).transpose(1, 2)
        expected = model(given)
        with regard.watch(model):
            out = model(given)
    assert torch.equal(out, expected)


def test_gradients_inside_the_block_are_those_outside() -> None:
    model = Stack(ByHand(24, 4, is_causal=True), nn.MultiheadAttention(24, 4, batch_first=True, dropout=0.2))
    model.layers[1].forward = lambda x, f=model.layers[1].forward: f(x, x, x)[0]  # type: ignore[misc]

    def gradients() -> list[Tensor]:
        torch.manual_seed(7)
        model.zero_grad()
        model(X).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    with regard.watch(model) as recording:
        found = gradients()
    assert len(recording) == 2
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Counted(TorchDispatchMode):
    """How often each operator ran, the watch's own included."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"attn_mask": torch.ones(11, 11).tril().bool()}])
def test_the_forward_pass_of_a_fused_call_runs_once(keywords: dict[str, Any]) -> None:
    model = Stack(ByHand(24, 4, **keywords), ByHand(24, 4, **keywords))
    with torch.no_grad(), Counted() as outer, regard.watch(model) as recording:
        model(X)
    assert len(recording) == 2
    forward = {name: n for name, n in outer.counts.items() if "scaled_dot_product" in name}
    assert forward == {"aten._scaled_dot_product_flash_attention_for_cpu": 2}


def test_what_a_causal_query_may_see_is_counted_without_a_table_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = regard.masks.Mask.tile

    def tile(self: Any, rows: range, columns: range, *rest: Any, **more: Any) -> Tensor:
        seen.append(len(rows) * len(columns))
        return real(self, rows, columns, *rest, **more)

    monkeypatch.setattr(regard.masks.Mask, "tile", tile)
    model = ByHand(24, 4, is_causal=True)
    want = regard.Want.none().but(key_mass=True)
    with torch.no_grad(), regard.watch(model, want=want) as recording:
        model(torch.randn(1, 2048, 24))
    assert recording.calls[0].counts()[0, 0].tolist() == list(range(1, 2049))
    assert sum(seen) < 2048 * 2048
