"""How good translations are: sacreBLEU with its signature, chrF, and whether one system beats another."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

_WORD = re.compile(r"\w+|[^\w\s]")


class Scored(NamedTuple):
    """One metric of one system."""

    name: str
    score: float
    signature: str


def bleu(hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False) -> float:
    """Corpus BLEU as sacreBLEU computes it (13a tokens, exponential smoothing)."""
    return float(_bleu(lowercase).corpus_score(list(hypotheses), [list(references)]).score)


def scores(hypotheses: Sequence[str], references: Sequence[str]) -> list[Scored]:
    """BLEU and chrF, lower-cased and cased, each with sacreBLEU's signature."""
    check_lines(hypotheses, references)
    found = []
    for name, metric in _metrics().items():
        score = metric.corpus_score(list(hypotheses), [list(references)]).score
        found.append(Scored(name, score, str(metric.get_signature())))
    return found


def check_lines(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} translations and {len(references)} references: expected one for each")
    if not references:
        raise ValueError("there are no sentences to evaluate")


def _bleu(lowercase: bool) -> Any:
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError:
        raise ImportError("BLEU is computed by sacrebleu: pip install sacrebleu") from None
    return BLEU(lowercase=lowercase, force=True)  # its advice about detokenising goes to stderr


def _metrics() -> dict[str, Any]:
    bleus = {"BLEU, lower-cased": _bleu(True), "BLEU, cased": _bleu(False)}
    from sacrebleu.metrics.chrf import CHRF

    return bleus | {"chrF2, lower-cased": CHRF(lowercase=True), "chrF2, cased": CHRF()}


def sentence_bleu(hypothesis: str, reference: str) -> float:
    """Of one sentence, as close as n-grams say (add-one smoothed, lower-cased words and signs)."""
    ours, theirs = _signs(hypothesis), _signs(reference)
    if not ours or not theirs:
        return 0.0
    log = min(0.0, 1 - len(theirs) / len(ours))
    for n in range(1, 5):
        have, want = _grams(ours, n), _grams(theirs, n)
        hits = sum(min(count, want[gram]) for gram, count in have.items())
        extra = 1 if n > 1 else 0
        if hits + extra == 0:
            return 0.0
        log += math.log((hits + extra) / (max(len(ours) - n + 1, 0) + extra)) / 4
    return 100 * math.exp(log)


def _signs(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _grams(words: list[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[at : at + n]) for at in range(len(words) - n + 1))


class Compared(NamedTuple):
    """One metric of two systems on the same sentences, by paired bootstrap resampling (Koehn, 2004)."""

    name: str
    ours: float
    theirs: float
    interval: tuple[float, float]  # our score in 95 % of the resampled test sets
    p_value: float  # how likely a difference this large is where the systems are equally good


def compare(
    ours: Sequence[str], theirs: Sequence[str], references: Sequence[str], *, samples: int = 1000
) -> list[Compared]:
    """Whether one system is better than another: sacreBLEU's paired bootstrap, BLEU and chrF, lower-cased and cased."""
    check_lines(ours, references)
    check_lines(theirs, references)
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    from sacrebleu.significance import PairedTest

    systems = [("theirs", list(theirs)), ("ours", list(ours))]
    found = []
    # one at a time: its results go by the metric's own name, and BLEU is here twice
    for name, metric in _metrics().items():
        results: Any = PairedTest(systems, {name: metric}, [list(references)], test_type="bs", n_samples=samples)()[1]
        [(base, own)] = [pair for key, pair in results.items() if key != "System"]
        # the mean of the draws and what spans 95 % of them, both ways: near the ends that is wider than a score can be
        interval = max(0.0, float(own.mean - own.ci)), min(100.0, float(own.mean + own.ci))
        # sacreBLEU counts the draws that differ by more than the scores do: none where nothing differs, ever
        p_value = 1.0 if own.score == base.score else float(own.p_value)
        found.append(Compared(name, float(own.score), float(base.score), interval, p_value))
    return found
