"""A small made-up language and its translation, so that a whole training run needs no data and one minute.

Source: "the small red dog sees a cat". Target: words of their own ("lo", "mi", …), the adjectives after the noun, the
verb at the end, and a noun's article by its gender: what a model must learn is a dictionary, an order, and agreement.
"""

from __future__ import annotations

import random

from regard.train._settings import Settings
from regard.train._text import Data, Pairs

NOUNS = {
    "dog": "hunta",
    "cat": "kato",
    "bird": "fugla",
    "man": "viro",
    "woman": "dama",
    "child": "infano",
    "horse": "cevala",
    "fish": "fiso",
    "house": "domo",
    "tree": "arba",
    "boat": "navo",
    "stone": "rocca",
}
ADJECTIVES = {"small": "pika", "big": "granda", "red": "rusa", "green": "verda", "old": "vetra", "young": "juna"}
VERBS = {"sees": "vidas", "likes": "amas", "follows": "sekvas", "carries": "portas", "finds": "trovas"}
ARTICLES = {("the", "a"): "la", ("the", "o"): "lo", ("a", "a"): "una", ("a", "o"): "uno"}  # by the noun's last letter

SETTINGS = Settings(
    source="plain", target="toy", vocab_size=300, embed_dim=64, num_layers=2, num_heads=4, ff_dim=128,
    dropout=0.1, attention_dropout=0.0, r_drop=0.0, batch_tokens=1_200, steps=500, warmup=100, peak_lr=4e-3,
    ema_decay=0.98, validate_every=100, bleu_every=1, save_every=250, max_tokens=64,
)  # fmt: skip


def sentence(draw: random.Random) -> tuple[str, str]:
    """A sentence and its translation."""
    subject, subject_there = _phrase(draw)
    thing, thing_there = _phrase(draw)
    verb = draw.choice(list(VERBS))
    return f"{subject} {verb} {thing}.", f"{subject_there} {thing_there} {VERBS[verb]}."


def toy(count: int = 4_000, valid: int = 100, *, seed: int = 1) -> Data:
    """Training and validation text; no validation sentence occurs in training."""
    draw = random.Random(seed)
    pairs = dict(sentence(draw) for _ in range(count + valid))
    source, target = list(pairs), list(pairs.values())
    return Data(Pairs(source[valid:], target[valid:]), Pairs(source[:valid], target[:valid]))


def _phrase(draw: random.Random) -> tuple[str, str]:
    article, noun = draw.choice(("the", "a")), draw.choice(list(NOUNS))
    adjectives = draw.sample(list(ADJECTIVES), draw.choice((0, 0, 1, 1, 2)))
    there = NOUNS[noun]
    translated = [ARTICLES[article, there[-1]], there, *(ADJECTIVES[each] for each in adjectives)]
    return " ".join([article, *adjectives, noun]), " ".join(translated)


def toy_settings() -> Settings:
    """Of a run that takes about a minute on two cores."""
    return SETTINGS
