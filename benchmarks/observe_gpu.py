"""Times the observation on a GPU beside the plain forward pass of cuDNN, in one run.

    python benchmarks/observe_gpu.py [--quick] [--json FILE]

For each shape: the plain forward pass, then forward pass with log-sum-exp and observation, as a multiple of it, for
row statistics alone, for all statistics but the largest weights, and for all of them; bfloat16, batch 1, Gaussian
inputs, medians. Memory is the peak beyond inputs and output.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from triton.testing import do_bench

from regard import Want, masks
from regard._arguments import prepare
from regard._triton import launch

WANTS = {"rows": Want.none().but(rows=True), "all but top": Want(top_k=0), "all": Want()}


def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, lse: bool) -> tuple:
    return torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, lse, 0.0, causal, False)


def measure(length: int, heads: int, dim: int, causal: bool) -> dict[str, float]:
    shape = (1, heads, length, dim)
    query, key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    call = prepare(query, key, value, masks.causal() if causal else None, None, None, None, None, 0.0, None)
    timing = {"warmup": 10, "rep": 60 if length < 40_000 else 200, "return_mode": "median"}
    found = {"forward ms": do_bench(lambda: forward(query, key, value, causal, False), **timing)}
    for name, want in WANTS.items():

        def observed(want: Want = want) -> None:
            lse = forward(query, key, value, causal, True)[1]
            launch.observe(call, lse.reshape(1, heads, length), want)

        observed()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        observed()
        found[f"{name} MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        found[f"{name} ×"] = do_bench(observed, **timing) / found["forward ms"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 384 tokens only")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    given = parser.parse_args()
    figures = {}
    for length in (16_384,) if given.quick else (4096, 16_384, 65_536):
        for heads, dim in ((16, 128), (32, 64)):
            for causal in (False, True):
                name = f"{length} tokens {heads}×{dim} {'causal' if causal else 'full'}"
                figures[name] = measure(length, heads, dim, causal)
                print(name, *(f"{key} {value:.2f}" for key, value in figures[name].items()), sep="  ", flush=True)
    if given.json:
        given.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
