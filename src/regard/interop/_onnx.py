"""Models as ONNX files, in which attention is written out in operations that every runtime has."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard import _compiled


def decompositions() -> dict[Any, Callable[..., Any]]:
    """For `ExportedProgram.run_decompositions`: regard's op in operations of torch's, next to torch's own table.

    program = torch.export.export(model, (tokens,))
    program = program.run_decompositions(regard.interop.decompositions())
    """
    table: dict[Any, Callable[..., Any]] = dict(torch.export.default_decompositions().items())  # type: ignore[no-untyped-call]
    table[torch.ops.regard.attention.default] = _compiled.plain
    return table


def to_onnx(
    model: nn.Module,
    inputs: tuple[Any, ...],
    path: str | Path,
    *,
    keywords: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    **options: Any,
) -> None:
    """Write a model that calls regard as an ONNX file, by `torch.export` and `torch.onnx`.

    Args:
        model: any module; it is exported in the mode it is in (`model.eval()` first).
        inputs, keywords, dynamic_shapes: as of `torch.export.export`.
        path: the file to write.
        options: further ones of `torch.onnx.export`, such as `input_names`, `opset_version`.
    """
    try:
        import onnxscript  # noqa: F401  # torch's exporter needs it, and says so only after the work
    except ImportError:
        raise ImportError("to_onnx needs torch's exporter: pip install onnx onnxscript") from None
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter warns about itself
        program = torch.export.export(model, inputs, keywords, dynamic_shapes=dynamic_shapes)
        wanted = _sizes(program)
        program = program.run_decompositions(decompositions())
        if lost := [f"{name} (dim {dim})" for name, dim in wanted - _sizes(program)]:
            raise ValueError(
                f"dynamic_shapes: {', '.join(sorted(lost))} cannot vary: attention is written out for one length; let "
                "the batch vary, and write one file for each length (padded with masks.padding)"
            )
        torch.onnx.export(program, f=str(path), verbose=False, **options)


def _sizes(program: Any) -> set[tuple[str, int]]:
    """The dims of inputs whose size is not a number yet."""
    found: set[tuple[str, int]] = set()
    for node in program.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and not size.node.expr.is_number:
                    found.add((node.name, dim))
    return found
