"""The forward kernel and `backend="triton"` against the definitions: masks, modifiers, row statistics, gradients."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests import forced
from tests._triton import definitions
from tests._triton.calls import DEVICE, multiply_bfloat16, placed
from tests._triton.inside import attend, decoding, encode, observing
from tests.core_calls import every_mask, prepare

import regard
from regard import Want, bias, masks
from regard.spec import Call
from regard.testing import check

ROWS = Want.none().but(rows=True)
ALL = Want(map=(3, 5), top_k=4)
RULES = [5, 6, 7, 8, 9, 29, 44]
# the interpreter takes minutes for all of them in both precisions: there, each rule in one; on a GPU, all in both.
# Rule 7, on gradients, takes longest: their own tests have poisoned padding, and `make test-kernels` has the rule
INTERPRETED = {torch.float32: [5, 9], torch.float16: [6, 8, 29, 44]}
SIZES = {"B": 2, "H": 2, "G": 1, "L": 37, "S": 111}


def call_of(
    B: int, H: int, G: int, L: int, S: int, dtype: Any = torch.float32, D: int = 11, E: int = 5, **given: Any
) -> Call:
    tensors = [torch.randn(shape, device=DEVICE).to(dtype) for shape in ((B, H, L, D), (B, G, S, D), (B, G, S, E))]
    names = ("mask", "bias", "scale", "softcap", "sinks")
    given["mask"] = placed(given.get("mask"))
    return prepare(*tensors, *(given.get(name) for name in names), 0.0, given.get("query_offset"))


def wrong(call: Call, meant: Call | None = None, tolerance: float = 2e-5) -> list[str]:
    """In what out, lse and row statistics differ from their definitions, on ``meant`` where the call is in short."""
    done = attend.attend(call, rows=True)
    lse, weights, _ = definitions.whole(meant or call)
    value = call.value.double().repeat_interleave(call.spec.heads // call.spec.kv_heads, 1)
    missing = lse == -torch.inf
    exact = {
        "out": weights @ value,
        "lse": lse,
        "entropy": -torch.special.xlogy(weights, weights).sum(-1).masked_fill(missing, torch.nan),
        "max_weight": weights.amax(-1).masked_fill(missing, torch.nan),
    }
    bad = []
    for name, want in exact.items():
        got = getattr(done, name)
        same = (got == want) | (got.isnan() & want.isnan())
        error = torch.where(same, 0.0, got.double() - want).abs() / (1 + want.abs().nan_to_num())
        if got.shape != want.shape or not (error <= tolerance).all():
            bad.append(f"{name}: off by {error.max():.2e}")
    return bad


@pytest.mark.parametrize("kind", every_mask(2, 2, 37, 111))
def test_every_mask_gives_the_result_of_its_dense_form(kind: str) -> None:
    assert wrong(call_of(**SIZES, mask=every_mask(2, 2, 37, 111)[kind])) == []


@pytest.mark.parametrize(
    "given",
    [
        {"softcap": 2.5},
        {"scale": -0.7, "mask": masks.causal()},
        {"scale": 0.0},
        {"sinks": torch.tensor([0.5, -300.0]), "mask": masks.causal(), "query_offset": -20},
        {"sinks": torch.tensor([500.0, -torch.inf])},
        {"bias": torch.randn(37, 111).masked_fill(torch.rand(37, 111) < 0.3, -torch.inf)},
        {"bias": torch.randn(2, 2, 1, 111) * 100, "softcap": 3.0, "mask": masks.window(left=9)},
        {"query_offset": torch.tensor([3, 90]), "mask": masks.causal() & masks.window(left=20)},
    ],
    ids=lambda given: "-".join(given),
)
def test_every_modifier_enters_the_weights(given: dict[str, Any]) -> None:
    given = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    assert wrong(call_of(**SIZES, **given)) == []


def test_a_bias_by_rule_is_read_along_its_diagonals() -> None:
    call = call_of(**SIZES, bias=bias.alibi(2), query_offset=torch.tensor([3, 90], device=DEVICE))
    whole = bias.alibi(2).dense(37, 111, query_offset=call.offset.cpu()).to(DEVICE)
    dense = prepare(call.query, call.key, call.value, None, whole, None, None, None, 0.0, call.offset)
    assert wrong(call, dense) == []


def test_half_precision_stays_within_twice_the_error_of_plain_arithmetic() -> None:
    call = call_of(**{**SIZES, "L": 131}, dtype=torch.float16, D=32, E=64, mask=masks.causal())
    weights = definitions.whole(call)[1]
    value = call.value.repeat_interleave(2, 1)
    exact = weights @ value.double()
    naive = (weights.to(torch.float16).float() @ value.float()).to(torch.float16).double()
    bound = 2 * (naive - exact).abs().max() + 1e-5
    assert (attend.attend(call, rows=False).out.double() - exact).abs().max() <= bound


def test_out_has_the_same_bits_with_and_without_row_statistics() -> None:
    call = call_of(**SIZES, mask=masks.causal())
    assert torch.equal(attend.attend(call, rows=True).out, attend.attend(call, rows=False).out)


def test_large_logits_keep_their_entropy() -> None:
    call = call_of(1, 2, 1, 5, 63)
    query = torch.cat([call.query, torch.full_like(call.query[..., :1], 1e4)], -1)
    key = torch.cat([call.key, torch.ones_like(call.key[..., :1])], -1)
    shifted = prepare(query, key, call.value, None, None, 0.25, None, None, 0.0, None)
    plain = prepare(call.query, call.key, call.value, None, None, 0.25, None, None, 0.0, None)
    moved, still = attend.attend(shifted, rows=True).entropy, attend.attend(plain, rows=True).entropy
    assert moved is not None and still is not None
    assert (moved - still).abs().max() < 0.01


def test_a_nan_key_reaches_the_rows_that_see_it() -> None:
    call = call_of(1, 2, 1, 7, 63, mask=masks.causal(), query_offset=0)
    call.key[0, 0, 3] = torch.nan
    out = attend.attend(call, rows=False).out
    assert out[:, :, 3:].isnan().all()


@pytest.mark.parametrize("S", [0, 5])
def test_no_keys_give_zeros_and_no_rows_nothing(S: int) -> None:
    call = call_of(1, 2, 1, 3 if S == 0 else 0, S)
    done = attend.attend(call, rows=True)
    assert done.entropy is not None
    assert done.out.shape == (1, 2, 3 if S == 0 else 0, 5)
    assert (done.out == 0).all() and (done.lse == -torch.inf).all() and done.entropy.isnan().all()


def test_gradients_come_from_the_recomputing_path() -> None:
    tensors = [
        torch.randn(shape, device=DEVICE, dtype=torch.float64) for shape in ((1, 2, 7, 3), (1, 1, 11, 3), (1, 1, 11, 5))
    ]
    given = {"mask": masks.causal(), "softcap": 2.0, "sinks": torch.tensor([0.3, -1.0], device=DEVICE)}
    grads = []
    for backend, dtype in (("triton", torch.float32), ("eager", torch.float64)):
        inputs = [t.to(dtype).requires_grad_() for t in tensors]
        sinks = given["sinks"].to(dtype).requires_grad_()
        out = regard.attention(*inputs, backend=backend, **{**given, "sinks": sinks})
        grads.append(torch.autograd.grad(out.sin().sum(), [*inputs, sinks]))
    for got, want in zip(*grads, strict=True):
        assert (got - want).abs().max() < 1e-4


def test_observe_by_name_has_the_bits_of_attention_and_the_rows_of_the_definition() -> None:
    call = call_of(1, 2, 1, 37, 63)
    seen = regard.observe(call.query, call.key, call.value, want=ROWS, backend="triton")
    assert torch.equal(seen.out, regard.attention(call.query, call.key, call.value, backend="triton"))
    _, exact = definitions.statistics(call, ROWS)
    found = {"entropy": seen.entropy, "max_weight": seen.max_weight}
    assert definitions.wrong(found, exact) == []


def test_refusals_name_what_cannot_be_done() -> None:
    q = torch.zeros(1, 2, 3, 5, device=DEVICE)
    with pytest.raises(regard.Refused, match="float32"):
        regard.attention(q.double(), q.double(), q.double(), backend="triton")
    wide = torch.zeros(1, 2, 3, 300, device=DEVICE)
    with pytest.raises(regard.Refused, match="300"):
        regard.attention(wide, wide, wide, backend="triton")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter: numbers do overflow here
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rules_that_need_care_hold(dtype: torch.dtype) -> None:
    """Poisoned keys, NaN, huge logits, gradients that cancel: PROMISES 5 to 9, 29 and 44."""
    assert failures(dtype, RULES if DEVICE == "cuda" else INTERPRETED[dtype]) == []


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_rule_on_poisoned_gradients_holds() -> None:
    assert failures(torch.float32, [7]) == []


def failures(dtype: torch.dtype, rules: list[int]) -> list[Any]:
    report = check(functools.partial(regard.attention, backend="triton"), device=DEVICE, dtype=dtype, rules=rules)
    return [(row.rule, row.case, row.detail) for row in report.failures]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_huge_key_changes_no_bit_of_rows_that_may_not_see_it() -> None:
    call = call_of(1, 1, 1, 256, 256, mask=masks.causal())
    before = attend.attend(call, rows=True)
    call.key[:, :, 230] = 1e10
    after = attend.attend(call, rows=True)
    for one, other in zip(before, after, strict=True):
        assert one is not None and other is not None and torch.equal(one[:, :, :230], other[:, :, :230])
    assert not torch.equal(before.out[:, :, 230:], after.out[:, :, 230:])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("first", "last"),
    [
        (torch.finfo(torch.float32).min, 3.0),
        (-1e37, 3.0),
        (-(2.0**126), 3.0),
        (-1e30, 2e8),
        (3e38, -3e38),
        (-3e38, -3e38),
    ],
)
def test_logits_of_any_size_give_their_weights(first: float, last: float) -> None:
    """On the way to a row's largest logit nothing may overflow, nor where all of them are the smallest there are."""
    added = torch.full((5, 400), first, device=DEVICE)
    added[:, 390:] = last
    added[:, 395] = -torch.inf
    call = call_of(1, 1, 1, 5, 400, bias=added, scale=0.0)
    done = attend.attend(call, rows=True)
    weights = torch.softmax(added.double(), -1)
    assert (done.out - weights @ call.value.double()).abs().max() <= 1e-5
    assert (done.max_weight - weights.amax(-1)).abs().max() <= 1e-5
    assert (done.entropy + torch.special.xlogy(weights, weights).sum(-1)).abs().max() <= 1e-5
    if last == 3.0:  # where float32 holds lse to the digits that statistics need
        lse, exact = definitions.statistics(call, ALL)
        assert definitions.wrong(observing.observe(call, lse.float(), ALL), exact) == []


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"mask": masks.causal()},
        {"mask": masks.padding([0, 700]) & masks.causal()},
        {"mask": masks.padding([5, 640], side="left")},
        {"mask": masks.window(left=90), "softcap": 2.0},
        {"mask": masks.causal(), "query_offset": torch.tensor([3, 650]), "sinks": torch.tensor([0.5, -30.0, 2.0, 0.0])},
    ],
    ids=lambda given: "-".join(given) or "plain",
)
@pytest.mark.parametrize("L", [1, 5] if DEVICE == "cuda" else [3])
def test_decoding_splits_the_keys_and_gives_the_same(given: dict[str, Any], L: int) -> None:
    given = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    call = call_of(2, 4, 2, L, 700, D=16, E=16, **given)
    assert decoding.is_decoding(call.spec)
    done = attend.attend(call, rows=False)
    lse, weights, _ = definitions.whole(call)
    exact = weights @ call.value.double().repeat_interleave(2, 1)
    assert (done.out.double() - exact).abs().max() < 2e-5
    assert torch.equal(done.lse == -torch.inf, lse == -torch.inf)
    assert (done.lse.double() - lse).nan_to_num().abs().max() < 2e-5


def test_like_decoding_calls_have_their_own_results(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = forced.fresh_launches(monkeypatch)
    if DEVICE == "cpu":
        from tests._triton.compiled import compile_kernels

        compile_kernels(monkeypatch)
    sinks = torch.tensor([0.5, -3.0, 2.0, 0.0], device=DEVICE)
    for lengths, more in (
        ([600, 3], {}),
        ([1, 700], {}),
        ([600, 3], {"sinks": sinks}),
        ([9, 8], {"sinks": sinks - 1}),
    ):
        call = call_of(2, 4, 2, 1, 700, D=16, E=16, mask=masks.padding(torch.tensor(lengths, device=DEVICE)), **more)
        done = attend.attend(call, rows=False)
        lse, weights, _ = definitions.whole(call)
        assert (done.out.double() - weights @ call.value.double().repeat_interleave(2, 1)).abs().max() < 2e-5
        assert (done.lse.double() - lse).abs().max() < 2e-5
    assert len(kept) == 2  # with sinks and without


def test_values_that_are_their_keys_are_found_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    forced.sizes(monkeypatch, width_of_whole_heads=16)
    call = call_of(2, 19, 1, 2, 130, D=21, E=16, mask=masks.causal())
    band = encode.band_of(call)
    assert band is not None
    call = call.replace(query=call.query.contiguous(), value=call.key[..., :16])
    way = decoding.Decoding(call, band)
    for value in (call.value, torch.randn_like(call.key)[..., :16], call.value):
        out, _ = way(call.replace(value=value))
        _, weights, _ = definitions.whole(call)
        assert (out.double() - weights @ value.double()).abs().max() < 2e-5


@pytest.mark.parametrize("shared", [True, False])
def test_decoding_takes_latent_heads_whose_keys_are_wider_than_a_power_of_two(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # in place of 576 wide keys and 128 heads
    forced.sizes(monkeypatch, width_of_whole_heads=16, rows_of_a_program=16)
    call = call_of(2, 19, 1, 2, 130, D=21, E=16, mask=masks.causal() & masks.padding([130, 77]))
    value = call.key[..., :16] if shared else call.value
    call = call.replace(value=value, query=call.query.contiguous())
    band = encode.band_of(call)
    assert band is not None
    out, lse = decoding.Decoding(call, band)(call)
    meant, weights, _ = definitions.whole(call)
    assert (out.double() - weights @ value.double()).abs().max() < 2e-5
    assert (lse.double() - meant).abs().max() < 2e-5


def test_decoding_takes_the_heads_of_deepseek_v3(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        multiply_bfloat16(monkeypatch)
    call = call_of(2, 128, 1, 1, 530, D=576, E=512, dtype=torch.bfloat16, mask=masks.padding([530, 65]))
    call = call.replace(query=call.query.contiguous(), value=call.key[..., :512])
    band = encode.band_of(call)
    assert band is not None
    out, lse = decoding.Decoding(call, band)(call)
    meant, weights, _ = definitions.whole(call)
    exact = weights @ call.value.double()
    assert (out.double() - exact).abs().max() <= 2**-7 * exact.abs().max()
    assert (lse.double() - meant).abs().max() < 1e-4


def test_decoding_is_refused_for_wide_heads_that_it_cannot_take() -> None:
    spec = call_of(1, 2, 1, 1, 4, D=16, E=16).spec._replace(
        heads=128, head_dim=576, value_dim=512, keys=32_768, dtype=torch.bfloat16, device="cuda"
    )
    assert decoding.takes_wide(spec) and attend.refuse(spec) == []
    for changes in ({"grad": True}, {"dropout": 0.1}, {"queries": 32}, {"dtype": torch.float32}, {"head_dim": 900}):
        assert not decoding.takes_wide(spec._replace(**changes))
        assert attend.refuse(spec._replace(**changes)) != []
    assert not decoding.takes_wide(spec._replace(mask=("strided", 3)))


def test_decoding_shows_a_nan_that_is_seen_and_no_other() -> None:
    call = call_of(2, 4, 2, 1, 700, D=16, E=16, mask=masks.padding([300, 700]))
    call.key[0, 0, 300:] = torch.nan
    call.value[0, :, 300:] = torch.inf
    assert attend.attend(call, rows=False).out.isfinite().all()
    call.key[1, 1, 650] = torch.nan
    out = attend.attend(call, rows=False).out
    assert out[0].isfinite().all() and out[1, :2].isfinite().all() and out[1, 2:].isnan().all()
