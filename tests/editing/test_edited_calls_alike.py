"""What an edit decides is remembered for calls that are alike, and decided anew for others; and functions that are no
part of attention run unseen, while all others are shown."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.core_calls import Operators
from torch import Tensor, nn

import regard
from regard import edits, masks
from regard.edits._edit import Change


class Heads(nn.Module):
    """Two heads; the call's mask, and how the attention is written, are given with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.num_heads = nn.Linear(12, 36), 2

    def forward(self, x: Tensor, causal: bool = False, how: str = "fused", hide: Tensor | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 6)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        keep = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        keep = keep.tril() if causal else keep
        if hide is not None:
            keep = keep & ~hide
        if how == "fused" and hide is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        elif how == "fused" or hide is not None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        else:  # scores by a linear layer whose weights are keys
            scores = torch.stack([F.linear(a, b) for a, b in zip(q.flatten(0, 1), k.flatten(0, 1), strict=True)])
            weights = (scores / 6**0.5).masked_fill(~keep, -torch.inf).softmax(-1)
            out = torch.bmm(weights, v.flatten(0, 1)).unflatten(0, (len(x), 2))
        return out.transpose(1, 2).flatten(2)


def model() -> Heads:
    torch.manual_seed(0)
    return Heads().double().eval()


def columns(tokens: int, queries: Any, keys: Any) -> Tensor:
    hide = torch.zeros(tokens, tokens, dtype=torch.bool)
    hide[queries, keys] = True
    return hide


@torch.no_grad()
def test_one_block_meets_calls_of_several_lengths_and_masks_in_turn() -> None:
    m, inputs = model(), [torch.randn(2, n, 12, dtype=torch.float64) for n in (5, 9, 5, 7, 9)]
    cut = edits.cut(queries=slice(-3, None), keys=[0, -2])
    for causal in (False, True):
        wanted = []
        for x in inputs:
            hide = columns(x.shape[1], slice(-3, None), 0) | columns(x.shape[1], slice(-3, None), -2)
            wanted.append(m(x, causal, hide=hide))
        with regard.edit(m, cut):
            found = [m(x, causal) for x in inputs]
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@torch.no_grad()
def test_whether_a_call_has_an_edge_is_asked_of_each_mask() -> None:
    m, x = model(), torch.randn(2, 5, 12, dtype=torch.float64)
    later = columns(5, 0, 3)
    with regard.edit(m, edits.cut(queries=0, keys=3)) as report:
        for causal, hide, count in [
            (False, None, 1),
            (True, None, 1),
            (False, later, 1),
            (False, ~later, 2),
            (False, None, 3),
        ]:
            m(x, causal, hide=hide)
            assert len(report) == count


@torch.no_grad()
@pytest.mark.parametrize("how", ["fused", "linear"])
@pytest.mark.parametrize("causal", [False, True])
def test_cuts_by_positions_that_are_joined_keep_their_own_positions(how: str, causal: bool) -> None:
    m, x = model(), torch.randn(2, 7, 12, dtype=torch.float64)
    cut, every = edits.cut, slice(None)
    for joined, hide in [
        (cut(keys=1) | cut(keys=3), columns(7, every, 1) | columns(7, every, 3)),
        (cut(queries=[4, 5]) & cut(keys=slice(1, 4)), columns(7, slice(4, 6), slice(1, 4))),
        (cut(queries=-1) & cut(queries=[5, 6], keys=2), columns(7, 6, 2)),
        (cut(keys=slice(1, 4)) & ~cut(keys=2), columns(7, every, 1) | columns(7, every, 3)),
    ]:
        wanted = m(x, causal, how, hide)
        with regard.edit(m, joined):
            for _ in range(2):
                torch.testing.assert_close(m(x, causal, how), wanted, rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("how", ["fused", "linear"])
def test_steers_of_calls_of_several_kinds_are_their_own(how: str) -> None:
    m = model()
    inputs = [torch.randn(b, n, 12, dtype=torch.float64) for b, n in ((1, 5), (3, 5), (1, 8))]
    for amount, queries in ((1.5, None), (-2.0, slice(2, None))):
        steer = edits.steer([0, 2], amount, queries=queries)
        for x in inputs * 2:
            with regard.edit(m, steer, heads=[1]):
                found = m(x.float().double(), how=how)
            q, k, v = (part.unflatten(-1, (2, 6)).transpose(1, 2) for part in m.qkv(x.float().double()).chunk(3, -1))
            logits = q @ k.mT / 6**0.5
            logits[:, 1, slice(None) if queries is None else queries, [0]] += amount
            logits[:, 1, slice(None) if queries is None else queries, [2]] += amount
            wanted = (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    with regard.edit(m, edits.steer([0, 2], 1.0)):  # one block for dtypes and numbers of items
        for dtype in (torch.float32, torch.float64):
            m.to(dtype)
            assert m(inputs[1].to(dtype), how=how).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("heads", [None, [1]])
def test_a_pass_in_inference_mode_leaves_nothing_that_a_later_one_with_gradients_cannot_use(
    dtype: torch.dtype, heads: list[int] | None
) -> None:
    m, x = model().to(dtype), torch.randn(2, 12, 12, dtype=dtype)
    scattered = [0, 2, 4, 6, 8, 10]  # more gaps than a rule takes
    for edit in (edits.cut(keys=scattered), edits.cut(queries=[1, 3, 5, 7], keys=scattered), edits.steer([0, 2], 1.0)):
        with regard.edit(m, edit, heads=heads):
            with torch.inference_mode():
                first = m(x, causal=True)
            m.zero_grad()
            again = m(x, causal=True)
            again.square().sum().backward()
        torch.testing.assert_close(again, first.clone())
        assert m.qkv.weight.grad is not None and m.qkv.weight.grad.isfinite().all()


@torch.no_grad()
def test_modes_of_others_are_shown_every_operator_of_an_edited_model() -> None:
    m, x = model(), torch.randn(1, 5, 12, dtype=torch.float64)
    with Operators() as plain:
        m(x)
    for inner in (True, False):
        edit = regard.edit(m, edits.cut(masks.columns(1)))
        counting = Operators()
        with counting if not inner else edit, edit if not inner else counting:
            m(x)
        views = [name for name in plain.names if "attention" not in name]
        assert all(name in counting.names for name in views)


@torch.no_grad()
def test_an_error_in_a_plain_function_leaves_the_block_as_it_was() -> None:
    class Fails(Heads):
        def forward(self, x: Tensor, *args: Any, **given: Any) -> Tensor:
            with pytest.raises(RuntimeError):
                x.view(999, 999)
            with pytest.raises(RuntimeError):
                F.linear(x, self.qkv.weight[:, :1])
            return super().forward(x, *args, **given)

    m, x = Fails().double(), torch.randn(2, 5, 12, dtype=torch.float64)
    wanted = m(x, hide=columns(5, slice(None), 1))
    for how in ("fused", "linear"):
        with regard.edit(m, edits.cut(keys=1)) as report:
            torch.testing.assert_close(m(x, how=how), wanted, rtol=0, atol=1e-12)
        assert len(report) == 1
    assert torch._C._len_torch_dispatch_stack() == 0


@torch.no_grad()
@pytest.mark.parametrize("fused_first", [True, False])
def test_edges_of_one_call_of_a_module_are_not_those_of_another(fused_first: bool) -> None:
    def written(q: Tensor) -> Tensor:
        return (q @ q.mT).softmax(-1) @ q

    class Twice(nn.Module):
        """A causal call, in which token 0 has no look at token 3, and one in which it has."""

        def forward(self, x: Tensor) -> Tensor:
            q = x.unflatten(-1, (2, 6)).transpose(1, 2)
            out = torch.zeros_like(x)
            for fused in (fused_first, not fused_first):
                made = F.scaled_dot_product_attention(q, q, q, is_causal=True) if fused else written(q)
                out = out + made.transpose(1, 2).flatten(2)
            return out

    model, x = Twice(), torch.randn(1, 5, 12)
    with regard.edit(model, edits.cut(queries=0, keys=3)) as report:
        for count in (1, 2, 3):
            model(x)
            assert len(report) == count


@torch.no_grad()
@pytest.mark.parametrize(
    "edit",
    [
        edits.cut(keys=[0, 2]),
        edits.cut(masks.columns(2)) & edits.cut(queries=slice(3, None)),
        ~edits.cut(keys=[0, 1]),
        edits.steer([0, 2], 1.5),
        edits.ablate("mean"),
        edits.ablate("zero", queries=slice(2, None)),
        [edits.cut(keys=0), edits.steer(1, -1.0), edits.ablate("zero", queries=4)],
    ],
    ids=str,
)
@pytest.mark.parametrize("heads", [None, [1], {0: [0], 1: [1]}], ids=str)
def test_a_call_of_a_kind_that_was_met_has_the_bits_of_one_that_was_not(edit: Any, heads: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Heads(), Heads()).eval()
    inputs = [torch.randn(*shape) for shape in ((1, 7, 12), (1, 7, 12), (2, 7, 12), (1, 9, 12))]
    wanted = []
    for x in inputs:
        with regard.edit(model, edit, heads=heads):
            wanted.append(model(x))
    with regard.edit(model, edit, heads=heads) as report:
        found = [model(x) for x in inputs * 2]
    assert [(call.layer, call.heads) for call in report] == [
        (layer, (0, 1) if heads is None else (1,) if isinstance(heads, list) else (layer,)) for layer in (0, 1)
    ] * 8
    for one, other in zip(found, wanted * 2, strict=True):
        assert torch.equal(one, other)


@torch.no_grad()
def test_scales_and_layouts_of_calls_are_kinds_of_their_own() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: float | None, turned: bool) -> Tensor:
            q = x.transpose(2, 3).contiguous().transpose(2, 3) if turned else x
            return F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=scale)

    model, x = Scaled(), torch.randn(1, 2, 7, 8, dtype=torch.float64)
    keep = torch.ones(7, 7, dtype=torch.bool).tril()
    keep[:, 1] = False
    for _ in range(2):
        with regard.edit(model, edits.cut(keys=1)):
            for scale in (None, 0.5, 2.0, None, 0.5):
                for turned in (False, True):
                    wanted = F.scaled_dot_product_attention(x, x, x, keep, scale=scale)
                    torch.testing.assert_close(model(x, scale, turned), wanted, rtol=0, atol=1e-12)


@torch.no_grad()
def test_what_does_not_go_by_numbers_alone_is_asked_of_every_call() -> None:
    class EverySecond(edits.Edit):
        def change(self, place: Any) -> Change | None:
            return Change(hide=masks.columns(1)) if place.turn % 2 else None

    m, x = model(), torch.randn(1, 5, 12, dtype=torch.float64)
    plain, cut = m(x), m(x, hide=columns(5, slice(None), 0))
    with regard.edit(m, EverySecond()) as report:
        for wanted in (plain, cut, plain, cut):
            torch.testing.assert_close(m(x), wanted, rtol=0, atol=1e-12)
    assert len(report) == 2
    hidden = torch.zeros(5, 5, dtype=torch.bool)
    with regard.edit(m, edits.cut(masks.keep(hidden))):
        for key in (1, 2):
            hidden[:, key] = True
            torch.testing.assert_close(m(x), m(x, hide=hidden), rtol=0, atol=1e-12)
    with torch.random.fork_rng(), regard.edit(m, edits.ablate("resample"), heads=[0]):
        assert not torch.equal(m(x), m(x))


@torch.no_grad()
def test_whether_a_call_has_an_edge_is_read_of_a_mask_once_while_it_stays_the_same() -> None:
    m, x = model(), torch.randn(1, 5, 12, dtype=torch.float64)
    keep = torch.ones(5, 5, dtype=torch.bool)
    keep[0, 3] = False
    module = nn.Module()
    module.attend = lambda x, keep: F.scaled_dot_product_attention(x, x, x, attn_mask=keep)
    module.forward = lambda x, keep: module.attend(x, keep)  # type: ignore[method-assign]
    q = m.qkv(x)[..., :12].unflatten(-1, (2, 6)).transpose(1, 2)
    with regard.edit(module, edits.cut(queries=0, keys=3)) as report:
        for count in (0, 0):
            module(q, keep)
            assert len(report) == count
        keep[0, 3] = True
        for count in (1, 2):
            module(q, keep)
            assert len(report) == count


def test_whether_a_call_has_an_edge_is_read_anew_of_a_mask_that_is_filled_past_torch() -> None:
    m, x = model(), torch.randn(1, 5, 12, dtype=torch.float64)
    module = nn.Module()
    module.forward = lambda x, keep: F.scaled_dot_product_attention(x, x, x, attn_mask=keep)  # type: ignore[method-assign]
    q = m.qkv(x)[..., :12].unflatten(-1, (2, 6)).transpose(1, 2)
    keep = torch.ones(5, 5, dtype=torch.bool)
    memory = keep.numpy()  # what is written here does not count as a change of the tensor
    cut = keep.clone()
    cut[:, 3] = False
    with regard.edit(module, edits.cut(keys=3)) as report:
        memory[:, 3] = False
        module(q, keep)
        assert len(report) == 0
        memory[:, 3] = True
        out = module(q, keep)
        assert len(report) == 1
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, q, q, attn_mask=cut))
