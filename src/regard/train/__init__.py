"""Train the Transformer of 2017 on parallel text, or a language model on any text; translate; evaluate.

settings = Settings(source="en", target="de", steps=6000)
trainer = translation_trainer(settings, read_folder("data", "en", "de"), "runs/x", device="cuda")
trainer.start()
trainer.run()
Translator.load("runs/x")(["A man rides a bike."])
"""

from __future__ import annotations

from regard.train._align import Aligned, align
from regard.train._build import language_trainer, translation_trainer
from regard.train._distill import distilled, learn_from, soft_targets
from regard.train._evaluate import Compared, Scored, bleu, compare, scores
from regard.train._loop import LAST, Stopped, Trainer, read_metrics
from regard.train._processes import in_group, join_group, leave_group
from regard.train._quoted import Vocabulary, load_quoted, load_quoted_vocabularies, quoted_config
from regard.train._settings import Settings, read_settings
from regard.train._text import Data, Pairs, find, read_folder, read_lines, read_pairs, split
from regard.train._tokens import Words
from regard.train._toy import toy, toy_settings
from regard.train._translate import Translation, Translator

__all__ = [
    "LAST",
    "Aligned",
    "Compared",
    "Data",
    "Pairs",
    "Scored",
    "Settings",
    "Stopped",
    "Trainer",
    "Translation",
    "Translator",
    "Vocabulary",
    "Words",
    "align",
    "bleu",
    "compare",
    "distilled",
    "find",
    "in_group",
    "join_group",
    "language_trainer",
    "learn_from",
    "leave_group",
    "load_quoted",
    "load_quoted_vocabularies",
    "quoted_config",
    "read_folder",
    "read_lines",
    "read_metrics",
    "read_pairs",
    "read_settings",
    "scores",
    "soft_targets",
    "split",
    "toy",
    "toy_settings",
    "translation_trainer",
]
