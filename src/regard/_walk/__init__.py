"""The walkthrough: every step of multi-head attention with real numbers, in the terminal and as the page.

`regard walk` is its command; the numbers are those of `regard.reference.trace`. NumPy only: torch is not needed.
Experiments are computed by `regard.lab`, which shows them as stories of this package.
"""

from __future__ import annotations

from regard._walk._examples import BY_NAME, walk_example
from regard._walk._inputs import Layer, Settings
from regard._walk._page import Begin, html
from regard._walk._story import Panel, Step, Story
from regard._walk._tell import Source, walk_layer, walk_text
from regard._walk._terminal import View

__all__ = [
    "BY_NAME",
    "Begin",
    "Layer",
    "Panel",
    "Settings",
    "Source",
    "Step",
    "Story",
    "View",
    "html",
    "walk_example",
    "walk_layer",
    "walk_text",
]
