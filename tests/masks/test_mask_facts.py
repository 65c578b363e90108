"""What other packages ask of a mask: one answer each, from facts of the kinds; nobody else knows the kinds by name."""

from __future__ import annotations

import ast
import operator
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch
from mask_oracle import chosen_pairs
from torch import Tensor, nn

import regard
from regard import masks
from regard.cache import KVCache
from regard.masks._base import KINDS
from regard.masks._rebuild import of_intervals

SOURCE = Path(regard.__file__).parent
X = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(3))
PADDED = masks.padding([7, 4])
LEFT = masks.padding([7, 4], side="left")
IDS = masks.documents(ids=[[0, 0, 0, 1, 1, 1, 1], [0, 0, 2, 2, -1, -1, -1]])
TAIL, HEAD, NONE = (torch.zeros(2, 7, dtype=torch.bool) for _ in range(3))
TAIL[1, 4:] = True
HEAD[1, :3] = True
MARKED = {
    "padding": (PADDED, TAIL),
    "left padding": (LEFT, HEAD),
    "padding and causal": (masks.causal() & PADDED, TAIL),
    "two paddings": (PADDED & LEFT, TAIL | HEAD),
    "padding or padding": (PADDED | LEFT, TAIL & HEAD),
    "padding or causal": (PADDED | masks.causal(), None),
    "not padding": (~PADDED, None),
    "not not padding": (~~PADDED, TAIL),
    "not (not padding or causal)": (~(~PADDED | ~masks.causal()), TAIL),
    "documents with -1": (IDS, TAIL),
    "documents with -1, causal": (IDS & masks.causal(), TAIL),
    "not documents": (~IDS, None),
    "documents of all tokens": (masks.documents(ids=[0, 0, 0, 1, 1, 1, 1]), None),
    "documents by lengths": (masks.documents(lengths=[3, 4]), None),
    "columns": (masks.columns(3), None),
    "keep": (masks.keep(~TAIL[:, None, None]), None),
}


class Own(nn.Module):
    def forward(self, x: Tensor, mask: masks.Mask) -> Tensor:
        x = x[:, None]
        return regard.attention(x, x, x, mask=mask)


@pytest.mark.parametrize("name", MARKED)
def test_the_tokens_that_are_padding_are_the_same_to_a_mask_a_module_a_watch_and_a_cache(name: str) -> None:
    mask, pads = MARKED[name]
    found = mask.padding_keys(7, "cpu")
    assert mask.marks_padding == (found is not None) == (pads is not None)
    marked = NONE if pads is None else pads
    if found is not None:
        assert torch.equal(found.expand(2, 7), marked)
    empty = ~mask.dense(7, 7).expand(2, 1, 7, 7).any(-1)[:, 0]

    torch.manual_seed(5)
    mha = regard.nn.MultiHeadAttention(12, 3).eval()
    nn.init.normal_(mha.out_proj.bias)  # a row that sees nothing is not 0, one of padding is
    assert torch.equal((mha(X, mask=mask) == 0).all(-1), marked)

    model = Own()
    with regard.watch(model) as recording:
        model(X, mask)
    assert torch.equal(recording.calls[0].entropy.isnan()[:, 0], marked | empty)


@pytest.mark.parametrize("name", MARKED)
def test_a_cache_holds_padding_exactly_where_the_mask_marks_some(name: str) -> None:
    mask, pads = MARKED[name]
    mha = regard.nn.MultiHeadAttention(12, 3).eval()
    cache = KVCache(11)
    if mask.padding_side == "right":
        with pytest.raises(ValueError, match="pads on the right"):
            mha(X, mask=mask, cache=cache)
        return
    mha(X, mask=mask, cache=cache)
    if pads is None:
        mha(X[:, :1], cache=cache)
    else:
        with pytest.raises(ValueError, match="their padding is in it"):
            mha(X[:, :1], cache=cache)


def test_facts_of_a_join_come_from_its_parts() -> None:
    causal, near, table = masks.causal(), masks.window(3), masks.blocks(torch.ones(2, 2, dtype=torch.bool), 12)
    assert (causal & near | ~masks.strided(3)).relative
    assert not (causal & masks.columns(2)).relative
    assert (PADDED & ~masks.columns(2)).about_keys and not (PADDED & causal).about_keys
    assert (causal & near).bounded and (causal & (near | masks.columns(2))).bounded
    assert not (near | causal).bounded and not (~near).bounded
    assert (causal & (table | masks.random_blocks(2, 18))).grain == 6 and (causal & near).grain == 0
    parts = (causal & (near & table)).conjuncts
    assert parts == [causal, near, table] and reduce(operator.and_, parts).conjuncts == parts
    assert (causal | ~(near & table)).leaves == [causal, near, table]
    assert (~PADDED).padding_side is None and (causal & LEFT).padding_side == "left"


def test_what_a_cut_by_positions_leaves_is_intervals_to_kernels_and_one_rule_to_longer_calls() -> None:
    rows, columns = np.arange(7) >= 0, np.isin(np.arange(7), [0, 5, 6])
    cut, longer = (chosen_pairs(np.resize(rows, n), np.resize(columns, n) | (np.arange(n) > 6), 3) for n in (7, 8))
    assert cut is not None and cut == longer and ~~cut == cut
    left = masks.causal() & ~cut
    assert of_intervals(left.structure) and left.rows(7, 7, 0) is not None
    assert chosen_pairs(rows, np.arange(7) % 2 == 0, 3) is None  # four gaps


def test_a_mask_taken_apart_by_heads_has_an_item_for_each_head() -> None:
    table = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(1)) > 0.5
    mask = ~(masks.blocks(table, 2) & masks.causal()) | PADDED & IDS & masks.drop(table[:1, :, :1, :1])
    apart = mask.per_head(2, 3)
    assert apart is not None and apart.heads == 1
    assert torch.equal(apart.dense(7, 7).reshape(2, 3, 7, 7), mask.dense(7, 7).expand(2, 3, 7, 7))
    pairs = torch.ones(2, 3, 7, 7, dtype=torch.bool)
    assert (mask & masks.keep(pairs)).per_head(2, 3) is None


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def naming(path: Path) -> list[str]:
    """Where a module knows a kind of mask by its class or by the tag of its structure."""
    tags, classes = (
        set(KINDS),
        {kind.__name__ for kind in KINDS.values()} - {"Blocks"},
    )  # regard's flex has its own Blocks
    above = {"interop", "lab", "cli"}  # are written with what users have
    found = []
    inside = path.relative_to(SOURCE)
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"{inside}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("regard.masks"):
            found += [f"{where} {name.name}" for name in node.names if name.name in classes]
        if isinstance(node, ast.Attribute) and node.attr in classes and ast.unparse(node.value) == "masks":
            found.append(f"{where} masks.{node.attr}")
        if isinstance(node, ast.Subscript) and _last(node.value) == "structure":
            found.append(f"{where} {ast.unparse(node)}")
        if isinstance(node, (ast.Tuple, ast.List, ast.Set, ast.Dict)):
            items = node.keys if isinstance(node, ast.Dict) else node.elts
            words = {item.value for item in items if isinstance(item, ast.Constant)} & (tags - {"window", "prefix"})
            found += [f"{where} {sorted(words)}"] if len(words) > 2 else []
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "kind":
            words = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)} & tags
            found += [f"{where} {ast.unparse(node)}"] if words else []
        if isinstance(node, ast.Compare) and not above & set(inside.parts):
            made = [part.func for part in (node.left, *node.comparators) if isinstance(part, ast.Call)]
            named = [call for call in made if isinstance(call, ast.Attribute) and ast.unparse(call.value) == "masks"]
            found += [f"{where} {ast.unparse(node)}"] if named else []
    return found


def test_no_module_outside_masks_names_a_kind_of_mask() -> None:
    # the conformance suite states the meaning of every mask a second time, by itself
    apart = {SOURCE / "masks", SOURCE / "testing"}
    modules = [path for path in SOURCE.rglob("*.py") if not apart & set(path.parents)]
    assert len(modules) > 100
    assert [place for path in modules for place in naming(path)] == []


@pytest.mark.parametrize(
    "code",
    [
        "if mask.kind == 'causal': pass",
        "kind = mask.structure[0]",
        "known = frozenset(('causal', 'strided', 'everything'))",
        "from regard.masks._documents import Documents",
        "isinstance(mask, masks.Padding)",
        "if mask != masks.causal(): pass",
    ],
)
def test_a_module_that_names_one_is_found(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    module = tmp_path / "planted.py"
    module.write_text(code)
    assert naming(module)


ROWS = np.array([False, True, True, False, True, True, True])
SOME = np.array([True, False, True, False, False, False, True])
FEW = {
    "what a cut of the first keys leaves": masks.causal() & ~masks.columns(4),
    "what a cut of far keys leaves": masks.causal() & masks.window(left=2),
    "far keys alone": masks.causal() & ~masks.window(left=2),
    "between": ~masks.window(left=1, right=1) & ~masks.columns(1),
    "rows and columns": chosen_pairs(ROWS, SOME, 4),
    "all others": ~chosen_pairs(ROWS, SOME, 4),
    "all others, causal": masks.causal() & ~chosen_pairs(ROWS, SOME, 4),
}
MANY = {
    "five intervals": masks.causal() & ~masks.window(left=1) & ~chosen_pairs(ROWS, SOME, 4),
    "many columns": ~chosen_pairs(ROWS, np.arange(11) % 2 == 0, 8),
    "any keys": masks.causal() & masks.keep(torch.ones(7, 7, dtype=torch.bool)),
}


@pytest.mark.parametrize("name", FEW)
def test_masks_of_few_intervals_are_known_by_their_structure(name):
    """On a GPU our kernels take these; others are compiled anew for each kind, or tested pair by pair."""
    mask = FEW[name]
    assert of_intervals(mask.structure)
    rows = mask.rows(7, 7, 0)
    assert rows is not None
    j = np.arange(7)
    seen = ((rows.lo[..., None] <= j) & (j < rows.hi[..., None])).any(1)
    np.testing.assert_array_equal(seen[0], mask.dense(7, 7).expand(1, 1, 7, 7)[0, 0].numpy())


@pytest.mark.parametrize("name", MANY)
def test_masks_of_many_intervals_are_known_too(name):
    assert not of_intervals(MANY[name].structure)
