"""A sequence over two and four processes gives the outputs, gradients and statistics of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.train.group import together

import regard
from regard import Want, masks
from regard.bias import alibi
from regard.train import ContextParallel

TOKENS = 48
MERGED = (
    "lse", "entropy", "max_weight", "key_mass", "map", "distance", "first_mass", "relations", "value_length",
    "value_mass", "value_sum", "value_map", "value_top_lengths",
)  # fmt: skip
WANT = Want(map=(16, 9), first=3, value_mass=True, scores=torch.arange(TOKENS) % 5)
CASES: dict[str, dict[str, Any]] = {
    "everything": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.causal() & masks.window(5)},
    "padding": {"mask": masks.causal() & masks.padding([48, 31])},
    "documents": {"mask": masks.documents(lengths=[11, 20, 17])},
    "prefix": {"mask": masks.causal() | masks.prefix(7)},
    "bias": {"bias": torch.randn(3, TOKENS, TOKENS, generator=torch.Generator().manual_seed(4)).double()},
    "alibi": {"mask": masks.causal(), "bias": alibi(3), "softcap": 3.0},
}


def tensors() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = (2, 3, TOKENS, 5), (2, 3, TOKENS, 5), (2, 3, TOKENS, 7), (2, 3, TOKENS, 7)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def spread_out(layout: str) -> dict[str, Any]:
    """Of each case: the output, the gradients and the statistics, put together again."""
    spread = ContextParallel(layout=layout)
    found: dict[str, Any] = {}
    for name, keywords in CASES.items():
        *inputs, weight = (spread.shard(x) for x in tensors())
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = spread.attention(*leaves, **keywords)
        (out * weight).sum().backward()
        seen = spread.observe(*inputs, want=WANT, **keywords)
        assert torch.equal(seen.out, out.detach())
        held = {part: getattr(seen, part) for part in (*MERGED, "top_keys")}
        grads = [spread.gather(leaf.grad) for leaf in leaves]
        pairs = sum(plan.cost.kept_pairs for plan in spread.explain(*inputs, **keywords))
        found[name] = {"out": spread.gather(out.detach()), "grads": grads, **held, "pairs": pairs}
    return found


@pytest.mark.parametrize(("count", "layout"), [(2, "contiguous"), (4, "balanced")])
def test_every_rule_gives_what_one_process_gives(count: int, layout: str) -> None:
    everyone = together(count, spread_out, layout)
    for name, keywords in CASES.items():
        *inputs, weight = tensors()
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = regard.attention(*leaves, **keywords)
        (out * weight).sum().backward()
        seen = regard.observe(*inputs, want=WANT, **keywords)
        for found in (each[name] for each in everyone):
            torch.testing.assert_close(found["out"], out.detach(), rtol=1e-10, atol=1e-12)
            for grad, leaf in zip(found["grads"], leaves, strict=True):
                torch.testing.assert_close(grad, leaf.grad, rtol=1e-10, atol=1e-12)
            for part in MERGED:
                torch.testing.assert_close(found[part], getattr(seen, part), rtol=1e-9, atol=1e-11, equal_nan=True)
            assert torch.equal(found["top_keys"], seen.top_keys)


def work() -> list[int]:
    spread = ContextParallel()
    x = torch.empty(1, 1, 4096 // spread.count, 8)
    rules = masks.causal(), masks.causal() & masks.window(100), masks.everything()
    return [sum(plan.cost.kept_pairs for plan in spread.explain(x, x, x, mask=rule)) for rule in rules]


def test_the_work_of_each_process_is_a_quarter_within_a_tenth() -> None:
    x = torch.empty(1, 1, 4096, 8)
    rules = masks.causal(), masks.causal() & masks.window(100), masks.everything()
    whole = [regard.explain(x, x, x, mask=rule).cost.kept_pairs for rule in rules]
    for one in together(4, work):
        for pairs, total in zip(one, whole, strict=True):
            assert abs(pairs - total / 4) <= 0.1 * total / 4
    assert sum(each[0] for each in together(4, work)) == whole[0]  # no pair is computed twice


def with_dtensors() -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    query, key, value, _ = (distribute_tensor(x, mesh, [Shard(2)]) for x in tensors())
    spread = ContextParallel()
    out: Any = spread.attention(query, key, value, mask=masks.causal())
    assert tuple(out.placements) == (Shard(2),)
    with pytest.raises(TypeError, match="key must be a DTensor"):
        spread.attention(query, key.to_local(), value)
    return out.full_tensor()


def test_dtensors_go_in_and_come_out() -> None:
    query, key, value, _ = tensors()
    wanted = regard.attention(query, key, value, mask=masks.causal())
    for found in together(2, with_dtensors):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def refused() -> list[str]:
    spread = ContextParallel()
    x = torch.randn(1, 1, 4, 4)
    said = []
    for call in (
        lambda: spread.attention(x, x, x, mask=masks.causal() & masks.keep(torch.ones(8, 8).bool())),
        lambda: spread.attention(x[:, :, :3], x, x),
        lambda: spread.observe(x, x, x, want=Want(map=(6, 6))),
        lambda: spread.observe(x, x, x, want=Want.all()),
        lambda: ContextParallel(layout="ring"),
    ):
        try:
            call()
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_cannot_be_spread_is_refused() -> None:
    for said in together(2, refused):
        assert "masks.keep and masks.drop name rows" in said[0]
        assert "6 tokens cannot be spread evenly over 2 processes: give a multiple of 4" in said[1]
        assert "want.map has 6 rows, which 4 pieces cannot share" in said[2]
        assert "weights, pairs and queries name rows of the whole sequence" in said[3]
        assert "layout must be one of balanced, contiguous, got 'ring'" in said[4]


def test_it_needs_a_group() -> None:
    with pytest.raises(RuntimeError, match="needs torch.distributed.init_process_group first"):
        ContextParallel()


def share_that_dropout_keeps(layout: str) -> list[float]:
    """Of the keys of each of four rows, where both processes have the same seed."""
    spread = ContextParallel(layout=layout)
    torch.manual_seed(3)
    query, keys = (spread.shard(torch.ones(1, 1, tokens, 1)) for tokens in (4, 600))
    out = spread.gather(spread.attention(query, keys, keys, dropout=0.5))
    torch.manual_seed(3)
    seen = spread.observe(query, keys, keys, dropout=0.5)
    assert torch.equal(spread.gather(seen.out), out)
    return out.flatten().tolist()


@pytest.mark.parametrize("layout", ["balanced", "contiguous"])
def test_processes_with_one_seed_drop_other_weights(layout: str) -> None:
    one, other = together(2, share_that_dropout_keeps, layout)
    assert one == other and len(set(one)) == 4
