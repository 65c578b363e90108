"""What the walk says, in English and Chinese. The page is built with the texts of layers and examples too."""

from __future__ import annotations

from regard._display.texts import read

STEPS = {**read("regard._walk", "layer.json"), **read("regard._walk", "steps.json")}
EXAMPLES = read("regard._walk", "examples.json")
