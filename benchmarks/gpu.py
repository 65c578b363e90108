"""Attention on a GPU against the best that PyTorch has for the same call: SDPA, or FlexAttention where SDPA cannot.

    python benchmarks/gpu.py [--only GROUP,GROUP] [--json FILE]

Each row is one kind of call, forward or forward and backward, in bfloat16. Before a row is timed, its output and its
gradients are compared with float32 arithmetic. Contenders take turns, round by round; a ratio is the median over the
rounds of ours to the peer's time, and the peer against itself tells how far to trust it. Host rows are microseconds
that a call keeps the host busy, above those of SDPA.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import bias, masks
from regard.backends import _stored
from regard.cache import BlockPool, KVCache, PagedCache

ROUNDS = 7
Work = Callable[[], Any]


@dataclass
class Row:
    group: str
    name: str
    bar: float
    unit: str = "×"
    ratio: float = 0.0
    control: float = 0.0
    backend: str = ""
    error: float = 0.0  # of ours against float32, see ``errors``
    milliseconds: dict[str, float] = field(default_factory=dict)
    note: str = ""


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


def normal(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)


def qkv(B: int, H: int, L: int, D: int, Dv: int | None = None, Hkv: int | None = None) -> tuple[Tensor, ...]:
    Hkv = Hkv or H
    return normal(B, H, L, D), normal(B, Hkv, L, D), normal(B, Hkv, L, Dv or D)


def once(work: Work, repeats: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / repeats


def in_turn(works: dict[str, Work], budget_ms: float = 20.0) -> dict[str, list[float]]:
    """Milliseconds of each work in each round."""
    repeats = {}
    for name, work in works.items():
        work()
        torch.cuda.synchronize()
        repeats[name] = max(2, min(200, int(budget_ms / max(once(work, 3), 1e-3))))
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            found[name].append(once(work, repeats[name]))
    return found


def with_backward(call: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Work:
    grad = torch.randn_like(call())
    return lambda: torch.autograd.grad(call(), leaves, grad)


def plain_sdpa(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **more)


_flex: list[Any] = []


def flex(mask_mod: Any = None, score_mod: Any = None) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not _flex:
        torch._dynamo.config.recompile_limit = 64
        _flex.append(torch.compile(flex_attention, dynamic=False))
    made: list[Any] = []

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if mask_mod is not None and not made:
            made.append(create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2], device="cuda"))
        out: Tensor = _flex[0](q, k, v, score_mod=score_mod, block_mask=made[0] if made else None)
        return out

    return call


def causal_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def biases() -> Iterator[Case]:
    tensors = qkv(1, 16, 8192, 128)
    causal = masks.causal()
    slopes = torch.tensor([2.0 ** (-8 * n / 16) for n in range(1, 17)], device="cuda")
    alibi_mod = lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()  # noqa: E731
    peer = flex(causal_mod, alibi_mod)
    ours: dict[str, Any] = {"mask": causal, "bias": bias.alibi(16)}
    triangle = lambda q, k, v: plain_sdpa(q, k, v, is_causal=True)  # noqa: E731
    yield Case("ALiBi causal 8192", tensors, ours, peer, (None, 1.0))
    yield Case("ALiBi causal 8192, against plain causal", tensors, ours, peer, (1.25, None), plain=triangle)
    t5 = bias.T5Bias(16).to("cuda")
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
    for length in (4096, 16384):
        tensors = qkv(1, 16, length, 128)
        lengths = [length // 16] * 16
        ids = torch.arange(length, device="cuda") // (length // 16)
        window = lambda b, h, i, j: (i >= j) & (i - j <= 256)  # noqa: E731
        documents = lambda b, h, i, j, ids=ids: (i >= j) & (ids[i] == ids[j])  # noqa: E731
        half = length // 2
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
            yield Case(f"{name} {length}", tensors, {"mask": mask}, flex(mod), (1.0, 1.0))


def dropout() -> Iterator[Case]:
    for name, causal in {"causal": True, "full": False}.items():
        tensors = qkv(8, 16, 1024, 64)
        ours = {"dropout": 0.1, **({"mask": masks.causal()} if causal else {})}
        peer = lambda q, k, v, c=causal: plain_sdpa(q, k, v, dropout_p=0.1, is_causal=c)  # noqa: E731
        yield Case(f"dropout 0.1 {name} 8×1024×16×64", tensors, ours, peer, (1.15, 1.15), random=True)


def padding() -> Iterator[Case]:
    for shape, bar in (((8, 16, 1024, 64), 1.0), ((32, 4, 40, 32), 1.1)):
        tensors = qkv(*shape)
        B, L = shape[0], shape[2]
        lengths = torch.randint(L // 2, L + 1, (B,), device="cuda")
        seen = (torch.arange(L, device="cuda") < lengths[:, None])[:, None, None]
        peer = lambda q, k, v, m=seen: plain_sdpa(q, k, v, attn_mask=m)  # noqa: E731
        ours: dict[str, Any] = {"mask": masks.padding(lengths)}
        yield Case(f"padding {B}×{L}", tensors, ours, peer, (bar, bar))
        dropped = lambda q, k, v, m=seen: plain_sdpa(q, k, v, attn_mask=m, dropout_p=0.1)  # noqa: E731
        yield Case(f"padding + dropout {B}×{L}", tensors, {**ours, "dropout": 0.1}, dropped, (1.15, 1.15), random=True)


def heads() -> Iterator[Case]:
    triangle = lambda q, k, v: plain_sdpa(q, k, v, is_causal=True)  # noqa: E731
    causal = {"mask": masks.causal()}
    yield Case("192/128 causal 4096", qkv(1, 16, 4096, 192, 128), causal, triangle, (1.03, 1.03))
    yield Case("256 causal 8192", qkv(1, 16, 8192, 256), causal, triangle, (1.03, 1.03))
    yield Case("causal 16×512×16×128", qkv(16, 16, 512, 128), causal, triangle, (1.05, 1.05))
    yield Case("causal 1×2048×16×128", qkv(1, 16, 2048, 128), causal, triangle, (1.05, 1.05))
    yield Case("grouped 32/8 causal 4096×128", qkv(1, 32, 4096, 128, Hkv=8), causal, triangle, (1.05, 1.05))
    tensors = qkv(1, 16, 2048, 128)
    added = normal(1, 16, 2048, 2048)
    peer = lambda q, k, v: plain_sdpa(q, k, v, attn_mask=added)  # noqa: E731
    fixed = lambda q, k, v: plain_sdpa(q, k, v, attn_mask=added.detach())  # noqa: E731
    yield Case("bias tensor 2048, no gradient of it", tensors, {"bias": added.detach()}, fixed, (1.1, None))
    yield Case("bias tensor 2048, with its gradient", tensors, {"bias": added}, peer, (None, 1.1), more=(added,))


def decode() -> Iterator[Case]:
    """One query over caches of unequal lengths, against cuDNN on all of the keys."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def all_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return plain_sdpa(q, k, v)

    for batch, keys in ((1, 4096), (8, 8192), (8, 65536), (64, 4096)):
        tensors = normal(batch, 32, 1, 128), normal(batch, 8, keys, 128), normal(batch, 8, keys, 128)
        lengths = torch.linspace(keys // 2, keys, batch, device="cuda").long()
        yield Case(f"decode {batch}×{keys}", tensors, {"mask": masks.padding(lengths)}, all_keys, (1.1, None))


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "biases": biases,
    "sparse": sparse,
    "dropout": dropout,
    "padding": padding,
    "heads": heads,
    "decode": decode,
}


def exact(case: Case) -> tuple[Tensor, list[Tensor], Tensor]:
    """Output and gradients of the first item in float32, and the output's gradient that was used."""
    leaves = [t[:1].detach().float().requires_grad_() for t in case.tensors]
    ours = dict(case.ours)
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
        works: dict[str, Work] = {"ours": ours, "peer": base, "again": base}
        if case.plain is not None and case.peer is not case.plain:
            works["rival"] = peer
        if backward:
            works = {
                name: with_backward(work, (*case.tensors, *(case.more if name == "ours" or base is peer else ())))
                for name, work in works.items()
            }
        try:
            context = torch.enable_grad() if backward else torch.no_grad()
            with context:
                found = in_turn(works)
        except Exception as problem:  # one row that fails must not lose the others
            yield Row(
                group,
                f"{case.name}{' +bwd' if backward else ''}",
                bar,
                note=f"{type(problem).__name__}: {problem}"[:300],
            )
            continue
        ratio = statistics.median(o / p for o, p in zip(found["ours"], found["peer"], strict=True))
        control = statistics.median(o / p for o, p in zip(found["again"], found["peer"], strict=True))
        medians = {name: statistics.median(times) for name, times in found.items()}
        yield Row(
            group, f"{case.name}{' +bwd' if backward else ''}", bar, "×", ratio, control, plan.backend, off, medians
        )


def host_rows() -> Iterator[Row]:
    """Microseconds of the host, ours less SDPA's, at a size where the device is not waited for."""
    q, k, v = qkv(1, 16, 256, 128)
    lengths = torch.randint(128, 257, (1,), device="cuda")
    kinds: dict[str, tuple[dict[str, Any], float, float]] = {
        "plain": ({}, 8, 25),
        "causal": ({"mask": masks.causal()}, 8, 25),
        "window": ({"mask": masks.window(left=64)}, 15, 60),
        "padding": ({"mask": masks.padding(lengths)}, 15, 60),
    }

    def host(work: Work) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            work()
        spent = time.perf_counter() - start
        torch.cuda.synchronize()
        return spent / 50 * 1e6

    for name, (given, bar, bar_backward) in kinds.items():
        ours = lambda given=given: regard.attention(q, k, v, **given)  # noqa: E731
        peer = lambda causal=name == "causal": plain_sdpa(q, k, v, is_causal=causal)  # noqa: E731
        for backward in (False, True):
            works = (ours, peer) if not backward else (with_backward(ours, (q, k, v)), with_backward(peer, (q, k, v)))
            with torch.enable_grad() if backward else torch.no_grad():
                for work in works:
                    for _ in range(5):
                        work()
                times = [(host(works[0]), host(works[1]), host(works[1])) for _ in range(ROUNDS)]
            more = statistics.median(o - p for o, p, _ in times)
            control = statistics.median(a - p for _, p, a in times)
            medians = {"ours": statistics.median(t[0] for t in times), "peer": statistics.median(t[1] for t in times)}
            plan = regard.explain(q, k, v, **given)
            row_bar = bar_backward if backward else bar
            yield Row(
                "host", f"{name}{' +bwd' if backward else ''}", row_bar, "µs", more, control, plan.backend, 0.0, medians
            )


def ceilings() -> tuple[float, float]:
    """Bytes and multiplications of a millisecond: those of a copy, and of a large product of matrices."""
    big = normal(8192, 8192, grad=False)
    there = torch.empty_like(big)
    rates = in_turn({"copy": lambda: there.copy_(big), "product": lambda: big @ big})
    return 2 * big.nbytes / statistics.median(rates["copy"]), 2 * 8192**3 / statistics.median(rates["product"])


def stored_rows() -> Iterator[Row]:
    """One token over caches of unequal lengths as they are kept, 32 heads over 8 of 128, against their bytes at the
    rate of a copy."""
    bytes_ms, _ = ceilings()
    for batch, keys in ((8, 8192), (64, 4096)):
        counts = torch.linspace(keys // 2, keys, batch).long().tolist()
        kinds: dict[str, Callable[[], Any]] = {
            "plain": lambda keys=keys: KVCache(keys),
            "int8": lambda keys=keys: KVCache(keys, int8=True),
            "paged": lambda batch=batch, keys=keys: PagedCache(BlockPool(batch * keys // 16, block_size=16)),
            "paged int8": lambda batch=batch, keys=keys: PagedCache(
                BlockPool(batch * keys // 16, block_size=16, int8=True)
            ),
        }
        tokens = [normal(batch, 8, keys, 128, grad=False) for _ in range(2)]
        query = normal(batch, 32, 1, 128, grad=False)
        for kind, make in kinds.items():
            with torch.no_grad():
                cache = make()
                key, value, _ = cache.padded(counts).update(*tokens)
                stored = cache._as_stored()
                assert _stored.can_decode(query, stored)
                found = _stored.decode(query, stored, None, None, None).float()
                exact = regard.attention(*(t.float() for t in (query, key, value)), mask=masks.padding(stored.lengths))
                off = (found - exact).abs().max().item() / (2**-7 * exact.abs().max().item())
                times = in_turn({"ours": lambda q=query, s=stored: _stored.decode(q, s, None, None, None)})["ours"]
            size = sum(counts) * 8 * 2 * (128 + 16 if "int8" in kind else 256)
            medians = {"ours": statistics.median(times), "floor": size / bytes_ms}
            ratio = medians["ours"] / medians["floor"]
            yield Row("stored", f"decode {kind} {batch}×{keys}", 1.18, "×", ratio, 1.0, "triton", off, medians)
            del cache, key, value, stored


def latent_rows() -> Iterator[Row]:
    """Absorbed decoding of DeepSeek-V3's heads, against the larger of its two floors."""
    bytes_ms, flops_ms = ceilings()
    for batch, keys in ((8, 2048), (8, 32768)):
        query, key = normal(batch, 128, 1, 576, grad=False), normal(batch, 1, keys, 576, grad=False)
        value = key[..., :512]
        lengths = torch.linspace(keys // 2, keys, batch, device="cuda").long()
        off = 0.0
        if keys < 10_000:
            exact = regard.attention(query.float(), key.float(), value.float(), mask=masks.padding(lengths))
            found = regard.attention(query, key, value, mask=masks.padding(lengths))
            off = (found.float() - exact).abs().max().item() / (2**-7 * exact.abs().max().item())
        mask = masks.padding(lengths)
        times = in_turn({"ours": lambda q=query, k=key, v=value, m=mask: regard.attention(q, k, v, mask=m)})["ours"]
        kept = int(lengths.sum())
        floor = max(kept * 576 * 2 / bytes_ms, 2 * 128 * kept * (576 + 512) / flops_ms)
        medians = {"ours": statistics.median(times), "floor": floor}
        plan = regard.explain(query, key, value, mask=mask)
        name = f"decode {batch}×{keys}, 128 heads of 576/512"
        yield Row("latent", name, 1.3, "×", medians["ours"] / floor, 1.0, plan.backend, off, medians)


def show(row: Row) -> None:
    if row.note:
        print(f"{row.group:8} {row.name:44} FAIL {row.note}", flush=True)
        return
    good = row.ratio <= row.bar + max(0.0, row.control - (row.unit == "×")) and row.error <= 2
    times = " ".join(f"{name} {time:.3f}" for name, time in row.milliseconds.items() if name != "again")
    print(
        f"{row.group:8} {row.name:44} {row.ratio:7.2f}{row.unit} (bar {row.bar:g}, control {row.control:.2f}) "
        f"{'ok  ' if good else 'MISS'} error {row.error:.2f} {row.backend:9} {times}",
        flush=True,
    )


def save(rows: list[Row], path: Path | None) -> None:
    """After every row: a run that is cut off leaves what it has."""
    if path is None:
        return
    import triton

    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "date": datetime.date.today().isoformat(),
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(about, indent=1))


APART: dict[str, Callable[[], Iterator[Row]]] = {"host": host_rows, "latent": latent_rows, "stored": stored_rows}


def every_row(group: str) -> Iterator[Row]:
    if group in APART:
        try:
            yield from APART[group]()
        except Exception as problem:  # one group that fails must not lose the others
            yield Row(group, "", 0.0, note=f"{type(problem).__name__}: {problem}"[:300])
        return
    for case in GROUPS[group]():
        try:
            yield from rows_of(group, case)
        except Exception as problem:  # one case that fails must not lose the others
            yield Row(group, case.name, 0.0, note=f"{type(problem).__name__}: {problem}"[:300])


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
