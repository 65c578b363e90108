"""The way from a call to the kernel stays short: Python calls, files and choices, counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.core_calls import prepare

from regard import masks

# In a process of its own: here, annotations are checked by functions around each function.
COUNT = """
import json, sys, torch, regard
from regard import masks
from regard.cache import KVCache
from regard.nn import MultiHeadAttention
from regard.positions import Rotary

def files_of(work):
    found = []
    def note(frame, event, _):
        if event == "call":
            found.append(frame.f_code.co_filename)
    for _ in range(3):
        work()
    sys.setprofile(note)
    work()
    sys.setprofile(None)
    return found[1:]

def names_of(work):
    found = []
    def note(frame, event, _):
        if event == "call" and "/regard/" in frame.f_code.co_filename:
            found.append(frame.f_code.co_qualname)
    sys.setprofile(note)
    work()
    sys.setprofile(None)
    return found

def stack_of(work, file, function):
    # functions of ours that are waiting when `function` begins
    found = []
    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and not found and code.co_name == function and code.co_filename.endswith(file):
            while frame is not None:
                if "/regard/" in frame.f_code.co_filename:
                    found.insert(0, frame.f_code.co_qualname)
                frame = frame.f_back
    sys.setprofile(note)
    work()
    sys.setprofile(None)
    return found

counted = {}
for name, mask in {
    "causal": masks.causal(),
    "padding": masks.padding([20, 32]),
    "band": masks.causal() & masks.window(left=4),
    "documents": masks.documents(lengths=[16, 16]),
}.items():
    for grad in (False, True):
        inputs = [torch.randn(2, 4, 32, 16).requires_grad_(grad) for _ in range(3)]
        found = files_of(lambda: regard.attention(*inputs, mask=mask))
        counted[f"{name} {grad}"] = len(found), len(set(found))
    counted[f"way of {name}"] = names_of(lambda: regard.attention(*[x.detach() for x in inputs], mask=mask))
long, band = [torch.randn(1, 4, 600, 64) for _ in range(3)], masks.causal() & masks.window(left=30)
counted["stack of several steps"] = stack_of(lambda: regard.attention(*long, mask=band), "_kernels.py", "forward")
with torch.no_grad():
    module, cache = MultiHeadAttention(64, 8, num_kv_heads=2, positions=Rotary(8)).eval(), KVCache(100)
    module(torch.randn(1, 64, 64), mask=masks.causal(), cache=cache)
    token, causal = torch.randn(1, 1, 64), masks.causal()
    ways = [names_of(lambda: module(token, mask=causal, cache=cache)) for _ in range(20)]
    counted["backends asked by each token"] = [sum(name.endswith(".refuse") for name in way) for way in ways]
    found = files_of(lambda: module(token, mask=causal, cache=cache))
    counted["token"] = len(found), len([file for file in found if "/regard/" in file])
    batch = KVCache(100)
    module(torch.randn(2, 7, 64), mask=causal, cache=batch.padded([7, 3]))
    ways = [names_of(lambda: module(torch.randn(2, 1, 64), mask=causal, cache=batch)) for _ in range(3)]
    counted["tokens of a padded batch"] = ways[-1]
print(json.dumps(counted))
"""


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("mask", ["causal", "padding", "band", "documents"])
def test_a_repeated_masked_call_is_short(counted: dict[str, Any], mask: str, grad: bool) -> None:
    calls, files = counted[f"{mask} {grad}"]
    assert calls <= 25
    assert files <= (10 if grad else 8)  # two of them are torch's, for the hook that second derivatives need


def test_the_way_of_a_repeated_call_is_the_one_that_contributing_follows(counted: dict[str, Any]) -> None:
    page = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    way = [name for name in counted["way of band"] if "<" not in name]
    assert way[0] == "attention" and way[-1] == "KernelCall.run"
    assert [name for name in way if f"`{name}`" not in page] == []


def test_the_way_of_a_call_of_several_steps_is_the_one_that_contributing_follows(counted: dict[str, Any]) -> None:
    page = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    stack = counted["stack of several steps"]
    assert stack[0] == "attention" and stack[-2:] == ["Sdpa.step_forward", "forward"]
    assert len(stack) <= 14
    assert [name for name in stack if f"`{name}`" not in page] == []


def test_a_decoded_token_of_a_layer_is_short(counted: dict[str, Any]) -> None:
    calls, ours = counted["token"]
    assert ours <= 70
    assert calls <= 100  # torch's own modules and their attributes are a third


def test_where_items_of_a_batch_end_is_not_worked_out_for_each_token(counted: dict[str, Any]) -> None:
    # the mask that says so is new for every token
    assert "Mask.tile" in counted["tokens of a padded batch"]
    assert "row_intervals" not in counted["tokens of a padded batch"]


def test_twenty_decoded_tokens_are_one_choice(counted: dict[str, Any]) -> None:
    first, *others = counted["backends asked by each token"]
    assert first and len(others) == 19 and not any(others)


def test_a_call_cannot_be_written_to() -> None:
    query = torch.randn(1, 2, 3, 4)
    call = prepare(query, query, query, masks.causal(), None, None, None, None, 0.0, None)
    with pytest.raises(AttributeError):
        call.seed = torch.zeros(())  # type: ignore[misc]
