"""FlexAttention's backend, without its GPU: the rules and tables it is given, what it refuses, and the whole path
through torch's own uncompiled flex_attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.core_calls import prepare
from torch import Tensor

import regard
from regard import masks, reference
from regard.backends import _flex_rules, flex
from regard.backends._flex_rules import blocks_of, score_of
from regard.masks import Mask
from regard.masks._flex import Frame

B, H, L, S = 3, 4, 63, 111
CPU = torch.device("cpu")
BACKEND = flex.Flex()


def _random(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.4


def _lower(*shape: int) -> Tensor:
    return torch.where(_random(*shape), 0.0, -torch.inf)


MASKS: dict[str, Mask] = {
    "everything": masks.everything(),
    "causal": masks.causal(),
    "window": masks.window(5, 3),
    "wide window": masks.window(2**63 - 1, 2**63 - 1),
    "padding": masks.padding([7, 0, 111]),
    "left padding": masks.padding(torch.tensor([5, 111, 63], dtype=torch.uint8), side="left"),
    "document lengths": masks.documents(lengths=[7, 0, 63, 41]),
    "document ids": masks.documents(ids=torch.randint(-1, 3, (S,))),
    "document ids by item": masks.documents(ids=torch.randint(-1, 3, (B, S))),
    "unsigned document ids": masks.documents(ids=torch.randint(0, 3, (S,), dtype=torch.uint8)),
    "prefix": masks.prefix(77),
    "columns": masks.columns(5),
    "strided": masks.strided(7),
    "blocks": masks.blocks(_random(5, 3), 23),
    "blocks by head": masks.blocks(_random(B, H, 11, 9), 11),
    "no blocks": masks.blocks(_random(0, 3), 23),
    "random blocks": masks.random_blocks(2, 11, seed=3),
    "keep": masks.keep(_random(L, S)),
    "keep keys": masks.keep(_random(S)),
    "keep by item": masks.keep(_random(B, 1, L, S)),
    "keep rows by head": masks.keep(_random(1, H, L, 1)),
    "drop": masks.drop(_random(B, H, L, S)),
    "from_additive": masks.from_additive(_lower(B, 1, 1, S)),
    "not": ~masks.causal(),
    "prefix and causal": masks.prefix(71) | masks.causal(),
    "sparse": (masks.causal() & masks.window(9)) | masks.columns(3) | (masks.strided(11) & masks.causal()),
    "by item and head": masks.padding([7, 0, 111]) & ~masks.drop(_random(1, H, L, S)) & masks.causal(),
}
OFFSETS: list[int | Tensor] = [S - L, 0, -5, 2**40, torch.tensor([0, 48, -7])]


def _dense(mask: Mask, rows: int, keys: int, offset: int | Tensor, items: int = B, heads: int = H) -> Tensor:
    whole = mask.tile(range(rows), range(keys), rows, keys, offset=offset)
    return whole.expand(items, heads, rows, keys)


def _index(items: int, heads: int, rows: int, keys: int) -> tuple[Tensor, ...]:
    return torch.meshgrid(
        *(torch.arange(n) for n in (items, heads, rows, keys)),
        indexing="ij",
    )


@pytest.mark.parametrize("offset", OFFSETS, ids=["default", "0", "-5", "far", "by item"])
@pytest.mark.parametrize("name", MASKS)
def test_a_rule_permits_what_its_mask_permits(name: str, offset: int | Tensor) -> None:
    mask = MASKS[name]
    rule = mask.predicate(Frame(L, S, B, offset, CPU))
    assert torch.equal(rule.see(*_index(B, H, L, S)), _dense(mask, L, S, offset))


@pytest.mark.parametrize("name", MASKS)
def test_a_rule_can_be_evaluated_one_pair_at_a_time(name: str) -> None:
    from torch.nn.attention.flex_attention import create_mask

    rule = MASKS[name].predicate(Frame(L, S, B, S - L, CPU))
    assert torch.equal(create_mask(rule.see, B, H, L, S, device="cpu"), _dense(MASKS[name], L, S, S - L))


def test_the_kind_of_a_rule_holds_its_numbers_and_not_the_lengths_of_the_call() -> None:
    def kind(mask: Mask, rows: int, keys: int) -> tuple[Any, ...]:
        return mask.predicate(Frame(rows, keys, B, keys - rows, CPU)).kind

    def local(width: int) -> Mask:
        return masks.causal() & masks.window(width)

    assert kind(local(5), 63, 111) == kind(local(5), 7, 300)
    assert kind(local(5), 63, 111) != kind(local(7), 63, 111)
    assert kind(masks.keep(_random(7, 11)), 7, 11) == kind(masks.keep(_random(5, 3)), 5, 3)
    assert kind(masks.keep(_random(7, 11)), 7, 11) != kind(masks.keep(_random(1, 11)), 7, 11)
    assert kind(masks.documents(lengths=[5, 6]), 7, 11) == kind(masks.documents(ids=torch.arange(3)), 3, 3)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks as they are when their tensors lie on a GPU: not to be read."""
    monkeypatch.setattr(Mask, "readable", lambda mask: False)
    monkeypatch.setattr(_flex_rules, "_PAIRS", 1 << 12)


def _dense_states(mask: Mask, rows: int, keys: int, offset: int | Tensor, size: int) -> Tensor:
    """0 empty, 1 partial, 2 full, by looking at every pair; a block over the edge is never full."""
    seen = _dense(mask, rows, keys, offset)
    seen = torch.nn.functional.pad(seen, (0, -keys % size, 0, -rows % size))
    cut = seen.view(B, H, seen.shape[2] // size, size, seen.shape[3] // size, size)
    return cut.any(5).any(3).any(1).int() + cut.all(5).all(3).all(1).int()


def _from_lists(number: Tensor, index: Tensor) -> Tensor:
    found = torch.zeros(index.shape, dtype=torch.int32)
    return found.scatter_(-1, index.long(), (torch.arange(index.shape[-1]) < number.unsqueeze(-1)).int())


def _states_of(table: Any) -> Tensor:
    by_query = _from_lists(table.kv_num_blocks, table.kv_indices) + 2 * _from_lists(
        table.full_kv_num_blocks, table.full_kv_indices
    )
    by_key = _from_lists(table.q_num_blocks, table.q_indices) + 2 * _from_lists(
        table.full_q_num_blocks, table.full_q_indices
    )
    assert torch.equal(by_query, by_key.transpose(2, 3))
    assert by_query.shape[1] == 1
    return by_query[:, 0].expand(B, -1, -1)


TABLES: dict[str, Mask] = {
    "causal": masks.causal(),
    "window": masks.window(200, 5),
    "prefix and causal": masks.prefix(150) | masks.causal(),
    "padding": masks.padding([7, 0, 511]),
    "documents": masks.documents(lengths=[300, 100, 111]),
    "ids": masks.documents(ids=(torch.arange(511) // 150).expand(B, -1).contiguous()),
    "blocks": masks.blocks(_random(4, 4), 128),
    "keep": masks.keep(torch.ones(B, H, 300, 511, dtype=torch.bool).tril(150)),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_table_of_a_readable_mask_is_exact(name: str) -> None:
    for offset in (211, 0):
        found = blocks_of(TABLES[name], Frame(300, 511, B, offset, CPU))
        assert torch.equal(_states_of(found.table), _dense_states(TABLES[name], 300, 511, offset, 128))
        assert found.table.mask_mod is found.rule.see
        assert found.table.shape[-2:] == (300, 511)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.usefixtures("on_device")
def test_the_table_of_an_unreadable_mask_is_exact(name: str) -> None:
    for offset in (211, 0, torch.tensor([0, 211, -5])):
        found = blocks_of(TABLES[name], Frame(300, 511, B, offset, CPU))
        assert torch.equal(_states_of(found.table), _dense_states(TABLES[name], 300, 511, offset, 128))


def test_a_table_is_made_once() -> None:
    mask, frame = masks.causal() & masks.padding([7, 0, 111]), Frame(L, S, B, 0, CPU)
    assert blocks_of(mask, frame).table is blocks_of(mask, frame).table
    lengths = torch.tensor([7, 0, 111])
    mask = masks.padding(lengths)
    before = blocks_of(mask, frame)
    lengths[1] = 5
    assert blocks_of(mask, frame).table is not before.table


def test_blocks_grow_where_the_table_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_flex_rules, "_MOST_CELLS", 4)
    mask = masks.causal() & masks.window(77)
    table = blocks_of(mask, Frame(1000, 1500, B, 500, CPU)).table
    assert table.BLOCK_SIZE == (1024, 1024)
    assert torch.equal(_states_of(table), _dense_states(mask, 1000, 1500, 500, 1024))


def test_scores_are_capped_then_biased() -> None:
    scores = 9 * torch.randn(B, H, L, S)
    bias = torch.randn(1, H, 1, S).masked_fill(_random(1, H, 1, S), -torch.inf)
    capped = 5 * torch.tanh(scores / 5)
    index = _index(B, H, L, S)
    assert score_of(None, None) == (None, ())
    for given, softcap, expected in ((None, 5.0, capped), (bias, None, scores + bias), (bias, 5.0, capped + bias)):
        change, _ = score_of(given, softcap)
        assert change is not None
        torch.testing.assert_close(change(scores, *index), expected)
    change, _ = score_of(bias, None)
    assert change is not None
    assert not change(torch.full_like(scores, torch.inf), *index).isnan().any()


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend on CPU: torch's unfused flex_attention, which warns of itself and refuses gradients only here."""
    import torch.nn.attention.flex_attention as theirs

    monkeypatch.setattr(flex, "_compiled", lambda kind: flex._attend)
    monkeypatch.setattr(theirs, "_validate_device", lambda *tensors: None)


def _tensors(dtype: torch.dtype = torch.float64, kv_heads: int = 2, dim: int = 17, out: int = 5) -> list[Tensor]:
    shapes = ((B, H, L, dim), (B, kv_heads, S, dim), (B, kv_heads, S, out))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"mask": masks.causal(), "softcap": 2.0},
    "bias": {"bias": torch.randn(1, H, L, S).masked_fill(_random(1, 1, L, 1), -torch.inf).double()},
    "sinks": {"mask": masks.prefix(70) | masks.causal(), "scale": -0.3},
    "empty rows": {"mask": masks.causal() & masks.window(9), "query_offset": -11, "softcap": 3.0},
    "offsets": {"mask": masks.causal() & masks.window(20), "query_offset": torch.tensor([0, 48, -7])},
    "documents": {"mask": masks.documents(ids=torch.randint(-1, 3, (B, S))), "scale": 0.5},
    "padding": {"mask": masks.padding([7, 0, 111]), "bias": torch.randn(B, 1, 1, S).double(), "softcap": 2.0},
    "heads": {"mask": masks.keep(_random(1, H, L, S)) | masks.random_blocks(2, 11, seed=1)},
    "blocks": {"mask": masks.blocks(_random(B, H, 11, 9), 11) & masks.causal()},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_values_and_gradients_are_those_of_the_reference(name: str) -> None:
    options = dict(CALLS[name])
    tensors = _tensors()
    sinks = torch.randn(H, dtype=torch.float64, requires_grad=True) if name in ("sinks", "empty rows") else None
    call = prepare(
        *tensors,
        *(options.get(key) for key in ("mask", "bias", "scale", "softcap")),
        sinks,
        0.0,
        options.get("query_offset"),
    )
    out, lse, *_ = BACKEND.run(call, named=True)
    grad_out = torch.randn_like(out)
    inputs = [*tensors, *([] if sinks is None else [sinks])]
    grads = torch.autograd.grad(out, inputs, grad_out)
    mask, bias = options.get("mask"), options.get("bias")
    same = {
        "mask": None if mask is None else _dense(mask, L, S, call.offset).numpy(),
        "bias": None if bias is None else bias.numpy(),
        "scale": options.get("scale"),
        "softcap": options.get("softcap"),
        "sinks": None if sinks is None else sinks.detach().numpy(),
    }
    arrays = [tensor.detach().numpy() for tensor in tensors]
    expected = reference.attention(*arrays, **same, return_weights=True)
    torch.testing.assert_close(out.detach(), torch.from_numpy(expected.out))
    torch.testing.assert_close(lse, torch.from_numpy(expected.lse))
    dq, dk, dv, _, dsinks = reference.gradients(*arrays, grad_out.numpy(), **same)
    for found, array in zip(grads, (dq, dk, dv, dsinks), strict=False):
        torch.testing.assert_close(found, torch.from_numpy(array))
    if name == "empty rows":
        empty = expected.lse == -float("inf")
        assert empty.any()
        assert not out[torch.from_numpy(empty)].any()
        assert not grads[0][torch.from_numpy(empty)].any()


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
class TestDerivatives:
    def _call(self, tensors: list[Tensor], **options: Any) -> Any:
        return prepare(*tensors, masks.causal(), None, None, 2.0, options.get("sinks"), 0.0, None)

    def test_a_retained_graph_gives_the_same_gradients_twice(self) -> None:
        tensors = _tensors()
        out, _, *_ = BACKEND.run(self._call(tensors), named=True)
        first = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
        second = torch.autograd.grad(out.sum(), tensors)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out.sum(), tensors)

    def test_a_compiled_function_serves_all_lengths_and_retained_graphs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        import torch.nn.attention.flex_attention as theirs

        monkeypatch.setattr(theirs, "_validate_device", lambda *tensors: None)
        compiled = torch.compile
        monkeypatch.setattr(
            torch, "compile", lambda *given, **options: compiled(*given, **options, backend="aot_eager")
        )
        monkeypatch.setattr(flex, "_kinds", {})
        for rows, keys, width in ((63, 111, 5), (77, 130, 5), (111, 111, 5), (63, 63, 7)):
            tensors = [torch.randn(2, 3, n, 11, requires_grad=True) for n in (rows, keys, keys)]
            mask = masks.causal() & masks.window(width)
            out, _, *_ = BACKEND.run(prepare(*tensors, mask, None, None, 2.0, None, 0.0, None), named=True)
            exact = regard.attention(*tensors, mask=mask, softcap=2.0, backend="eager")
            torch.testing.assert_close(out, exact)
            expected = torch.autograd.grad(exact.sum(), tensors)
            for keep in (True, False):
                grads = torch.autograd.grad(out.sum(), tensors, retain_graph=keep)
                torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)
        assert len(flex._kinds) == 2

    def test_only_what_requires_grad_receives_one(self) -> None:
        query, key, value = _tensors()
        sinks = torch.randn(H, dtype=torch.float64, requires_grad=True)
        call = self._call([query.detach(), key, value.detach()], sinks=sinks)
        out, lse, *_ = BACKEND.run(call, named=True)
        assert not lse.requires_grad
        out.sum().backward()
        assert key.grad is not None and sinks.grad is not None
        assert query.grad is None and value.grad is None

    def test_a_second_derivative_goes_through_eager_or_is_refused(self) -> None:
        tensors = _tensors()
        out, _, *_ = BACKEND.run(self._call(tensors), named=False)
        (grad,) = torch.autograd.grad(out.square().sum(), tensors[:1], create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), tensors[1:2])
        exact = regard.attention(*tensors, mask=masks.causal(), softcap=2.0, backend="eager")
        (grad,) = torch.autograd.grad(exact.square().sum(), tensors[:1], create_graph=True)
        torch.testing.assert_close(second, torch.autograd.grad(grad.sum(), tensors[1:2])[0])
        out, _, *_ = BACKEND.run(self._call(tensors), named=True)
        with pytest.raises(regard.Refused, match="'flex' has no second derivative"):
            torch.autograd.grad(out.sum(), tensors[:1], create_graph=True)

    def test_a_backward_pass_after_a_change_in_place_is_an_error(self) -> None:
        tensors = _tensors()
        out, _, *_ = BACKEND.run(self._call(tensors), named=True)
        with torch.no_grad():
            tensors[1].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    def test_without_grad_mode_nothing_is_recorded(self) -> None:
        tensors = _tensors()
        with torch.no_grad():
            out, _, *_ = BACKEND.run(self._call(tensors), named=True)
        assert not out.requires_grad
        with torch.inference_mode():
            again, _, *_ = BACKEND.run(self._call(tensors), named=True)
        assert torch.equal(out, again)
        after, _, *_ = BACKEND.run(self._call(tensors), named=True)
        torch.autograd.grad(after.sum(), tensors)


def _spec(**changes: Any) -> Any:
    query, key, value = (torch.randn(2, 4, n, 64) for n in (1111, 1300, 1300))
    spec = prepare(query, key, value, masks.strided(7), None, None, 30.0, None, 0.0, None).spec
    return spec._replace(**{"device": "cuda", **changes})


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "has_triton", lambda: True)


@pytest.mark.usefixtures("triton")
def test_a_call_on_cuda_is_taken() -> None:
    assert BACKEND.refuse(_spec()) == []
    assert BACKEND.refuse(_spec(dtype=torch.bfloat16, value_dim=48, kv_heads=2, sinks=True)) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "for CUDA, the call is on cpu"),
        ({"mode": "transform"}, "use eager"),
        ({"mode": "dual"}, "forward-mode"),
        ({"mode": "compile"}, "inside torch.compile"),
        ({"dtype": torch.float64}, "float64"),
        ({"dropout": 0.1}, "dropout"),
        ({"head_dim": 15}, "head dim 15"),
        ({"value_dim": 257}, "value dim 257"),
        ({"queries": 127}, "127 queries"),
        ({"keys": 0}, "over 0 keys"),
        ({"bias": ((1, 1, 1, 1), torch.float32, True), "grad": True}, "the bias requires grad"),
        ({"unit_stride": False}, ".contiguous()"),
    ],
)
@pytest.mark.usefixtures("triton")
def test_what_it_cannot_do_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    if "bias" in changes:
        changes["bias"] = regard.spec.BiasSpec(*changes["bias"])
    reasons = BACKEND.refuse(_spec(**changes))
    assert len(reasons) == 1 and reason in reasons[0]


def test_without_triton_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "has_triton", lambda: False)
    assert BACKEND.refuse(_spec()) == ["triton is not installed"]


@pytest.mark.usefixtures("triton")
def test_auto_takes_it_for_large_calls_only_and_the_plan_says_that_it_compiles() -> None:
    from regard.plan import Cost, Plan, _choose

    large = _choose(_spec(), "auto")
    assert large.backend.name == "flex"
    plan = Plan(_spec(), large, lambda: Cost(0, 0, 0, 0, True))
    assert "the first call of a kind takes some seconds" in plan.reason and "benchmarks/" in plan.reason
    assert _choose(_spec(queries=200), "auto").backend.name != "flex"
    dense = _spec(mask=None, softcap=None, dtype=torch.bfloat16)
    assert _choose(dense, "auto").backend.name == "sdpa"


def test_it_exists_on_cuda_alone() -> None:
    assert "flex" in regard.backends.available("cuda")
    assert "flex" not in regard.backends.available("cpu")
    with pytest.raises(regard.Refused, match="FlexAttention's kernels are for CUDA"):
        regard.attention(*_tensors(), backend="flex")
