"""Rows of benchmarks/gpu.py that are no comparison of one call with one peer: time of the host, caches as they are
stored, latent heads, first calls of a new process, watched models, observed steps, and a grid of sizes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import regard
from _gpu import (
    DEVICE,
    DRY,
    DTYPE,
    ROUNDS,
    Row,
    Work,
    against,
    failed,
    in_turn,
    length,
    normal,
    plain_sdpa,
    qkv,
    replayed,
    wait,
    with_backward,
)
from regard import Want, masks
from regard.backends import _stored
from regard.cache import BlockPool, KVCache, PagedCache

HOST_CALLS = 2 if DRY else 50


def host_rows() -> Iterator[Row]:
    """Microseconds of the host, ours less SDPA's, at a size where the device is not waited for."""
    q, k, v = qkv(1, 16, length(256), 128)
    lengths = torch.randint(q.shape[2] // 2, q.shape[2] + 1, (1,), device=DEVICE)
    kinds: dict[str, tuple[dict[str, Any], float, float]] = {
        "plain": ({}, 8, 25),
        "causal": ({"mask": masks.causal()}, 8, 25),
        "window": ({"mask": masks.window(left=64)}, 15, 60),
        "padding": ({"mask": masks.padding(lengths)}, 15, 60),
    }

    def host(work: Work) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            work()
        spent = time.perf_counter() - start
        wait()
        return spent / HOST_CALLS * 1e6

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
    side = 256 if DRY else 8192
    big = normal(side, side, grad=False)
    there = torch.empty_like(big)
    rates = in_turn({"copy": lambda: there.copy_(big), "product": lambda: big @ big})
    return 2 * big.nbytes / statistics.median(rates["copy"]), 2 * side**3 / statistics.median(rates["product"])


def stored_rows() -> Iterator[Row]:
    """One token over caches of unequal lengths as they are kept, 32 heads over 8 of 128, against their bytes at the
    rate of a copy. These kernels are called by themselves: a dry run has them where Triton interprets them."""
    if DRY and os.environ.get("TRITON_INTERPRET") != "1":
        return
    bytes_ms, _ = ceilings()
    for batch, tokens_each in ((8, 8192), (64, 4096)):
        title = f"{batch}×{tokens_each}"
        batch, keys = (2, length(tokens_each)) if DRY else (batch, tokens_each)
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
                step = lambda q=query, s=stored: _stored.decode(q, s, None, None, None)  # noqa: E731
                times = in_turn({"ours": step, "device": replayed(step)})
            size = sum(counts) * 8 * 2 * (128 + 16 if "int8" in kind else 256)
            medians = {name: statistics.median(each) for name, each in times.items()} | {"floor": size / bytes_ms}
            ratio = medians["ours"] / medians["floor"]
            yield Row("stored", f"decode {kind} {title}", 1.18, "×", ratio, 1.0, "triton", off, medians)
            del cache, key, value, stored


def latent_rows() -> Iterator[Row]:
    """Absorbed decoding of DeepSeek-V3's heads, against the larger of its two floors."""
    bytes_ms, flops_ms = ceilings()
    for batch, tokens in ((8, 2048), (8, 32768)):
        keys = length(tokens)
        query, key = normal(batch, 128, 1, 576, grad=False), normal(batch, 1, keys, 576, grad=False)
        value = key[..., :512]
        lengths = torch.linspace(keys // 2, keys, batch, device=DEVICE).long()
        off = 0.0
        if keys < 10_000:
            exact = regard.attention(query.float(), key.float(), value.float(), mask=masks.padding(lengths))
            found = regard.attention(query, key, value, mask=masks.padding(lengths))
            off = (found.float() - exact).abs().max().item() / (2**-7 * exact.abs().max().item())
        mask = masks.padding(lengths)
        step = lambda q=query, k=key, v=value, m=mask: regard.attention(q, k, v, mask=m)  # noqa: E731
        times = in_turn({"ours": step, "device": replayed(step)})
        kept = int(lengths.sum())
        floor = max(kept * 576 * 2 / bytes_ms, 2 * 128 * kept * (576 + 512) / flops_ms)
        medians = {name: statistics.median(each) for name, each in times.items()} | {"floor": floor}
        plan = regard.explain(query, key, value, mask=mask)
        name = f"decode {batch}×{tokens}, 128 heads of 576/512"
        yield Row("latent", name, 1.3, "×", medians["ours"] / floor, 1.0, plan.backend, off, medians)


# In a process of its own, with nothing compiled yet: seconds of the first call of a kind, without gradients and with
# them; then milliseconds of the first call on a new length, and on a new mask of the kind.
FIRST = """
import json, sys, time, torch, regard
from regard import bias, masks
kind, device, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
dtype = torch.bfloat16 if device == "cuda" else torch.float32
wait = torch.cuda.synchronize if device == "cuda" else lambda: None
def given(tokens, n):
    if kind == "window": return {"mask": masks.window(left=tokens // n)}
    if kind == "documents":
        ids = torch.arange(tokens, device=device) * n // tokens
        return {"mask": masks.causal() & masks.documents(ids=ids)}
    if kind == "padding": return {"mask": masks.padding(torch.tensor([tokens - n], device=device))}
    return {"mask": masks.causal(), "bias": bias.alibi(16)}
def tensors(tokens):
    return [torch.randn(1, 16, tokens, 128, device=device, dtype=dtype).requires_grad_() for _ in range(3)]
def timed(inputs, how, backward):
    wait(); start = time.perf_counter()
    with torch.enable_grad() if backward else torch.no_grad():
        out = regard.attention(*inputs, **how)
    if backward: torch.autograd.grad(out, inputs, torch.ones_like(out))
    wait(); return time.perf_counter() - start
first, second = tensors(tokens), tensors(tokens + 64)
plain = timed(first, {}, False), timed(first, {}, True)
found = {"forward s": timed(first, given(tokens, 7), False), "backward s": timed(first, given(tokens, 7), True)}
found["new length ms"] = timed(second, given(tokens + 64, 7), True) * 1e3
found["new mask ms"] = timed(first, given(tokens, 5), True) * 1e3
print(json.dumps(found))
"""


def first_rows() -> Iterator[Row]:
    for kind in ("window", "documents", "padding", "ALiBi"):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", FIRST, kind, DEVICE, str(length(4096))]
            env = {**os.environ, "TRITON_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
            run = subprocess.run(command, env=env, capture_output=True, text=True)
        if run.returncode:
            yield Row("first", kind, 3.0, note=run.stderr.strip().splitlines()[-1][:300])
            continue
        found = json.loads(run.stdout)
        yield Row(
            "first", f"{kind}, forward and backward, compiled", 3.0, "s", found["forward s"] + found["backward s"]
        )
        for name in ("new length", "new mask"):
            yield Row("first", f"{kind}, {name}, with gradients", 50.0, "ms", found[f"{name} ms"])


def watch_rows() -> Iterator[Row]:
    """A Hugging Face Llama of 8 layers, 16 heads over 4 of 128, under a watch, as a multiple of its own time."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32_000, hidden_size=2048 // (16 if DRY else 1), intermediate_size=5632 // (16 if DRY else 1),
        num_hidden_layers=8 // (4 if DRY else 1), num_attention_heads=16, num_key_value_heads=4,
        max_position_embeddings=131_072,
    )  # fmt: skip
    model = transformers.LlamaModel(config).to(DEVICE, DTYPE).eval()

    def watched(want: Want, ids: Tensor) -> object:
        with regard.watch(model, want=want):
            return model(ids, use_cache=False)

    for tokens in (4096, 32_768, 131_072):
        ids = torch.randint(0, 32_000, (1, length(tokens)), device=DEVICE)
        plain = lambda ids=ids: model(ids, use_cache=False)  # noqa: E731
        for name, want, bar in (("all", Want(), 2.0), ("all but top-k", Want(top_k=0), 1.8)):
            try:
                with torch.no_grad():
                    works = {"ours": lambda w=want, i=ids: watched(w, i), "peer": plain, "again": plain}
                    ratio, control, medians = against(in_turn(works), "peer", "again")
            except Exception as problem:
                yield failed("watch", f"{name}, {tokens}", bar, problem)
                continue
            yield Row("watch", f"{name}, {tokens}", bar, "×", ratio, control, "", 0.0, medians)


def observed_rows() -> Iterator[Row]:
    """The backward pass of an observed call, and the statistics of decode steps, against the plain ones."""
    tensors = qkv(1, 16, length(8192), 128)
    causal = masks.causal()
    plain = regard.attention(*tensors, mask=causal)
    seen = regard.observe(*tensors, mask=causal).out
    grad = torch.randn_like(plain)
    again = lambda out: torch.autograd.grad(out, tensors, grad, retain_graph=True)  # noqa: E731
    works: dict[str, Work] = {"ours": lambda: again(seen), "peer": lambda: again(plain), "again": lambda: again(plain)}
    ratio, control, medians = against(in_turn(works), "peer", "again")
    yield Row("observed", "backward pass, causal 8192", 1.15, "×", ratio, control, "", 0.0, medians)
    for batch, tokens in ((1, 4096), (8, 8192)):
        keys = length(tokens)
        query, key, value = (normal(batch, h, n, 128, grad=False) for h, n in ((32, 1), (8, keys), (8, keys)))
        mask = masks.padding(torch.linspace(keys // 2, keys, batch, device=DEVICE).long())
        step = lambda q=query, k=key, v=value, m=mask: regard.attention(q, k, v, mask=m)  # noqa: E731
        look = lambda q=query, k=key, v=value, m=mask: regard.observe(q, k, v, mask=m)  # noqa: E731
        ratio, control, medians = against(in_turn({"ours": look, "peer": step, "again": step}), "peer", "again")
        yield Row(
            "observed", f"decode step {batch}×{tokens}, all statistics", 1.15, "×", ratio, control, "", 0.0, medians
        )


def fused_kernels(tensors: tuple[Tensor, ...], causal: bool) -> dict[str, Work]:
    """SDPA by each of torch's fused kernels that takes the call."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kinds = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    found: dict[str, Work] = {}
    for name, kind in kinds.items():

        def call(kind: Any = kind) -> Tensor:
            with sdpa_kernel(kind):
                return plain_sdpa(*tensors, is_causal=causal)

        try:
            call()
        except RuntimeError:
            continue
        found[name] = call
    return found


def grid_rows() -> Iterator[Row]:
    """Head dims, lengths, full, causal and grouped, forward and backward, against the fastest of torch's kernels;
    outputs and gradients are held against that kernel's, which the other groups hold against float32."""
    for dim in (64, 128, 256):
        for tokens in (512, 2048, 8192, 32_768, 131_072):
            heads = 16 if tokens <= 8192 else 4
            for name, causal, kv_heads in (
                ("full", False, heads),
                ("causal", True, heads),
                ("grouped", True, heads // 4),
            ):
                if tokens > 100_000 and not causal:
                    continue  # seconds for each pass
                title = f"{name} {tokens}×{heads}×{dim}"
                try:
                    yield from _grid_cell(title, qkv(1, heads, length(tokens), dim, Hkv=kv_heads), causal)
                except Exception as problem:
                    yield failed("grid", title, 1.05, problem)


def _grid_cell(title: str, tensors: tuple[Tensor, ...], causal: bool) -> Iterator[Row]:
    given: dict[str, Any] = {"mask": masks.causal()} if causal else {}
    peers = fused_kernels(tensors, causal)
    ours = lambda: regard.attention(*tensors, **given)  # noqa: E731
    plan = regard.explain(*tensors, **given)
    off = _apart(ours, next(iter(peers.values())), tensors)
    for backward in (False, True):
        works: dict[str, Work] = {"ours": ours, **peers}
        if backward:
            works = {name: with_backward(work, tensors) for name, work in works.items()}
        with torch.enable_grad() if backward else torch.no_grad():
            found = in_turn(works, budget_ms=8.0)
        best = min(peers, key=lambda name: statistics.median(found[name]))
        ratio, control, medians = against(found, best)
        yield Row(
            "grid", f"{title}{' +bwd' if backward else ''}", 1.05, "×", ratio, control, plan.backend, off, medians
        )


def _apart(ours: Work, peer: Work, tensors: tuple[Tensor, ...]) -> float:
    """How far two functions lie apart, in outputs and gradients, as a multiple of 2^-6 of the largest number."""
    grad = torch.randn_like(ours())
    worst = 0.0
    for found, meant in zip(
        *((out, *torch.autograd.grad(out, tensors, grad)) for out in (ours(), peer())), strict=True
    ):
        bound = max(2**-6 * meant.abs().max().item(), 1e-3)
        worst = max(worst, (found.float() - meant.float()).abs().max().item() / bound)
    return worst


APART: dict[str, Callable[[], Iterator[Row]]] = {
    "host": host_rows,
    "latent": latent_rows,
    "stored": stored_rows,
    "first": first_rows,
    "observed": observed_rows,
    "watch": watch_rows,
    "grid": grid_rows,
}
