"""At lengths where a call runs in steps: edits by positions stay rules, so that no kernel is given a mask of pairs, and
equal the same edit made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard import edits
from regard.models import Decoder, DecoderConfig

LENGTH, HEADS, GROUPS, DIM = 1111, 4, 2, 8
KERNEL = "aten::_scaled_dot_product_flash_attention_for_cpu"
TOKENS = [["cat" if n in (3, 500) else f"t{n}" for n in range(LENGTH)]]


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*apart(x), is_causal=True, enable_gqa=True)


def apart(x: Tensor) -> tuple[Tensor, ...]:
    return x.unflatten(-1, (-1, DIM)).transpose(1, 2).split([HEADS, GROUPS, GROUPS], 1)


class Kernels(TorchDispatchMode):
    """Numbers that the fused kernel is given as masks, and the widest head that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.masks, self.width = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.name() == KERNEL:
            mask = kwargs.get("attn_mask")
            self.masks += 0 if mask is None else mask.untyped_storage().nbytes() // mask.element_size()
            self.width = max(self.width, args[0].shape[3])
        return func(*args, **kwargs)


def given(items: int = 1) -> Tensor:
    torch.manual_seed(7)
    return torch.randn(items, LENGTH, (HEADS + 2 * GROUPS) * DIM, dtype=torch.float64, requires_grad=True)


def by_hand(x: Tensor, change: Callable[[Tensor], Tensor], heads: list[int] | None) -> Tensor:
    query, *grouped = apart(x)
    key, value = (part.repeat_interleave(HEADS // GROUPS, 1) for part in grouped)
    logits = query @ key.transpose(2, 3) / DIM**0.5
    chosen = torch.zeros(HEADS, dtype=torch.bool)
    chosen[heads or list(range(HEADS))] = True
    logits = torch.where(chosen[:, None, None], change(logits), logits)
    logits = logits.masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -torch.inf)
    return torch.softmax(logits, -1) @ value


def at(rows: Any, columns: Any) -> Tensor:
    pairs = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    line = torch.zeros(LENGTH, dtype=torch.bool)
    line[columns] = True
    pairs[rows] = line
    return pairs


LATE, FEW = slice(600, None), [3, 4, 500]
CASES: dict[str, tuple[edits.Edit, Callable[[Tensor], Tensor]]] = {
    "cut positions": (edits.cut(queries=LATE, keys=FEW), lambda x: x.masked_fill(at(LATE, FEW), -torch.inf)),
    "cut keys": (edits.cut(keys=slice(5, 90)), lambda x: x.masked_fill(at(slice(None), slice(5, 90)), -torch.inf)),
    "cut texts": (edits.cut(queries=-1, keys="cat"), lambda x: x.masked_fill(at(-1, [3, 500]), -torch.inf)),
    "cut every seventh": (
        edits.cut(keys=slice(7, None, 7)), lambda x: x.masked_fill(at(slice(None), slice(7, None, 7)), -torch.inf)
    ),
    "steer": (edits.steer(FEW, 1.7), lambda x: x + 1.7 * at(slice(None), FEW).double()),
    "steer queries": (edits.steer(FEW, -1.7, queries=LATE), lambda x: x - 1.7 * at(LATE, FEW).double()),
}  # fmt: skip


@pytest.mark.parametrize("heads", [None, [0, 3]])
@pytest.mark.parametrize("name", CASES)
def test_an_edit_equals_the_same_by_hand_and_no_kernel_is_given_pairs(name: str, heads: list[int] | None) -> None:
    edit, change = CASES[name]
    x, model = given(), Attention()
    with Kernels() as kernels, regard.edit(model, edit, heads=heads, tokens=TOKENS):
        out = model(x)
    expected = by_hand(x, change, heads)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    grad = torch.randn_like(out)
    (ours,), (theirs,) = (torch.autograd.grad(result, x, grad) for result in (out, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
    if name == "cut every seventh":  # more gaps than a row of intervals has: masks, of some rows at a time
        return
    assert kernels.masks < 64 * LENGTH
    assert kernels.width == (DIM + 1 if name == "steer queries" else DIM)


def test_items_with_texts_of_their_own_are_cut_apart() -> None:
    tokens = [*TOKENS, ["cat" if n in (9, 10, 700) else f"t{n}" for n in range(LENGTH)]]
    x, model = given(items=2), Attention()
    with Kernels() as kernels, torch.no_grad(), regard.edit(model, edits.cut(queries=LATE, keys="cat"), tokens=tokens):
        out = model(x)
    pairs = torch.stack([at(LATE, [3, 500]), at(LATE, [9, 10, 700])])[:, None]
    expected = by_hand(x, lambda logits: logits.masked_fill(pairs, -torch.inf), None)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert kernels.masks < 64 * LENGTH


def test_every_decoded_token_is_cut_by_the_same_rule() -> None:
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=30, embed_dim=12, num_layers=1, num_heads=2, ff_dim=8, max_tokens=16)
    model = Decoder(config).eval()
    found = set()

    class Kept(edits.Edit):
        def change(self, place: Any) -> Any:
            change = edit.change(place)
            found.add(change.hide.code)
            return change

    edit = edits.cut(queries=slice(2, None), keys=[0, 2])
    caches, ids = model.caches(16), torch.arange(9)[None]
    with torch.no_grad(), regard.edit(model, Kept()):
        for start, stop in ((0, 4), *((n, n + 1) for n in range(4, 9))):
            model(ids[:, start:stop], caches=caches)
    assert len(found) == 2  # of the prompt, and of the tokens after it
