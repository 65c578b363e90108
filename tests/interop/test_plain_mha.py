"""The plain module of notes and tutorials: its weights load by name and give the same outputs."""

from __future__ import annotations

import pytest
import torch
from tests.interop.hub import Plain
from torch import nn

from regard import masks
from regard.interop import from_plain


@pytest.mark.parametrize("how", ["module", "state dict"])
def test_its_weights_load_by_name_and_give_the_same_outputs_and_gradients(how: str) -> None:
    torch.manual_seed(3)
    plain = Plain(3, 15).double().eval()
    ours = from_plain(plain) if how == "module" else from_plain(plain.state_dict(), num_heads=3)
    assert ours.training == (how == "state dict") and ours.dropout == (0.1 if how == "module" else 0.0)
    x, memory = (torch.randn(2, n, 15, dtype=torch.float64, requires_grad=True) for n in (5, 7))
    mask = torch.randint(0, 2, (2, 5, 7))
    mask[:, :, 0] = 1
    theirs, found = plain(x, memory, memory, mask), ours.eval()(x, memory, mask=masks.keep(mask[:, None] != 0))
    torch.testing.assert_close(found, theirs, rtol=0, atol=1e-14)
    one, other = (torch.autograd.grad(out.square().sum(), [x, memory]) for out in (theirs, found))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_a_row_where_all_is_forbidden_gives_zeros_here_and_a_uniform_mean_there() -> None:
    torch.manual_seed(3)
    plain = Plain(3, 15).double().eval()
    x, nothing = torch.randn(1, 4, 15, dtype=torch.float64), torch.zeros(1, 4, 4)
    mean = plain.out(plain.v_linear(x).mean(1, keepdim=True)).expand(1, 4, 15)
    torch.testing.assert_close(plain(x, x, x, nothing), mean)
    found = from_plain(plain)(x, mask=masks.keep(nothing[:, None] != 0))
    assert torch.equal(found, plain.out.bias.expand(1, 4, 15))


def test_what_does_not_fit_is_refused() -> None:
    plain = Plain(3, 15)
    with pytest.raises(TypeError, match="a module or its state dict, got int"):
        from_plain(3)
    with pytest.raises(ValueError, match="give num_heads="):
        from_plain(plain.state_dict())
    with pytest.raises(ValueError, match="no q_linear.weight"):
        from_plain(nn.Linear(3, 3), num_heads=1)
    with pytest.raises(ValueError, match="norm.weight has no place here"):
        from_plain({**plain.state_dict(), "norm.weight": torch.ones(15)}, num_heads=3)
    with pytest.raises(ValueError, match=r"k_linear.weight has the shape \[15, 7\]; expected \[15, 15\]"):
        from_plain({**plain.state_dict(), "k_linear.weight": torch.ones(15, 7)}, num_heads=3)
