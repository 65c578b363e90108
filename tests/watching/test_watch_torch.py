"""`regard.watch` on models made of torch's own parts: what is seen, that nothing changes, that all is restored."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.watching.models import ByHand, Stack, check_statistics, dense
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import regard
from regard.backends import _guard

X = torch.randn(2, 11, 21)


def patched_things() -> tuple[Any, ...]:
    return (
        F.scaled_dot_product_attention,
        _guard.run,
        torch.backends.mha.get_fastpath_enabled(),
        torch._C._len_torch_function_stack(),
    )


BEFORE = patched_things()


@pytest.fixture(autouse=True)
def _everything_is_restored() -> Any:
    yield
    assert patched_things() == BEFORE


@pytest.mark.parametrize("how", ["attribute", "earlier", "keywords"])
def test_a_call_is_seen_by_whatever_name_it_is_made(how: str) -> None:
    model = ByHand(how=how)
    expected = model(X)
    with regard.watch(model) as recording:
        out = model(X)
    assert torch.equal(out, expected)
    (call,) = recording
    assert (call.path, call.layer, call.kind, call.phase) == ("(root)", 0, "self", "prefill")
    q, k, _ = model.split(X)
    check_statistics(call, dense(q, k).detach())


def test_causal_masks_and_float_masks_reach_the_statistics() -> None:
    permitted = torch.ones(11, 11).tril().bool()
    additive = torch.zeros(11, 11).masked_fill(~permitted, torch.finfo(torch.float32).min)
    for keywords in ({"is_causal": True}, {"attn_mask": permitted}, {"attn_mask": additive}):
        model = ByHand(**keywords)
        with regard.watch(model) as recording:
            model(X)
        q, k, _ = model.split(X)
        check_statistics(recording.calls[0], dense(q, k, permitted).detach())
        assert recording.calls[0].counts()[0, 0].tolist() == list(range(1, 12))
        assert (recording.calls[0].top_keys[:, :, 0, 1:] == -1).all()


@pytest.mark.parametrize("need_weights", [False, True])
def test_torch_multihead_attention_is_seen_with_and_without_weights(need_weights: bool) -> None:
    model = nn.MultiheadAttention(21, 3, batch_first=True, dropout=0.3)
    padding = torch.zeros(2, 11, dtype=torch.bool)
    padding[1, 7:] = True
    keywords = {"need_weights": need_weights, "key_padding_mask": padding, "average_attn_weights": False}
    torch.manual_seed(3)
    expected = model(X, X, X, **keywords)
    torch.manual_seed(3)
    with regard.watch(model) as recording:
        out = model(X, X, X, **keywords)
    assert torch.equal(out[0], expected[0])
    (call,) = recording
    model.eval()
    check_statistics(call, model(X, X, X, **{**keywords, "need_weights": True})[1].detach(), real=~padding)
    assert call.kind == "self"


@pytest.mark.parametrize("need_weights", [False, True])
def test_the_extra_keys_of_torch_multihead_attention_are_counted(need_weights: bool) -> None:
    model = nn.MultiheadAttention(21, 3, batch_first=True, add_bias_kv=True, add_zero_attn=True).eval()
    hidden = torch.ones(11, 11).triu(1).bool()
    with regard.watch(model) as recording:
        model(X, X, X, attn_mask=hidden, need_weights=need_weights)
    (call,) = recording
    assert (call.keys, call.counts()[0, 0].tolist()) == (13, list(range(3, 14)))
    check_statistics(call, model(X, X, X, attn_mask=hidden, average_attn_weights=False)[1].detach())


def test_cross_attention_with_extra_keys_of_torch_is_cross() -> None:
    model = nn.MultiheadAttention(21, 3, batch_first=True, add_bias_kv=True, add_zero_attn=True).eval()
    with regard.watch(model) as recording:
        model(X[:, :5], X[:, :7], X[:, :7])
        model(X, X, X)
    assert [call.kind for call in recording] == ["cross", "self"]


def test_multi_head_attention_forward_called_by_position_is_seen_once() -> None:
    inner = nn.MultiheadAttention(21, 3)

    class Bare(nn.Module):
        def forward(self, x: Tensor, need_weights: bool) -> Tensor:
            bare = (inner.in_proj_weight, inner.in_proj_bias, None, None, False, 0.0)
            out = (inner.out_proj.weight, inner.out_proj.bias, False, None, need_weights)
            return F.multi_head_attention_forward(x, x, x, 21, 3, *bare, *out)[0]

    model = Bare()
    with regard.watch(model) as recording:
        model(X, True)
        model(X, False)
    assert recording.missed == [] and len(recording) == 2
    torch.testing.assert_close(recording.calls[0].entropy, recording.calls[1].entropy)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 3, 0, 4)])
def test_an_empty_call_attends_to_nothing_and_an_otherwise_shaped_one_is_seen(shape: tuple[int, ...]) -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    model = Bare()
    with regard.watch(model) as recording:
        model(torch.randn(shape))
        model(torch.randn(5, 4))
        model(torch.randn(2, 3, 7, 5, 4))
    assert recording.missed == []
    assert [(call.batch, len(call.heads), call.queries) for call in recording] == [(1, 1, 5), (6, 7, 5)]


def test_the_encoder_is_seen_layer_by_layer_though_its_fast_path_would_hide_it() -> None:
    layer = nn.TransformerEncoderLayer(24, 4, 31, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    x = torch.randn(2, 7, 24)
    with torch.no_grad():
        fast = model(x)
        with regard.watch(model) as recording:
            out = model(x)
    assert [call.path for call in recording] == [f"layers.{n}.self_attn" for n in range(3)]
    torch.testing.assert_close(out, fast)


def test_self_and_cross_attention_of_a_transformer_are_told_apart() -> None:
    model = nn.Transformer(24, 4, 1, 2, 31, batch_first=True).eval()
    source, target = torch.randn(2, 7, 24), torch.randn(2, 5, 24)
    with torch.no_grad(), regard.watch(model) as recording:
        model(source, target)
    found = [(call.path, call.kind, call.queries, call.keys) for call in recording]
    assert found == [
        ("encoder.layers.0.self_attn", "self", 7, 7),
        ("decoder.layers.0.self_attn", "self", 5, 5),
        ("decoder.layers.0.multihead_attn", "cross", 5, 7),
        ("decoder.layers.1.self_attn", "self", 5, 5),
        ("decoder.layers.1.multihead_attn", "cross", 5, 7),
    ]
    assert recording["decoder.layers.1.multihead_attn", 3].key_mass.shape == (7,)


def test_regards_own_module_is_seen_once_with_its_mask() -> None:
    model = Stack(regard.nn.MultiHeadAttention(21, 3), regard.nn.MultiHeadAttention(21, 3, num_kv_heads=1))
    attend = model.layers[1]
    mask = regard.masks.causal() & regard.masks.window(left=3)

    def run() -> Tensor:
        return attend(model.layers[0](X), mask=mask)

    expected = run()
    with regard.watch(model) as recording:
        out = run()
    assert torch.equal(out, expected)
    assert [call.path for call in recording] == ["layers.0", "layers.1"]
    seen = attend.observe(model.layers[0](X), mask=mask)
    for name in ("entropy", "key_mass", "map", "top_weights", "distance"):
        torch.testing.assert_close(getattr(recording.calls[1], name), getattr(seen, name))
    assert recording.calls[1].counts()[0, 0].tolist() == [1, 2, 3] + 8 * [4]


def test_gradients_are_those_of_the_model_without_a_watch() -> None:
    model = Stack(ByHand(is_causal=True), ByHand())
    model(X).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with regard.watch(model) as recording:
        out = model(X)
    out.square().sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True) if p.grad is not None)
    assert not any(part.requires_grad for call in recording for part in call.parts.values())


def test_dropout_draws_the_same_numbers_as_without_a_watch() -> None:
    model = ByHand(dropout_p=0.4)
    torch.manual_seed(5)
    expected = model(X), torch.rand(3)
    torch.manual_seed(5)
    with regard.watch(model) as recording:
        found = model(X), torch.rand(3)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    q, k, _ = model.split(X)
    check_statistics(recording.calls[0], dense(q, k).detach())


def test_what_a_checkpoint_recomputes_is_not_recorded_again() -> None:
    inner = ByHand()

    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    model = Saving()
    with regard.watch(model) as recording:
        model(X.clone().requires_grad_()).sum().backward()
    assert len(recording) == 1


def test_several_passes_append_and_layers_keep_their_numbers() -> None:
    model = Stack(ByHand(), ByHand(is_causal=True))
    with regard.watch(model) as recording:
        model(X)
        model(X[:, :5])
    assert [(call.number, call.layer, call.queries) for call in recording] == [
        (0, 0, 11),
        (0, 1, 11),
        (1, 0, 5),
        (1, 1, 5),
    ]
    assert recording[1, 2, 1].entropy.shape == (5,)


def test_a_module_that_runs_twice_in_a_pass_is_two_layers() -> None:
    shared = ByHand()
    model = Stack(shared, shared)
    with regard.watch(model) as recording:
        model(X)
    assert [call.path for call in recording] == ["layers.0", "layers.0 #2"]


def test_only_the_layers_and_heads_asked_for_are_kept() -> None:
    model = Stack(ByHand(), ByHand(is_causal=True), ByHand())
    with regard.watch(model) as everything, regard.watch(model, layers=[1, "layers.2"], heads=[2, 0]) as some:
        model(X)
    assert [call.layer for call in some] == [1, 2]
    for call in some:
        full = everything.at(call.layer)[0]
        assert call.heads == (2, 0)
        for name in ("entropy", "key_mass", "top_weights"):
            torch.testing.assert_close(getattr(call, name), getattr(full, name)[:, [2, 0]])
    with pytest.raises(IndexError, match=r"head 1 of layers.1 was not recorded; there are heads 2, 0"):
        some[1, 1]


def test_want_says_what_is_kept_and_the_rest_is_an_error_that_says_how_to_ask() -> None:
    model = ByHand()
    with regard.watch(model, want=regard.Want.none().but(rows=True)) as recording:
        model(X)
    assert set(recording.calls[0].parts) == {"lse", "entropy", "max_weight"}
    with pytest.raises(AttributeError, match=r"key_mass was not recorded: ask for it with regard.watch"):
        _ = recording[0, 0].key_mass


def test_an_exception_in_the_block_restores_everything_and_keeps_what_was_seen() -> None:
    model = Stack(ByHand(), nn.Linear(3, 3))
    with pytest.raises(RuntimeError), regard.watch(model) as recording:
        model(X)
    assert len(recording) == 1
    assert not any(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    with regard.watch(model) as recording, pytest.raises(RuntimeError):
        model(X)
    assert len(recording) == 1


def test_watches_nest_on_one_model_and_on_a_part_of_it() -> None:
    model = Stack(ByHand(), nn.MultiheadAttention(21, 3, batch_first=True))
    model.layers[1].forward = lambda x, f=model.layers[1].forward: f(x, x, x)[0]  # type: ignore[misc]
    with regard.watch(model) as outer, regard.watch(model.layers[1]) as inner:
        model(X)
    assert [call.path for call in outer] == ["layers.0", "layers.1"]
    assert [call.path for call in inner] == ["(root)"]


def test_calls_outside_the_model_are_nobodys_and_those_on_other_threads_are_listed() -> None:
    model, other = ByHand(), ByHand()
    with pytest.warns(UserWarning, match="it ran on another thread"), regard.watch(model) as recording:
        other(X)
        regard.attention(*(torch.randn(1, 1, 3, 5) for _ in range(3)))
        thread = threading.Thread(target=model, args=(X,))
        thread.start()
        thread.join()
    assert len(recording) == 0
    ((path, reason),) = recording.missed
    assert path == "(root)" and reason.startswith("it ran on another thread")


def test_two_threads_watch_at_once() -> None:
    together = threading.Barrier(2)
    found: dict[int, int] = {}

    def work(count: int) -> None:
        model = Stack(*(ByHand() for _ in range(count)))
        with regard.watch(model) as recording:
            together.wait()
            model(X)
            together.wait()
        found[count] = len(recording)

    threads = [threading.Thread(target=work, args=(count,)) for count in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {2: 2, 3: 3}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_cannot_be_observed_is_listed_with_the_reason_and_changes_nothing() -> None:
    class Nested(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    items = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(5, 2, 8)], layout=torch.jagged)
    model = Nested()
    with pytest.warns(UserWarning, match="nested tensors"), regard.watch(model) as recording:
        model(items.transpose(1, 2))
    assert {reason for _, reason in recording.missed} == {"nested tensors"}
    bad = ByHand(attn_mask=torch.full((11, 11), torch.nan))
    with pytest.warns(UserWarning, match="bias"), regard.watch(bad) as recording:
        bad(X)
    assert "bias" in recording.missed[0][1]
    assert recording.notes()[0].startswith("1 calls have no statistics (ValueError: bias")


def test_past_the_memory_limit_calls_are_listed_and_not_kept() -> None:
    model = Stack(*(ByHand() for _ in range(3)))
    with pytest.warns(UserWarning, match="memory limit"), regard.watch(model, memory_limit=1) as recording:
        model(X)
    assert len(recording) == 1
    assert [path for path, _ in recording.missed] == ["layers.1", "layers.2"]
    assert "memory limit of 1 bytes" in recording.missed[0][1]


def test_a_model_without_a_call_that_can_be_seen_warns() -> None:
    model = nn.Linear(3, 3)
    with pytest.warns(UserWarning, match="saw no attention call in Linear"), regard.watch(model) as recording:
        model(torch.randn(5, 3))
    assert len(recording) == 0


def test_a_compiled_model_is_seen() -> None:
    model = Stack(ByHand(), ByHand())
    compiled = torch.compile(model, backend="eager")
    with regard.watch(compiled) as recording:
        out = compiled(X)
    assert torch.equal(out, model(X))
    assert [call.path for call in recording] == ["layers.0", "layers.1"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_model_is_seen_and_a_scripted_part_hinders_nothing() -> None:
    inner = ByHand()
    scripted = torch.jit.trace(inner, X)
    expected = scripted(X)
    with regard.watch(scripted) as recording:
        out = scripted(X)
    assert torch.equal(out, expected) and recording.missed == []
    q, k, _ = inner.split(X)
    check_statistics(recording.calls[0], dense(q, k).detach())
    model = Stack(ByHand(), torch.jit.script(nn.Linear(21, 21)))
    with regard.watch(model) as recording:
        model(X)
    assert [call.path for call in recording] == ["layers.0"]


def test_half_precision_autocast_and_inference_mode() -> None:
    model = Stack(ByHand(), ByHand(is_causal=True))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        expected = model(X)
        with regard.watch(model) as recording:
            out = model(X)
    assert torch.equal(out, expected)
    assert len(recording) == 2 and recording.missed == []
    assert all(not part.is_inference() for call in recording for part in call.parts.values())


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got function"), regard.watch(len and dense):  # type: ignore[arg-type]
        pass
    tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda ids: ids)
    for given, complaint in (
        ({"tokens": tokenizer}, r"tokens must be a list of strings, got a SimpleNamespace: pass it as tokenizer="),
        ({"tokens": ["a", 3]}, "tokens must be a list of strings"),
        ({"tokenizer": ["a", "b"]}, "tokenizer must have decode .*got list"),
    ):
        with pytest.raises(TypeError, match=complaint), regard.watch(ByHand(), **given):
            pytest.fail("refused before the block runs")
    with pytest.raises(TypeError, match="want must be a regard.Want"), regard.watch(ByHand(), want=8):  # type: ignore[arg-type]
        pass


def test_thirty_layers_of_nine_heads_at_8192_tokens_take_less_than_300_mib() -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    model = Layer()
    with regard.watch(model) as recording:
        model(torch.randn(1, 9, 8192, 8))
    (call,) = recording
    assert call.bytes == sum(part.nbytes for part in (*call.parts.values(), call.permitted, call.positions))
    assert 30 * call.bytes < 300 << 20  # layers of one shape take the same


def test_a_dense_mask_that_is_causal_with_padding_is_observed_as_that_rule() -> None:
    permitted = torch.ones(2, 1, 11, 11).tril().bool()
    permitted[1, :, :, :4] = False
    model = ByHand(attn_mask=permitted)
    with regard.watch(model) as recording:
        model(X)
    q, k, _ = model.split(X)
    weights = dense(q, k, permitted).detach()
    (call,) = recording
    check_statistics(recorded_item(call, 0), weights[:1])
    assert call.entropy[1, :, :4].isnan().all() and (call.top_keys[1, :, :4] == -1).all()
    assert (call.key_mass[1, :, :4] == 0).all()
    torch.testing.assert_close(call.key_mass[1, :, 4:].double(), weights[1, :, 4:, 4:].sum(1), rtol=0.0, atol=1e-5)


def recorded_item(call: Any, item: int) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(**{name: part[item : item + 1] for name, part in call.parts.items()})
