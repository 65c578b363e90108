"""Text generation with a `Decoder`: one step per new token; rows that end leave the batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard._checks import check_count
from regard.cache import CacheFull, KVCache, TokenCache
from regard.models._parts import check_caches
from regard.models._sampling import NOTHING, Draws, Sampling
from regard.models._static import StaticSteps, is_worthwhile
from regard.nn._products import generating

if TYPE_CHECKING:
    from regard.models._decoder import Decoder


def stream(
    model: Decoder,
    prompts: Tensor | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: int | Sequence[int] = (),
    caches: Sequence[TokenCache] | None = None,
    use_cache: bool = True,
    **how: Any,
) -> Iterator[list[int | None]]:
    """See `Decoder.generate`; `how` is that of `Sampling`. Wrong arguments raise at once, not at the first step."""
    rows, known = _rows(prompts), [field.name for field in fields(Sampling)]
    if unknown := how.keys() - {*known}:
        others = "max_new_tokens, stop, caches, use_cache"
        raise TypeError(f"stream has no argument {', '.join(sorted(unknown))}; it has {others}, {', '.join(known)}")
    sampling = Sampling(**how)
    check_generation(model, max_new_tokens)
    check_vocabulary("prompts", [token for row in rows for token in row], model.config.vocab_size)
    stops = set(token_numbers("stop", stop))
    check_vocabulary("stop", stops, model.config.vocab_size)
    if caches is not None and not use_cache:
        raise ValueError("caches are given together with use_cache=False")
    check_caches(caches, len(model.layers))
    held = _held(caches, len(rows))
    _check_room(caches, [len(row) + before + max_new_tokens - 1 for row, before in zip(rows, held, strict=True)])
    if model.config.positions == "learned":
        longest = max(len(row) + before for row, before in zip(rows, held, strict=True))
        if longest + max_new_tokens - 1 > model.config.max_tokens:
            raise ValueError(
                f"max_new_tokens={max_new_tokens} after {longest} tokens goes beyond the model's "
                f"{model.config.max_tokens} positions; at most {model.config.max_tokens + 1 - longest} can follow"
            )
    draws = sampling.draws_for(len(rows))
    if use_cache and caches is None and is_worthwhile(model, max_new_tokens):
        return static_steps(model, rows, max_new_tokens, sampling, draws, stops)
    if use_cache and caches is None:
        caches = model.caches(max(map(len, rows)) + max_new_tokens - 1)
    return _steps(_Run(model, rows, caches), len(rows), max_new_tokens, sampling, draws, stops)


def _steps(
    run: _Run, items: int, count: int, sampling: Sampling, draws: Draws | None, stops: set[int]
) -> Iterator[list[int | None]]:
    alive = list(range(items))  # the item of each row
    with torch.inference_mode(), generating():
        logits = run.start()
    for step in range(count):
        with torch.inference_mode():
            uniform = None if draws is None else draws.next(alive)
            chosen: list[int] = sampling.choose(logits, uniform).tolist()
        _check_tokens(chosen, alive, step)
        found: list[int | None] = [None] * items
        for item, token in zip(alive, chosen, strict=True):
            found[item] = token
        yield found
        stay = [row for row, token in enumerate(chosen) if token not in stops]
        if not stay or step + 1 == count:
            return
        alive = [alive[row] for row in stay]
        with torch.inference_mode(), generating():  # not across the yield: it would hold in the caller's code too
            logits = run.advance([chosen[row] for row in stay], stay)


def static_steps(
    model: Decoder,
    rows: list[list[int]],
    count: int,
    sampling: Sampling,
    draws: Draws | None,
    stops: set[int],
) -> Iterator[list[int | None]]:
    """What `_steps` gives of a cached run, from steps that are all alike: see `_static`."""
    caches = [KVCache(max(map(len, rows)) + count - 1) for _ in model.layers]
    with torch.inference_mode():
        logits = _last_logits(model, rows, caches)
    alive = set(range(len(rows)))
    for step, chosen in enumerate(StaticSteps(model, logits, caches, count, sampling, draws)):
        going = sorted(alive)
        _check_tokens([chosen[item] for item in going], going, step)
        yield [token if item in alive else None for item, token in enumerate(chosen)]
        alive -= {item for item in going if chosen[item] in stops}
        if not alive:
            return


def _check_tokens(chosen: list[int], items: list[int], step: int) -> None:
    if NOTHING in chosen:
        raise ValueError(
            f"the model gives NaN for prompt {items[chosen.index(NOTHING)]} after {step} new tokens: its weights "
            "hold NaN, or its numbers grow beyond their dtype (float16 ends at 65504)"
        )


class _Run:
    """The model over rows that grow by a token each step; gives the logits of what comes next, [row, vocab].

    With caches a step computes the new tokens alone, without them everything."""

    def __init__(self, model: Decoder, prompts: list[list[int]], caches: Sequence[TokenCache] | None) -> None:
        self.model, self.rows, self.caches = model, prompts, caches

    def start(self) -> Tensor:
        return _last_logits(self.model, self.rows, self.caches)

    def advance(self, tokens: list[int], stay: list[int]) -> Tensor:
        """Rows `stay` go on, each by its token; the others are gone."""
        if self.caches is None:
            self.rows = [[*self.rows[row], token] for row, token in zip(stay, tokens, strict=True)]
            return self.start()
        if len(stay) < len(self.caches[0].lengths):
            for cache in self.caches:
                cache.reorder(stay)
        given = torch.tensor(tokens, device=_device(self.model)).unsqueeze(1)
        return self.model.logits(self.model.states(given, caches=self.caches)[:, -1])


def _last_logits(model: Decoder, rows: list[list[int]], caches: Sequence[TokenCache] | None) -> Tensor:
    """Logits after the last token of each row; the output layer sees those tokens alone."""
    lengths, longest, device = [len(row) for row in rows], max(map(len, rows)), _device(model)
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    if min(lengths) == longest:
        return model.logits(model.states(tokens, caches=caches)[:, -1])
    states = model.states(tokens, lengths=lengths, caches=caches)
    last = torch.tensor(lengths, device=device) - 1
    return model.logits(states[torch.arange(len(rows), device=device), last])


def _device(model: Decoder) -> torch.device:
    return model.token_embedding.weight.device


def _held(caches: Sequence[Any] | None, items: int) -> list[int]:
    """How many tokens each item has in the caches already."""
    held: list[int] = [] if not caches else list(caches[0].lengths)
    if held and len(held) != items:
        raise ValueError(f"caches hold {len(held)} items, and {items} prompts are given")
    return held or [0] * items


def _check_room(caches: Sequence[Any] | None, needed: list[int]) -> None:
    """At once: a text would break off in the middle."""
    for cache in caches or ():
        room = getattr(cache, "capacity", None)
        if room is not None and max(needed) > room:
            raise CacheFull(
                f"caches have room for {room} tokens an item, and the prompt with max_new_tokens needs {max(needed)}; "
                "make larger ones, or use a RollingCache"
            )


def _rows(prompts: Any) -> list[list[int]]:
    if isinstance(prompts, Tensor):
        if prompts.dim() != 2 or prompts.is_floating_point() or prompts.dtype == torch.bool:
            raise TypeError(f"prompts must be token numbers [batch, token], got {prompts.dtype} {list(prompts.shape)}")
        prompts = prompts.tolist()
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
        raise TypeError(f"prompts must be a list of lists of token numbers, got {type(prompts).__name__}")
    if any(isinstance(row, (int, str)) or not isinstance(row, (Sequence, Tensor)) for row in prompts):
        raise TypeError("prompts must be a list of lists of token numbers; for one prompt give [prompt]")
    rows = [row.tolist() if isinstance(row, Tensor) else list(row) for row in prompts]
    if not rows or not all(rows):
        raise ValueError("prompts must be one or more, each of one token at least: begin with the start token")
    return [token_numbers("prompts", row) for row in rows]


def token_numbers(name: str, given: Any) -> list[int]:
    """One token or several, as a list."""
    if isinstance(given, Tensor):
        given = given.tolist()
    found: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    if any(isinstance(token, bool) or not isinstance(token, Integral) for token in found):
        raise TypeError(f"{name} must hold token numbers (ints), got {given!r}")
    return [int(token) for token in found]


def check_vocabulary(name: str, tokens: Any, words: int) -> None:
    if wrong := [token for token in tokens if not 0 <= token < words]:
        raise ValueError(f"{name} holds {wrong[0]}; the model's tokens are 0 … {words - 1}")


def check_generation(model: Any, max_new_tokens: int) -> None:
    check_count("max_new_tokens", max_new_tokens)
    if next(model.parameters()).is_meta:
        raise ValueError('the model is on the device "meta" and has no weights; build it on another')
    if model.training and (model.config.dropout or model.config.attention_dropout):
        raise ValueError("the model is in training mode, where dropout changes the tokens; call model.eval() first")
