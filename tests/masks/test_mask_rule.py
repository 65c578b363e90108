"""Masks from a function: on every backend, with statistics and gradients, as values; and what is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import regard
from regard import masks
from regard.masks._flex import Frame

DOCUMENTS = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2])
TABLE = torch.rand(2, 3, 9, generator=torch.Generator().manual_seed(4)) > 0.4
i, j = torch.arange(2, 9)[:, None], torch.arange(9)
b, h = torch.arange(2).view(2, 1, 1, 1), torch.arange(3).view(3, 1, 1)


def by_document(b, h, i, j):
    return (DOCUMENTS[i] == DOCUMENTS[j]) & (j <= i)


def by_table(b, h, i, j, table=TABLE):
    return table[b, h, j] | (i == j)


CASES = {
    "positions": (masks.rule(lambda b, h, i, j: (i - j) ** 2 <= 4), (i - j) ** 2 <= 4),
    "documents": (masks.rule(by_document), (DOCUMENTS[i] == DOCUMENTS[j]) & (j <= i)),
    "heads": (masks.rule(lambda b, h, i, j: (j <= i) & ((h != 1) | (j > 3))), (j <= i) & ((h != 1) | (j > 3))),
    "items": (masks.rule(lambda b, h, i, j: (j <= i) | (b == 1)), (j <= i) | (b == 1)),
    "items and heads": (masks.rule(by_table), TABLE[:, :, None] | (i == j)),
    "joined": (~masks.rule(by_table) & masks.causal() | masks.columns(1), ~TABLE[:, :, None] & (j < i) | (j < 1)),
    "nothing": (masks.rule(lambda b, h, i, j: False), torch.zeros(7, 9, dtype=torch.bool)),
}


def tensors(dtype=torch.float64):
    made = torch.Generator().manual_seed(7)
    return [torch.randn(2, 3, n, 5, generator=made, dtype=dtype).requires_grad_() for n in (7, 9, 9)]


@pytest.mark.parametrize("backend", ["reference", "eager", "blockwise", "sdpa", "auto"])
@pytest.mark.parametrize("name", CASES)
def test_a_rule_equals_its_booleans_with_gradients_on_every_backend(name, backend):
    mask, bits = CASES[name]
    given, same = tensors(), tensors()
    if backend == "reference":
        given, same = ([x.detach() for x in side] for side in (given, same))
    out = regard.attention(*given, mask=mask, backend=backend)
    oracle = regard.reference.attention(*[x.detach().numpy() for x in same], mask=bits.expand(2, 3, 7, 9).numpy())
    torch.testing.assert_close(out.detach(), torch.from_numpy(oracle), rtol=0, atol=1e-12)
    if backend != "reference":
        out.square().sum().backward()
        regard.attention(*same, mask=masks.keep(bits.expand(2, 3, 7, 9)), backend="eager").square().sum().backward()
        for mine, theirs in zip(given, same, strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_statistics_costs_and_the_predicate_of_flex_are_those_of_the_booleans(name):
    mask, bits = CASES[name]
    given = [x.detach() for x in tensors()]
    keep = masks.keep(bits.expand(2, 3, 7, 9))
    seen, same = regard.observe(*given, mask=mask), regard.observe(*given, mask=keep)
    for what in ("lse", "entropy", "key_mass", "map", "distance"):
        torch.testing.assert_close(getattr(seen, what), getattr(same, what), equal_nan=True)
    cost = regard.explain(*given, mask=mask).cost
    assert (cost.kept_pairs, cost.kept_exact) == (int(bits.expand(2, 3, 7, 9).sum()), True)
    see = mask.sized(2, 3).predicate(Frame(7, 9, 2, 2, torch.device("cpu"))).see
    asked = see(b, h[None], torch.arange(7)[:, None], torch.arange(9))
    assert torch.equal(torch.as_tensor(asked).expand(2, 3, 7, 9), bits.expand(2, 3, 7, 9))


def test_blocks_that_a_rule_leaves_empty_are_not_listed():
    mask = masks.rule(lambda b, h, i, j: (j <= i) & (i - j < 40) & (h < 2), heads=3)
    table = mask.blocks(130, 130, 0, 2, 16, 16)
    same = (masks.causal() & masks.window(39)).blocks(130, 130, 0, 2, 16, 16)
    assert (table.cols.tolist(), table.row_ptr.tolist()) == (same.cols.tolist(), same.row_ptr.tolist())
    assert not table.full.any()  # head 2 sees nothing
    one = masks.rule(lambda b, h, i, j: (j <= i) & (i - j < 40)).blocks(130, 130, 0, 2, 16, 16)
    assert one.full.tolist() == same.full.tolist() and one.full.any()


def test_a_rule_is_a_value():
    def near(width):
        return masks.rule(lambda b, h, i, j: (i - j).abs() < width)

    assert near(3) == near(3) and hash(near(3)) == hash(near(3))
    assert near(3) != near(4) and near(3) != near(3.0) and near(3) != masks.window(2, 2)
    mask = masks.rule(by_table, batch=2, heads=3)
    assert mask != masks.rule(by_table) and mask == masks.rule(by_table).sized(2, 3)
    for again in (masks.rebuild(mask.code, mask.tensors), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert again == mask and repr(again) == repr(mask) == "rule(by_table, batch=2, heads=3)"
        assert torch.equal(again.dense(4, 9), mask.dense(4, 9))
    other = masks.rebuild(mask.code, [~TABLE])
    assert other != mask and torch.equal(other.dense(1, 9), ~TABLE[:, :, None] | (torch.arange(9) == 8))


def test_a_rule_keeps_the_values_it_was_made_with_and_notices_tensors_that_change_in_place():
    made = []
    for width in (1, 2, 3):
        made.append(masks.rule(lambda b, h, i, j: (i - j).abs() < width))  # noqa: B023
    assert [int(mask.dense(3, 3).sum()) for mask in made] == [3, 7, 9]
    flags = torch.zeros(9, dtype=torch.bool)
    mask = masks.rule(lambda b, h, i, j: flags[j])
    assert mask.kept_pairs(5, 9, 0, 1, 1) == (0, True)
    flags[3] = True
    assert mask.kept_pairs(5, 9, 0, 1, 1) == (5, True)
    flags = None
    assert mask.dense(1, 9).sum() == 1


def test_a_rule_works_in_modules_with_a_cache_under_compile_and_vmap():
    mask = CASES["heads"][0]
    x = tensors(torch.float32)[0].detach()
    expected = regard.attention(x, x, x, mask=mask)
    compiled = torch.compile(lambda x, mask: regard.attention(x, x, x, mask=mask), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, mask), expected)
    torch.testing.assert_close(torch.vmap(lambda x: regard.attention(x, x, x, mask=mask))(x[None])[0], expected)
    tokens = torch.randn(2, 9, 12)
    mha = regard.nn.MultiHeadAttention(12, 3).eval()
    whole = mha(tokens, mask=mask)
    cache = regard.cache.KVCache(9)
    parts = [mha(part, mask=mask, cache=cache) for part in tokens.split((4, 1, 4), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_what_cannot_be_a_rule_is_refused():
    with pytest.raises(TypeError, match="must be a function"):
        masks.rule(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"use & \| ~ and torch.where"):
        masks.rule(lambda b, h, i, j: i > j and j > 2)
    with pytest.raises(ValueError, match="cannot be evaluated on tensors"):
        masks.rule(lambda i, j: i > j)
    with pytest.raises(TypeError, match="must return booleans .* got an int64 tensor"):
        masks.rule(lambda b, h, i, j: i - j)
    with pytest.raises(ValueError, match="keep the shape"):
        masks.rule(lambda b, h, i, j: torch.ones(11, dtype=torch.bool))
    with pytest.raises(ValueError, match="heads must be in 1"):
        masks.rule(lambda b, h, i, j: h == 0, heads=0)
    for look in (
        lambda mask: mask.dense(2, 2),
        lambda mask: mask.show(2, 2),
        lambda mask: mask.kept_pairs(2, 2, 0, 1, 2),
    ):
        with pytest.raises(ValueError, match="give heads= to masks.rule"):
            look(masks.causal() & masks.rule(lambda b, h, i, j: h == 0))
    with pytest.raises(ValueError, match="is for 4 heads, but the call has 3"):
        regard.attention(*tensors(), mask=masks.rule(lambda b, h, i, j: h == 0, heads=4))


def test_documents_of_each_item_by_their_lengths():
    mask = masks.documents(lengths=[[2, 3], [1, 1, 2]])
    assert mask == masks.documents(ids=[[0, 0, 1, 1, 1], [0, 1, 2, 2, -1]])
    assert mask == masks.documents(lengths=torch.tensor([[2, 3, 0], [1, 1, 2]]))
    assert mask.padding_keys(5, "cpu").tolist() == [[False] * 5, [False] * 4 + [True]]
    alone = [masks.documents(lengths=[2, 3]), masks.documents(lengths=[1, 1, 2])]
    assert torch.equal(mask.dense(5, 5)[0, 0], alone[0].dense(5, 5))
    assert torch.equal(mask.dense(5, 5)[1, 0, :4, :4], alone[1].dense(4, 4))
    with pytest.raises(ValueError, match="ids for 5 keys, the call has 6"):
        mask.dense(6, 6)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        masks.documents(lengths=[[2, -1], [1]])
    with pytest.raises(ValueError, match="there give ids="):
        masks.documents(lengths=torch.ones(2, 2, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize(
    "mask", [masks.padding(torch.tensor([9, 4])), masks.keep(TABLE[:, :, None]), CASES["documents"][0]]
)
def test_explain_on_meta_tensors_reads_masks_that_hold_cpu_tensors(mask):
    given = [x.detach() for x in tensors()]
    far = [x.to("meta") for x in given]
    assert regard.explain(*far, mask=mask).cost.kept_pairs == regard.explain(*given, mask=mask).cost.kept_pairs
