"""How much the tests know of what lies inside regard: every file that knows any of it is listed, with its reason.

Tests state behaviour through public names, so that the code may change underneath. What must be forced stands in
``forced.py``. The numbers below may only fall.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent

# Reason: {file: (names from inside, places where something of regard is replaced)}
ALLOWED: dict[str, dict[str, tuple[int, int]]] = {
    "It is the one place where what lies inside has its name, for all tests that need it.": {
        "_serve/small.py": (3, 0),
        "_triton/inside.py": (21, 0),
        "core_calls.py": (2, 0),
        "forced.py": (53, 31),
        "lab/quick.py": (9, 0),
        "masks/mask_oracle.py": (2, 0),
    },
    "It has a meaning of its own, which its callers show too little of: texts, pictures, losses, batches.": {
        "_display/test_text.py": (7, 0),
        "_display/test_units.py": (1, 0),
        "_page/test_page_data.py": (5, 0),
        "_walk/test_walk_views.py": (6, 0),
        "cli/test_bench_command.py": (1, 1),
        "cost/test_roofline.py": (1, 0),
        "cost/test_spread_bills.py": (2, 0),
        "masks/test_mask_areas.py": (4, 0),
        "models/test_sampling.py": (3, 0),
        "test_hash.py": (3, 0),
        "train/test_batches.py": (6, 0),
        "train/test_graphs_gpu.py": (6, 1),
        "train/test_losses.py": (3, 0),
    },
    "Kernels are launched, compiled and laid out one by one, which nothing public does.": {
        "_triton/compiled.py": (2, 2),
        "_triton/test_encode.py": (2, 0),
        "_triton/test_fits_observing.py": (2, 0),
        "_triton/test_fits_states.py": (4, 0),
        "_triton/test_kernels.py": (3, 0),
        "_triton/test_launches.py": (1, 3),
        "_triton/test_recipes.py": (1, 1),
        "_triton/test_stored.py": (0, 2),
        "_triton/test_stored_codes.py": (2, 0),
        "test_statistics.py": (1, 0),
    },
    "What a GPU would be given is run on tensors of a CPU: no public call takes that way here.": {
        "backends/test_areas.py": (4, 0),
        "backends/test_flex.py": (3, 0),
        "backends/test_kernel_call.py": (1, 0),
        "backends/test_sdpa.py": (1, 0),
        "masks/test_mask_rule.py": (1, 0),
    },
    "What is prepared is examined: which pairs each step computes, what is cleaned, counted and undone.": {
        "backends/test_guard.py": (1, 0),
        "backends/test_meter.py": (2, 0),
        "backends/test_products.py": (1, 0),
        "backends/test_schedule.py": (5, 0),
        "backends/test_tiled.py": (2, 0),
        "masks/test_mask_facts.py": (2, 0),
        "nn/test_weight_products.py": (2, 0),
        "observation/test_numbers.py": (3, 0),
        "train/group.py": (1, 0),
        "watching/test_watch_torch.py": (1, 0),
    },
    "It counts how often Python looks: what a watch or an edit works out once, and what runs out of its sight.": {
        "editing/test_edited_calls_alike.py": (1, 0),
        "test_path_of_models.py": (2, 0),
        "watching/test_out_of_sight.py": (6, 3),
    },
    "A browser computes the same again, from what Python packs and draws.": {
        "browser/test_walk_view.py": (1, 0),
        "browser/test_widget.py": (2, 0),
    },
    "A public name is replaced, as a user may do it: by what fails, counts, or takes no minutes.": {
        "annotation_checks.py": (0, 1),
        "cli/test_cli.py": (0, 1),
        "cli/test_commands.py": (0, 1),
        "cli/test_cost_command.py": (0, 2),
        "cli/test_lab_command.py": (0, 4),
        "cli/test_look_with_edits.py": (0, 1),
        "cli/test_train_commands.py": (1, 9),
        "cost/small_bills.py": (0, 3),
        "positions/test_rotary_tables.py": (0, 1),
        "test_docs.py": (0, 1),
        "test_manual.py": (0, 1),
        "train/test_runs.py": (0, 1),
        "watching/test_watch_changes_nothing.py": (0, 1),
    },
    "Texts, docstrings and annotations inside are compared with what they describe.": {
        "linear/test_linear_state.py": (1, 0),
        "masks/test_mask_docs.py": (1, 0),
        "masks/test_mask_meaning.py": (1, 0),
        "test_contributing.py": (3, 0),
        "test_english.py": (1, 0),
        "test_shapes.py": (2, 0),
    },
    "The drawn calls of the conformance suite are examined: how often each kind comes, and that a seed repeats them.": {
        "testing/test_fuzz.py": (10, 3),
    },
}


class Known(NamedTuple):
    names: frozenset[str]  # dotted paths that begin with regard and have a part that begins with an underscore
    patches: int  # places where something of regard, public or not, is replaced


def is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def path_of(node: ast.expr, bound: dict[str, str]) -> str | None:
    """What an expression such as `regard.nn` stands for."""
    if isinstance(node, ast.Name):
        return bound.get(node.id)
    if isinstance(node, ast.Attribute):
        found = path_of(node.value, bound)
        return None if found is None else f"{found}.{node.attr}"
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"regard(\.\w+)+", node.value):
        return node.value
    return None


def imported(tree: ast.AST) -> dict[str, str]:
    """The names of a file that stand for something of regard, also where another file of the tests hands them on."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            ours = [alias for alias in node.names if alias.name.split(".")[0] == "regard"]
            bound |= {alias.asname or "regard": alias.name if alias.asname else "regard" for alias in ours}
        elif isinstance(node, ast.ImportFrom) and node.module:
            first, *rest = node.module.split(".")
            if first == "regard":
                bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                continue
            handed = names_of(TESTS.joinpath(*(rest if first == "tests" else [first])).with_suffix(".py"))
            bound |= {alias.asname or alias.name: handed[alias.name] for alias in node.names if alias.name in handed}
    return bound


@functools.cache
def names_of(file: Path) -> dict[str, str]:
    if not file.is_file():
        return {}
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = imported(tree)
    for node in tree.body:  # one = regard.other
        if isinstance(node, ast.Assign) and (path := path_of(node.value, found)):
            found |= {target.id: path for target in node.targets if isinstance(target, ast.Name)}
    return found


def replaces(node: ast.AST, bound: dict[str, str]) -> bool:
    """Whether it is setattr(thing, name, …), patch("thing.name"), thing.name = … and the like, of a thing of regard."""
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Attribute) and path_of(target.value, bound) for target in node.targets)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
        return False
    function, thing = node.func, node.args[0]
    if function.attr == "setitem":  # of sys.modules
        return len(node.args) > 1 and path_of(node.args[1], {}) is not None
    if isinstance(thing, ast.JoinedStr):
        return ast.unparse(thing).startswith("f'regard.")
    if isinstance(thing, ast.Call):  # an attribute of what a public function gives
        thing = thing.func
    return function.attr in {"setattr", "delattr", "object", "patch"} and path_of(thing, bound) is not None


def known(text: str, bound: dict[str, str] | None = None) -> Known:
    tree = ast.parse(text)
    bound = imported(tree) if bound is None else bound
    own = {
        name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if (name := (f"{node.module}." if isinstance(node, ast.ImportFrom) else "") + alias.name).startswith("regard.")
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Constant)) and (path := path_of(node, bound)):
            # what another file hands on is counted there; what is private in it is counted here too
            direct = isinstance(node, ast.Constant) or any(path == name or path.startswith(f"{name}.") for name in own)
            if direct or node.attr.startswith("_"):
                own.add(path)
    private = {name for name in own if is_private(name)}
    longest = {name for name in private if not any(other.startswith(f"{name}.") for other in private)}
    patches = sum(replaces(node, bound) for node in ast.walk(tree))
    return Known(frozenset(longest), patches)


def every() -> dict[str, Known]:
    found = {str(file.relative_to(TESTS)): known(file.read_text(encoding="utf-8")) for file in TESTS.rglob("*.py")}
    return {file: seen for file, seen in sorted(found.items()) if seen.names or seen.patches}


def test_no_file_knows_more_of_the_inside_than_is_listed() -> None:
    """State the behaviour through public names; force sizes and devices by forced.py; or list the file, and say why."""
    listed = {file: numbers for files in ALLOWED.values() for file, numbers in files.items()}
    assert len(listed) == sum(map(len, ALLOWED.values()))
    found = every()
    for file, (names, patches) in found.items():
        most = listed.get(file, (0, 0))
        assert len(names) <= most[0], f"{file} knows {sorted(names)}"
        assert patches <= most[1], f"{file} replaces something of regard in {patches} places"
    counted = {file: (len(names), patches) for file, (names, patches) in found.items()}
    assert {file: most for file, most in listed.items() if counted.get(file) != most} == {}, "fewer: lower the number"


def test_what_a_file_knows_is_seen_however_it_comes_by_it() -> None:
    seen = known(
        """
import regard.plan._table
from regard import masks, plan as planning
from regard._hash import mix, uniform
from tests._triton.inside import launcher
from forced import SIZES

planning._choose(masks.causal(), regard.__version__, launcher.Launch, launcher._kept, "regard.masks._base.KINDS")
patch.setattr(planning, "choose", None)
patch.setattr("regard.masks.Mask.tile", None)
patch.setattr(f"regard.{name}.plain", None)
patch.setattr(masks.causal(), "_memo", None)
patch.setattr(launcher.Launch, "run", None)
patch.setitem(sys.modules, "regard.api", None)
planning.choose = None
patch.setattr(torch, "empty", None)
"""
    )
    names = {name.removeprefix("regard.") for name in seen.names}
    assert names == {
        "plan._table", "_hash.mix", "_hash.uniform", "plan._choose", "_triton.launcher._kept", "masks._base.KINDS",
    }  # fmt: skip
    assert seen.patches == 7
