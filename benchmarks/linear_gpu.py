"""Causal linear attention on a GPU against flash-linear-attention, where it is installed: plain, decayed, gated.

    python benchmarks/linear_gpu.py [--quick] [--json FILE]

One item, 16 heads of 128, bfloat16; forward, and forward with backward. Before a row is timed, result and gradients are
compared with our float32 operations at 2048 tokens. Contenders take turns; a ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from _gpu import DEVICE, DTYPE, Row, against, failed, in_turn, length, normal, save, show, with_backward
from regard import linear_attention, masks

HEADS, DIM = 16, 128
Call = Callable[..., Tensor]


def peers() -> dict[str, Call]:
    """flash-linear-attention's for the same sums; its tensors are [batch, token, head, dim]."""
    try:
        from fla.ops.linear_attn import chunk_linear_attn
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError as problem:
        print(f"flash-linear-attention is not there ({problem}): no peer", flush=True)
        return {}

    def plain(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        out: Tensor = chunk_linear_attn(F.elu(q) + 1, F.elu(k) + 1, v, scale=1.0, normalize=True)[0]
        return out

    def decayed(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        out: Tensor = chunk_simple_gla(q, k, v, g_gamma=RATES.to(q.device).log())[0]
        return out

    def gated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        out: Tensor = chunk_simple_gla(q, k, v, g=gate)[0]
        return out

    return {"plain": plain, "decayed": decayed, "gated": gated}


# those of retention
RATES = 1 - 2.0 ** (-5 - torch.arange(HEADS, dtype=torch.float32))


def ours(kind: str, form: str = "auto") -> Call:
    given: dict[str, Any] = {"mask": masks.causal(), "form": form}
    if kind != "plain":
        given |= {"feature_map": "identity", "normalize": False}

    def call(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        more = {"decay": RATES.to(q.device)} if kind == "decayed" else {"log_gate": gate} if kind == "gated" else {}
        return linear_attention(q, k, v, **given, **more)

    return call


def inputs(tokens: int) -> tuple[Tensor, ...]:
    """Query, key, value and logs of gates; the last in float32."""
    tensors = [normal(1, HEADS, length(tokens), DIM) for _ in range(3)]
    gate = F.logsigmoid(torch.randn(1, HEADS, length(tokens), device=DEVICE) + 4).requires_grad_()
    return (*tensors, gate)


def error(kind: str) -> float:
    """The largest against float32 operations, as a multiple of 2^-7 of the largest number."""
    tensors = inputs(2048)
    wide = [t.detach().float().requires_grad_() for t in tensors]
    leaves = 4 if kind == "gated" else 3
    found, meant = ours(kind)(*tensors), ours(kind, "chunked")(*wide)
    grad = torch.randn_like(meant)
    pairs = [(found, meant)]
    pairs += zip(
        torch.autograd.grad(found, tensors[:leaves], grad.to(DTYPE)),
        torch.autograd.grad(meant, wide[:leaves], grad.to(DTYPE).float()),
        strict=True,
    )
    return max((a.float() - b).abs().max().item() / max(2**-7 * b.abs().max().item(), 1e-6) for a, b in pairs)


def rows(lengths: tuple[int, ...]) -> Iterator[Row]:
    known = peers()
    for kind in ("plain", "decayed", "gated"):
        off = error(kind)
        for tokens in lengths:
            tensors = inputs(tokens)
            turned = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in tensors]
            leaves = 4 if kind == "gated" else 3
            for backward in (False, True):
                works: dict[str, Any] = {"ours": lambda kind=kind, t=tensors: ours(kind)(*t)}
                if kind in known:
                    works |= dict.fromkeys(("peer", "again"), lambda kind=kind, t=turned: known[kind](*t))
                name = f"{kind} {tokens}{' +bwd' if backward else ''}"
                try:
                    if backward:
                        given = {n: tensors if n == "ours" else turned for n in works}
                        works = {n: with_backward(work, tuple(given[n][:leaves])) for n, work in works.items()}
                    with torch.enable_grad() if backward else torch.no_grad():
                        found = in_turn(works)
                except Exception as problem:
                    yield failed("linear", name, 1.0, problem)
                    continue
                peer = "peer" if "peer" in found else "ours"
                ratio, control, medians = against(found, peer, "again" if "again" in found else None)
                yield Row("linear", name, 1.0, "×", ratio, control, "fused", off, medians)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4096 tokens alone")
    parser.add_argument("--json", type=Path, help="file for the raw figures")
    args = parser.parse_args()
    torch.manual_seed(0)
    made: list[Row] = []
    for row in rows((4096,) if args.quick else (4096, 16384, 65536)):
        made.append(row)
        show(row)
        save(made, args.json)


if __name__ == "__main__":
    main()
