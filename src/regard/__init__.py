"""regard: attention you can see.

One call for every kind of attention, at the speed of the best kernel that can do it, with the weights never hidden.
Names load on first use, so that ``import regard`` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from regard import attributing as attributing
    from regard import backends as backends
    from regard import bias as bias
    from regard import cache as cache
    from regard import compat as compat
    from regard import cost as cost
    from regard import edits as edits
    from regard import interop as interop
    from regard import lab as lab
    from regard import linear as linear
    from regard import masks as masks
    from regard import models as models
    from regard import nn as nn
    from regard import positions as positions
    from regard import recording as recording
    from regard import reference as reference
    from regard import sparse as sparse
    from regard import testing as testing
    from regard import train as train
    from regard.api import attention as attention
    from regard.api import explain as explain
    from regard.api import observe as observe
    from regard.attributing import attribute as attribute
    from regard.attributing import rollout as rollout
    from regard.editing import edit as edit
    from regard.latent import latent_attention as latent_attention
    from regard.linear._call import linear_attention as linear_attention
    from regard.observation import Observation as Observation
    from regard.plan import Plan as Plan
    from regard.recording import Recording as Recording
    from regard.spec import Refused as Refused
    from regard.statistics import Want as Want
    from regard.watching import watch as watch

_FROM = {
    "attention": "regard.api",
    "observe": "regard.api",
    "explain": "regard.api",
    "latent_attention": "regard.latent",
    "linear_attention": "regard.linear._call",
    "Observation": "regard.observation",
    "Want": "regard.statistics",
    "Plan": "regard.plan",
    "Refused": "regard.spec",
    "watch": "regard.watching",
    "edit": "regard.editing",
    "Recording": "regard.recording",
    "rollout": "regard.attributing",
    "attribute": "regard.attributing",
}
_MODULES = (
    "attributing",
    "backends",
    "bias",
    "cache",
    "compat",
    "cost",
    "edits",
    "interop",
    "lab",
    "linear",
    "masks",
    "models",
    "nn",
    "positions",
    "recording",
    "reference",
    "sparse",
    "statistics",
    "testing",
    "train",
)

__all__ = [*_FROM, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _FROM:
        found = getattr(importlib.import_module(_FROM[name]), name)
    elif name in _MODULES:
        found = importlib.import_module(f"regard.{name}")
    else:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
