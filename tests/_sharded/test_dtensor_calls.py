"""`regard.attention` and `regard.observe` on DTensors over 2 and 4 processes give what one process gives (rule 70)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests import forced
from tests.train.group import together
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard import Want, masks, reference
from regard.bias import alibi

QUERIES, KEYS = 37, 43  # neither is a multiple of 2 or 4: the last process has fewer, or other numbers of them
TOKENS = [at * at % 7 for at in range(KEYS)]
PAIRS = [(0, 0), (36, 42), (20, 3), (9, 9), (20, 3), (30, 25)]
WANT = Want(map=(11, 7), first=3, top_k=5, weights=(slice(9, 30), slice(5, 20)), pairs=PAIRS, scores=TOKENS)
PARTS = (
    "lse", "entropy", "max_weight", "key_mass", "map", "distance", "first_mass", "top_weights", "weights", "pairs",
    "relations",
)  # fmt: skip


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


KEPT = drawn(2, 1, QUERIES, KEYS, seed=9) > -0.5
CASES: dict[str, dict[str, Any]] = {
    "everything": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.window(5), "scale": 0.7},
    "padding": {"mask": masks.causal() & masks.padding([43, 21])},
    "documents": {"mask": masks.documents(lengths=[11, 15, 17])},
    "strided": {"mask": masks.causal() & (masks.strided(3) | masks.columns(2))},
    "keep": {"mask": masks.keep(KEPT) & masks.causal()},
    "drop with an offset": {"mask": masks.drop(~KEPT), "query_offset": 3},
    "offsets": {"mask": masks.causal(), "query_offset": torch.tensor([2, 6])},
    "nothing": {"mask": masks.causal(), "query_offset": -100},
    "learned": {"bias": drawn(4, QUERIES, KEYS, seed=5), "sinks": drawn(4, seed=6), "softcap": 3.0},
    "alibi": {"mask": masks.causal(), "bias": alibi(4)},
    "some queries": {"mask": masks.causal(), "want": WANT.but(queries=slice(4, 25))},
}


def inputs() -> list[Tensor]:
    shapes = (2, 4, QUERIES, 5), (2, 2, KEYS, 5), (2, 2, KEYS, 3), (2, 4, QUERIES, 3)
    return [drawn(*shape, seed=at) for at, shape in enumerate(shapes)]


def learnt(keywords: dict[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
    """The keywords without `want`, and those of them that get gradients."""
    found = {name: each for name, each in keywords.items() if name != "want"}
    leaves = {
        name: each.clone().requires_grad_()
        for name, each in found.items()
        if isinstance(each, Tensor) and each.is_floating_point()
    }
    return {**found, **leaves}, list(leaves.values())


def whole(x: Any) -> Tensor:
    found: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return found.detach()


def computed(place: Any) -> dict[str, Any]:
    """Of each case: output, gradients and statistics, put together; `place` makes what the calls take."""
    found: dict[str, Any] = {}
    for name, given in CASES.items():
        *three, weight = inputs()
        leaves = [place(x).requires_grad_() for x in three]
        keywords, more = learnt(given)
        out = regard.attention(*leaves, **keywords)
        (out * place(weight)).sum().backward()
        seen = regard.observe(*map(place, three), want=given.get("want", WANT), **keywords)
        assert torch.equal(whole(seen.out), whole(out))
        grads = [whole(x.grad) for x in (*leaves, *more)]
        found[name] = {"out": whole(out), "grads": grads, "top_keys": whole(seen.top_keys)}
        found[name] |= {part: whole(getattr(seen, part)) for part in PARTS}
    return found


def over_processes(count: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (count,))
    return computed(lambda x: distribute_tensor(x, mesh, [Shard(2)]))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return computed(lambda x: x)


@pytest.mark.parametrize("count", [2, 4])
def test_every_rule_gives_what_one_process_gives(alone: dict[str, Any], count: int) -> None:
    for found in together(count, over_processes, count):
        for name, wanted in alone.items():
            assert torch.equal(found[name].pop("top_keys"), wanted["top_keys"]), name
            for part, value in found[name].items():
                message = f"{name}: {part}"
                torch.testing.assert_close(
                    value, wanted[part], rtol=1e-10, atol=1e-11, equal_nan=True, msg=lambda m, at=message: f"{at}: {m}"
                )


def test_one_process_gives_what_the_oracle_gives(alone: dict[str, Any]) -> None:
    query, key, value, _ = (x.numpy() for x in inputs())
    wanted = reference.attention(query, key, value, mask=masks.causal().dense(QUERIES, KEYS).numpy())
    np.testing.assert_allclose(alone["causal"]["out"].numpy(), wanted, atol=1e-12)


def short() -> list[str]:
    """Fewer tokens than processes, no keys, no queries: what differs from one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, wrong = init_device_mesh("cpu", (4,)), []
    for rows, keys in ((1, 7), (3, 2), (2, 9), (5, 0), (0, 4)):
        three = [drawn(2, 2, size, 4, seed=at) for at, size in enumerate((rows, keys, keys))]
        for mask in (None, masks.causal(), masks.window(1), masks.padding([min(keys, 2), 0])):
            results = []
            for place in (lambda x: x.clone(), lambda x: distribute_tensor(x, mesh, [Shard(2)])):
                leaves = [place(x).requires_grad_() for x in three]
                regard.attention(*leaves, mask=mask).sum().backward()
                seen = regard.observe(
                    *leaves, mask=mask, want=Want(map=(3, 3), first=1, weights="all", pairs=[], scores=True)
                )
                parts = [*(getattr(seen, part) for part in (*PARTS, "out", "top_keys")), *(x.grad for x in leaves)]
                results.append([whole(part) for part in parts])
            for at, (one, other) in enumerate(zip(*results, strict=True)):
                if one.shape != other.shape or not torch.allclose(one, other, equal_nan=True):
                    wrong.append(f"{rows} queries, {keys} keys, {mask}: part {at}")
    return wrong


def test_sequences_shorter_than_the_group() -> None:
    assert together(4, short) == [[]] * 4


RULES = {
    "causal": masks.causal(),
    "window": masks.causal() & masks.window(100),
    "wide window": masks.causal() & masks.window(1500),
    "everything": masks.everything(),
    "padding": masks.causal() & masks.padding([1500]),
    "blocks": masks.causal() & masks.random_blocks(3, 64, seed=1),
}


def pairs() -> dict[str, int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    x = distribute_tensor(torch.zeros(1, 1, 4096, 2), init_device_mesh("cpu", (4,)), [Shard(2)])
    return {name: regard.explain(x, x, x, mask=rule).cost.kept_pairs for name, rule in RULES.items()}


def test_each_of_four_processes_computes_a_quarter_of_the_kept_pairs() -> None:
    x = torch.zeros(1, 1, 4096, 2)
    everyone = together(4, pairs)
    for name, rule in RULES.items():
        total = regard.explain(x, x, x, mask=rule).cost.kept_pairs
        shares = [each[name] for each in everyone]
        assert sum(shares) == total, name  # no pair is computed twice, none is left out
        assert all(abs(share - total / 4) <= 0.1 * total / 4 for share in shares), (name, shares)


class Counted(TorchDispatchMode):
    """Pairs of a query and a key that torch's kernels compute while this is on, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward, self.backward = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "attention" in name:
            backward = name.endswith("backward")
            causal = kwargs.get("is_causal", False) or any(each is True for each in args)
            query, key = args[1:3] if backward else args[:2]
            rows, keys = query.shape[-2], key.shape[-2]
            # torch's own causal rule starts at the first key: row i computes i + 1 of them
            pairs = sum(min(row + 1, keys) for row in range(rows)) if causal else rows * keys
            pairs *= query.shape[0] * query.shape[1]
            self.forward += 0 if backward else pairs
            self.backward += pairs if backward else 0
        return func(*args, **kwargs or {})


def kernel_pairs() -> dict[str, tuple[int, int]]:
    """What this process's kernels do for the rules of the bar, in both directions."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, found = init_device_mesh("cpu", (4,)), {}
    for name in ("causal", "window"):
        x = distribute_tensor(torch.zeros(1, 1, 4096, 8), mesh, [Shard(2)]).requires_grad_()
        with Counted() as counted:
            regard.attention(x, x, x, mask=RULES[name]).to_local().sum().backward()
        found[name] = counted.forward, counted.backward
    return found


def test_each_of_four_processes_does_a_quarter_of_the_work_forward_and_backward() -> None:
    """Not what a plan says but what kernels are given. Tiles hold some pairs that the rule hides; those count too."""
    everyone = together(4, kernel_pairs)
    x = torch.zeros(1, 1, 4096, 8)
    for name in ("causal", "window"):
        kept = regard.explain(x, x, x, mask=RULES[name]).cost.kept_pairs
        for direction in (0, 1):
            shares = [each[name][direction] for each in everyone]
            assert sum(shares) >= kept, (name, direction)  # every pair was computed, and counted
            quarter = sum(shares) / 4
            assert all(abs(share - quarter) <= 0.1 * quarter for share in shares), (name, direction, shares)


def other_calls() -> list[Any]:
    """Keys that every process has whole, bfloat16, dropout, many calls for one map, and what is refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    query, key, value, _ = inputs()
    q, k, v = (distribute_tensor(x, mesh, [Shard(2)]) for x in (query, key, value))
    everywhere = [distribute_tensor(x, mesh, [Replicate()]).requires_grad_() for x in (key, value)]
    given = regard.attention(q, *everywhere, mask=masks.causal())
    given.sum().backward()
    half = regard.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask=masks.causal())
    torch.manual_seed(3)  # the same in both
    ones = distribute_tensor(torch.ones(1, 1, 2, 1), mesh, [Shard(2)])
    many = distribute_tensor(torch.ones(1, 1, 600, 1), mesh, [Shard(2)])
    # each row is the share of keys that it did not drop: two processes must not drop the same ones
    kept = whole(regard.attention(ones, many, many, dropout=0.5)).flatten().tolist()
    forced.sizes(pytest.MonkeyPatch(), numbers_of_a_shared_call=7 * 8 * 3)  # three rows per call
    seen = regard.observe(q, k, v, want=WANT, mask=masks.causal())
    said = []
    for call in (
        lambda: regard.attention(q, key, value),
        lambda: regard.attention(query, k, v),
        lambda: regard.attention(everywhere[0], *everywhere),
        lambda: regard.attention(q, k, everywhere[1]),
        lambda: regard.attention(q, k, v, mask=KEPT),
        lambda: regard.attention(q, k, v, mask=masks.padding([3, 4, 5])),
        lambda: regard.attention(q, k, v, bias=torch.zeros(5, KEYS)),
        lambda: regard.observe(q, k, v, want=Want.all()),
        lambda: regard.observe(q, k, v, differentiable=True),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        said.append(str(error.value))
    return [whole(given), whole(everywhere[0].grad), whole(half), kept, whole(seen.map), whole(seen.out), said]


def test_whole_keys_half_precision_dropout_and_refusals(alone: dict[str, Any]) -> None:
    query, key, value, _ = inputs()
    leaf = key.clone().requires_grad_()
    wanted = regard.attention(query, leaf, value, mask=masks.causal())
    wanted.sum().backward()
    for given, grad, half, kept, pooled, out, said in together(2, other_calls):
        torch.testing.assert_close(given, wanted.detach(), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(grad, leaf.grad, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(half.double(), wanted.detach(), rtol=0.0, atol=0.05)
        assert kept[0] != kept[1] and all(0.7 < share < 1.3 for share in kept)
        torch.testing.assert_close(pooled, alone["causal"]["map"], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(out, alone["causal"]["out"], rtol=1e-10, atol=1e-12)
        assert "key must be a DTensor on the mesh of the query" in said[0]
        assert "query must be a DTensor on the mesh of the query" in said[1]
        assert "query must be sharded over its tokens" in said[2]
        assert "both be sharded over their tokens" in said[3]
        assert "mask must be a value of regard.masks" in said[4]
        assert "is for 3 batch items, but the call has 2" in said[5]
        assert f"bias has 5 rows, and the call {QUERIES} queries" in said[6]
        assert "value_mass cannot be asked for where tokens lie on several processes" in said[7]
        assert "differentiable cannot be used where tokens lie on several processes" in said[8]
