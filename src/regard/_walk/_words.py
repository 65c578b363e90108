"""What the walkthrough says, and the worked examples (the page is built with these too), in English and in Chinese."""

from __future__ import annotations

from regard._display.texts import read

STEPS = read("regard._walk", "steps.json")
EXAMPLES = read("regard._walk", "examples.json")
