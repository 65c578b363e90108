"""The lab: worked examples of attention and experiments on it, each a function that returns numbers and draws a figure.

>>> from regard import lab
>>> lab.variance().raw
63.867000579833984

`lab.names()` lists them, `lab.run("E3")` runs one by its name, and so does the command, `regard lab E3`. Every run is
seeded: the same version of torch gives the same numbers. Figures need matplotlib, numbers do not.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard._display.texts import Catalogue, read

if TYPE_CHECKING:
    from regard.lab._blur import blur as blur
    from regard.lab._causal import causal as causal
    from regard.lab._fixed_weights import fixed_weights as fixed_weights
    from regard.lab._four_questions import four_questions as four_questions
    from regard.lab._from_scratch import from_scratch as from_scratch
    from regard.lab._growing_width import growing_width as growing_width
    from regard.lab._head_roles import head_roles as head_roles
    from regard.lab._induction import induction as induction
    from regard.lab._inverted_masks import inverted_masks as inverted_masks
    from regard.lab._line_of_work import line_of_work as line_of_work
    from regard.lab._mistakes import mistakes as mistakes
    from regard.lab._numpy_heads import numpy_heads as numpy_heads
    from regard.lab._parameters import parameters as parameters
    from regard.lab._permutation import permutation as permutation
    from regard.lab._result import Result as Result
    from regard.lab._result import Table as Table
    from regard.lab._rnn import rnn as rnn
    from regard.lab._saturation import saturation as saturation
    from regard.lab._sentence import sentence as sentence
    from regard.lab._sum_over_heads import sum_over_heads as sum_over_heads
    from regard.lab._two_heads import two_heads as two_heads
    from regard.lab._two_relations import two_relations as two_relations
    from regard.lab._two_tokens import two_tokens as two_tokens
    from regard.lab._variance import variance as variance
    from regard.lab._why_softmax import why_softmax as why_softmax

# Name on the command line: the function of this module, whose file is called likewise, as are its texts in words.json.
TOPICS = {
    "E1": "two_tokens",
    "E2": "two_heads",
    "E3": "variance",
    "E4": "saturation",
    "E5": "causal",
    "E6": "sentence",
    "E7": "fixed_weights",
    "E8": "blur",
    "E9": "from_scratch",
    "E10": "parameters",
    "E11": "numpy_heads",
    "E12": "head_roles",
    "E13": "four_questions",
    "E14": "line_of_work",
    "X1": "growing_width",
    "X2": "two_relations",
    "X3": "inverted_masks",
    "X4": "permutation",
    "X5": "mistakes",
    "X6": "induction",
    "M20": "why_softmax",
    "M21": "sum_over_heads",
    "S15": "rnn",
}

__all__ = ["TOPICS", "Result", "Table", "find", "names", "run", "words", *TOPICS.values()]  # pyright: ignore


def names() -> list[str]:
    """The names of all experiments: E1 … E14 from the notes, X1 … X6 added, and M20, M21 and S15 on single subjects."""
    return list(TOPICS)


def find(given: str) -> str:
    """The name of an experiment that is given by its name or its topic: `e3`, `variance`. ValueError for others."""
    if not isinstance(given, str):
        raise TypeError(f"an experiment is named by a str, such as 'E3', got {given!r}")
    known = {name.lower(): name for name in TOPICS} | {topic: name for name, topic in TOPICS.items()}
    wanted = given.strip().lower().replace("-", "_")
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.6)
    names = " or ".join(known[one] if one == known[one].lower() else one for one in near)
    hint = f"did you mean {names}? There are" if near else "there are"
    raise ValueError(f"{given!r} is no experiment; {hint} {', '.join(TOPICS)}")


def run(name: str) -> Result:
    """Run an experiment by its name or topic."""
    topic = TOPICS[find(name)]
    found: Result = getattr(import_module(f"regard.lab._{topic}"), topic)()
    return found


def words(name: str) -> Catalogue:
    """The texts of an experiment, English and Chinese side by side; nothing is run."""
    return read("regard.lab", "words.json", TOPICS[find(name)])


def __getattr__(name: str) -> Any:
    if name in TOPICS.values():
        return getattr(import_module(f"regard.lab._{name}"), name)
    if name in ("Result", "Table"):
        return getattr(import_module("regard.lab._result"), name)
    raise AttributeError(f"module 'regard.lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
