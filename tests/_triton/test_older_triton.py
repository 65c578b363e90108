"""What Triton 3.6 does not compile and later versions do, found in the source: nothing here has that version."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import regard

KERNELS = Path(regard.__file__).parent / "_triton"
IN_TRITON = {
    "zeros",
    "zeros_like",
    "sum",
    "max",
    "min",
    "sort",
    "cdiv",
}  # of tl: functions written in Triton themselves


def is_field(node: ast.AST) -> bool:
    """A field of the structure that a kernel is compiled for."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "F"


def faults(source: str) -> list[int]:
    """Lines in which a function that is written in Triton itself is given fields in a list."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in IN_TRITON:
            lists = [each for each in node.args if isinstance(each, (ast.List, ast.Tuple))]
            found += [node.lineno for each in lists if any(map(is_field, each.elts))]
    return found


@pytest.mark.parametrize("file", sorted(KERNELS.glob("*.py")), ids=lambda file: file.stem)
def test_kernels_compile_with_the_oldest_triton_that_is_supported(file: Path) -> None:
    assert faults(file.read_text(encoding="utf-8")) == []


def test_what_it_does_not_compile_is_found() -> None:
    assert faults("z = tl.zeros([F.BN, 8], tl.float32)") == [1]
    assert faults("z = tl.full([F.BN, 8], 0.0, tl.float32)") == []
