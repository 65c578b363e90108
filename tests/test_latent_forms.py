"""Latent attention as a function: expanding and absorbing are the same numbers (rule 59), gradients too."""

from __future__ import annotations

import pytest
import torch

import regard
from regard import masks, reference

SIZES = {"q_nope": (3, 6, 5, 10), "q_rope": (3, 6, 5, 4), "latent": (3, 11, 13), "k_rope": (3, 11, 4)}
WEIGHTS = {"w_uk": (6, 10, 13), "w_uv": (6, 7, 13)}
CALLS = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "window and columns": {"mask": masks.causal() & (masks.window(left=3) | masks.columns(2))},
    "padding": {"mask": masks.padding([11, 4, 7])},
    "modifiers": {"mask": masks.causal(), "scale": 0.3, "softcap": 1.7, "query_offset": 2},
    "per item": {"mask": masks.causal(), "query_offset": torch.tensor([6, 1, 4])},
}


def inputs(grad=False):
    torch.manual_seed(3)
    return {
        name: torch.randn(shape, dtype=torch.float64, requires_grad=grad) for name, shape in (SIZES | WEIGHTS).items()
    }


def decompressed(given, **keywords):
    """The textbook: every key and value written out, one head at a time, then the oracle."""
    parts = {name: x.detach().numpy() for name, x in given.items()}
    heads = parts["w_uk"].shape[0]
    key = torch.empty(3, heads, 11, 14, dtype=torch.float64).numpy()
    value = torch.empty(3, heads, 11, 7, dtype=torch.float64).numpy()
    query = torch.cat([given["q_nope"], given["q_rope"]], -1).detach().numpy()
    for h in range(heads):
        key[:, h, :, :10] = parts["latent"] @ parts["w_uk"][h].T
        key[:, h, :, 10:] = parts["k_rope"]
        value[:, h] = parts["latent"] @ parts["w_uv"][h].T
    mask, offset = keywords.pop("mask", None), keywords.pop("query_offset", None)
    dense = None if mask is None else mask.dense(5, 11, query_offset=offset).numpy()
    return torch.from_numpy(reference.attention(query, key, value, mask=dense, **keywords))


@pytest.mark.parametrize("form", ["expand", "absorb", "auto"])
@pytest.mark.parametrize("call", CALLS)
def test_both_forms_equal_attention_on_decompressed_keys(call, form):
    given = inputs()
    out = regard.latent_attention(*given.values(), form=form, **CALLS[call])
    assert (out - decompressed(given, **CALLS[call])).abs().max() < 1e-10


@pytest.mark.parametrize("call", CALLS)
def test_both_forms_have_the_same_gradients(call):
    found = []
    for form in ("expand", "absorb"):
        given = inputs(grad=True)
        bias = torch.ones(6, 1, 11, dtype=torch.float64, requires_grad=True)
        sinks = torch.linspace(-1, 1, 6, dtype=torch.float64).requires_grad_()
        out = regard.latent_attention(*given.values(), form=form, bias=bias, sinks=sinks, **CALLS[call])
        pull = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        found.append(torch.autograd.grad((out * pull).sum(), [*given.values(), bias, sinks]))
    assert all((a - b).abs().max() < 1e-10 for a, b in zip(*found, strict=True))


def test_gradients_are_right():
    given = inputs(grad=True)
    for form in ("expand", "absorb"):
        call = lambda *x, form=form: regard.latent_attention(*x, mask=masks.causal(), form=form)  # noqa: E731
        assert torch.autograd.gradcheck(call, tuple(given.values()), fast_mode=True)


def test_the_cheaper_form_is_chosen():
    from regard.latent import absorbing_is_cheaper

    def sized(rows, keys):
        return (
            torch.empty(1, 128, rows, 128, device="meta"),
            torch.empty(1, 128, rows, 64, device="meta"),
            torch.empty(1, keys, 512, device="meta"),
            torch.empty(128, 128, 512, device="meta"),
        )

    assert absorbing_is_cheaper(*sized(1, 4096))
    assert not absorbing_is_cheaper(*sized(4096, 4096))
    assert absorbing_is_cheaper(*sized(128, 4096))
    assert not absorbing_is_cheaper(*sized(512, 4096))


@pytest.mark.parametrize("form", ["expand", "absorb"])
def test_a_query_that_sees_nothing_gets_zeros(form):
    given = inputs()
    given["latent"][1], given["k_rope"][1] = torch.nan, torch.nan
    out = regard.latent_attention(*given.values(), mask=masks.padding([11, 0, 7]), form=form)
    assert not out[1].any() and out[0].all()


def test_what_does_not_fit_is_named():
    given = inputs()
    wrong = {
        "w_uk [6, 10, 13] is [head, n, r] with r = 13, but latent has r = 12": {"latent": given["latent"][..., :12]},
        "k_rope [2, 11, 4] is [batch, S, p] with batch = 2": {"k_rope": given["k_rope"][:2]},
        "q_rope must be [batch, head, L, p], got shape [6, 5, 4]": {"q_rope": given["q_rope"][0]},
        "w_uv must be a tensor [head, v, r], got NoneType": {"w_uv": None},
        "form must be one of auto, expand, absorb, got 'fast'": {"form": "fast"},
        "w_uv is torch.float32 on cpu but q_nope is torch.float64": {"w_uv": given["w_uv"].float()},
        "q_rope is torch.float32 on cpu but q_nope is torch.float64": {"q_rope": given["q_rope"].float()},
        "latent must be floating point, got torch.int64": {"latent": given["latent"].long()},
    }
    for words, changes in wrong.items():
        with pytest.raises((TypeError, ValueError)) as error:
            regard.latent_attention(**(given | changes))
        assert words in str(error.value)
    with pytest.raises(regard.Refused):
        regard.latent_attention(*given.values(), form="absorb", backend="sdpa")
