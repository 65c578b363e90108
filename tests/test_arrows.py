"""The architecture's arrows, as CONTRIBUTING.md draws them: a module imports what lies below it, never above."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "regard"

LEAVES = {"_checks", "_display", "_files", "_hash", "bias", "masks", "positions", "statistics"}
BELOW_API = LEAVES | {"spec", "backends", "plan", "_arguments", "observation"}
ANYTHING = {"*"}

# What each part of the package may import. A part is a top-level module or folder; a new one must be given its place.
ARROWS: dict[str, set[str]] = {
    **dict.fromkeys(LEAVES, LEAVES),
    "reference": set(),
    "spec": LEAVES,
    "backends": LEAVES | {"spec", "_triton"},
    "plan": LEAVES | {"spec", "backends"},
    "_arguments": LEAVES | {"spec"},
    "_triton": LEAVES | {"spec"},
    # the statistics: by kernels, or over the steps that the backends run on a CPU; and the value that holds them
    "observation": LEAVES | {"spec", "backends", "plan", "_triton"},
    "_compiled": BELOW_API,
    # linear attention describes a call as the others do, and runs it by forms of its own
    "linear": BELOW_API | {"_triton"},
    "sparse": LEAVES,
    # calls on sequences that lie on several processes: what each of them calls is handed down by api
    "_sharded": LEAVES | {"spec", "observation", "plan"},
    "api": BELOW_API | {"_compiled", "linear", "_sharded"},
    # a cache attends piece by piece and merges what it gets as the backends do
    "cache": LEAVES | {"api", "backends"},
    "latent": LEAVES | {"api"},
    "nn": LEAVES | {"api", "_sharded", "latent", "linear", "cache"},
    "models": LEAVES | {"api", "cache", "nn"},
    # a bill is made from configurations; its roofline measures calls next to what it predicts
    "cost": LEAVES | {"api", "models"},
    "compat": LEAVES | {"api"},
    # a graph for another runtime needs the one op of compiled calls written out
    "interop": LEAVES | {"api", "nn", "models", "_compiled"},
    # a training run writes folders that the others read, and watches its own model where it shows an alignment
    "train": LEAVES | {"api", "_sharded", "nn", "models", "interop", "recording", "__init__"},
    # recordings are read, saved and shown without any of the code that makes them
    "recording": LEAVES | {"_page"},
    "_page": LEAVES | {"recording"},
    # the local page: recordings of a folder, and looks that the command knows how to run
    "_serve": LEAVES | {"_page", "recording"},
    # what a watch keeps of a run for edits, it takes where edits act
    "watching": BELOW_API | {"api", "recording", "editing"},
    # rollout and attribution follow a model's calls as a watch does, and write nothing down
    "attributing": BELOW_API | {"api", "recording", "watching"},
    # edits are values; what they do to a model that runs is done where it is watched
    "edits": LEAVES | {"cache", "recording"},
    "editing": BELOW_API | {"api", "compat", "edits", "recording", "watching"},
    # the walkthrough shows what the oracle computes, step by step
    "_walk": {"_display", "_page", "reference"},
    # the lab's examples are written with what users have, and shown as the walk shows its steps; one looks into a
    # trained model, which is loaded as users load theirs, and one watches a model while it learns, and edits it
    "lab": LEAVES
    | {
        "api",
        "nn",
        "observation",
        "reference",
        "_page",
        "_walk",
        "interop",
        "recording",
        "watching",
        "edits",
        "editing",
    },
    "testing": ANYTHING,
    "cli": ANYTHING,
    "__init__": ANYTHING,
    "__main__": ANYTHING,
}

# The oracle stands alone: this is the one file of the fast code that may wrap it.
WRAPS_THE_REFERENCE = "backends/reference.py"


def part_of(file: Path, source: Path) -> str:
    first = file.relative_to(source).parts[0]
    return first.removesuffix(".py")


def modules_imported(file: Path, source: Path) -> Iterator[str]:
    """Dotted names imported anywhere in the file, inside functions too, relative ones resolved."""
    package = ["regard", *file.relative_to(source).parts[:-1]]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            # `from regard import masks` names a part; `from regard.masks import causal` names what is in one.
            yield from (".".join([*base, alias.name]) for alias in node.names)


def parts_imported(file: Path, source: Path) -> set[str]:
    parts = set()
    for name in modules_imported(file, source):
        pieces = name.split(".")
        if pieces[0] == "regard":
            is_part = len(pieces) > 1 and any((source / f"{pieces[1]}{end}").exists() for end in ("", ".py"))
            parts.add(pieces[1] if is_part else "__init__")
    return parts


def wrong_arrows(source: Path) -> list[str]:
    wrong = []
    for file in sorted(source.rglob("*.py")):
        name, part = file.relative_to(source).as_posix(), part_of(file, source)
        if part not in ARROWS:
            wrong.append(f"{name}: '{part}' has no place among the arrows; give it one")
            continue
        allowed = ARROWS[part] | {part} | ({"reference"} if name == WRAPS_THE_REFERENCE else set())
        if "*" not in allowed:
            wrong += [f"{name} imports {other}" for other in sorted(parts_imported(file, source) - allowed)]
    return wrong


def foreign_imports(file: Path, source: Path) -> set[str]:
    tops = {name.split(".")[0] for name in modules_imported(file, source)}
    return tops - set(sys.stdlib_module_names) - {"regard"}


def test_no_import_points_against_the_architecture() -> None:
    assert wrong_arrows(SOURCE) == []


def test_the_reference_knows_numpy_and_nothing_else() -> None:
    assert foreign_imports(SOURCE / "reference.py", SOURCE) == {"numpy"}


def test_leaves_do_not_import_each_other_in_a_circle() -> None:
    below: dict[str, set[str]] = {leaf: set() for leaf in LEAVES}
    for file in SOURCE.rglob("*.py"):
        if (part := part_of(file, SOURCE)) in LEAVES:
            below[part] |= parts_imported(file, SOURCE) - {part}
    while bottom := {leaf for leaf, others in below.items() if not others & below.keys()}:
        below = {leaf: others for leaf, others in below.items() if leaf not in bottom}
    assert below == {}


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("masks/_rules.py", "from regard.api import attention", "masks/_rules.py imports api"),
        ("masks/_rules.py", "from ..plan import plan", "masks/_rules.py imports plan"),
        ("spec.py", "def late():\n    import regard.backends.eager", "spec.py imports backends"),
        ("backends/eager.py", "from regard import reference", "backends/eager.py imports reference"),
        ("backends/eager.py", "from .. import plan", "backends/eager.py imports plan"),
        ("nn/attention.py", "from regard import attention", "nn/attention.py imports __init__"),
        ("compat.py", "import regard", "compat.py imports __init__"),
        ("novelty.py", "", "novelty.py: 'novelty' has no place among the arrows; give it one"),
    ],
)
def test_a_planted_bad_arrow_is_found(tmp_path: Path, file: str, line: str, complaint: str) -> None:
    for part in ("api.py", "plan.py", "spec.py", "reference.py", "backends/eager.py", "masks/__init__.py", file):
        (tmp_path / part).parent.mkdir(exist_ok=True)
        (tmp_path / part).touch()
    assert [wrong for wrong in wrong_arrows(tmp_path) if not wrong.startswith("novelty")] == []
    (tmp_path / file).write_text(line)
    assert wrong_arrows(tmp_path) == [complaint]


def test_the_wrapper_of_the_reference_may_import_it(tmp_path: Path) -> None:
    (tmp_path / "backends").mkdir()
    (tmp_path / "reference.py").touch()
    (tmp_path / "backends" / "reference.py").write_text("from regard import reference")
    assert wrong_arrows(tmp_path) == []
