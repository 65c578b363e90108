"""Kernels that hold a state, and the widest decoding, fit the shared memory of the devices they are chosen for."""

from __future__ import annotations

import itertools
import os
import warnings
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from regard._triton import decode, decoding, scan, scanning, tile_sizes  # noqa: E402

# bytes of shared memory that a program may have
LIMITS = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}
NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
OWN = ("X", "K", "V", "Q", "RAW", "Y")
OTHERS = {"GATES": "*fp64", "MARKS": "*i32", "LENGTHS": "*i64", "OFFSETS": "*i64", "scale": "fp32", "cap": "fp32"}
SIZES = ("T", "L", "S")
SUMS: dict[str, dict[str, Any]] = {
    "result": {"X_MAP": 1, "K_MAP": 1, "V_MAP": 0, "Y_MAP": 0, "SIDE": 0, "NORMED": True, "REVERSE": False},
    "query": {"X_MAP": 0, "K_MAP": 0, "V_MAP": 1, "Y_MAP": 1, "SIDE": 1, "NORMED": False, "REVERSE": False},
    "key": {"X_MAP": 0, "K_MAP": 0, "V_MAP": 1, "Y_MAP": 1, "SIDE": 2, "NORMED": False, "REVERSE": True},
    "value": {"X_MAP": 1, "K_MAP": 1, "V_MAP": 0, "Y_MAP": 0, "SIDE": 2, "NORMED": False, "REVERSE": True},
}


def shared(kernel: Any, arch: int, dtype: torch.dtype, constants: dict[str, Any], options: dict[str, int]) -> int:
    """Bytes of shared memory that the compiled kernel takes."""
    signature, fixed, hints = {}, {}, {}
    for at, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], fixed[(at,)] = "constexpr", constants[name]
            continue
        memory = name.isupper() and name not in SIZES
        signature[name] = NAMES[dtype] if name in OWN else OTHERS.get(name, "*fp32" if memory else "i32")
        if memory or "stride" in name:
            hints[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=hints)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return int(made.metadata.shared)


def scan_fits(arch: int, dim: int, dtype: torch.dtype, kind: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scanning, "shared_memory", lambda device: LIMITS[arch])
    if dim > scanning.widest(dtype, "cuda"):
        return  # refused there
    operand, precision, chunk = scanning._operand(dtype)
    one = SUMS[kind]
    flags = {"GATED": True, "MARKED": True, "LINED": kind in ("query", "key"), "DIVIDED": kind == "result"}
    flags |= {"TURNS": kind in ("query", "key"), "STARTED": True, "HIDES": not one["REVERSE"]}
    sizes = {"H": 2, "K_WIDTH": dim, "W": dim, "V_WIDTH": dim, "E": scanning._blocks(dim)[1], "C": chunk}
    groups = dict.fromkeys(("GX", "GK", "GV", "GG", "GS", "GR"), 1)
    constants = {**one, **flags, **sizes, **groups, "OPERAND": operand, "PRECISION": precision}
    for kernel in (scan.scan, scan.sum_segments):
        options = scanning.launch_options(dim, dtype)
        found = shared(kernel, arch, dtype, constants, options)
        assert found <= LIMITS[arch], f"{kernel.__name__}: {found} bytes"


def test_a_linear_kernel_fits_the_smallest_device(monkeypatch: pytest.MonkeyPatch) -> None:
    scan_fits(89, 128, torch.bfloat16, "key", monkeypatch)


@pytest.mark.kernels
@pytest.mark.parametrize(("arch", "dim", "dtype", "kind"), [*itertools.product(LIMITS, (64, 128, 256), NAMES, SUMS)])
def test_every_linear_kernel_fits_every_device(
    arch: int, dim: int, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan_fits(arch, dim, dtype, kind, monkeypatch)


@pytest.mark.kernels
@pytest.mark.parametrize(("arch", "same"), [*itertools.product((90, 100), (True, False))])
def test_decoding_of_latent_heads_fits_the_devices_that_take_it(arch: int, same: bool) -> None:
    options = decoding.decode_options(512, 512, same, torch.bfloat16)
    constants = {
        "HKV": 1, "GROUP": 128, "HEAD": 512, "D": 512, "REST": 64, "D2": 64, "VALUE": 512, "DV": 512, "BM": 64,
        "BN": options.pop("BN"), "SOFTCAP": False, "PADDED": True, "SAME": same, "PRECISION": "ieee",
    }  # fmt: skip
    assert tile_sizes._SHARED_MEMORY >= decoding._NEEDED_WHEN_WIDE
    assert shared(decode.decode, arch, torch.bfloat16, constants, options) <= decoding._NEEDED_WHEN_WIDE
