"""Attention on a GPU against the best that PyTorch has for the same call: SDPA, or FlexAttention where SDPA cannot.

    python benchmarks/gpu.py [--only GROUP,GROUP] [--json FILE]

Each row is one kind of call, forward or forward and backward, in bfloat16. Before a row is timed, its output and its
gradients are compared with float32 arithmetic. Contenders take turns, round by round; a ratio is the median over the
rounds of ours to the peer's time, and the peer against itself tells how far to trust it. Host rows are microseconds
that a call keeps the host busy, above those of SDPA. The other groups are in _gpu_groups.py. Without a GPU the run is
dry: a few tokens on a CPU, to see that every row can be computed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regard
from _gpu import (
    DEVICE,
    DRY,
    Row,
    Work,
    against,
    failed,
    in_turn,
    length,
    normal,
    plain_sdpa,
    qkv,
    save,
    show,
    with_backward,
)
from _gpu_groups import APART
from regard import bias, masks


@dataclass
class Case:
    """One kind of call: how we are asked, how the peer is, and what both should give."""

    name: str
    tensors: tuple[Tensor, ...]
    ours: dict[str, Any]
    peer: Callable[..., Tensor]
    bars: tuple[float | None, float | None]  # forward, forward and backward; None: not timed
    plain: Callable[..., Tensor] | None = None  # where the bar is a multiple of a plain call's time
    more: tuple[Tensor, ...] = ()  # that gradients are asked for too
    random: bool = False  # dropout: nothing to compare with


_flex: list[Any] = []


def flex(mask_mod: Any = None, score_mod: Any = None) -> Callable[..., Tensor]:
    if DRY:  # FlexAttention has no backward pass on a CPU
        return plain_sdpa
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not _flex:
        torch._dynamo.config.recompile_limit = 64
        _flex.append(torch.compile(flex_attention, dynamic=False))
    made: list[Any] = []

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if mask_mod is not None and not made:
            made.append(create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2], device=DEVICE))
        out: Tensor = _flex[0](q, k, v, score_mod=score_mod, block_mask=made[0] if made else None)
        return out

    return call


def causal_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def biases() -> Iterator[Case]:
    tensors = qkv(1, 16, length(8192), 128)
    causal = masks.causal()
    slopes = torch.tensor([2.0 ** (-8 * n / 16) for n in range(1, 17)], device=DEVICE)
    alibi_mod = lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()  # noqa: E731
    peer = flex(causal_mod, alibi_mod)
    ours: dict[str, Any] = {"mask": causal, "bias": bias.alibi(16)}
    triangle = lambda q, k, v: plain_sdpa(q, k, v, is_causal=True)  # noqa: E731
    yield Case("ALiBi causal 8192", tensors, ours, peer, (None, 1.0))
    yield Case("ALiBi causal 8192, against plain causal", tensors, ours, peer, (1.25, None), plain=triangle)
    t5 = bias.T5Bias(16).to(DEVICE)
    given = {"mask": causal, "bias": t5}
    yield Case("T5 causal 8192, against plain", tensors, given, triangle, (None, 3.0), triangle, (t5.weight,))
    for name, more in {"softcap": {"softcap": 30.0}, "sinks": {"sinks": normal(16)}}.items():
        cap = (lambda s, b, h, i, j: torch.tanh(s / 30.0) * 30.0) if name == "softcap" else None
        extra = (more["sinks"],) if name == "sinks" else ()
        asked = {"mask": causal, **more}
        capped = flex(causal_mod, cap)
        yield Case(f"{name} causal 8192, against plain causal", tensors, asked, capped, (1.25, None), triangle)
        if name == "softcap":
            yield Case(f"{name} causal 8192", tensors, asked, capped, (None, 1.0), more=extra)


def sparse() -> Iterator[Case]:
    for tokens in (4096, 16384):
        L = length(tokens)
        tensors = qkv(1, 16, L, 128)
        lengths = [L // 16] * 16
        ids = torch.arange(L, device=DEVICE) // (L // 16)
        window = lambda b, h, i, j: (i >= j) & (i - j <= 256)  # noqa: E731
        documents = lambda b, h, i, j, ids=ids: (i >= j) & (ids[i] == ids[j])  # noqa: E731
        half = L // 2
        prefix = lambda b, h, i, j, n=half: (i >= j) | ((i < n) & (j < n))  # noqa: E731
        columns = lambda b, h, i, j: (i >= j) & ((i - j <= 256) | (j < 64))  # noqa: E731
        causal = masks.causal()
        kinds = {
            "window 256": (masks.window(left=256), window),
            "documents": (causal & masks.documents(lengths=lengths), documents),
            "prefix": (causal | masks.prefix(half), prefix),
            "columns + window": (causal & (masks.window(left=256) | masks.columns(64)), columns),
        }
        for name, (mask, mod) in kinds.items():
            yield Case(f"{name} {tokens}", tensors, {"mask": mask}, flex(mod), (1.0, 1.0))


def gaps() -> Iterator[Case]:
    """A causal call without a few keys, as a cut leaves it, against the plain one; and several calls of cuDNN against
    one launch of ours, around the length where the plan changes from this to those (AREA_PAIRS in _cuda.py)."""
    triangle = lambda q, k, v: plain_sdpa(q, k, v, is_causal=True)  # noqa: E731
    for tokens in (2048, 4096, 8192, 16384, 32768):
        L = length(tokens)
        tensors = qkv(1, 16, L, 128)
        hole = masks.columns(L // 3 + 1) & ~masks.columns(L // 3)
        kinds = {
            "without the first four": masks.causal() & ~masks.columns(4),
            "with a hole": masks.causal() & ~(masks.columns(1) | hole),
            "with a prefix": masks.causal() | masks.prefix(L // 2),
        }
        for name, mask in kinds.items():
            if tokens < 32768:
                launch: dict[str, Any] = {"mask": mask} if DRY else {"mask": mask, "backend": "triton"}
                peer = lambda q, k, v, given=launch: regard.attention(q, k, v, **given)  # noqa: E731
                areas = {"mask": mask, "backend": "sdpa"}
                yield Case(f"causal {name} {tokens}, cuDNN against ours", tensors, areas, peer, (1.0, 1.0))
            elif name != "with a prefix":
                yield Case(f"causal {name} {tokens}, against plain", tensors, {"mask": mask}, triangle, (1.1, 1.1))


def dropout() -> Iterator[Case]:
    for name, causal in {"causal": True, "full": False}.items():
        tensors = qkv(8, 16, length(1024), 64)
        ours = {"dropout": 0.1, **({"mask": masks.causal()} if causal else {})}
        peer = lambda q, k, v, c=causal: plain_sdpa(q, k, v, dropout_p=0.1, is_causal=c)  # noqa: E731
        yield Case(f"dropout 0.1 {name} 8×1024×16×64", tensors, ours, peer, (1.15, 1.15), random=True)


def padding() -> Iterator[Case]:
    for shape, bar in (((8, 16, length(1024), 64), 1.0), ((32, 4, 40, 32), 1.1)):
        tensors = qkv(*shape)
        B, L = shape[0], shape[2]
        lengths = torch.randint(L // 2, L + 1, (B,), device=DEVICE)
        seen = (torch.arange(L, device=DEVICE) < lengths[:, None])[:, None, None]
        peer = lambda q, k, v, m=seen: plain_sdpa(q, k, v, attn_mask=m)  # noqa: E731
        ours: dict[str, Any] = {"mask": masks.padding(lengths)}
        yield Case(f"padding {B}×{L}", tensors, ours, peer, (bar, bar))
        dropped = lambda q, k, v, m=seen: plain_sdpa(q, k, v, attn_mask=m, dropout_p=0.1)  # noqa: E731
        yield Case(f"padding + dropout {B}×{L}", tensors, {**ours, "dropout": 0.1}, dropped, (1.15, 1.15), random=True)


def sentences() -> Iterator[Case]:
    """What a translator trains on: many short sentences, 15 000 tokens together."""
    for tokens in (16, 24, 40):
        count = max(2, length(15000) // tokens)
        tensors = qkv(count, 6, tokens, 32)
        lengths = torch.randint(tokens // 2, tokens + 1, (count,), device=DEVICE)
        seen = (torch.arange(tokens, device=DEVICE) < lengths[:, None])[:, None, None]
        triangle = lambda q, k, v: plain_sdpa(q, k, v, is_causal=True, dropout_p=0.1)  # noqa: E731
        padded = lambda q, k, v, m=seen: plain_sdpa(q, k, v, attn_mask=m, dropout_p=0.1)  # noqa: E731
        for name, mask, peer in (("causal", masks.causal(), triangle), ("padding", masks.padding(lengths), padded)):
            ours = {"mask": mask, "dropout": 0.1}
            yield Case(f"{name} + dropout {count}×{tokens}", tensors, ours, peer, (1.1, 1.1), random=True)


def heads() -> Iterator[Case]:
    triangle = lambda q, k, v: plain_sdpa(q, k, v, is_causal=True)  # noqa: E731
    causal = {"mask": masks.causal()}
    yield Case("192/128 causal 4096", qkv(1, 16, length(4096), 192, 128), causal, triangle, (1.03, 1.03))
    yield Case("256 causal 8192", qkv(1, 16, length(8192), 256), causal, triangle, (1.03, 1.03))
    yield Case("causal 16×512×16×128", qkv(16, 16, length(512), 128), causal, triangle, (1.05, 1.05))
    yield Case("causal 1×2048×16×128", qkv(1, 16, length(2048), 128), causal, triangle, (1.05, 1.05))
    yield Case("grouped 32/8 causal 4096×128", qkv(1, 32, length(4096), 128, Hkv=8), causal, triangle, (1.05, 1.05))
    tensors = qkv(1, 16, length(2048), 128)
    added = normal(1, 16, length(2048), length(2048))
    peer = lambda q, k, v: plain_sdpa(q, k, v, attn_mask=added)  # noqa: E731
    fixed = lambda q, k, v: plain_sdpa(q, k, v, attn_mask=added.detach())  # noqa: E731
    yield Case("bias tensor 2048, no gradient of it", tensors, {"bias": added.detach()}, fixed, (1.1, None))
    yield Case("bias tensor 2048, with its gradient", tensors, {"bias": added}, peer, (None, 1.1), more=(added,))


def decode() -> Iterator[Case]:
    """One query over caches of unequal lengths, against cuDNN on all of the keys."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def all_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH if DRY else SDPBackend.CUDNN_ATTENTION):
            return plain_sdpa(q, k, v)

    for batch, tokens in ((1, 4096), (8, 8192), (8, 65536), (64, 4096)):
        keys = length(tokens)
        tensors = normal(batch, 32, 1, 128), normal(batch, 8, keys, 128), normal(batch, 8, keys, 128)
        lengths = torch.linspace(keys // 2, keys, batch, device=DEVICE).long()
        yield Case(f"decode {batch}×{tokens}", tensors, {"mask": masks.padding(lengths)}, all_keys, (1.1, None))


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "biases": biases,
    "sparse": sparse,
    "gaps": gaps,
    "dropout": dropout,
    "padding": padding,
    "sentences": sentences,
    "heads": heads,
    "decode": decode,
}


def exact(case: Case) -> tuple[Tensor, list[Tensor], Tensor]:
    """Output and gradients of the first item in float32, and the output's gradient that was used."""
    leaves = [t[:1].detach().float().requires_grad_() for t in case.tensors]
    ours = {name: given for name, given in case.ours.items() if name != "backend"}
    if isinstance(ours.get("bias"), Tensor):
        ours["bias"] = ours["bias"].detach().float()
    if "sinks" in ours:
        ours["sinks"] = ours["sinks"].detach().float()
    if isinstance(ours.get("mask"), masks.Mask) and ours["mask"].batch > 1:
        L, S = leaves[0].shape[2], leaves[1].shape[2]
        ours["mask"] = masks.keep(ours["mask"].dense(L, S)[:1])
    out = regard.attention(*leaves, **ours, backend="blockwise")
    grad = torch.randn_like(case.tensors[0][..., :1].expand(*case.tensors[0].shape[:3], case.tensors[2].shape[3]))
    grads = list(torch.autograd.grad(out, leaves, grad[:1].float()))
    return out.detach(), grads, grad


def errors(case: Case) -> float:
    """The largest error of ours against float32, as a multiple of 2^-7 of the largest number."""
    out, grads, grad = exact(case)
    made = regard.attention(*case.tensors, **case.ours)
    ours = [made[:1], *(g[:1] for g in torch.autograd.grad(made, case.tensors, grad))]
    worst = 0.0
    for found, meant in zip(ours, (out, *grads), strict=True):
        bound = max(2**-7 * meant.abs().max().item(), 1e-3)
        worst = max(worst, (found.float() - meant).abs().max().item() / bound)
    return worst


def rows_of(group: str, case: Case) -> Iterator[Row]:
    plan = regard.explain(*case.tensors, **case.ours)
    off = 0.0 if case.random else errors(case)
    ours = lambda: regard.attention(*case.tensors, **case.ours)  # noqa: E731
    peer = lambda: case.peer(*case.tensors)  # noqa: E731
    base = peer if case.plain is None else lambda: case.plain(*case.tensors)  # type: ignore[misc]
    for backward in (False, True):
        bar = case.bars[backward]
        if bar is None:
            continue
        name = f"{case.name}{' +bwd' if backward else ''}"
        works: dict[str, Work] = {"ours": ours, "peer": base, "again": base}
        if case.plain is not None and case.peer is not case.plain:
            works["rival"] = peer
        if backward:
            works = {
                who: with_backward(work, (*case.tensors, *(case.more if who == "ours" or base is peer else ())))
                for who, work in works.items()
            }
        try:
            context = torch.enable_grad() if backward else torch.no_grad()
            with context:
                found = in_turn(works)
        except Exception as problem:
            yield failed(group, name, bar, problem)
            continue
        ratio, control, medians = against(found, "peer", "again")
        yield Row(group, name, bar, "×", ratio, control, plan.backend, off, medians)


def every_row(group: str) -> Iterator[Row]:
    if group in APART:
        try:
            yield from APART[group]()
        except Exception as problem:
            yield failed(group, "", 0.0, problem)
        return
    for case in GROUPS[group]():
        try:
            yield from rows_of(group, case)
        except Exception as problem:
            yield failed(group, case.name, 0.0, problem)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"groups to run, comma-separated: {', '.join((*GROUPS, *APART))}")
    parser.add_argument("--json", type=Path, help="file for the raw figures")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows: list[Row] = []
    for group in args.only.split(",") if args.only else [*GROUPS, *APART]:
        for row in every_row(group):
            rows.append(row)
            show(row)
            save(rows, args.json)


if __name__ == "__main__":
    main()
