"""The observation kernels against the definitions: every statistic, mask and modifier."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forced
from tests._triton import definitions
from tests._triton.calls import DEVICE, call_of, found_and_wrong, sample, tensors
from tests._triton.inside import observing, small, tiles
from tests.core_calls import every_mask

from regard import Want, masks
from regard.statistics import BUCKETS

SUMS = Want(map=(5, 7), first=3, top_k=0, weights=(slice(3, 70), slice(5, 100)))
SIZES = {"B": 2, "H": 2, "G": 1, "L": 37, "S": 111}


@pytest.mark.parametrize("kind", every_mask(2, 2, 37, 111))
def test_every_mask_gives_the_statistics_of_its_dense_form(kind: str) -> None:
    query, key = tensors(**SIZES)
    mask = every_mask(2, 2, 37, 111)[kind]
    assert found_and_wrong(query, key, SUMS, mask=mask)[1] == []


@pytest.mark.parametrize(
    "given",
    [
        {"softcap": 2.5},
        {"scale": -0.7},
        {"scale": 0.0},
        {"sinks": torch.tensor([0.5, -3.0])},
        {"bias": torch.randn(2, 1, 1, 111)},
        {"bias": torch.randn(1, 2, 37, 1), "mask": masks.causal()},
        {"bias": torch.randn(37, 111).masked_fill(torch.rand(37, 111) < 0.3, -torch.inf)},
        {"query_offset": torch.tensor([3, 90]), "mask": masks.causal() & masks.window(left=20)},
        {"query_offset": torch.tensor([-5, 200])},
        {"query_offset": -20, "mask": masks.causal()},
    ],
    ids=lambda given: "-".join(given),
)
def test_every_modifier_enters_the_weights(given: dict[str, Any]) -> None:
    query, key = tensors(**SIZES)
    given = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    assert found_and_wrong(query, key, SUMS, **given)[1] == []


# the interpreter multiplies bfloat16 matrices wrongly
HALF = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dim", [3, 64])
def test_half_precision_and_odd_head_sizes(dtype: torch.dtype, dim: int) -> None:
    query, key = tensors(H=4, G=2, L=131, S=67, D=dim, dtype=dtype)
    assert found_and_wrong(query, key, SUMS.but(weights=None), mask=masks.causal())[1] == []


def test_large_logits_keep_their_entropy() -> None:
    query, key = tensors(L=5, S=63)
    shifted = torch.cat([query, torch.full_like(query[..., :1], 1e4)], -1)
    key = torch.cat([key, torch.ones_like(key[..., :1])], -1)
    call = call_of(shifted, key, scale=0.25)
    logits = (shifted @ key.transpose(-1, -2)) * 0.25
    lse = logits.logsumexp(-1)
    found = observing.observe(call, lse, Want(top_k=0))
    weights = (logits - lse.unsqueeze(-1)).exp()
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    assert (found["entropy"] - entropy).abs().max() < 0.01


def test_limited_queries_count_alone_in_key_mass_and_map() -> None:
    query, key = tensors(L=131, S=67)
    want = Want(map=(3, 4), queries=slice(50, 113), top_k=0)
    assert found_and_wrong(query, key, want, mask=masks.causal())[1] == []


@pytest.mark.parametrize("kind", sample(list(every_mask(2, 2, 130, 111)), slice(1, None, 3)))
def test_the_map_of_short_calls_comes_from_the_key_mass_of_blocks_of_rows(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = torch.empty

    def spoiled(*sizes: Any, **given: Any) -> torch.Tensor:
        """Memory in which nothing may be read before it is written."""
        found = made(*sizes, **given)
        return found.fill_(torch.nan) if found.is_floating_point() else found

    monkeypatch.setattr(torch, "empty", spoiled)
    query, key = tensors(2, 2, 1, 130, 111)
    call = call_of(query, key, mask=every_mask(2, 2, 130, 111)[kind])
    # 130·1/2 is 65: no block of 64 rows may lie in two rows of the map
    assert not observing._recipe(call.spec, Want(map=(2, 7))).by_block
    want = Want(map=(1, 7), top_k=0)
    assert observing._recipe(call.spec, want).by_block
    assert found_and_wrong(query, key, want, mask=every_mask(2, 2, 130, 111)[kind])[1] == []


@pytest.mark.parametrize("more", [{}, {"key_mass": False}, {"distance": False}, {"rows": False, "key_mass": False}])
def test_maps_of_several_rows_whose_blocks_are_apart(more: dict[str, bool]) -> None:
    query, key = tensors(1, 2, 1, 256, 150)
    for map in ((4, 150), (2, 3), (1, 1)):
        want = Want(map=map, top_k=0).but(**more)
        assert observing._recipe(call_of(query, key).spec, want).by_block
        assert found_and_wrong(query, key, want, mask=masks.causal())[1] == []
        assert found_and_wrong(query, key, want)[1] == []


@pytest.mark.parametrize("offset", [300, -300], ids=["keys before", "keys after"])
@pytest.mark.parametrize("map", [(1, 1), (2, 3), None])
def test_tiles_that_cross_one_edge_between_buckets_of_distance(offset: int, map: tuple[int, int] | None) -> None:
    query, key = tensors(L=70, S=400)
    assert found_and_wrong(query, key, Want(map=map, top_k=0), query_offset=offset)[1] == []


@pytest.fixture
def tall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 128 rows, as in long calls."""
    forced.tall_blocks(monkeypatch)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"mask": masks.causal()},
        {"mask": masks.window(left=70, right=9), "query_offset": 40},
        {"mask": masks.causal(), "query_offset": -20},
        {"query_offset": 300},
        {"query_offset": -300},
        {"mask": masks.documents(lengths=[100, 230])},
    ],
    ids=lambda given: " ".join(f"{name} {value}" for name, value in given.items())[:40] or "plain",
)
@pytest.mark.parametrize("map", [(5, 7), (1, 1)])
def test_tall_blocks_of_rows(given: dict[str, Any], map: tuple[int, int], tall: None) -> None:
    query, key = tensors(H=1, L=330, S=330, D=5)
    want = Want(map=map, first=3)
    assert found_and_wrong(query, key, want, **given)[1] == []


@pytest.mark.parametrize("dim", [64, 128])
def test_tall_blocks_of_usual_heads_in_half_precision(dim: int, tall: None) -> None:
    query, key = tensors(H=2, G=1, L=270, S=450, D=dim, dtype=torch.float16)
    for mask in (None, masks.causal()):
        assert found_and_wrong(query, key, Want(map=(2, 3)), mask=mask)[1] == []


def test_blocks_are_tall_where_calls_are_long() -> None:
    query = torch.empty(1, 16, 3, 128, dtype=torch.float16, device=DEVICE)
    for mask, flags in ((None, None), (masks.causal(), (True, None, 0, False, None))):
        spec = call_of(query, query, mask=mask).spec._replace(queries=16_384, keys=16_384, flags=flags)
        for length, map, tall in (
            (16_384, (64, 64), True),
            (4096, (64, 64), False),  # a row of the map is 64 rows high
            (8192, (64, 64), True),
            (8200, (64, 64), False),
            (65_000, (64, 64), False),
            (66_000, (64, 64), True),
            (2048, None, False),
        ):
            long = spec._replace(queries=length, keys=length)
            rows = 0 if map is None else map[0]
            assert observing._is_tall(long, rows) == tall
    assert not observing._is_tall(spec._replace(flags=(True, None, 0, True, None)), 0)


def test_strided_inputs_are_read_in_place() -> None:
    query, key = tensors(L=37, S=63, D=22)
    query, key = query[..., ::2], key.transpose(2, 3).contiguous().transpose(2, 3)[..., :11]
    assert found_and_wrong(query, key, SUMS)[1] == []


@pytest.mark.parametrize(
    "want", [Want.none().but(distance=True), Want.none().but(map=(3, 3)), Want.none().but(first=70)]
)
def test_what_is_not_wanted_is_absent(want: Want) -> None:
    query, key = tensors(L=37, S=111)
    assert found_and_wrong(query, key, want, mask=masks.causal())[1] == []


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # from NumPy, which is what the interpreter computes with
def test_a_nan_query_spoils_its_row_and_the_sums_it_enters() -> None:
    query, key = tensors(L=7, S=63)
    query[0, 1, 2, 0] = torch.nan
    call = call_of(query, key, mask=masks.causal(), query_offset=0)
    lse = torch.where(query.isnan().any(-1), torch.nan, torch.zeros(1, 2, 7, device=DEVICE))
    found = observing.observe(call, lse, Want(map=(7, 3), top_k=2))
    bad = torch.zeros(1, 2, 7, dtype=torch.bool, device=DEVICE)
    bad[0, 1, 2] = True
    assert torch.equal(found["entropy"].isnan(), bad)
    assert torch.equal(found["max_weight"].isnan(), bad)
    assert torch.equal(found["top_weights"].isnan().all(-1), bad)
    assert set(found["top_keys"][0, 1, 2].tolist()) <= {0, 1, 2}
    assert found["key_mass"].isnan().nonzero().tolist() == [[0, 1, 0], [0, 1, 1], [0, 1, 2]]
    assert found["map"].isnan().nonzero().tolist() == [[0, 1, 2, 0]]


def test_the_same_call_twice_is_bitwise_equal() -> None:
    query, key = tensors(H=1, L=63, S=71)
    call = call_of(query, key, mask=masks.causal())
    lse = definitions.whole(call)[0].float()
    first, second = (observing.observe(call, lse, Want(map=(3, 5))) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_room_for_sums_is_what_the_kernels_use() -> None:
    assert tiles.COPIES.value == observing._COPIES and tiles.BUCKETS.value == BUCKETS


@pytest.mark.parametrize("case", ["4096 tokens 16×128 full", "16384 tokens 16×128 causal", "16384 tokens 32×64 full"])
def test_the_memory_that_a_plan_tells_is_what_was_measured(case: str) -> None:
    stored = Path(__file__).parents[2] / "benchmarks" / "results" / "observe_gpu.json"
    measured = json.loads(stored.read_text())["figures"][case]
    length, heads, dim = map(int, re.findall(r"\d+", case))
    query = torch.empty(1, heads, length, dim, dtype=torch.bfloat16, device=DEVICE)
    call = call_of(query, query, mask=masks.causal() if "causal" in case else None)
    lse = 4 * heads * length
    for name, want in {"all but top": Want(top_k=0), "all": Want()}.items():
        told = observing.layout_of(call.spec, want).nbytes + lse
        assert told / 2**20 == pytest.approx(measured[f"{name} MiB"], rel=0.05)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("top_k", [0, 8])
def test_rows_beyond_the_end_see_no_key_that_a_bias_hides(top_k: int) -> None:
    query, key = tensors(L=70, S=143)
    bias = torch.zeros(1, 1, 1, 143, device=DEVICE)
    bias[..., 100] = -torch.inf
    key[:, :, 100] = torch.nan
    call = call_of(query, key, bias=bias)
    lse, exact = definitions.statistics(call_of(query, key.nan_to_num(0.0), bias=bias), Want(map=(5, 7), top_k=top_k))
    assert definitions.wrong(observing.observe(call, lse.float(), Want(map=(5, 7), top_k=top_k)), exact) == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_nan_key_is_noted_for_rows_of_the_call_only() -> None:
    query, key = tensors(L=70, S=143)
    key[:, :, 100] = torch.nan
    found = observing.observe(call_of(query, key), torch.full((1, 2, 70), torch.nan, device=DEVICE), Want())
    assert found["top_weights"].isnan().any(-1).all()


def test_cells_of_more_pairs_than_32_bits_count_keep_their_mean() -> None:
    sums = torch.full((1, 1, 1), 65_536.0, dtype=torch.float64, device=DEVICE)
    found = torch.zeros(1, 1, 1, device=DEVICE)
    small.finish_sums[(1, 1)](sums, found, found, found, 1, 1, 1, 65_536, 65_536, 0, 1, 1, SIZE=512, WIDE=False)
    assert found.item() == 2.0**-16


def test_refusals_name_what_cannot_be_done() -> None:
    query, key = tensors(L=3, S=5)
    assert "float32" in observing.refuse(call_of(query.double(), key.double()).spec, Want())[0]
    wide = torch.zeros(1, 2, 3, 257, device=DEVICE)
    assert "257" in observing.refuse(call_of(wide, wide).spec, Want())[0]
    many = call_of(query, key).spec._replace(batch=4096, heads=8)
    assert "32,767" in observing.refuse(many, Want())[0]
    assert "top_k" in observing.refuse(call_of(query, key).spec, Want(top_k=257))[0]
