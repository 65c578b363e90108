"""Masks inside torch.compile, vmap and fake tensors: nothing is read there, and the meaning is the same."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from regard import masks

L, S = 5, 7
BITS = torch.tensor([[(3 * r + 5 * c) % 4 > 0 for c in range(S)] for r in range(L)])
TABLE = torch.tensor([[True, False, True], [False, True, True], [True, True, False]])

MAKERS = {
    "everything": lambda: masks.everything(),
    "causal": lambda: masks.causal(),
    "window": lambda: masks.window(2, right=1),
    "padding": lambda: masks.padding([4, 2, 6]),
    "documents by length": lambda: masks.documents(lengths=[3, 0, 4]),
    "documents by id": lambda: masks.documents(ids=[0, 0, -1, 3, 3, 0, 1]),
    "prefix": lambda: masks.prefix(3),
    "columns": lambda: masks.columns(2),
    "strided": lambda: masks.strided(3),
    "blocks": lambda: masks.blocks(TABLE, 3),
    "random blocks": lambda: masks.random_blocks(1, 2, seed=3),
    "keep": lambda: masks.keep(BITS),
    "drop": lambda: masks.drop(BITS),
    "from_additive": lambda: masks.from_additive(torch.where(BITS, 0.0, -torch.inf)),
    "joined": lambda: (masks.causal() & masks.window(2) & ~masks.padding([4, 2, 6])) | masks.columns(1),
}


@pytest.fixture(autouse=True)
def _no_compiled_code_left_over():
    torch.compiler.reset()


def picture(mask, x):
    """Everything a compiled caller may use, folded into one tensor that follows the mask."""
    tile = mask.tile(range(L), range(S), L, S, offset=2, device=x.device)
    hidden = mask.hidden_keys(S, x.device)
    mask.check(3, 1, L, S)
    assert mask.rows(L, S, 2, 3) is None or not torch.compiler.is_compiling()
    seen = torch.where(tile, x, 0.0)
    return seen if hidden is None else torch.where(hidden[:, None, None], -1.0, seen)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_a_mask_made_outside_a_compiled_function(name, dynamic):
    mask = MAKERS[name]()
    x = torch.randn(3, 1, L, S)
    compiled = torch.compile(lambda x: picture(mask, x), fullgraph=True, backend="eager", dynamic=dynamic)
    assert torch.equal(compiled(x), picture(mask, x))


# Dynamo (2.13) does not trace the operator ~ on objects that are not tensors; its method it does.
INSIDE = {**MAKERS, "joined": lambda: masks.causal() & masks.padding([4, 2, 6]).__invert__() | masks.columns(1)}


@pytest.mark.parametrize("name", INSIDE)
def test_a_mask_made_inside_a_compiled_function(name):
    x = torch.randn(3, 1, L, S)
    compiled = torch.compile(lambda x: picture(INSIDE[name](), x), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), picture(INSIDE[name](), x))


def test_a_mask_made_inside_of_tensors_with_dynamic_shapes():
    def run(bits, lengths, x):
        mask = masks.keep(bits) & masks.padding(lengths) & masks.window(x.shape[-1] // 2)
        return torch.where(mask.dense(bits.shape[0], bits.shape[1]), x, 0.0) + len(mask.code)

    compiled = torch.compile(run, fullgraph=True, backend="eager", dynamic=True)
    for rows, keys in [(5, 7), (3, 11)]:
        arguments = torch.rand(rows, keys) > 0.4, torch.tensor([2, 3]), torch.randn(2, 1, rows, keys)
        assert torch.equal(compiled(*arguments), run(*arguments))


def test_the_code_of_a_mask_made_inside_is_the_code_of_one_made_outside():
    found = []

    def run(x):
        mask = INSIDE["joined"]()
        found.append(mask.code)
        return x + len(mask.code)

    torch.compile(run, fullgraph=True, backend="eager")(torch.zeros(3))
    assert found[0] == INSIDE["joined"]().code


def test_flags_and_rebuilding_work_while_compiling():
    def run(x):
        mask = masks.causal() & masks.window(2)
        flags = mask.fused(L, S, 2)
        return x + flags.left + (flags.right or 0)

    assert torch.compile(run, fullgraph=True, backend="eager")(torch.zeros(3)).tolist() == [2, 2, 2]


def test_contents_are_not_readable_while_compiling():
    def run(x):
        assert not masks.causal().readable()
        return x

    torch.compile(run, fullgraph=True, backend="eager")(torch.zeros(3))


@pytest.mark.parametrize("side", ["right", "left"])
def test_vmap_over_lengths(side):
    lengths = torch.tensor([[4, 2, 6], [1, 7, 0]])

    def seen(lengths):
        mask = masks.causal() & masks.padding(lengths, side=side)
        assert not mask.readable()
        assert mask.rows(L, S, 2, 3) is None
        return mask.tile(range(L), range(S), L, S, offset=2)

    wanted = torch.stack([(masks.causal() & masks.padding(row, side=side)).dense(L, S) for row in lengths])
    assert torch.equal(torch.func.vmap(seen)(lengths), wanted)


@pytest.mark.parametrize("make", [masks.keep, masks.drop])
def test_vmap_over_booleans(make):
    bits = torch.rand(3, L, S) > 0.5
    seen = torch.func.vmap(lambda b: (make(b) | masks.columns(1)).tile(range(L), range(S), L, S, offset=2)[0, 0])(bits)
    assert torch.equal(seen, torch.stack([(make(b) | masks.columns(1)).dense(L, S) for b in bits]))


def test_vmap_over_documents():
    lengths = torch.tensor([[3, 0, 4], [2, 4, 1]])
    packed = torch.func.vmap(lambda n: masks.documents(n).tile(range(L), range(S), L, S, offset=2)[0, 0])(lengths)
    assert torch.equal(packed, torch.stack([masks.documents(n).dense(L, S) for n in lengths]))
    ids = torch.tensor([[0, 0, -1, 3, 3, 0, 1], [2, 2, 2, 2, 1, 1, -1]])
    named = torch.func.vmap(lambda n: masks.documents(ids=n).tile(range(L), range(S), L, S, offset=2)[0, 0])(ids)
    assert torch.equal(named, torch.stack([masks.documents(ids=n).dense(L, S) for n in ids]))


def test_vmap_over_block_tables_and_offsets():
    tables = torch.stack([TABLE, ~TABLE])
    seen = torch.func.vmap(lambda t: masks.blocks(t, 3).tile(range(L), range(S), L, S, offset=2)[0, 0])(tables)
    assert torch.equal(seen, torch.stack([masks.blocks(t, 3).dense(L, S) for t in tables]))
    offsets = torch.tensor([[-1, 0, 2], [3, 1, 1]])
    mask = masks.causal() & masks.blocks(TABLE, 3) | masks.random_blocks(1, 2, seed=3) & masks.documents([3, 4])
    seen = torch.func.vmap(lambda o: mask.tile(range(L), range(S), L, S, offset=o))(offsets)
    assert torch.equal(seen, torch.stack([mask.dense(L, S, query_offset=o) for o in offsets]))


def test_vmap_over_additive_masks_reads_nothing():
    added = torch.where(torch.rand(3, L, S) > 0.5, 0.0, -torch.inf)
    seen = torch.func.vmap(lambda a: masks.from_additive(a).tile(range(L), range(S), L, S, offset=2)[0, 0])(added)
    assert torch.equal(seen, added == 0)


def test_fake_tensors_have_shapes_but_are_not_read():
    with FakeTensorMode():
        mask = masks.causal() & masks.padding(torch.ones(3, dtype=torch.int64)) & masks.keep(torch.ones(S).bool())
        assert not mask.readable()
        assert mask.rows(L, S, 2, 3) is None
        assert mask.tile(range(L), range(S), L, S, offset=2).shape == (3, 1, L, S)
        assert mask.hidden_keys(S, "cpu").shape == (3, S)


def test_a_mask_goes_through_export():
    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.where((masks.causal() & masks.documents([3, 4])).dense(L, S), x, 0.0)

    x = torch.randn(L, S)
    assert torch.equal(torch.export.export(Model(), (x,)).module()(x), Model()(x))


def test_the_same_mask_on_another_device_keeps_its_lists_on_cpu():
    mask = masks.padding([4, 2, 6]) & masks.documents([3, 4])
    tile = mask.tile(range(L), range(S), L, S, offset=2, device="meta")
    assert tile.device.type == "meta"
    assert tile.shape == (3, 1, L, S)
    assert all(tensor.device.type == "cpu" for tensor in mask.tensors)


def test_a_list_is_copied_to_another_device_once_even_in_inference_mode():
    mask = masks.padding([4, 2, 6])
    with torch.inference_mode():
        first = mask._on(torch.device("meta"))
    assert mask._on(torch.device("meta")) is first
    assert not first.is_inference()
