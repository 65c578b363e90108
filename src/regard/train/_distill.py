"""A small model learns from several: from what they translate, and from how sure they were of each token."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from regard.models import Transformer
from regard.train._batches import Corpus, Soft, join, plan_epoch
from regard.train._build import encode_pairs
from regard.train._evaluate import sentence_bleu
from regard.train._loop import Trainer
from regard.train._step import logits_of
from regard.train._text import Pairs
from regard.train._translate import Translator


def distilled(
    teachers: Translator,
    pairs: Pairs,
    *,
    beams: int = 5,
    batch_tokens: int = 40_000,
    use_cache: bool = True,
    seconds: float = math.inf,
    progress: Callable[[int], None] = lambda done: None,
) -> Pairs:
    """The sources with the teachers' translation: of the n best, the one closest to the reference (Kim and Rush, 2016).

    After `seconds` it gives what it has.
    """
    found = Pairs([], [])
    end = time.monotonic() + seconds
    step = max(1, batch_tokens // (30 * beams)) * 4
    for at in range(0, len(pairs.source), step):
        if time.monotonic() > end:
            break
        lines, references = pairs.source[at : at + step], pairs.target[at : at + step]
        given = teachers(lines, beams=beams, best=beams, batch_tokens=batch_tokens, use_cache=use_cache)
        for line, reference, candidates in zip(lines, references, given, strict=True):
            texts = list(dict.fromkeys(each.text for each in candidates if each.text.strip()))
            if not texts:
                continue
            best = max(texts, key=lambda text: sentence_bleu(text, reference))
            found.source.append(line)
            found.target.append(best)
        progress(min(at + step, len(pairs.source)))
    return found


@torch.inference_mode()
def soft_targets(
    models: Sequence[Transformer], corpus: Corpus, *, k: int = 16, batch_tokens: int = 8_000, half: bool = False
) -> Soft:
    """The models' mean probabilities of the k likeliest tokens at each target token, in `corpus.target`'s order."""
    device = corpus.target.flat.device
    k = min(k, models[0].config.vocab_size)
    tokens = torch.zeros(corpus.target.flat.shape[0], k, dtype=torch.int64, device=device)
    weights = torch.zeros(corpus.target.flat.shape[0], k, device=device)
    for planned in plan_epoch(corpus, batch_tokens, seed=0, epoch=0):
        rows = torch.tensor(planned.rows, device=device)
        batch = corpus.take(rows, planned.widths)
        mean: Tensor | None = None
        for model in models:
            with torch.autocast(device.type, torch.bfloat16, half):
                p = logits_of(model, batch).float().softmax(-1)
            mean = p if mean is None else mean + p
        assert mean is not None
        top = (mean / len(models)).topk(k, dim=-1)
        at, real = corpus.target.places(rows, planned.widths[1] + 1)
        here = at[:, 1:][real[:, 1:]]
        tokens[here] = top.indices[real[:, 1:]]
        weights[here] = top.values[real[:, 1:]]
    return Soft(tokens.clone(), weights.clone())


def learn_from(
    trainer: Trainer,
    teachers: Translator,
    pairs: Pairs,
    *,
    beams: int = 5,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Let a run learn from the real and the teachers' translations, with the teachers' certainty at each token."""
    words, settings = teachers.words, trainer.settings
    if settings.bpe_dropout:
        raise ValueError(
            f"bpe_dropout is {settings.bpe_dropout}: what teachers say of a sentence holds for one way to split it; "
            "set it to 0"
        )
    made = distilled(teachers, pairs, beams=beams, batch_tokens=6_000, progress=progress)
    corpora = []
    for each in (pairs, made):
        corpus = encode_pairs(words, each, settings).to(trainer.device)
        corpora.append(corpus._replace(soft=soft_targets(teachers.models, corpus)))
    together = join(corpora)
    trainer.encode = lambda epoch: together
    trainer.text += f", with teachers {_digest(teachers.models)}"


def _digest(models: Sequence[torch.nn.Module]) -> str:
    """Which teachers they are: a resumed run goes on with the same."""
    found = hashlib.sha256()
    for model in models:
        for name, weight in model.state_dict().items():
            found.update(name.encode())
            found.update(weight.detach().float().cpu().contiguous().numpy().data)
    return found.hexdigest()[:16]
