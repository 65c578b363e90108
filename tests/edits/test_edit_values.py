"""Edits are values: they print as they are written, compare, hash, and refuse what means nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from tests.watching.models import ByHand

import regard
from regard import edits, masks


@pytest.mark.parametrize(
    "text",
    [
        "cut(queries=slice(3, None), keys=[0, 2])",
        "cut(keys=' cat')",
        "cut(causal())",
        "(cut(keys=0) | ~cut(masks.window(left=2)))".replace("masks.", ""),
        "(cut(keys=slice(4)) & cut(queries=-1))",
        "ablate('zero')",
        "ablate('mean', queries=[1, 2])",
        "steer(keys=[3, 4], amount=2.0)",
        "steer(keys=0, amount=-4.0, queries=slice(8, None))",
        "cut(keys=[slice(0, 2), 5, range(7, 9)])",
        "steer(keys=slice(None, None, 2), amount=1.0)",
        "keep('recent', budget=64, first=4)",
        "keep('key_mass', budget=64, recent=16)",
        "keep('window', budget=64, first=4, recent=8)",
    ],
)
def test_an_edit_prints_as_it_is_written(text: str) -> None:
    names = {name: getattr(edits, name) for name in ("cut", "ablate", "steer", "keep")}
    names |= {"causal": masks.causal, "window": masks.window}
    one, other = (eval(text, dict(names)) for _ in range(2))
    assert repr(one) == text and one == other
    assert hash(one) == hash(other)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.anything = 1


@pytest.mark.parametrize("one", [np.int64(3), np.int16(3), np.array(3), torch.tensor(3), torch.tensor(3).byte()])
def test_whole_numbers_of_other_libraries_are_ints(one: Any) -> None:
    for made, same in [
        (edits.cut(keys=one), edits.cut(keys=3)),
        (edits.cut(queries=[one, 0], keys="a"), edits.cut(queries=[3, 0], keys="a")),
        (edits.cut(keys=slice(one, None)), edits.cut(keys=slice(3, None))),
        (edits.steer(one, 1.0, queries=[one]), edits.steer(3, 1.0, queries=[3])),
        (edits.ablate("zero", queries=one, seed=one), edits.ablate("zero", queries=3, seed=3)),
    ]:
        assert made == same and hash(made) == hash(same) and repr(made) == repr(same)
    assert masks.padding([one, 1]) == masks.padding([3, 1]) and masks.documents(ids=(one, 1)) == masks.documents(
        ids=[3, 1]
    )
    if isinstance(one, np.integer):
        assert edits.keep("key_mass", one, first=one, recent=type(one)(0)) == edits.keep(
            "key_mass", 3, first=3, recent=0
        )
        assert edits.steer(0, one) == edits.steer(0, np.float32(3)) == edits.steer(0, 3)


@pytest.mark.parametrize("many", [np.array([2, 0]), np.array([2, 0], dtype=np.uint8), torch.tensor([2, 0])])
def test_arrays_of_whole_numbers_are_lists(many: Any) -> None:
    assert edits.cut(keys=many) == edits.cut(keys=[2, 0]) and edits.steer(many, 1.0) == edits.steer([2, 0], 1.0)
    model, x = ByHand(), torch.randn(1, 5, 21)
    with regard.edit(model, edits.cut(keys=many), heads=many, layers=many[1:]) as report:
        model(x)
    assert report.heads == [(0, 0), (0, 2)]
    with (
        regard.edit(model, edits.cut(keys=1), heads={many[1]: many}) as report,
        regard.watch(model, heads=many) as found,
    ):
        model(x)
    assert report.heads == [(0, 0), (0, 2)] and found.calls[0].heads == (2, 0)


@pytest.mark.parametrize(
    "wrong", [np.bool_(True), np.array([True]), torch.tensor([True]), torch.tensor(1.0), np.ones(2)]
)
def test_what_is_no_whole_number_is_no_position(wrong: Any) -> None:
    with pytest.raises(TypeError, match="keys must be a position"):
        edits.cut(keys=wrong)
    for given in (wrong, [wrong], np.array(1), 1):
        with (
            pytest.raises(TypeError, match="heads must be a list"),
            regard.edit(ByHand(), edits.cut(keys=0), heads=given),  # type: ignore[arg-type]
        ):
            pass


def recording(keep: Any = ("output",)) -> regard.Recording:
    model = ByHand()
    with regard.watch(model, keep=keep) as found:
        model(torch.randn(1, 5, 21))
    return found


def test_what_means_nothing_is_refused() -> None:
    wrong: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "cut.. names no edges", lambda: edits.cut()),
        (TypeError, r"masks.keep\(tensor\)", lambda: edits.cut(torch.ones(3, 3).bool())),  # type: ignore[arg-type]
        (ValueError, "join both by", lambda: edits.cut(masks.causal(), keys=0)),
        (TypeError, "keys must be a position, a slice", lambda: edits.cut(keys=1.5)),  # type: ignore[arg-type]
        (TypeError, "queries must be a position", lambda: edits.cut(queries=[])),
        (TypeError, "joins by & with another cut", lambda: edits.cut(keys=0) & masks.causal()),  # type: ignore[operator]
        (ValueError, "'zero', 'mean', 'resample', got 'zeros'", lambda: edits.ablate("zeros")),
        (ValueError, "which needs none", lambda: edits.ablate("zero", recording())),
        (TypeError, "must be a regard.Recording", lambda: edits.ablate("mean", 3)),  # type: ignore[arg-type]
        (ValueError, r"keep=\('output',\)", lambda: edits.ablate("mean", recording(keep=()))),
        (ValueError, r"keep=\('pattern',\)", lambda: edits.patch(recording(), "pattern")),
        (ValueError, "what='output' or what='pattern'", lambda: edits.patch(recording(), "weights")),
        (ValueError, "a pattern is patched whole", lambda: edits.patch(recording(["pattern"]), "pattern", queries=1)),
        (TypeError, "amount must be a number", lambda: edits.steer(0, "2")),  # type: ignore[arg-type]
        (ValueError, "must be finite, got inf; to take edges away use", lambda: edits.steer(0, float("inf"))),
        (ValueError, "changes nothing", lambda: edits.steer(0, 0.0)),
        (ValueError, "policy must be one of", lambda: edits.keep("lru", 5)),
        (ValueError, "budget must be at least 1", lambda: edits.keep("recent", 0)),
        (TypeError, "first must be an int", lambda: edits.keep("recent", 5, first=1.0)),  # type: ignore[arg-type]
        (ValueError, "fills its budget", lambda: edits.keep("recent", 5, recent=2)),
        (ValueError, "more than budget=5", lambda: edits.keep("key_mass", 5, first=3, recent=3)),
        (ValueError, "those queries are its window", lambda: edits.keep("window", 5, recent=0)),
        (ValueError, "keep must be a list of 'output' and 'pattern'", lambda: recording(keep=("outputs",))),
    ]
    for kind, words, make in wrong:
        with pytest.raises(kind, match=words):
            make()


def test_a_patch_from_a_run_of_another_length_is_refused_with_both_sizes() -> None:
    model = ByHand()
    with regard.watch(model, keep=["output", "pattern"]) as other:
        model(torch.randn(1, 5, 21))
    for what in ("output", "pattern"):
        with (
            pytest.raises(edits.CannotEdit, match=r"\(root\) \(layer 0\): .*\[2, 3, 6, .*\[1, 3, 5, .*same length"),
            regard.edit(model, edits.patch(other, what)),
        ):
            model(torch.randn(2, 6, 21))
    with (
        regard.edit(model, edits.patch(other)),
        pytest.raises(edits.CannotEdit, match="has 1 calls of it, and this is"),
    ):
        model(torch.randn(2, 5, 21))  # one item for all
        model(torch.randn(2, 5, 21))


def test_resampling_draws_outputs_of_the_reference_and_again_the_same() -> None:
    model, x = ByHand(), torch.randn(2, 6, 21)
    with regard.watch(model, keep=["output"]) as reference:
        model(torch.randn(3, 5, 21))
    (kept,) = reference.kept[reference.sites[0]]
    outs = []
    for seed in (0, 0, 1):
        with regard.edit(model, edits.ablate("resample", reference, seed=seed), heads=[1]):
            outs.append(model(x).unflatten(-1, (3, 7)))
    plain = model(x).unflatten(-1, (3, 7))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert torch.equal(outs[0][:, :, [0, 2]], plain[:, :, [0, 2]])
    apart = (outs[0][:, :, 1].reshape(-1, 1, 7) - kept.output[:, 1].reshape(1, -1, 7)).abs().amax(-1)
    assert (apart.amin(1) == 0).all()  # every row is one of the reference's


def test_a_mean_leaves_padding_out() -> None:
    model = torch.nn.MultiheadAttention(12, 3, batch_first=True).eval()
    x, hidden = torch.randn(2, 5, 12), torch.zeros(2, 5, dtype=torch.bool)
    hidden[1, 3:] = True
    with regard.watch(model, keep=["output"]) as found:
        model(x, x, x, key_padding_mask=hidden)
    (kept,) = found.kept[found.sites[0]]
    mean = kept.output.transpose(0, 1)[:, ~hidden].mean(1)
    expected = model.out_proj(mean.flatten()).expand(2, 5, -1)
    with regard.edit(model, edits.ablate("mean")):
        out, _ = model(x, x, x, key_padding_mask=hidden)
    torch.testing.assert_close(out, expected)
