"""Which source pieces a translation looked at: the cross attention of one sentence, watched."""

from __future__ import annotations

from typing import NamedTuple

import torch

from regard import Want, watch
from regard.recording import Recording
from regard.train._tokens import START, STOP
from regard.train._translate import Translation, Translator


class Aligned(NamedTuple):
    """A sentence, its translation, and how much each target piece attends to each source piece."""

    text: str
    source: list[str]
    target: list[str]
    weights: list[list[float]]  # [target piece][source piece]: mean over heads and layers, each row sums to 1
    recording: Recording


def align(
    translator: Translator, line: str, *, translation: Translation | None = None, layers: int | None = None
) -> Aligned:
    """Watch the first model read a sentence and its translation.

    Args:
        translation: of this sentence by this translator; the best of a beam search when not given.
        layers: average over this many last decoder layers; over all when not given.
    """
    best = translator([line])[0][0] if translation is None else translation
    words, model = translator.words, translator.models[0]
    source = [*words.encode([line])[0], STOP]
    target = [*best.tokens, STOP]
    tensors = [torch.tensor([each], device=translator.device) for each in (source, [START, *target[:-1]])]
    names = words.names(source), words.names(target)
    want = Want(map=(max(len(target), 1), max(len(source), 1)))
    model.eval()
    with torch.inference_mode(), watch(model, want=want) as recording:
        model(*tensors)
    recording.tokens = [words.names([START, *target[:-1]])]
    recording.source_tokens = [names[0]]
    recording.title = f"{line} → {best.text}"
    cross = [call.map for call in recording if "cross_attention" in call.path]
    chosen = cross if layers is None else cross[-layers:]
    mean = torch.stack([each[0].mean(0) for each in chosen]).mean(0)
    return Aligned(best.text, names[0], names[1], mean.tolist(), recording)
