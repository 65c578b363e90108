"""Identical decoding steps of a `Decoder`, which can be replayed as a CUDA graph.

A step reads its tokens from the device and leaves the next ones there. The host launches it without knowing them, and
reads them while the device runs the next step. Rows that have ended stay in the batch, and their tokens are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.cache import KVCache
from regard.cache._steps import step_caches

if TYPE_CHECKING:
    from regard.models._decoder import Decoder
    from regard.models._sampling import Draws, Sampling

# new tokens from which a graph is worth being recorded
_FEWEST = 8
# steps that numbers are drawn for at a time
_AHEAD = 256
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack


def is_worthwhile(model: Decoder, new_tokens: int) -> bool:
    """Whether the model's steps can be recorded as a graph, and there are enough of them to be worth it."""
    weight = model.token_embedding.weight
    usual = weight.device.type == "cuda" and weight.dtype != torch.float64 and type(weight) is nn.Parameter
    return usual and new_tokens >= _FEWEST and can_be_recorded(model) and not _is_watched(model)


def can_be_recorded(model: Decoder) -> bool:
    """Whether a step is the same operations for every token: layers of other kinds may read from the device what they
    do next (which experts to ask), and have caches of their own."""
    from regard.models._decoder import Decoder, DecoderLayer

    return type(model) is Decoder and all(type(layer) is DecoderLayer for layer in model.layers)


def _is_watched(model: nn.Module) -> bool:
    """Whether somebody wants to see each operation or module run: a replay shows none."""
    if _dispatch_modes() or _function_modes():
        return True
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class StaticSteps:
    """Tokens of all items, step by step: `for chosen in StaticSteps(...)`, where `chosen` are token numbers.

    Args:
        logits: of the first new token, `[batch, vocab]`.
        caches: hold the tokens before it, with room for all new ones; must not be used afterwards.
        count: number of tokens per item.
    """

    def __init__(
        self,
        model: Decoder,
        logits: Tensor,
        caches: Sequence[KVCache],
        count: int,
        sampling: Sampling,
        draws: Draws | None,
    ) -> None:
        self.model, self.sampling, self.draws, self.count = model, sampling, draws, count
        self._steps, self._caches = step_caches(caches)
        device, items = logits.device, logits.shape[0]
        self._graphs = device.type == "cuda"  # elsewhere every step is launched operation by operation
        self._graph: Any = None
        self._launched = 0
        with torch.inference_mode(False):
            self._chosen = torch.zeros(items, dtype=torch.int64, device=device)
            self._uniform = torch.zeros(_AHEAD, items, dtype=torch.float64, device=device)
            self._at = torch.zeros(1, dtype=torch.int64, device=device)
            self._logits = logits.clone()
        self._waiting: deque[tuple[Tensor, Any]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        with torch.no_grad():
            self._draw(0)
            self._choose(self._logits)
            self._send()
        for step in range(self.count):
            with torch.no_grad():  # not across the yield: it would hold in the caller's code too
                if step + 1 < self.count:
                    self._draw(step + 1)
                    self._advance()
                    self._send()
                chosen = self._receive()
            yield chosen

    def _advance(self) -> None:
        """The next token of every item."""
        self._launched += 1
        if self._graph is None and self._graphs and self._launched > 1 and not _is_watched(self.model):
            # the step before has run operation by operation: all kernels are compiled, and libraries have their memory
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._step()
        if self._graph is None or _is_watched(self.model):
            self._step()
        else:
            self._graph.replay()

    def _step(self) -> None:
        self._steps.begin()
        # where logits are NaN there is no token; any does, since what follows is not looked at
        tokens = self._chosen.clamp_min(0).unsqueeze(1)
        states = self.model.states(tokens, caches=self._caches)
        self._choose(self.model.logits(states[:, -1]))
        self._steps.end()

    def _choose(self, logits: Tensor) -> None:
        uniform = None
        if self.draws is not None:
            uniform = self._uniform.index_select(0, self._at)[0]
            self._at.add_(1)
        self._chosen.copy_(self.sampling.choose(logits, uniform))

    def _draw(self, step: int) -> None:
        if self.draws is None or step % _AHEAD:
            return
        items = range(self._chosen.shape[0])
        ahead = min(_AHEAD, self.count - step)
        self._uniform[:ahead].copy_(torch.stack([self.draws.next(items) for _ in range(ahead)]))
        self._at.zero_()

    def _send(self) -> None:
        """Let the device copy the tokens to the host when it has them; nobody waits."""
        if self._chosen.device.type != "cuda":
            self._waiting.append((self._chosen.clone(), None))
            return
        there = torch.empty(self._chosen.shape, dtype=torch.int64, pin_memory=True)
        there.copy_(self._chosen, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self._chosen.device))
        self._waiting.append((there, done))

    def _receive(self) -> list[int]:
        there, done = self._waiting.popleft()
        if done is not None:
            done.synchronize()
        found: list[int] = there.tolist()
        return found
