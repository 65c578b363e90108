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
from regard.train._context import ContextParallel
from regard.train._distill import distilled as distilled
from regard.train._distill import learn_from
from regard.train._distill import soft_targets as soft_targets
from regard.train._evaluate import Compared, Scored, bleu, compare, scores
from regard.train._loop import LAST as LAST
from regard.train._loop import Stopped, Trainer, read_metrics
from regard.train._processes import in_group as in_group
from regard.train._processes import join_group as join_group
from regard.train._processes import leave_group as leave_group
from regard.train._processes import on_all as on_all
from regard.train._quoted import Vocabulary, load_quoted, load_quoted_vocabularies, quoted_config
from regard.train._settings import Settings
from regard.train._settings import read_settings as read_settings
from regard.train._tensor_parallel import tensor_parallel
from regard.train._text import Data, Pairs, read_folder, read_lines, read_pairs, split
from regard.train._text import find as find
from regard.train._text import split_lines as split_lines
from regard.train._tokens import Words
from regard.train._toy import toy, toy_settings
from regard.train._translate import Translation, Translator

__all__ = [
    "Aligned",
    "Compared",
    "ContextParallel",
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
    "language_trainer",
    "learn_from",
    "load_quoted",
    "load_quoted_vocabularies",
    "quoted_config",
    "read_folder",
    "read_lines",
    "read_metrics",
    "read_pairs",
    "scores",
    "split",
    "tensor_parallel",
    "toy",
    "toy_settings",
    "translation_trainer",
]
