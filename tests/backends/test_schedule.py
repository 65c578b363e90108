from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests import forced

import regard
from core_calls import every_mask, permitted, prepare, tensors
from regard import bias, masks
from regard.backends._schedule import ROWS_OF_A_READ, STEP_PAIRS, permitted_of, steps_of
from regard.backends._steps import Step
from regard.backends.sdpa import Sdpa
from regard.spec import Call


def call_of(mask: masks.Mask | None, B: int, H: int, L: int, S: int, offset: Any = None) -> Call:
    query, key, value = tensors(B, H, 1, L, S, 2)
    return prepare(query, key, value, mask, None, None, None, None, 0.0, offset)


def painted(call: Call, steps: list[Step]) -> np.ndarray:
    """How often each pair is computed and not masked away."""
    spec = call.spec
    count = np.zeros((spec.batch, spec.heads, spec.queries, spec.keys), dtype=int)
    for step in steps:
        items = slice(None) if step.batch is None else slice(step.batch, step.batch + 1)
        for run in step.runs:
            seen = permitted_of(step, call, range(step.start, step.stop), run)
            part = 1 if seen is None else seen.numpy()
            count[items, :, step.start : step.stop, run.start : run.stop] += part
    return count


def check_kinds(steps: list[Step], allowed: np.ndarray) -> None:
    """What the kernels are told of a step is what its rectangle holds."""
    for step in steps:
        items = slice(None) if step.batch is None else slice(step.batch, step.batch + 1)
        part = np.concatenate([allowed[items, :, step.start : step.stop, r.start : r.stop] for r in step.runs], axis=-1)
        assert step.width == part.shape[-1] > 0
        if step.kind == "rect":
            assert part.all() and all(run.full for run in step.runs)
        elif step.kind == "triangle":
            assert step.rows == step.width
            assert (part == np.tri(step.rows, dtype=bool)).all()
        for run in step.runs:
            if run.full:
                assert allowed[items, :, step.start : step.stop, run.start : run.stop].all()
        if not step.has_empty_rows:
            assert part.any(-1).all()


SIZES = [(5, 7), (64, 64), (63, 200), (130, 65), (200, 200), (1, 111), (111, 1)]
KINDS = list(every_mask(2, 3, 5, 7))


@pytest.fixture(params=[0, STEP_PAIRS], ids=["items apart", "short items together"])
def step_pairs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    forced.sizes(monkeypatch, pairs_of_a_step=request.param)


@pytest.mark.usefixtures("step_pairs")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_the_steps_cover_the_permitted_pairs_once_each(kind: str, seed: int) -> None:
    B, H = 2, 3
    for L, S in SIZES:
        mask = every_mask(B, H, L, S, seed)[kind]
        for offset in (None, 0, S // 2, -3, S):
            call = call_of(mask, B, H, L, S, offset)
            steps, allowed = steps_of(call), permitted(mask, B, H, L, S, offset)
            assert (painted(call, steps) == allowed).all(), (L, S, offset)
            check_kinds(steps, allowed)


@pytest.mark.usefixtures("step_pairs")
@pytest.mark.parametrize("seed", range(40))
def test_the_steps_of_joined_masks_cover_the_permitted_pairs_once_each(seed: int) -> None:
    draw = np.random.default_rng(seed)
    B, H = 3, 2
    L, S = SIZES[seed % len(SIZES)]
    known = list(every_mask(B, H, L, S, seed).values())
    mask = known[draw.integers(len(known))]
    for _ in range(2):
        other = known[draw.integers(len(known))]
        mask = [mask & other, mask | other, mask & ~other, other | ~mask][draw.integers(4)]
    offset = [None, 4, torch.tensor([0, 5, S - L])][seed % 3]
    call = call_of(mask, B, H, L, S, offset)
    steps, allowed = steps_of(call), permitted(mask, B, H, L, S, offset)
    assert (painted(call, steps) == allowed).all()
    check_kinds(steps, allowed)


def test_a_call_without_a_mask_is_one_rectangle() -> None:
    (step,) = steps_of(call_of(None, 2, 3, 63, 111))
    assert (step.kind, step.rows, step.width, step.batch) == ("rect", 63, 111, None)


def test_a_square_causal_call_is_one_triangle() -> None:
    (step,) = steps_of(call_of(masks.causal(), 2, 3, 411, 411))
    assert (step.kind, step.rows, step.width, step.merges) == ("triangle", 411, 411, False)


def test_a_causal_call_with_earlier_keys_is_a_rectangle_and_a_triangle_over_the_same_rows() -> None:
    first, second = steps_of(call_of(masks.causal(), 2, 3, 300, 411))
    assert (first.kind, first.rows, first.width, first.merges) == ("rect", 300, 111, False)
    assert (second.kind, second.rows, second.width, second.merges) == ("triangle", 300, 300, True)


def test_rows_before_the_first_key_are_in_no_step() -> None:
    (step,) = steps_of(call_of(masks.causal(), 1, 1, 411, 300))
    assert (step.kind, step.start, step.stop) == ("triangle", 111, 411)


def test_each_document_is_one_rectangle() -> None:
    lengths = [111, 63, 300, 37]
    steps = steps_of(call_of(masks.documents(lengths=lengths), 2, 1, 511, 511))
    assert [(step.kind, step.rows, step.width) for step in steps] == [("rect", n, n) for n in lengths]


def test_each_causal_document_is_one_triangle() -> None:
    lengths = [111, 63, 300, 37]
    steps = steps_of(call_of(masks.documents(lengths=lengths) & masks.causal(), 2, 1, 511, 511))
    assert [(step.kind, step.rows, step.width) for step in steps] == [("triangle", n, n) for n in lengths]


def test_short_documents_share_steps() -> None:
    steps = steps_of(call_of(masks.documents(lengths=[5] * 40), 1, 1, 200, 200))
    assert len(steps) == 4


def test_padding_of_its_own_length_gives_each_item_its_rectangle() -> None:
    steps = steps_of(call_of(masks.padding([63, 111]), 2, 1, 65, 111))
    assert [(step.batch, step.kind, step.width) for step in steps] == [(0, "rect", 63), (1, "rect", 111)]


@pytest.mark.parametrize("rows", [1, 7])
def test_items_of_few_rows_share_a_step_while_their_keys_are_few(rows: int) -> None:
    mask, offset = masks.padding([63, 111]), torch.tensor([63, 111]) - rows
    (step,) = steps_of(call_of(mask, 2, 1, rows, 111, offset))
    assert (step.batch, step.kind, step.rows, step.width) == (None, "tile", rows, 111)
    keys = 32 * STEP_PAIRS // max(ROWS_OF_A_READ, rows) + 1  # of head dim 2
    steps = steps_of(call_of(mask, 2, 1, rows, keys, offset))
    assert [(step.batch, step.width) for step in steps] == [(0, 63), (1, 111)]


def test_a_long_text_is_decoded_among_short_ones_by_a_step_for_each() -> None:
    lengths = [2001, *[17] * 15]
    call = prepare(*tensors(16, 4, 4, 1, 2001, 32), masks.padding(lengths), None, None, None, None, 0.0, None)
    assert [step.width for step in Sdpa().plan_steps(call)] == lengths


@pytest.mark.parametrize(
    ("backend", "given"),
    [
        ("sdpa", {}),
        ("sdpa", {"bias": bias.alibi(4)}),
        ("blockwise", {}),
        ("blockwise", {"bias": bias.alibi(4)}),
        ("blockwise", {"softcap": 5.0}),
    ],
    ids=str,
)
def test_a_decoded_token_takes_as_much_python_for_many_items_as_for_few(backend: str, given: dict[str, Any]) -> None:
    counts = []
    for items in (3, 48):
        inputs = tensors(items, 4, 2, 1, 40, 8)
        lengths = torch.arange(items) % 40 + 1

        def attend(name: str, inputs: Any = inputs, lengths: Any = lengths) -> torch.Tensor:
            # as in a new step of decoding: a mask and offsets of which nothing is remembered
            rule = masks.padding(lengths.clone())
            return regard.attention(*inputs, mask=rule, query_offset=lengths - 1, backend=name, **given)

        assert torch.allclose(attend(backend), attend("reference"), rtol=0, atol=1e-12)
        counts.append(python_calls(lambda attend=attend: attend(backend)))
    assert counts[1] <= counts[0] + 10


def python_calls(work: Callable[[], object]) -> int:
    count = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize(
    ("mask", "most"),
    [
        (masks.causal() & masks.window(left=256), 1.3),
        (masks.window(left=100, right=100), 1.4),
        ((masks.causal() & masks.window(left=256)) | masks.columns(64), 1.3),
        (masks.documents(lengths=[256] * 16), 1.0),
        (masks.documents(lengths=[17, 1000, 3, 700, 64, 2312]), 1.02),
        (masks.documents(lengths=[256] * 16) & masks.window(left=64, right=64), 1.6),
        (masks.random_blocks(4, 64, seed=3), 1.0),
        (masks.prefix(1024), 1.0),
    ],
    ids=str,
)
def test_the_computed_area_follows_the_kept_pairs(mask: masks.Mask, most: float) -> None:
    size = 4096
    call = call_of(mask, 1, 1, size, size)
    area = sum(step.rows * step.width for step in steps_of(call))
    kept, exact = mask.kept_pairs(size, size, 0, 1, 1)
    assert exact and kept <= area <= most * kept


def test_a_band_costs_in_proportion_to_the_length() -> None:
    mask = masks.causal() & masks.window(left=256)
    areas = [sum(step.rows * step.width for step in steps_of(call_of(mask, 1, 1, n, n))) for n in (2048, 4096, 8192)]
    assert areas[1] < 2.2 * areas[0] and areas[2] < 2.2 * areas[1]


def test_steps_are_remembered_until_the_mask_changes() -> None:
    allowed = torch.ones(63, 111, dtype=torch.bool)
    mask = masks.keep(allowed)
    call = call_of(mask, 1, 1, 63, 111)
    before = steps_of(call)
    assert steps_of(call) is before
    allowed[:, :64] = False
    assert (painted(call, steps_of(call)) == allowed.numpy()).all()


def test_offsets_in_a_tensor_are_read_at_every_call() -> None:
    offset = torch.tensor([0, 40])
    call = call_of(masks.causal(), 2, 1, 63, 111, offset)
    steps_of(call)
    offset += 5
    assert (painted(call, steps_of(call)) == permitted(masks.causal(), 2, 1, 63, 111, torch.tensor([5, 45]))).all()


@pytest.mark.parametrize("backend", ["sdpa", "blockwise"])
@pytest.mark.parametrize(("L", "S"), [(64, 11), (111, 63), (200, 200)])
def test_classes_of_a_strided_mask_whose_first_interval_holds_none_of_their_keys(backend: str, L: int, S: int) -> None:
    inputs = tensors(2, 3, 3, L, S, 4)
    near = masks.window(left=0) | masks.columns(5) & ~masks.columns(3)
    for mask in (masks.strided(9) | masks.window(left=0), masks.strided(9) & ~near, masks.strided(7) | near):
        out, expected = (regard.attention(*inputs, mask=mask, backend=name) for name in (backend, "eager"))
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
