from __future__ import annotations

import pytest
import torch
from tests.nn.helpers import build, close, gradients, random

from regard import masks

LENGTHS = [7, 3, 5, 0]


def padded(side: str, content: float = 0.0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    items = [random(n, 44) for n in LENGTHS]
    batch = torch.full((4, 7, 44), content, dtype=torch.float64)
    for b, item in enumerate(items):
        batch[b, : len(item)] = item
        if side == "left":
            batch[b] = batch[b].roll(7 - len(item), 0)
    return batch, items


def rows(side: str, length: int) -> slice:
    return slice(0, length) if side == "right" else slice(7 - length, 7)


@pytest.mark.parametrize("content", [0.0, 1e6, float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_padded_batch_equals_each_sequence_alone_and_its_pad_rows_are_zero(side, causal, content):
    module = build(44, 4, packed=True)
    batch, items = padded(side, content)
    rule = masks.causal() if causal else masks.everything()
    out = module(batch, mask=masks.padding(LENGTHS, side=side) & rule)
    for b, item in enumerate(items):
        at = rows(side, len(item))
        assert close(out[b, at], module(item[None], mask=rule)[0])
        pads = torch.ones(7, dtype=torch.bool)
        pads[at] = False
        assert not out[b, pads].any()


@pytest.mark.parametrize("content", [1e6, float("nan"), float("inf")])
@pytest.mark.parametrize("packed", [False, True])
def test_content_of_padding_reaches_no_gradient(content, packed):
    module = build(44, 4, packed=packed, qk_norm=True)
    clean, _ = padded("right")
    dirty = clean.clone()
    for b, n in enumerate(LENGTHS):
        dirty[b, n:] = content
    mask = masks.causal() & masks.padding(LENGTHS)
    found = []
    for batch in (clean, dirty):
        batch.requires_grad_()
        found.append(gradients(module, module(batch, mask=mask), batch))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not found[1]["input 0"][1, 3:].any()


def test_a_document_id_of_minus_one_is_padding():
    module = build(44, 4)
    x = random(2, 7, 44)
    ids = torch.tensor([[0, 0, 0, 1, 1, -1, -1], [0, 1, 1, 1, 1, 1, -1]])
    out = module(x, mask=masks.documents(ids=ids))
    assert not out[ids < 0].any()
    assert close(out[0, 3:5], module(x[:1, 3:5])[0])


def test_padding_is_found_inside_joined_masks():
    module = build(44, 4)
    x, _ = padded("right")
    lengths = masks.padding(LENGTHS)
    for mask in (
        (masks.causal() & lengths) & masks.window(left=3),
        (masks.causal() & lengths) | (masks.columns(1) & lengths),
    ):
        out = module(x, mask=mask)
        assert not out[1, 3:].any() and not out[3].any()


def test_hiding_keys_does_not_make_a_row_padding():
    module = build(44, 4)
    x, _ = padded("right")
    keys = torch.tensor([True, True, False, False, False, False, False])
    for mask in (masks.columns(2), masks.keep(keys), masks.padding(LENGTHS) | masks.columns(2)):
        assert module(x, mask=mask).abs().amin(-1)[:3].min() > 0


def test_padding_of_keys_says_nothing_about_the_queries_of_cross_attention():
    module = build(44, 4)
    x, memory = random(4, 5, 44), random(4, 7, 44)
    memory[1, 3:] = torch.nan
    x.requires_grad_()
    out = module(x, memory, mask=masks.padding(LENGTHS))
    assert close(out[1:2], module(x[1:2], memory[1:2, :3]))
    assert close(out[3], module.out_proj.bias.expand(5, 44))
    assert all(torch.isfinite(g).all() for g in gradients(module, out, x).values())
