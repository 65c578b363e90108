"""The observation kernels fit the shared memory of the devices they are chosen for; on Hopper, products of matrices go
on while the sums of another tile are made."""

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
from tests._triton.inside import encode, form, inputs, kernels, observing, top  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from regard import Want  # noqa: E402

LIMITS = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448}
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
MEMORY = {"LSE": "*fp32", "PAIRS": "*i32", "PAIRS_HI": "*i32", "RUNS": "*i32", "COUNTS": "*i32", "EDGE_RUNS": "*i32",
          "EDGE_COUNTS": "*i32", "OFFSETS": "*i64", "SUMS": "*fp64", "ENTROPY": "*fp32", "LARGEST": "*fp32",
          "FIRST": "*fp32", "MAXIMA": "*fp32", "MASSES": "*fp32", "THRESHOLD": "*fp32", "COUNT": "*i32",
          "NOTED": "*i64"}  # fmt: skip
LONG = 16_384
KERNELS, ANY_OR_BAND = ("observe", "find"), (encode.ANY, encode.BAND)
EVERY = list(itertools.product(LIMITS, (64, 128, 256), DTYPES, KERNELS, (encode.INTERVALS,), (LONG,)))
# blocks of rows are taller in long calls
HALVES = ((90,), (64, 128), (torch.bfloat16,), KERNELS)
EVERY += list(itertools.product(*HALVES, (*ANY_OR_BAND, encode.DENSE), (LONG,)))
EVERY += list(itertools.product(*HALVES, ANY_OR_BAND, (4096,)))
FEW = [(90, 128, torch.bfloat16, "observe", encode.BAND, LONG), (90, 64, torch.float16, "find", encode.ANY, LONG)]


def compiled(
    arch: int, dim: int, dtype: torch.dtype, kind: str, test: int, length: int, patch: pytest.MonkeyPatch
) -> Any:
    forced.gpu_of(patch, arch, LIMITS[arch])
    query = torch.zeros(1, 16, 3, dim, dtype=dtype)
    spec = prepare(query, query, query, None, None, None, None, None, 0.0, None).spec
    # a band is what flags say; with other masks there is a structure and no flags
    mask = None if test == encode.ANY else ("mask",)
    flags = (True, None, 0, False, None) if test == encode.BAND else None
    spec = spec._replace(queries=length, keys=length, device="cuda", mask=mask, flags=flags)
    recipe = observing._make_recipe(spec, Want())
    kernel, tiles = (kernels.observe, recipe.tiles) if kind == "observe" else (top.find, recipe.finds)
    if kind == "find" and test == encode.BAND:
        test = encode.INTERVALS
    width = max(16, inputs.power(dim))
    constants: dict[str, Any] = {
        **recipe.flags, "BM": tiles["BM"], "BN": tiles["BN"], "WARPS": tiles["num_warps"], "COPIED": arch >= 90,
        "WIDE": recipe.wide, "H": 16, "GROUP": 1, "HEAD": dim, "D": width, "SOFTCAP": False, "BIASED": False,
        "PRECISION": inputs.PRECISION[dtype], "PREDICATE": test, "SLOTS": 1, "EACH": False, "DIRECT": True,
        "BY_BLOCK": recipe.by_block, "AHEAD": recipe.ahead, "EDGE_MAP": True, "EDGE_DISTANCE": True, "RAW": True,
        "ROOM": recipe.room,
    }  # fmt: skip
    if kind == "observe":
        constants = {"F": form.ObservedForm(**{name: constants[name] for name in form.ObservedForm._fields})}
    signature, fixed, hints = {}, {}, {}
    for at, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], fixed[(at,)] = "constexpr", constants[name]
        elif name in ("Q", "K") and arch >= 90:
            rows = tiles["BM"] if name == "Q" else tiles["BN"]
            signature[name] = f"tensordesc<{DTYPES[dtype]}[1, 1, {rows}, {width}]>"
        else:
            own = f"*{DTYPES[dtype]}" if name in ("Q", "K", "BIAS") else "i32"
            signature[name] = MEMORY.get(name, "fp32" if name in ("scale", "cap", "magic") else own)
            if (name.isupper() and len(name) > 1) or "stride" in name:
                hints[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=hints)
    options = {name: tiles[name] for name in ("num_warps", "num_stages", "maxnreg") if name in tiles}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert made.metadata.shared <= LIMITS[arch], f"{tiles}: {made.metadata.shared} bytes"
    return made


@pytest.mark.parametrize(("arch", "dim", "dtype", "kind", "test", "length"), FEW)
def test_a_product_is_not_waited_for_where_it_is_made(
    arch: int, dim: int, dtype: torch.dtype, kind: str, test: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = compiled(arch, dim, dtype, kind, test, length, monkeypatch)
    # of the products in the loop over plain tiles, one may be on its way
    assert made.asm["ttgir"].count("pendings = 1 : i32") == 1


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("arch", "dim", "dtype", "kind", "test", "length"), [each for each in EVERY if each not in FEW]
)
def test_every_observation_kernel_fits_every_device(
    arch: int, dim: int, dtype: torch.dtype, kind: str, test: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dim > inputs.widest(dtype):
        pytest.skip(f"{dtype} takes heads up to {inputs.widest(dtype)}")
    compiled(arch, dim, dtype, kind, test, length, monkeypatch)
