"""Train the Transformer of 2017 on parallel text, or a language model on any text; translate; evaluate.

settings = Settings(source="en", target="de", steps=6000)
trainer = translation_trainer(settings, read_folder("data", "en", "de"), "runs/x", device="cuda")
trainer.start()
trainer.run()
Translator.load("runs/x")(["A man rides a bike."])
"""

from __future__ import annotations

from regard.train._build import language_trainer, translation_trainer
from regard.train._distill import distilled, soft_targets
from regard.train._evaluate import Scored, bleu, scores
from regard.train._loop import Stopped, Trainer, read_metrics
from regard.train._settings import Settings
from regard.train._text import Data, Pairs, find, read_folder, read_lines, read_pairs, split
from regard.train._tokens import Words
from regard.train._translate import Translation, Translator

__all__ = [
    "Data",
    "Pairs",
    "Scored",
    "Settings",
    "Stopped",
    "Trainer",
    "Translation",
    "Translator",
    "Words",
    "bleu",
    "distilled",
    "find",
    "language_trainer",
    "read_folder",
    "read_lines",
    "read_metrics",
    "read_pairs",
    "scores",
    "soft_targets",
    "split",
    "translation_trainer",
]
