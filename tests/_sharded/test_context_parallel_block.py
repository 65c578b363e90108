"""Inside torch's `context_parallel` block, calls are those of the whole sequence (rule 70)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.train.group import together
from torch import Tensor

import regard
from regard import Want, masks
from regard.nn import MultiHeadAttention

ROWS = ("out", "lse", "entropy", "max_weight", "top_keys", "top_weights", "first_mass", "key_mass")
SUMS = ("map", "distance")
CASES: dict[str, dict[str, Any]] = {
    "everything": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.window(5), "softcap": 3.0},
    "padding": {"mask": masks.causal() & masks.padding([11, 40])},
    "keep": {"mask": masks.keep(torch.arange(40) % 3 != 0)},
}


def seen_of(tensors: list[Tensor], keywords: dict[str, Any]) -> dict[str, Tensor]:
    seen = regard.observe(*tensors, want=Want(map=(7, 5), first=2, top_k=3), **keywords)
    assert torch.equal(seen.out, regard.attention(*tensors, **keywords))
    return {name: getattr(seen, name) for name in (*ROWS, *SUMS)}


def inputs(tokens: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(2, 3, tokens, 5, generator=draw, dtype=torch.float64) for _ in range(3)]


def module() -> MultiHeadAttention:
    torch.manual_seed(5)
    return MultiHeadAttention(15, 3, dtype=torch.float64)


def in_a_block(tokens: int) -> tuple[dict[str, Any], list[Tensor], list[int]]:
    """Of each case, what was seen, put together again; the gradients of a module; the pairs of each process."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard
    from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

    torchs._cp_options.enable_load_balance = tokens == 40  # for 44, torch 2.11 wants to be told; later ones see it
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors, mha = inputs(tokens), module()
    x = tensors[0].transpose(1, 2).flatten(2)
    found: dict[str, Any] = {}
    with context_parallel(mesh, buffers=[*tensors, x], buffer_seq_dims=[2, 2, 2, 1]):
        for name, keywords in CASES.items() if tokens == 40 else [("causal", CASES["causal"])]:
            seen = seen_of(tensors, keywords)
            whole = context_parallel_unshard(mesh, [seen[part] for part in ROWS], [2] * len(ROWS))
            found[name] = dict(zip(ROWS, whole, strict=True)) | {part: seen[part] for part in SUMS}
        mha(x, mask=masks.causal()).square().sum().backward()
        grads = [weight.grad for weight in mha.parameters()]
        for grad in grads:
            dist.all_reduce(grad)
        pairs = regard.explain(*tensors, mask=masks.causal()).cost.kept_pairs
        with pytest.raises(regard.Refused, match="cannot be compiled"):
            torch.compile(regard.attention, backend="eager")(*tensors)
        with pytest.raises(regard.Refused, match="cannot tell which of its tokens are padding"):
            mha(x, mask=masks.padding([3, 9]))
        with pytest.raises(regard.Refused, match="differentiable cannot be used where tokens lie on several processes"):
            regard.observe(*tensors, differentiable=True)
        part = regard.train.ContextParallel(layout="balanced" if tokens == 40 else "contiguous")
        assert torch.allclose(part.attention(*tensors), regard.attention(*tensors), atol=1e-12)
    assert tensors[0].shape[2] == tokens  # torch gives the buffers back, and calls are ordinary again
    found["after"] = seen_of(tensors, CASES["causal"])
    return found, grads, [pairs]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("count", "tokens"), [(2, 40), (4, 40), (4, 44)])
def test_a_block_gives_what_one_process_gives(count: int, tokens: int) -> None:
    """Torch cuts 40 tokens into pieces from both ends, 44 into four in order."""
    everyone = together(count, in_a_block, tokens)
    tensors, mha = inputs(tokens), module()
    mha(tensors[0].transpose(1, 2).flatten(2), mask=masks.causal()).square().sum().backward()
    for found, grads, _ in everyone:
        for name, parts in found.items():
            wanted = seen_of(tensors, CASES["causal" if name == "after" else name])
            for part, value in parts.items():
                torch.testing.assert_close(
                    value,
                    wanted[part],
                    rtol=1e-10,
                    atol=1e-12,
                    equal_nan=True,
                    msg=lambda m, at=(name, part): f"{at}: {m}",
                )
        for grad, weight in zip(grads, mha.parameters(), strict=True):
            torch.testing.assert_close(grad, weight.grad, rtol=1e-10, atol=1e-11)
    total = regard.explain(*tensors, mask=masks.causal()).cost.kept_pairs
    assert sum(pairs for _, _, [pairs] in everyone) == total
