"""Every kernel fits the shared memory of the devices it is chosen for: compiled here, without a GPU.

What a program needs is estimated when its tiles are chosen (`regard._triton.tile_sizes`); it must not need more by
the compiler. A few kinds run in `make test`, all of them in `make test-kernels`.
"""

from __future__ import annotations

import itertools
import os
import warnings
from typing import Any

import pytest
import torch
from tests.core_calls import prepare

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from tests import forced  # noqa: E402
from tests._triton.inside import backward, form, forward, inputs, tile_sizes  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from regard import bias, masks  # noqa: E402

# bytes of shared memory that a program may have
LIMITS = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}
KERNELS = {"forward": forward.attend, "keys": backward.keys_backward, "queries": backward.queries_backward,
           "bias": backward.bias_backward}  # fmt: skip
MODIFIERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "slopes": {"mask": masks.causal(), "bias": bias.alibi(2)},
    "matrix": {"bias": torch.zeros(1, 2, 3, 3)},
    "softcap": {"softcap": 5.0},
    "dropout": {"dropout": 0.1},
}
DTYPES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
MEMORY = {"LSE": "*fp32", "DELTA": "*fp32", "ENTROPY": "*fp32", "LARGEST": "*fp32", "SINKS": "*fp32", "DBIAS": "*fp32",
          "BIAS": "*fp32", "TILES": "*i32", "STARTS": "*i32", "PAIRS": "*i64", "PAIRS_HI": "*i64",
          "SEED": "*i64"}  # fmt: skip
OWN = ("Q", "K", "V", "DO", "OUT", "DQ", "DK", "DV_")  # in the call's dtype
FLOATS = ("scale", "cap", "share", "factor")
LONG = 4096  # for the largest tiles
EVERY = list(itertools.product(LIMITS, (64, 80, 96, 128, 192, 256), DTYPES, MODIFIERS, KERNELS, (LONG,)))
EVERY += list(itertools.product(LIMITS, (32, 128), (torch.bfloat16,), MODIFIERS, KERNELS, (13, 30)))
FEW = [
    (90, 128, torch.bfloat16, "matrix", "forward", LONG),
    (90, 128, torch.bfloat16, "slopes", "forward", LONG),
    (80, 128, torch.float16, "matrix", "keys", LONG),
    (89, 256, torch.bfloat16, "plain", "queries", LONG),
    (90, 128, torch.float32, "plain", "keys", LONG),
    (90, 32, torch.bfloat16, "dropout", "forward", 13),
    (80, 128, torch.bfloat16, "dropout", "keys", 30),
]


def fits(arch: int, dim: int, dtype: torch.dtype, modifier: str, kind: str, length: int, patch: Any) -> None:
    forced.gpu_of(patch, arch, LIMITS[arch])
    given = {"dropout": 0.0, **MODIFIERS[modifier]}
    query = torch.zeros(1, 2, 3, dim, dtype=dtype)
    names = ("mask", "bias", "scale", "softcap", "sinks")
    call = prepare(query, query, query, *(given.get(name) for name in names), given["dropout"], None)
    spec = call.spec._replace(queries=length, keys=length)
    if dim > inputs.widest(dtype):
        pytest.skip(f"{dtype} takes heads up to {inputs.widest(dtype)}")
    keys, queries, square = tile_sizes.gradient_tiles(spec)
    tiles = {"forward": tile_sizes.tiles_of(spec), "keys": keys, "queries": queries, "bias": square}[kind]
    wide = max(16, inputs.power(dim))
    made = form.Form(
        D=wide, DV=wide, WHOLE=wide == dim, WHOLE_V=wide == dim, UNIT=16 // dtype.itemsize, BM=tiles["BM"],
        BN=tiles["BN"], PREDICATE=3, SLOTS=0, PADDED=True, SOFTCAP=spec.softcap is not None,
        BIASED={"slopes": 3, "matrix": 4}.get(modifier, 0), DROPOUT=spec.dropout > 0,
        PRECISION=inputs.PRECISION[dtype], DIRECT=True, RISING=modifier in ("plain", "causal"), ROWS=True,
    )  # fmt: skip
    kernel = KERNELS[kind]
    signature, fixed, hints = {}, {}, {}
    for at, name in enumerate(kernel.arg_names):
        if name == "F":
            signature[name], fixed[(at,)] = "constexpr", made
            continue
        other = DTYPES[dtype] if name in OWN else "fp32" if name in FLOATS else "i32"
        signature[name] = MEMORY.get(name, other)
        if name in OWN or name in MEMORY:
            hints[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=hints)
    options = {"num_warps": tiles["num_warps"], "num_stages": tiles["num_stages"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert made.metadata.shared <= LIMITS[arch], f"{tiles}: {made.metadata.shared} bytes"


@pytest.mark.parametrize(("arch", "dim", "dtype", "modifier", "kind", "length"), FEW)
def test_a_kernel_fits_the_devices_it_is_chosen_for(
    arch: int, dim: int, dtype: torch.dtype, modifier: str, kind: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits(arch, dim, dtype, modifier, kind, length, monkeypatch)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("arch", "dim", "dtype", "modifier", "kind", "length"), [each for each in EVERY if each not in FEW]
)
def test_every_kernel_fits_every_device(
    arch: int, dim: int, dtype: torch.dtype, modifier: str, kind: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits(arch, dim, dtype, modifier, kind, length, monkeypatch)
