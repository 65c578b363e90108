"""Whole calls of linear attention at random, against the formula."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests import forced
from tests.linear.linear_oracle import attend, gradients, inputs

import regard
from regard import linear_attention, masks

SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@st.composite
def calls(draw):
    B, Hkv, G = (draw(st.integers(1, 3)) for _ in range(3))
    S, D, Dv = draw(st.integers(1, 40)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    L = draw(st.one_of(st.just(S), st.integers(1, 40)))
    offset = draw(st.one_of(st.none(), st.integers(-45, 45)))
    mask, hidden = None, None
    if causal := draw(st.booleans()):
        mask = masks.causal()
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, S), min_size=B, max_size=B))
        side = draw(st.sampled_from(["left", "right"]))
        padding = masks.padding(lengths, side=side)
        hidden = ~padding.tile(range(1), range(S), 1, S, offset=0)[:, 0, 0]
        mask = padding if mask is None else mask & padding
    if draw(st.booleans()):
        cut = draw(st.integers(0, S))
        documents = masks.documents(lengths=[cut, S - cut])
        mask = documents if mask is None else documents & mask
    decay = draw(st.lists(st.floats(0.1, 1.0), min_size=Hkv * G, max_size=Hkv * G)) if causal else None
    seed, chunk, once = draw(st.integers(0, 99)), draw(st.integers(1, 9)), draw(st.sampled_from([1, 64, 8192]))
    return (B, Hkv * G, L, S, D, Dv, Hkv, seed), mask, hidden, offset, decay, chunk, once


@settings(max_examples=60, suppress_health_check=SLOW)
@given(calls())
def test_random_calls_equal_the_formula(monkeypatch, call):
    (B, H, L, S, D, Dv, Hkv, seed), mask, hidden, offset, decay, chunk, once = call
    forced.sizes(monkeypatch, chunk_of_linear=chunk, chunks_of_linear_at_once=once)
    tensors = inputs(B, H, L, S, D, Dv=Dv, Hkv=Hkv, seed=seed)
    fade = None
    if decay is not None:
        fade = torch.tensor(decay, dtype=torch.float64).log()[None, :, None].expand(B, H, S)
    exact = attend(*tensors, mask, offset=offset, log_gate=fade, hidden=hidden)
    truth = gradients(exact, *tensors)
    for form in ("auto", "chunked", "recurrent", "quadratic"):
        try:
            out = linear_attention(*tensors, mask=mask, decay=decay, query_offset=offset, form=form)
        except regard.Refused:
            assert form == "recurrent" and decay is None
            continue
        assert (out - exact).abs().max() <= 1e-10
        for mine, right in zip(gradients(out, *tensors), truth, strict=True):
            assert (mine - right).abs().max() <= 1e-10 * max(1.0, float(right.abs().max()))
