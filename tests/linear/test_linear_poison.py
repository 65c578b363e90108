"""What is masked cannot leak into linear attention either: not forwards, not into gradients, not into a state."""

from __future__ import annotations

import pytest
import torch
from tests.linear.linear_oracle import inputs

from regard import linear_attention, masks
from regard.linear import LinearState

BAD = [torch.nan, torch.inf, -torch.inf]
FORMS = ["chunked", "recurrent", "quadratic"]
B, H, L, D = 2, 4, 37, 5


def clean_and_spoilt(place, what, which):
    clean = [x.detach() for x in inputs(B, H, L, L, D, Hkv=2)]
    spoilt = [x.clone() for x in clean]
    for name in which:
        spoilt["qkv".index(name)][:, 1, place, 2] = what
    return [x.requires_grad_() for x in clean], [x.requires_grad_() for x in spoilt]


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("which", ["k", "v", "kv"])
@pytest.mark.parametrize("form", ["auto", *FORMS])
def test_a_hidden_key_leaves_output_and_gradients_as_they_are(form, which, what):
    clean, spoilt = clean_and_spoilt(30, what, which)
    mask = masks.padding([29, 13]) & (masks.everything() if form == "auto" else masks.causal())
    out, other = (linear_attention(*given, mask=mask, form=form) for given in (clean, spoilt))
    assert torch.equal(out, other)
    for mine, theirs in zip(
        torch.autograd.grad(out.sum(), clean), torch.autograd.grad(other.sum(), spoilt), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("which", ["q", "k", "v", "kv"])
@pytest.mark.parametrize("form", FORMS)
def test_bad_numbers_reach_the_rows_that_see_them_and_no_others(form, which, what, grad):
    clean, spoilt = clean_and_spoilt(20, what, which)
    mask = masks.causal() & masks.documents(lengths=[5, 18, 14])
    with torch.set_grad_enabled(grad):
        out = linear_attention(*clean, mask=mask, form=form)
        found = linear_attention(*spoilt, mask=mask, form=form)
    lost = torch.zeros(B, H, L, dtype=torch.bool)
    if which == "q":
        lost[:, 1, 20] = True
    else:
        lost[:, 2:4, 20:23] = True  # the rest of its document, in the heads that share this key
    assert torch.equal(found.isnan().all(-1), lost)
    assert torch.equal(found[~lost], out[~lost])
    if grad:
        rest = torch.autograd.grad(found.masked_fill(lost.unsqueeze(-1), 0.0).sum(), spoilt)
        truth = torch.autograd.grad(out.masked_fill(lost.unsqueeze(-1), 0.0).sum(), clean)
        for mine, exact in zip(rest, truth, strict=True):
            unspoilt = torch.isfinite(mine)
            assert torch.allclose(mine[unspoilt], exact[unspoilt], atol=1e-12)
            assert unspoilt.all()


def test_unordered_documents_keep_a_bad_key_among_themselves():
    clean, spoilt = clean_and_spoilt(20, torch.nan, "v")
    mask = masks.documents(lengths=[5, 18, 14])
    out, found = (linear_attention(*given, mask=mask) for given in (clean, spoilt))
    lost = torch.zeros(B, H, L, dtype=torch.bool)
    lost[:, 2:4, 5:23] = True
    assert torch.equal(found.isnan().all(-1), lost)
    assert torch.equal(found[~lost], out[~lost])


def test_a_bad_key_stays_in_the_state_it_was_added_to():
    _, spoilt = clean_and_spoilt(20, torch.nan, "k")
    state = LinearState()
    with torch.no_grad():
        linear_attention(*spoilt, mask=masks.causal(), state=state)
        fresh = [x.detach() for x in inputs(B, H, 3, 3, D, Hkv=2)]
        later = linear_attention(*fresh, mask=masks.causal(), state=state)
    assert later[:, 2:4].isnan().all()
    assert later[:, :2].isfinite().all()


def test_gates_of_hidden_tokens_may_hold_anything():
    tensors = [x.detach() for x in inputs(B, H, L, L, D)]
    log_gate = torch.full((B, H, L), -0.1, dtype=torch.float64)
    mask = masks.causal() & masks.padding([30, 30])
    plain = linear_attention(*tensors, mask=mask, log_gate=log_gate)
    log_gate[:, :, 30:] = torch.nan
    assert torch.equal(linear_attention(*tensors, mask=mask, log_gate=log_gate), plain)


def test_strong_gates_do_not_overflow():
    tensors = [x.detach().float() for x in inputs(1, 1, 200, 200, D)]
    log_gate = torch.full((1, 1, 200), -60.0)
    for form in FORMS:
        out = linear_attention(*tensors, mask=masks.causal(), log_gate=log_gate, form=form)
        assert torch.allclose(out, tensors[2], atol=1e-5)  # everything but the token itself has faded
