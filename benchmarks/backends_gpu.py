"""Times the backends on a GPU where no fused kernel of PyTorch takes the call: what "auto" chooses by.

    python benchmarks/backends_gpu.py [--json FILE]

8192 tokens, 16 heads of 128, batch 1, medians of forward passes in milliseconds. FlexAttention's first call, which
compiles, is told beside its time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from pathlib import Path
from typing import Any

import torch
from triton import __version__ as triton_version
from triton.testing import do_bench

import regard
from regard import bias, masks

LENGTH, HEADS, DIM = 8192, 16, 128


def cases() -> dict[str, tuple[torch.dtype, dict[str, Any]]]:
    added = torch.randn(1, HEADS, LENGTH, LENGTH, device="cuda", dtype=torch.bfloat16)
    half = {
        "causal or prefix": {"mask": masks.causal() | masks.prefix(1000)},
        "softcap, causal": {"mask": masks.causal(), "softcap": 20.0},
        "alibi, causal": {"mask": masks.causal(), "bias": bias.alibi(HEADS)},
        "bias tensor": {"bias": added},
        "strided or window": {"mask": masks.causal() & (masks.strided(128) | masks.window(left=255))},
        "random blocks or window": {"mask": masks.random_blocks(8, 128, 0) | masks.window(left=127, right=127)},
    }
    single: dict[str, dict[str, Any]] = {
        "float32, full": {},
        "float32, causal": {"mask": masks.causal()},
        "float32, window": {"mask": masks.window(left=255)},
    }
    return {
        **{name: (torch.bfloat16, given) for name, given in half.items()},
        **{name: (torch.float32, given) for name, given in single.items()},
    }


def measure(dtype: torch.dtype, given: dict[str, Any]) -> dict[str, float | str]:
    tensors = [torch.randn(1, HEADS, LENGTH, DIM, device="cuda", dtype=dtype) for _ in range(3)]
    found: dict[str, float | str] = {"auto": regard.explain(*tensors, **given).backend}
    for backend in ("sdpa", "triton", "flex", "blockwise"):
        try:
            start = time.perf_counter()
            regard.attention(*tensors, backend=backend, **given)
            torch.cuda.synchronize()
            found[f"{backend} first s"] = time.perf_counter() - start
        except regard.Refused:
            continue
        run = lambda b=backend: regard.attention(*tensors, backend=b, **given)  # noqa: E731
        found[f"{backend} ms"] = float(do_bench(run, warmup=5, rep=25, return_mode="median"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    given = parser.parse_args()
    figures = {}
    for name, (dtype, arguments) in cases().items():
        figures[name] = measure(dtype, arguments)
        parts = (
            f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}"
            for key, value in figures[name].items()
        )
        print(name, *parts, sep="  ", flush=True)
    if given.json:
        about = {
            "machine": {"gpu": torch.cuda.get_device_name()},
            "versions": {"torch": torch.__version__, "triton": triton_version},
            "date": datetime.date.today().isoformat(),
            "command": "python benchmarks/backends_gpu.py --json FILE",
        }
        given.json.write_text(json.dumps({**about, "figures": figures}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
