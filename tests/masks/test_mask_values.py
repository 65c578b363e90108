"""Masks as values: equality, hashing, repr, code and rebuild, copies, and remembered answers that notice a change."""

from __future__ import annotations

import ast
import copy
import pickle
import random
import threading

import numpy as np
import pytest
import torch
from mask_oracle import RULES, Sizes, full_size, join, sizes

from regard import masks

BITS = torch.tensor([[True, False, True], [False, True, True]])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_code_and_tensors_rebuild_an_equal_mask(rule):
    rng = random.Random(11)
    for _ in range(20):
        z = sizes(rng, 9)
        mask, bits = rule(rng, z)
        assert mask.code == repr(mask.structure)
        assert ast.literal_eval(mask.code) == mask.structure
        again = masks.rebuild(mask.code, mask.tensors)
        assert again == mask
        assert hash(again) == hash(mask) == hash(mask.structure)
        assert type(again) is type(mask)
        assert (again.batch, again.heads) == (mask.batch, mask.heads)
        assert (full_size(again, z) == bits).all()


def test_joins_rebuild_and_copy_and_pickle():
    rng = random.Random(12)
    for _ in range(50):
        z = sizes(rng, 9)
        mask, bits = join(rng, z, 3)
        mask.blocks(z.L, z.S, z.offset, z.B, 2, 2)
        for again in (
            masks.rebuild(mask.code, mask.tensors),
            copy.deepcopy(mask),
            copy.copy(mask),
            pickle.loads(pickle.dumps(mask)),
        ):
            assert again == mask
            assert hash(again) == hash(mask)
            assert repr(again) == repr(mask)
            assert (full_size(again, z) == bits).all()


def test_rebuild_refuses_too_many_tensors():
    with pytest.raises(ValueError, match="more tensors"):
        masks.rebuild(masks.keep(BITS).code, [BITS, BITS])


def test_equality_compares_structure_and_contents():
    assert masks.causal() == masks.causal()
    assert masks.window(3) != masks.window(4)
    assert masks.window(3, 1) != masks.window(1, 3)
    assert masks.padding([3, 5]) == masks.padding(torch.tensor([3, 5]))
    assert masks.padding([3, 5]) != masks.padding([3, 4])
    assert hash(masks.padding([3, 5])) == hash(masks.padding([3, 4]))
    assert masks.padding([3, 5]) != masks.padding([3, 5], side="left")
    assert masks.keep(BITS) == masks.keep(BITS.clone())
    assert masks.keep(BITS) != masks.drop(BITS)
    assert masks.keep(BITS) != masks.keep(~BITS)
    assert masks.causal() & masks.window(2) != masks.window(2) & masks.causal()
    assert masks.documents(lengths=[3, 4]) != masks.documents(ids=[3, 4])
    assert masks.causal() != "causal()"
    assert len({masks.causal(), masks.causal(), masks.window(3), masks.window(3)}) == 2


def test_the_structure_holds_no_tensor_and_no_device():
    here, nowhere = masks.keep(BITS), masks.keep(BITS.to("meta"))
    assert here.structure == nowhere.structure == ("keep", (2, 3), "bool")
    assert here != nowhere


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (masks.everything(), "everything()"),
        ((masks.causal() & masks.window(left=256)) | masks.columns(64), "(causal() & window(left=256)) | columns(64)"),
        (masks.causal() & masks.window(1, 2) & masks.prefix(3), "causal() & window(left=1, right=2) & prefix(3)"),
        (masks.causal() & (masks.strided(2) & masks.prefix(3)), "causal() & (strided(2) & prefix(3))"),
        (~(masks.causal() | masks.columns(2)) & ~masks.strided(3), "~(causal() | columns(2)) & ~strided(3)"),
        (masks.padding([3, 5], side="left"), "padding([3, 5], side='left')"),
        (masks.padding(list(range(9))), "padding(<lengths [9]>)"),
        (masks.documents(ids=torch.zeros(2, 3).long()), "documents(ids=<ids [2, 3]>)"),
        (masks.documents([2, 1]), "documents(lengths=[2, 1])"),
        (masks.blocks(BITS, 5), "blocks(<bool [2, 3]>, size=5)"),
        (masks.random_blocks(2, 16, seed=-7), "random_blocks(count=2, size=16, seed=-7)"),
        (masks.keep(BITS), "keep(<bool [2, 3]>)"),
        (masks.drop(BITS), "drop(<bool [2, 3]>)"),
        (masks.from_additive(torch.zeros(1, 1, 3, 5)), "from_additive(<float32 [1, 1, 3, 5]>)"),
    ],
)
def test_repr_reads_like_the_code_that_made_it(mask, text):
    assert repr(mask) == text


def test_given_tensors_are_told_apart_from_those_made_of_lists():
    lengths = torch.tensor([3, 5])
    mask = masks.padding(lengths) & ~masks.documents(lengths=[2, 3]) | masks.keep(BITS[:, :1, None, None])
    assert len(mask.tensors) == 3
    assert [tensor is other for tensor, other in zip(mask.given, (lengths, mask.tensors[2]), strict=True)] == [True] * 2


def test_integers_may_come_from_numpy():
    assert masks.window(np.int64(3)) == masks.window(3)
    assert masks.padding(np.array([3, 5])) == masks.padding([3, 5])


@pytest.mark.parametrize(
    "make",
    [
        lambda t: masks.padding(t),
        lambda t: masks.causal() & masks.padding(t),
        lambda t: ~masks.padding(t) | masks.columns(1),
    ],
)
def test_a_change_in_place_is_noticed(make):
    lengths = torch.tensor([3, 5])
    mask = make(lengths)

    def answers(mask):
        rows, table = mask.rows(7, 7, 0, 2), mask.blocks(7, 7, 0, 2, 2, 2)
        arrays = (rows.lo, rows.hi, table.row_ptr, table.cols, table.full)
        return [array.tolist() for array in arrays], mask.kept_pairs(7, 7, 0, 2, 3)

    before = answers(mask)
    assert answers(mask) == before
    lengths[0] = 6
    fresh = make(torch.tensor([6, 5]))
    assert answers(mask) == answers(fresh) != before
    assert mask == fresh


def test_documents_and_keys_changed_in_place_are_noticed():
    ids, keys = torch.tensor([0, 0, 1, 1, 1]), torch.ones(5, dtype=torch.bool)
    documents, keep = masks.documents(ids=ids), masks.keep(keys)
    assert documents.kept_pairs(5, 5, 0, 1, 1) == (13, True)
    assert keep.kept_pairs(5, 5, 0, 1, 1) == (25, True)
    ids[2] = 0
    keys[1] = False
    assert documents.kept_pairs(5, 5, 0, 1, 1) == (13, True)
    assert documents.rows(5, 5, 0, 1).hi.tolist() == [[[3, 3, 3, 5, 5]]]
    assert keep.rows(5, 5, 0, 1).lo[0, :, 0].tolist() == [0, 2]
    lengths = torch.tensor([2, 3])
    packed = masks.documents(lengths)
    packed.check(1, 1, 5, 5)
    lengths += 1
    with pytest.raises(ValueError, match="add up to 7"):
        packed.check(1, 1, 5, 5)


def test_answers_are_remembered_and_shared_by_equal_masks_without_tensors():
    def build():
        return masks.causal() & masks.window(17)

    assert build().rows(63, 63, 0, 1) is build().rows(63, 63, 0, 1)
    assert build().blocks(63, 63, 0, 1, 8, 8) is build().blocks(63, 63, 0, 1, 8, 8)
    assert build().rows(63, 63, 0, 1) is not build().rows(63, 63, 1, 1)
    own = masks.padding([3, 5])
    assert own.rows(7, 7, 0, 2) is own.rows(7, 7, 0, 2)


def test_answers_of_inference_tensors_and_tensor_offsets_are_not_remembered():
    with torch.inference_mode():
        lengths = torch.tensor([3, 5])
        mask = masks.padding(lengths)
        assert mask.rows(7, 7, 0, 2).hi[0, 0, 0] == 3
        lengths[0] = 4
        assert mask.rows(7, 7, 0, 2).hi[0, 0, 0] == 4
    offset = torch.tensor([0, 2])
    assert masks.causal().rows(3, 7, offset, 2).hi[0, 0].tolist() == [1, 2, 3]
    offset += 1
    assert masks.causal().rows(3, 7, offset, 2).hi[0, 0].tolist() == [2, 3, 4]


def test_what_reads_no_tensor_is_remembered_for_all_masks_of_one_structure_that_cannot_be_read():
    def ask(lengths, side="right", reads=False):
        return masks.padding(lengths, side).remember("probe", 0, object, reads=reads)

    there = torch.empty(2, dtype=torch.int64, device="meta")  # as on a GPU, nothing can be read from it
    assert ask(there) is ask(torch.empty_like(there))
    assert ask(there) is not ask(there, "left")
    assert ask(there) is not ask(there.int())
    assert ask(there, reads=True) is not ask(there, reads=True)
    # what can be read may decide
    assert ask(torch.tensor([3, 5])) is not ask(torch.tensor([3, 5]))
    lengths = torch.tensor([3, 5])
    mask = masks.padding(lengths)
    first = mask.remember("probe", 0, object, reads=False)
    assert mask.remember("probe", 0, object, reads=False) is first
    lengths += 1
    assert mask.remember("probe", 0, object, reads=False) is not first


def test_a_tensor_made_in_inference_mode_is_not_remembered_beyond_it():
    mask = masks.window(5)
    with torch.inference_mode():
        assert mask.remember("probe", 0, lambda: torch.zeros(3)).is_inference()
    assert not mask.remember("probe", 0, lambda: torch.zeros(3)).is_inference()


def test_a_list_given_in_inference_mode_does_not_become_an_inference_tensor():
    with torch.inference_mode():
        assert not masks.padding([3, 5]).tensors[0].is_inference()


def test_only_a_bounded_number_of_answers_is_kept():
    mask = masks.padding([3, 5])
    for L in range(100):
        mask.rows(L, 7, 0, 2)
    assert len(mask._memo.found) <= 16


def test_what_is_recalled_was_remembered_and_needs_no_look_at_tensors() -> None:
    rule, lengths = masks.causal() & masks.window(left=37), torch.tensor([5, 4])
    for mask, recalled in ((rule, 1), (masks.padding(lengths), None)):
        assert mask.recalled("kind") is None
        assert mask.remember("kind", 0, lambda: 1, reads=False) == 1
        assert mask.recalled("kind") == recalled and mask.recalled("other") is None


def test_several_threads_may_ask_the_same_mask():
    mask = masks.causal() & masks.padding([3, 5])
    wanted = {L: mask.kept_pairs(L, 9, 0, 2, 1) for L in range(30)}
    wrong = []

    def ask():
        rng = random.Random(threading.get_ident())
        for _ in range(300):
            L = rng.randrange(30)
            if mask.kept_pairs(L, 9, 0, 2, 1) != wanted[L]:
                wrong.append(L)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


def test_batch_and_heads_are_those_of_the_tensors():
    z = Sizes(3, 7, 5, 11, (6,))
    assert (masks.causal().batch, masks.causal().heads) == (1, 1)
    mask = masks.padding([1, 2, 3]) & masks.keep(torch.ones(1, 7, 5, 11, dtype=torch.bool))
    assert (mask.batch, mask.heads) == (3, 7)
    assert ((~mask).batch, (~mask).heads) == (3, 7)
    assert full_size(mask, z).shape == (3, 7, 5, 11)
