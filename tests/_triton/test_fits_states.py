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

from tests import forced  # noqa: E402
from tests._triton.inside import (  # noqa: E402
    decode,
    decoding,
    inputs,
    scan,
    scanning,
    stored_codes,
    stored_decoding,
    tile_sizes,
)
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

# bytes of shared memory that a program may have
LIMITS = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}
NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
OWN = ("X", "K", "V", "Q", "RAW", "Y")
OTHERS = {
    "GATES": "*fp64",
    "MARKS": "*i32",
    "LENGTHS": "*i64",
    "OFFSETS": "*i64",
    "TABLE": "*i64",
    "scale": "fp32",
    "cap": "fp32",
}
SIZES = ("T", "L", "S")
SUMS: dict[str, dict[str, Any]] = {
    "result": {"X_MAP": 1, "K_MAP": 1, "V_MAP": 0, "Y_MAP": 0, "SIDE": 0, "NORMED": True, "REVERSE": False},
    "query": {"X_MAP": 0, "K_MAP": 0, "V_MAP": 1, "Y_MAP": 1, "SIDE": 1, "NORMED": False, "REVERSE": False},
    "key": {"X_MAP": 0, "K_MAP": 0, "V_MAP": 1, "Y_MAP": 1, "SIDE": 2, "NORMED": False, "REVERSE": True},
    "value": {"X_MAP": 1, "K_MAP": 1, "V_MAP": 0, "Y_MAP": 0, "SIDE": 2, "NORMED": False, "REVERSE": True},
}


def compiled(
    kernel: Any, arch: int, dtype: torch.dtype, constants: dict[str, Any], options: dict[str, int], **types: str
) -> Any:
    """The kernel for that generation of devices; ``types``: of arguments that have others than usual."""
    signature, fixed, hints = {}, {}, {}
    for at, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], fixed[(at,)] = "constexpr", constants[name]
            continue
        memory = name.isupper() and name not in SIZES
        usual = NAMES[dtype] if name in OWN else OTHERS.get(name, "*fp32" if memory else "i32")
        signature[name] = types.get(name, usual)
        if memory or "stride" in name:
            hints[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=hints)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def shared(*given: Any, **types: str) -> int:
    """Bytes of shared memory that the compiled kernel takes."""
    return int(compiled(*given, **types).metadata.shared)


def scan_fits(arch: int, dim: int, dtype: torch.dtype, kind: str, patch: pytest.MonkeyPatch) -> None:
    forced.gpu_of(patch, arch, LIMITS[arch])
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
        "ROWS": 128, "BN": options.pop("BN"), "K_STEP": 576, "V_STEP": 576 if same else 512, "SOFTCAP": False,
        "PADDED": True, "SAME": same, "APART": arch == 90, "PRECISION": "ieee",
    }  # fmt: skip
    assert tile_sizes._SHARED_MEMORY >= decoding._NEEDED_WHEN_WIDE
    made = compiled(decode.decode, arch, torch.bfloat16, constants, options)
    assert made.metadata.shared <= decoding._NEEDED_WHEN_WIDE
    if arch == 90:
        # of 64 keys (32 where values are read apart), each group of warps computes one half of the first product
        keys = 64 if same else 32
        assert made.asm["ptx"].count(f"wgmma.mma_async.sync.aligned.m64n{keys // 2}k16") == 576 // 16


def code_constants(dim: int, dtype: torch.dtype, paged: bool) -> dict[str, Any]:
    """Of four heads over each head of keys; a pool has eight of those."""
    wide, step = max(32, inputs.power(dim)), 8 if paged else 1
    steps = {"K_STEP": dim // 2 * step, "KS_STEP": -(-dim // 32) * step}
    steps |= {"V_STEP": steps["K_STEP"], "VS_STEP": steps["KS_STEP"]}
    return {
        "HKV": 8, "GROUP": 4, "HEAD": dim, "D": wide, "VALUE": dim, "DV": wide, "SIZE": 16, "PAGED": paged,
        "ROWS": stored_decoding.code_rows(4, wide, wide), "SOFTCAP": True, "FINE": dtype == torch.float16,
        "DIRECT": True, **steps,
    }  # fmt: skip


def codes_fit(arch: int, dim: int, dtype: torch.dtype, paged: bool) -> str:
    """The kernel over codes fits the device; gives its code for that."""
    constants = code_constants(dim, dtype, paged)
    options = stored_decoding.code_options(constants["D"], constants["DV"], paged)
    constants["BN"] = options.pop("BN")
    made = compiled(stored_codes.decode_codes, arch, dtype, constants, options, K="*i8", V="*i8")
    assert made.metadata.shared <= LIMITS[arch]
    return str(made.asm["ptx"])


@pytest.mark.parametrize("paged", [False, True])
def test_codes_are_multiplied_as_they_are(paged: bool) -> None:
    """What made decoding over int8 take longer than its bytes: a conversion for each code, and a product with its
    scale."""
    code = codes_fit(90, 128, torch.bfloat16, paged)
    # of 64 keys and values in four warps, 8 × 16 numbers in each product of matrices: no more than without scales
    assert code.count("mma.sync") == 2 * 64 * 128 // (8 * 16) // 4
    assert "cvt.rn.f32.s" not in code and "cvt.s16.s8" not in code
    assert code.count("cp.async.cg.shared.global") > 0 and "ld.shared.b8" not in code and "ld.shared.u8" not in code


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("arch", "dim", "dtype", "paged"),
    [*itertools.product(LIMITS, (40, 64, 128, 256), (torch.bfloat16, torch.float16), (False, True))],
)
def test_every_kernel_over_codes_fits_every_device(arch: int, dim: int, dtype: torch.dtype, paged: bool) -> None:
    codes_fit(arch, dim, dtype, paged)
