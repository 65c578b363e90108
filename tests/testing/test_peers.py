"""Adapters of other implementations: translated in their favour, refused where they have no argument."""

from __future__ import annotations

import sys

import pytest
import torch

from regard import masks
from regard.testing import check, peers

HERE = ["torch", "torch-math", "torch-is_causal", "nn.MultiheadAttention", "flex"]


def tensors(*sizes):
    B, H, L, S, D = sizes
    return torch.randn(B, H, L, D), torch.randn(B, H, S, D), torch.randn(B, H, S, D)


@pytest.mark.parametrize("name", HERE)
def test_peer_agrees_on_a_plain_masked_call(name):
    query, key, value = tensors(2, 3, 5, 7, 11)
    kept = torch.rand(5, 7) > 0.3
    kept[:, 0] = True
    expected = torch.softmax((query @ key.mT / 11**0.5).masked_fill(~kept, -torch.inf), -1) @ value
    found = peers.load(name)(query, key, value, mask=masks.keep(kept))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["torch", "torch-math", "nn.MultiheadAttention"])
def test_peer_passes_rule_1(name):
    assert check(peers.load(name), rules=[1], dtype=torch.float32).ok


def test_causal_flag_of_torch_is_top_left_and_its_mask_is_not():
    assert check(peers.load("torch"), rules=[10], dtype=torch.float32).ok
    assert not check(peers.load("torch-is_causal"), rules=[10], dtype=torch.float32).ok


@pytest.mark.parametrize("name", HERE)
def test_what_a_peer_has_no_argument_for_is_refused(name):
    query, key, value = tensors(1, 2, 3, 5, 7)
    with pytest.raises(NotImplementedError, match="sinks"):
        peers.load(name)(query, key, value, sinks=torch.zeros(2))


def test_suite_finds_the_known_faults_of_torch():
    report = check(peers.load("torch"), rules=[6, 8, 20, 23], dtype=torch.float32)
    assert {row.rule for row in report.failures} == {6, 8, 20, 23}


def test_unknown_peer_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match="nn.MultiheadAttention"):
        peers.load("jax")


@pytest.mark.parametrize(
    ("name", "package"), [("x-transformers", "x_transformers"), ("transformers-sdpa", "transformers")]
)
def test_missing_package_is_named(monkeypatch, name, package):
    for loaded in [module for module in sys.modules if module.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(peers.Missing, match=f"pip install {name.removesuffix('-sdpa')}"):
        peers.load(name)
