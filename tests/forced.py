"""What a small test on this machine has to force: tiles so tiny that few tokens cross their edges, and calls taken as
if a GPU were here. The names inside regard that this needs are written here and nowhere else, so that a change inside
regard changes this file.

Each function takes pytest's monkeypatch, or any object with its `setattr`, and lasts as long as that does.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import masks

SIZES: dict[str, tuple[str, ...]] = {
    # calls on a CPU
    "numbers_of_a_dense_mask": ("regard.backends.sdpa.MASK_NUMBERS",),  # up to which a call is one step
    "pairs_of_a_step": ("regard.backends._schedule.STEP_PAIRS",),  # up to which items of few rows share one
    "numbers_of_a_piece": ("regard.backends._grouped.AT_ONCE",),  # of steps that are computed as one
    "weights_of_a_product": ("regard.backends._products.MOST_WEIGHTS",),  # up to which they are written out
    "chunk_of_linear": ("regard.linear._forms.CHUNK",),
    "chunks_of_linear_at_once": ("regard.linear._forms.AT_ONCE",),
    "piece_of_a_cache": ("regard.cache._pieces.PIECE",),
    "tokens_generated_ahead": ("regard.models._static._AHEAD",),
    "numbers_of_a_shared_call": ("regard._sharded._calls.NUMBERS",),  # that one process computes at once
    # how masks are looked at
    "rows_of_a_strip": ("regard.masks._blocks._STRIP_ROWS", "regard.masks._count._STRIP_ROWS"),
    "cells_of_a_strip": ("regard.masks._blocks._STRIP_CELLS",),
    "pairs_of_a_counted_tile": ("regard.masks._count._TILE_PAIRS",),
    "pairs_counted_one_by_one": ("regard.masks._count._FEW_PAIRS",),
    # calls on a GPU
    "least_area": (
        "regard.backends._cuda.AREA_PAIRS",
        "regard.backends._cuda.AREA_ROWS",
        "regard.masks._base.LEAST_ROWS",
    ),
    "pairs_of_a_flex_table": ("regard.backends._flex_rules._PAIRS",),
    "cells_of_a_flex_table": ("regard.backends._flex_rules._MOST_CELLS",),
    "keys_of_a_split": ("regard._triton.decoding._LEAST",),
    "width_of_whole_heads": ("regard._triton.decoding._WHOLE",),  # wider ones are read in parts
    "rows_of_a_program": ("regard._triton.decoding._MOST_ROWS",),
    "segments_of_a_scan": ("regard._triton.scanning._FEWEST",),
    "columns_of_a_scan": ("regard._triton.scanning._COLUMNS",),
    # the rest
    "plans_kept": ("regard.plan._LIMIT",),
    "bytes_of_a_page": ("regard._page._pack.SMALL", "regard._page._pack.LARGE"),
    "numbers_copied": ("regard.cost._measure.COPY",),
}


def sizes(patch: pytest.MonkeyPatch, **given: int) -> None:
    """Sizes at which regard turns to another way, in place of its own."""
    for name, number in given.items():
        for place in SIZES[name]:
            patch.setattr(place, number)


def fresh_plans(patch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """No choice is remembered of other tests; what is remembered from here on is in the result."""
    kept: dict[Any, Any] = {}
    patch.setattr("regard.plan._chosen", kept)
    return kept


def as_if_on_gpu(patch: pytest.MonkeyPatch, *, hopper: bool = False, triton: bool = True) -> None:
    """Backends answer as where there is a GPU, of the Hopper kind or older, with or without Triton."""
    fresh_plans(patch)
    patch.setattr("regard.backends._cuda.is_hopper", lambda: hopper)
    for backend in ("flex", "triton"):
        patch.setattr(f"regard.backends.{backend}.has_triton", lambda: triton)


def masks_on_gpu(patch: pytest.MonkeyPatch) -> None:
    """Masks as they are when their tensors lie on a GPU: not to be read."""
    patch.setattr("regard.masks.Mask.readable", lambda mask: False)


def gpu_of(patch: pytest.MonkeyPatch, arch: int, shared_memory: int) -> None:
    """Kernels are laid out for a GPU of this architecture (90 is Hopper), with so many bytes of shared memory."""
    from regard._triton import tile_sizes

    for module in ("tile_sizes", "scanning", "decoding"):
        patch.setattr(f"regard._triton.{module}.shared_memory", lambda device: shared_memory)
    for function in (tile_sizes.tiles_of, tile_sizes.gradient_tiles):
        function.cache_clear()
    patch.setattr("regard._triton.inputs.has_copy_engine", lambda device: arch >= 90)
    patch.setattr("regard._triton.inputs.has_asynchronous_products", lambda device: arch // 10 == 9)


def uncompiled_flex(patch: pytest.MonkeyPatch) -> None:
    """FlexAttention on a CPU by its unfused operations, which refuse gradients only there."""
    from regard.backends import flex

    patch.setattr(flex, "_compiled", lambda kind: flex._attend)
    patch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)


def flex_by_torch(patch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """FlexAttention on a CPU by what torch.compile makes of it without a compiler; the kinds it was compiled for."""
    compiled, kinds = torch.compile, dict[Any, Any]()
    patch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    patch.setattr(torch, "compile", lambda *given, **options: compiled(*given, **options, backend="aot_eager"))
    patch.setattr("regard.backends.flex._kinds", kinds)
    return kinds


def onednn_of_amd(patch: pytest.MonkeyPatch) -> None:
    """On a processor of AMD, where generation multiplies large matrices by oneDNN."""
    patch.setattr("regard.nn._products._is_faster", lambda: True)


def fresh_launches(patch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """No launch is remembered of other tests; what is remembered of this one is in the result."""
    kept: dict[Any, Any] = {}
    patch.setattr("regard._triton.launcher._kept", kept)
    patch.setattr("regard.masks._memo._shared", {})
    patch.setattr(masks.causal(), "_memo", None)
    patch.setattr("regard._triton.observing._recipes", {})
    return kept


def compiling_ahead(patch: pytest.MonkeyPatch) -> None:
    """Kernels of the backward pass are compiled while the forward one is, as on a GPU."""
    for module in ("launcher", "attend"):
        patch.setattr(f"regard._triton.{module}.can_compile_ahead", lambda device: True)


def tall_blocks(patch: pytest.MonkeyPatch) -> None:
    """Statistics in blocks of 128 rows, as of long calls."""
    fresh_launches(patch)
    patch.setattr("regard._triton.observing._is_tall", lambda spec, map_rows: True)


def values_on_gpu(patch: pytest.MonkeyPatch) -> None:
    """Linear attention whose values are not looked at before kernels read them."""
    patch.setattr("regard.linear._guard.reads_values", lambda spec: False)


def statistics_by_attention(patch: pytest.MonkeyPatch, *, always: bool = True) -> list[int]:
    """Gradients of statistics are computed as those of attention calls: always, or for calls for which a GPU would. The
    result has an entry for each call that was."""
    from regard.observation import _as_attention

    takes, gradients, used = _as_attention.takes, _as_attention.gradients, list[int]()

    def would(call: Any) -> bool:
        return always or takes(call.replace(spec=call.spec._replace(device="cuda")))

    def noted(*given: Any) -> Any:
        used.append(1)
        return gradients(*given)

    patch.setattr(_as_attention, "takes", would)
    patch.setattr(_as_attention, "gradients", noted)
    return used


def statistics_by_kernels(patch: pytest.MonkeyPatch, observe: Callable[..., Any], bytes_taken: int) -> None:
    """Statistics are computed by this function where kernels would compute them, which take so many bytes."""
    kernels: Any = types.ModuleType("kernels")
    kernels.observe, kernels.layout_of = observe, lambda spec, want: types.SimpleNamespace(nbytes=bytes_taken)
    patch.setitem(sys.modules, "regard._triton.observing", kernels)
    refuse = lambda spec, want: ["new"] if want.asks_unusual else []  # noqa: E731
    patch.setattr("regard.observation._observe.kernel_refusals", refuse)


def static_steps(patch: pytest.MonkeyPatch) -> list[int]:
    """Text is written in steps that are all alike, as on a GPU. The result has the number of prompts, for each time
    that it was."""
    from regard.models import _generation, _static

    used: list[int] = []
    steps = _generation.static_steps

    def noted(model: Any, prompts: Any, *given: Any) -> Any:
        used.append(len(prompts))
        return steps(model, prompts, *given)

    def may(model: Any, tokens: int) -> bool:
        return _static.can_be_recorded(model) and not _static._is_watched(model)

    patch.setattr(_generation, "is_worthwhile", may)
    patch.setattr(_generation, "static_steps", noted)
    return used


def nothing_read_by_attention(patch: pytest.MonkeyPatch) -> None:
    """Modules that do all but the attention itself, which looks at values on a CPU; and masks that lie on a GPU."""
    patch.setattr("regard.api.attention", lambda query, key, value, **how: query)
    for module in ("masks._padding", "masks._arguments", "masks._rules", "positions._rotary"):
        patch.setattr(f"regard.{module}.plain", lambda tensor: False, raising=False)


def clock(patch: pytest.MonkeyPatch, times: Callable[..., list[float]]) -> None:
    """In place of what times a piece of work on a device for some seconds, and gives the seconds of each run."""
    patch.setattr("regard.cost._measure.times", times)


class Elsewhere(Tensor):
    """Says that it is on a GPU."""

    device = torch.device("cuda")


@contextlib.contextmanager
def heads_apart(patch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Calls of which some heads are edited are taken apart on a CPU too; whether each was."""
    from regard.editing import _fused
    from regard.watching import _index

    real, parted = _fused.by_heads, list[bool]()

    def here(part: Any) -> Any:
        """The call with its tensors on the CPU again; its description stays that of a GPU."""
        return part._replace(**{name: getattr(part, name).as_subclass(Tensor) for name in ("query", "key", "value")})

    def by_heads(seen: Any, changes: object, place: object) -> object:
        query, key, value = (each.as_subclass(Elsewhere) for each in seen.tensors)
        parts = real(seen._replace(query=query, key=key, value=value), changes, place)
        parted.append(parts is not None)
        return None if parts is None else [(heads, here(part)) for heads, part in parts]

    patch.setattr(_fused, "by_heads", by_heads)
    patch.setattr(_index, "kept", lambda numbers, device: torch.tensor(numbers))
    yield parted
    _index.index_of.cache_clear()  # what it remembers is said to be on a GPU


def areas_of_few_tokens(patch: pytest.MonkeyPatch) -> None:
    """A few tokens are long enough for areas, and float32 is a dtype of cuDNN's."""
    sizes(patch, least_area=1)
    patch.setattr("regard.backends._cuda._HALF", (torch.float32,))


def kernels_of_areas(patch: pytest.MonkeyPatch, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """These in place of the fused kernel's two passes."""
    patch.setattr("regard.backends._areas.plain_forward", forward)
    patch.setattr("regard.backends._areas.plain_backward", backward)
