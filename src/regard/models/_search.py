"""Generating targets with a `Transformer`: greedy search, sampling, or beam search."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard._checks import check_count, check_number
from regard.models._generation import check_generation, check_vocabulary, token_numbers
from regard.models._sampling import Sampling
from regard.nn._products import generating

if TYPE_CHECKING:
    from regard.models._transformer import Transformer


class Hypothesis(NamedTuple):
    """A target, without its start tokens and its stop token."""

    tokens: list[int]
    score: float  # log P / length penalty
    log_probability: float
    finished: bool  # it ended with the stop token


class _Node(NamedTuple):
    """A partial target: its last token, and what it continues. Partial targets share what they have in common."""

    token: int
    before: _Node | None


class Asked(NamedTuple):
    """How targets are searched for; see `Transformer.generate`."""

    start: int | Sequence[int]
    stop: int
    max_new_tokens: int
    beams: int
    length_penalty: float
    best: int
    use_cache: bool
    sampling: Sampling


def search(
    models: Sequence[Transformer],
    source: tuple[Tensor, Any, str],
    asked: Asked,
    limits: Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """See `Transformer.generate`. Several models form an ensemble: the mean of their probabilities decides.

    `limits` is the maximum number of new tokens per item, at most `max_new_tokens`: an item ends as it would alone.
    """
    for model in models:
        prefix = _check(model, asked)
    with torch.inference_mode(), generating():
        run = _Run(models, source, prefix, asked)
        most = [asked.max_new_tokens] * run.items if limits is None else limits
        items = [_Item(asked, limit) for limit in most]
        if items and asked.beams == 1:
            _greedy(run, items, asked.sampling)
        elif items:
            _beam(run, items, asked.beams)
    return [item.best(asked.best) for item in items]


def _check(model: Transformer, asked: Asked) -> list[int]:
    """Refuse what cannot be searched; the tokens that the target begins with."""
    start, stop, max_new_tokens, beams, length_penalty, best, _, sampling = asked
    check_generation(model, max_new_tokens)
    check_count("beams", beams)
    check_count("best", best)
    if best > beams:
        raise ValueError(f"best={best} must be from 1 to beams={beams}")
    if sampling.draws and beams > 1:
        raise ValueError(f"beams={beams} with a temperature: tokens are drawn one target at a time, beams=1")
    prefix, words = token_numbers("start", start), model.output_embedding.num_embeddings
    if not prefix:
        raise ValueError("start must be one token or more")
    if isinstance(stop, Iterable):
        raise TypeError(f"stop must be one token number, got {stop!r}")
    check_vocabulary("start", prefix, words)
    check_vocabulary("stop", token_numbers("stop", stop), words)
    longest = getattr(model.config, "max_tokens", None)  # Whisper's positions are learned
    if longest is not None and len(prefix) + max_new_tokens - 1 > longest:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} after {len(prefix)} start tokens goes beyond the model's {longest} "
            f"positions; at most {longest + 1 - len(prefix)} can follow"
        )
    check_number("length_penalty", length_penalty, "finite and at least 0", lambda alpha: 0.0 <= alpha < math.inf)
    if length_penalty * math.log((5 + max_new_tokens) / 6) > math.log(sys.float_info.max):
        raise ValueError(
            f"length_penalty={length_penalty} makes ((5 + {max_new_tokens}) / 6)^α larger than any number; the paper's "
            "are around 0.6"
        )
    return prefix


class _Part(NamedTuple):
    """One model's side of a run: what it read of the source, and its caches."""

    model: Transformer
    memory: Tensor
    caches: Any


class _Run:
    """The decoder over rows that grow by a token each step and may be copied, dropped and put in another order.

    Several models share the rows; each has a memory and caches of its own.
    """

    def __init__(
        self, models: Sequence[Transformer], source: tuple[Tensor, Any, str], prefix: list[int], asked: Asked
    ) -> None:
        given, lengths, self.side = source
        self.parts: list[_Part] = []
        for model in models:
            memory = model.encode(given, lengths=lengths, side=self.side)
            room = len(prefix) + asked.max_new_tokens
            caches = model.caches(room, memory.shape[1]) if asked.use_cache else None
            self.parts.append(_Part(model, memory, caches))
        self.items, self.device, self.use_cache = memory.shape[0], memory.device, asked.use_cache
        self.lengths = None if lengths is None else torch.as_tensor(lengths, device=self.device)
        # all, or with caches the new
        self.tokens = torch.tensor([prefix] * self.items, dtype=torch.long, device=self.device)

    def log_probabilities(self) -> Tensor:
        """Of the next token, [row, vocab]."""
        each = [self._log_probabilities(part) for part in self.parts]
        if len(each) == 1:
            return each[0]
        return torch.stack(each).logsumexp(0) - math.log(len(each))

    def _log_probabilities(self, part: _Part) -> Tensor:
        how: dict[str, Any] = {"memory_lengths": self.lengths, "side": self.side, "caches": part.caches}
        states = part.model.decode(self.tokens, part.memory, **how)
        return part.model.logits(states[:, -1]).double().log_softmax(-1)

    def advance(self, rows: list[int], tokens: list[int], *, same_items: bool) -> None:
        """Row i becomes what row `rows[i]` was, followed by `tokens[i]`.

        `same_items`: every row still belongs to the same item, so what was read of the source stays in place.
        """
        if rows != list(range(self.tokens.shape[0])):
            at = torch.tensor(rows, device=self.device)
            for part in self.parts:
                for own, cross in part.caches or ():
                    own.reorder(rows)
                    if not same_items:
                        cross.reorder(rows)
            self.tokens = self.tokens[at]
            if not same_items:
                self.parts = [part._replace(memory=part.memory[at]) for part in self.parts]
                self.lengths = None if self.lengths is None else self.lengths[at]
        new = torch.tensor(tokens, device=self.device).unsqueeze(1)
        self.tokens = new if self.use_cache else torch.cat([self.tokens, new], 1)


class _Item:
    """The targets of one item, finished and not."""

    def __init__(self, asked: Asked, limit: int) -> None:
        self.stop, self.limit, self.beams, self.alpha = asked.stop, limit, asked.beams, asked.length_penalty
        self.length = 0
        self.alive: list[tuple[float, _Node | None]] = [(0.0, None)]  # log P, best first
        self.finished: list[Hypothesis] = []
        self.done = False

    def penalty(self, length: int) -> float:
        return math.pow((5 + length) / 6, self.alpha)

    def grow(self, candidates: Sequence[tuple[float, int, int]]) -> list[tuple[int, int]]:
        """Take the best candidates (log P, which alive one it continues, token), best first.

        Candidates that end are finished. Of the others, one per beam continues: (which, token) of each.
        """
        if math.isnan(candidates[0][0]):  # it sorts before all numbers
            raise ValueError(
                f"the model gives NaN after {self.length} new tokens: its weights hold NaN, or its numbers grow beyond "
                "their dtype (float16 ends at 65504)"
            )
        self.length += 1
        alive: list[tuple[float, _Node | None]] = []
        parents = []
        for log_p, which, token in candidates:
            if log_p == -float("inf"):
                continue
            if token == self.stop:
                self.finished.append(self._hypothesis(log_p, self.alive[which][1], True))
            elif len(alive) < self.beams:
                alive.append((log_p, _Node(token, self.alive[which][1])))
                parents.append((which, token))
        self.alive = alive
        self.finished = sorted(self.finished, key=lambda each: -each.score)[: self.beams]
        self.done = not alive or self.length == self.limit or self._is_settled()
        return parents

    def _is_settled(self) -> bool:
        """Whether no unfinished target can beat the finished ones: log P only falls, the penalty ends at the limit."""
        hope = self.alive[0][0] / self.penalty(self.limit)
        return len(self.finished) == self.beams and self.finished[-1].score >= hope

    def best(self, count: int) -> list[Hypothesis]:
        """The finished ones; if there are too few, also unfinished ones."""
        rest = [self._hypothesis(log_p, node, False) for log_p, node in self.alive]
        return (self.finished + rest)[:count]

    def _hypothesis(self, log_p: float, node: _Node | None, finished: bool) -> Hypothesis:
        tokens = []
        while node is not None:
            tokens.append(node.token)
            node = node.before
        return Hypothesis(tokens[::-1], log_p / self.penalty(self.length), log_p, finished)


def _greedy(run: _Run, items: list[_Item], sampling: Sampling) -> None:
    """One target of each item: the likeliest token each time, or one that is drawn."""
    rows, draws = items, sampling.draws_for(len(items))
    numbers = list(range(len(items)))  # which item a row is: each draws from a stream of its own
    while True:
        log_p = run.log_probabilities()
        if draws is None:
            best, tokens = log_p.max(-1)
        else:
            tokens = sampling.choose(log_p, draws.next(numbers))
            best = log_p.gather(1, tokens.clamp_min(0).unsqueeze(1)).squeeze(1)
        chosen = list(zip(best.tolist(), tokens.tolist(), strict=True))
        for item, (log_p, token) in zip(rows, chosen, strict=True):
            item.grow([(item.alive[0][0] + log_p, 0, token)])
        stay = [row for row, item in enumerate(rows) if not item.done]
        if not stay:
            return
        run.advance(stay, [chosen[row][1] for row in stay], same_items=len(stay) == len(rows))
        rows, numbers = [rows[row] for row in stay], [numbers[row] for row in stay]


def _beam(run: _Run, items: list[_Item], beams: int) -> None:
    rows = items  # those whose search goes on; each has `beams` rows after the first step, one before
    wide = 1
    while True:
        log_p = run.log_probabilities()
        words = log_p.shape[-1]
        # an item with fewer alive targets than rows has its spare rows at −inf
        so_far = [[value for value, _ in item.alive] + [-float("inf")] * (wide - len(item.alive)) for item in rows]
        total = torch.tensor(so_far, dtype=log_p.dtype, device=log_p.device).unsqueeze(2) + log_p.view(-1, wide, words)
        # twice as many as go on: at most one continuation of each ends
        values, places = total.flatten(1).topk(min(2 * beams, wide * words))
        follow: list[int] = []
        tokens: list[int] = []
        for at, (item, found, where) in enumerate(zip(rows, values.tolist(), places.tolist(), strict=True)):
            parents = item.grow([(v, p // words, p % words) for v, p in zip(found, where, strict=True)])
            if not item.done:
                spare = [parents[0]] * (beams - len(parents))
                follow += [at * wide + which for which, _ in parents + spare]
                tokens += [token for _, token in parents + spare]
        left = [item for item in rows if not item.done]
        if not left:
            return
        run.advance(follow, tokens, same_items=wide == beams and len(left) == len(rows))
        rows, wide = left, beams
