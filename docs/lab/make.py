"""Draws the figures of these pages: python docs/lab/make.py"""

from __future__ import annotations

from pathlib import Path

from regard import lab
from regard.lab._folder import draw

HERE = Path(__file__).parent

if __name__ == "__main__":
    for name in lab.names():
        draw(lab.run(name), HERE / f"{name}.svg")
