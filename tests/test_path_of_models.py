"""What watching and editing a model adds to each of its calls, and to all else that runs, counted in Python calls."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

# In a process of its own: here, annotations are checked by functions around each function.
COUNT = """
import contextlib, json, sys, torch, regard
import torch.nn.functional as F
from torch import nn
from regard import edits, masks

LAYERS, HEADS, DIM = 6, 4, 8

class Model(nn.Module):
    def __init__(self, more=0, linear=0):
        super().__init__()
        self.given = nn.ModuleList(nn.Linear(HEADS * DIM, 3 * HEADS * DIM) for _ in range(LAYERS))
        self.more, self.linear = more, nn.ModuleList(nn.Linear(HEADS * DIM, HEADS * DIM) for _ in range(linear))

    def forward(self, x, **given):
        for layer in self.given:
            query, key, value = layer(x).view(*x.shape[:2], 3, HEADS, DIM).permute(2, 0, 3, 1, 4).unbind(0)
            x = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
            for _ in range(self.more):
                x = x.mul(2.0)
            for module in self.linear:
                x = module(x)
        return x

def names_of(work):
    found = []
    def note(frame, event, _):
        if event == "call":
            code = frame.f_code
            found.append(("regard." if "/regard/" in code.co_filename else "") + code.co_qualname)
    sys.setprofile(note)
    work()
    sys.setprofile(None)
    return found

HALF = range(0, HEADS, 2)
BLOCKS = {
    "plain": lambda model: contextlib.nullcontext(),
    "watch": regard.watch,
    "cut by a rule": lambda model: regard.edit(model, edits.cut(masks.columns(4))),
    "cut by positions": lambda model: regard.edit(model, edits.cut(queries=slice(4, None), keys=[0, 2, 4])),
    "cut in half of the heads": lambda model: regard.edit(model, edits.cut(keys=[0, 2, 4]), heads=HALF),
    "ablate": lambda model: regard.edit(model, edits.ablate("zero"), heads=HALF),
    "steer": lambda model: regard.edit(model, edits.steer([0, 2, 4], 2.0), heads=HALF),
}
counted, x = {}, torch.randn(1, 9, HEADS * DIM)
for name, block in BLOCKS.items():
    ways = {}
    for kind, model in {"alone": Model(), "more": Model(more=10), "linear": Model(linear=10)}.items():
        with torch.no_grad(), block(model):
            model(x)
            ways[kind] = names_of(lambda: model(x))
            if kind == "alone":
                longer = names_of(lambda: model(x.repeat(1, 2, 1)))
    counted[name] = {kind: len(way) for kind, way in ways.items()}
    counted[name]["names"] = sorted(set(ways["alone"]))
    counted[name]["first"] = sorted(set(longer))
print(json.dumps({"layers": LAYERS, **counted}))
"""
EDITS = ["cut by a rule", "cut by positions", "cut in half of the heads", "ablate", "steer"]


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def more(counted: dict[str, Any], block: str, kind: str = "alone") -> float:
    """Python calls per layer beyond those of the plain pass."""
    return float(counted[block][kind] - counted["plain"][kind]) / float(counted["layers"])


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_call_is_short(counted: dict[str, Any], edit: str) -> None:
    # on a CPU, calls in which rows may see nothing and those with a bias take 50 to 80 more for their kernel
    most = {"ablate": 100, "cut by positions": 95, "cut by a rule": 150, "steer": 145, "cut in half of the heads": 180}
    assert more(counted, edit) <= most[edit]


@pytest.mark.parametrize("edit", EDITS)
def test_what_an_edit_makes_of_a_kind_of_call_is_worked_out_once(counted: dict[str, Any], edit: str) -> None:
    decides = {"regard.Editor.changes", "regard.Editor._look_for_edges", "regard.Editor._remember"}
    assert decides <= set(counted[edit]["first"])
    for name in (*decides, "regard.prepare", "regard.choose", "regard.Editor.applied", "regard.real_queries"):
        assert name not in counted[edit]["names"]


def test_a_watched_call_is_short(counted: dict[str, Any]) -> None:
    assert more(counted, "watch") <= 340  # two thirds of them for the statistics


@pytest.mark.parametrize(("block", "calls"), [("watch", 5), *((edit, 2) for edit in EDITS)])
def test_an_operator_that_is_no_part_of_attention_is_let_through_at_once(
    counted: dict[str, Any], block: str, calls: int
) -> None:
    # of those under a watch, three are torch's own
    assert (more(counted, block, "more") - more(counted, block)) / 10 <= calls


@pytest.mark.parametrize(("block", "calls"), [("watch", 10), *((edit, 3) for edit in EDITS)])
def test_a_linear_layer_is_let_through_at_once(counted: dict[str, Any], block: str, calls: int) -> None:
    assert (more(counted, block, "linear") - more(counted, block)) / 10 <= calls
