from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from tests.nn.helpers import build, close, random
from torch import nn

from regard import bias, masks, positions
from regard.positions import LearnedPositions, sinusoidal


@pytest.mark.parametrize("dim", [10, 7])
@pytest.mark.parametrize("offset", [0, 63])
def test_sinusoidal_is_the_papers_formula(dim, offset):
    table = sinusoidal(5, dim, offset=offset, dtype=torch.float64)
    for row in range(5):
        for column in range(dim):
            angle = (row + offset) / 10_000 ** (2 * (column // 2) / dim)
            wanted = math.cos(angle) if column % 2 else math.sin(angle)
            assert table[row, column].item() == pytest.approx(wanted, abs=1e-13)


def test_sinusoidal_takes_a_start_for_each_item_and_every_dtype():
    whole = sinusoidal(111, 6, dtype=torch.float64)
    by_item = sinusoidal(5, 6, offset=torch.tensor([0, 63, 106]), dtype=torch.float64)
    assert by_item.shape == (3, 5, 6)
    for item, start in enumerate((0, 63, 106)):
        assert close(by_item[item], whole[start : start + 5])
    assert sinusoidal(5, 6).dtype == torch.float32
    assert torch.equal(sinusoidal(111, 6, dtype=torch.bfloat16), whole.to(torch.bfloat16))
    assert sinusoidal(0, 6).shape == (0, 6) and sinusoidal(5, 6, device="meta").device.type == "meta"


def test_a_shift_of_sinusoidal_positions_is_one_linear_map():
    # what the paper chose it for: PE(pos + k) is a rotation of PE(pos), whatever pos is
    table = sinusoidal(63, 10, dtype=torch.float64)
    shift = torch.linalg.lstsq(table[:40], table[7:47]).solution
    assert close(table[:56] @ shift, table[7:63], 1e-9)


def test_learned_positions_are_added_and_learned():
    learned = LearnedPositions(11, 6, dtype=torch.float64)
    x = random(3, 5, 6)
    assert close(learned(x), x + learned.weight[:5])
    assert close(learned(x, offset=6), x + learned.weight[6:])
    offsets = torch.tensor([0, 6, 2])
    by_item = learned(x, offset=offsets)
    for item, start in enumerate(offsets.tolist()):
        assert close(by_item[item], x[item] + learned.weight[start : start + 5])
    given = random(3, 5, 6)
    (grad,) = torch.autograd.grad(by_item, learned.weight, given)
    wanted = torch.zeros(11, 6, dtype=torch.float64)
    for item, start in enumerate(offsets.tolist()):
        wanted[start : start + 5] += given[item]
    assert close(grad, wanted)


def test_learned_positions_are_a_module_like_others():
    learned = LearnedPositions(11, 6)
    assert learned.weight.std().item() == pytest.approx(0.02, rel=0.3)
    x = torch.randn(2, 7, 6)
    for other in (copy.deepcopy(learned), pickle.loads(pickle.dumps(learned))):
        assert torch.equal(other(x), learned(x))
    assert list(learned.state_dict()) == ["weight"]
    compiled = torch.compile(learned, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, offset=3), learned(x, offset=3))
    starts = torch.tensor([1, 4])
    assert torch.equal(compiled(x, offset=starts), learned(x, offset=starts))


ENCODINGS = {
    "sinusoidal": (lambda x: x + sinusoidal(x.shape[1], x.shape[2], dtype=x.dtype), {}, {}),
    "learned": (LearnedPositions(7, 48, std=1.0, dtype=torch.float64), {}, {}),
    "rotary": (nn.Identity(), {"positions": positions.Rotary(12)}, {}),
    "alibi": (nn.Identity(), {}, {"bias": bias.alibi(4)}),
    "t5": (nn.Identity(), {}, {"bias": bias.T5Bias(4, std=1.0, dtype=torch.float64)}),
}
ORDER = torch.tensor([3, 0, 6, 1, 5, 2, 4])


@pytest.mark.parametrize("encoding", [None, *ENCODINGS])
def test_attention_is_permutation_equivariant_exactly_when_it_has_no_positions(encoding):  # FACTS M15
    encode, made, called = ENCODINGS[encoding] if encoding else (nn.Identity(), {}, {})
    module = build(48, 4, **made)
    x = random(3, 7, 48)
    permuted, straight = module(encode(x[:, ORDER]), **called), module(encode(x), **called)[:, ORDER]
    assert close(permuted, straight) == (encoding is None)
    assert encoding is None or not close(permuted, straight, 1e-3)


def test_a_causal_mask_alone_breaks_the_permutation_too():
    module, x = build(48, 4), random(3, 7, 48)
    assert not close(module(x[:, ORDER], mask=masks.causal()), module(x, mask=masks.causal())[:, ORDER], 1e-3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sinusoidal(-1, 6), ValueError, "length must be at least 0, got -1"),
        (lambda: sinusoidal(5, 0), ValueError, "dim must be at least 1, got 0"),
        (lambda: sinusoidal(5, 6, base=0.5), ValueError, "base must be finite and above 1, got 0.5"),
        (lambda: sinusoidal(5, 6, offset=1.5), TypeError, "offset must be an int or an integer tensor"),
        (lambda: sinusoidal(5, 6, offset=torch.zeros(2)), TypeError, "offset must hold integers, got torch.float32"),
        (lambda: LearnedPositions(0, 6), ValueError, "length must be at least 1, got 0"),
        (lambda: LearnedPositions(5, 6, std=0), ValueError, "std must be finite and above 0, got 0"),
        (
            lambda: LearnedPositions(11, 6)(torch.zeros(2, 5, 6), offset=7),
            ValueError,
            "positions 7 … 11 were asked for .* length=11, so they go from 0 to 10",
        ),
        (
            lambda: LearnedPositions(11, 6)(torch.zeros(2, 5, 6), offset=torch.tensor([0, 7])),
            ValueError,
            "positions 0 … 11 were asked for",
        ),
        (lambda: LearnedPositions(11, 6)(torch.zeros(2, 5, 6), offset=-1), ValueError, "positions -1 … 3 were asked"),
        (lambda: LearnedPositions(11, 6)(torch.zeros(2, 5, 7)), ValueError, "x has width 7; .* built with dim=6"),
        (lambda: LearnedPositions(11, 6)(torch.zeros(5, 6)), ValueError, r"x must be \[batch, token, dim\]"),
    ],
)
def test_refusals_say_what_was_expected(call, error, message):
    with pytest.raises(error, match=message):
        call()
